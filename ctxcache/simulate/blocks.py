"""A replay in which the unit of placement is a block: a prefix of so many tokens, held once for all sessions.

A request finds its longest prefix of blocks that are held; the rest is computed. Then all of its blocks are
held, and the policy says what leaves. Where a trace names no blocks, they are made of its sessions: a
session's own, full ones, its answers' too. Only prompts have blocks in a trace that names them.

A policy says whether it `ranks_holders`. One that does not hears each block as if it were a session, the
deepest first: of two blocks that were used at once a child then leaves before its parent. That is how vLLM
frees them.

A holder is a session, or a prefix that several sessions had in common. A session that the policy gives up
loses its deepest block first. The block leaves the store when no other session holds it. So a block is worth
what the best of its holders is, and a child leaves before its parent. With LRU this is block LRU.

Turns take no time. Tiers are not told apart. Memory: the blocks that are held, and per session the names of
its blocks.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from ctxcache.core.placement.order import Accepts
from ctxcache.core.placement.policy import Facts, Level, Policy
from ctxcache.core.placement.prefixes import Prefixes
from ctxcache.simulate.leaving import leaving
from ctxcache.simulate.load import NEVER_S, Liar, Lie, Load, TraceHint
from ctxcache.simulate.replay import STEP_TURNS
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.tally import HitTally


@dataclass(slots=True)
class BlockRequest:
    """A turn by its blocks: `asked` are the prompt's, `kept` all that it leaves behind.

    `prompt_tokens` of the prompt, of which `history_tokens` the session had before.
    """

    turn: TraceTurn
    asked: tuple[bytes, ...]
    kept: tuple[bytes, ...]
    prompt_tokens: int
    history_tokens: int
    is_later: bool


class BlockReader:
    """Reads turns as requests for blocks of `block_tokens`. Owned by one replay."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sizes: dict[bytes, int] = {}

    def request(self, turn: TraceTurn) -> BlockRequest:
        """Name the blocks of the next turn."""
        uid = turn.session
        size_tokens = self._sizes.get(uid)
        history_tokens = turn.history_tokens if turn.history_tokens is not None else size_tokens or 0
        prompt_tokens = history_tokens + turn.input_tokens
        whole_tokens = prompt_tokens + turn.output_tokens
        is_later = size_tokens is not None if turn.number is None else turn.number > 1
        self._sizes[uid] = whole_tokens
        if turn.blocks is not None:
            full = turn.blocks[: prompt_tokens // self._block_tokens]
            return BlockRequest(turn, full, full, prompt_tokens, history_tokens, is_later)
        kept = tuple([b"%b/%d" % (uid, number) for number in range(whole_tokens // self._block_tokens)])
        asked = kept[: prompt_tokens // self._block_tokens]
        return BlockRequest(turn, asked, kept, prompt_tokens, history_tokens, is_later)


# One turn, in this order:
#
#     found(asked)   how many of the first blocks are held      counted before anything of this turn is held
#     use            the policy hears of what is left behind
#     expected       the client's hint about the session
#     settle         what has no room leaves                    last, so that the hint is heard before
class BlockStore:
    """Blocks up to `limit`, by name. A subclass has a policy choose."""

    def __init__(self, policy: Policy, block_tokens: int, token_bytes: int, limit: int) -> None:
        self.policy, self._order = policy, leaving(policy)
        self._token_bytes, self._limit = token_bytes, limit
        self._block_bytes = block_tokens * token_bytes
        self.written_count = 0
        """Blocks that came to be held, each time."""

    def found(self, asked: tuple[bytes, ...]) -> int:
        """How many of the first blocks of a prompt are held."""
        raise NotImplementedError

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:
        """The request found that many of its blocks, and leaves all of them behind."""
        raise NotImplementedError

    # Each turn leaves blocks, but only some loads give hints.
    def expected(self, uid: bytes, return_s: float | None) -> None:  # noqa: ARG002  not every policy listens
        """The client says when the session returns; None: never."""
        return

    def settle(self) -> None:
        """The turn is over, and its hint was told: what has no room leaves."""
        return


class SingleBlocks(BlockStore):
    """A policy that hears of each block by itself."""

    def __init__(self, policy: Policy, block_tokens: int, token_bytes: int, limit: int) -> None:
        super().__init__(policy, block_tokens, token_bytes, limit)
        self._uses: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def found(self, asked: tuple[bytes, ...]) -> int:
        """See BlockStore."""
        uses = self._uses
        return next((number for number, block in enumerate(asked) if block not in uses), len(asked))

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:  # noqa: ARG002
        """See BlockStore. A request too large to hold is held from its beginning."""
        # Blocks behind the limit could never be held together with those before them.
        uses, policy, current = self._uses, self.policy, request.kept[: self._limit]
        mine = set(current)
        for block in reversed(current):
            # Each block arrives and rests by itself: to the policy it is a session whose turn takes no time.
            policy.arrived(block, now_s)
            policy.idle(block, self._facts(uses.get(block, 0)), now_s)
        new_count = sum(block not in uses for block in mine)
        self.written_count += new_count
        left_count = max(len(uses) + new_count - self._limit, 0)
        victims = self._order.give_up(left_count, mine)
        if len(victims) < left_count:
            raise AssertionError("a policy names nobody while there are others")
        for victim in victims:
            del uses[victim]
        for block in current:
            if block not in uses:
                policy.placed(block, Level.BELOW)
            self._order.put(block, Level.BELOW)
            uses[block] = uses.get(block, 0) + 1

    def _facts(self, use_count: int) -> Facts:
        """What a policy hears of a block that was used so often before this use."""
        return Facts(self._block_bytes, use_count + 1, self._block_bytes, self._token_bytes)


# What a server does with the blocks of a request, and so this:
#
#     all of them are used, from the first to the last      each is in memory then
#     SSD takes those that it has not, or spares them       the coldest leaves, in its place its last child
#     memory has too many                                   the coldest leave it; a spared one is gone
class SpaceBlocks(SingleBlocks):
    """A space of blocks, as a server keeps it for engines that know no sessions, under any policy that ranks.

    To the policy a block is a session of one turn, in which it was put; each use after that adds nothing. SSD
    has `limit` blocks. One that is worth less than those that would have to leave for it is spared: it is in
    memory alone, among `memory_limit` blocks, and gone when it leaves there.
    """

    def __init__(
        self, policy: Policy, block_tokens: int, token_bytes: int, limit: int, memory_limit: int
    ) -> None:
        super().__init__(policy, block_tokens, token_bytes, limit)
        self._memory_limit = memory_limit
        self._memory: set[bytes] = set()
        self._spared: set[bytes] = set()
        self._known: set[bytes] = set()
        """Blocks that were ever put: one that is put again after it left is taken to be the same."""
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:  # noqa: ARG002
        """See BlockStore."""
        uses, policy, current = self._uses, self.policy, request.kept[: self._limit]
        for number, block in enumerate(current):
            policy.arrived(block, now_s)
            policy.idle(block, self._facts(block in self._known), now_s)
            self._known.add(block)
            if block not in uses:
                self._spared.add(block)
                if number:
                    self._parents[block] = current[number - 1]
                    self._children.setdefault(current[number - 1], {})[block] = None
            policy.placed(block, Level.MEMORY)
            self._order.put(block, Level.MEMORY)
            self._memory.add(block)
            uses[block] = uses.get(block, 0) + 1
        for block in current:
            if block in self._spared and self._has_room_for(block):
                self._spared.discard(block)
                self.written_count += 1
        while len(self._memory) > self._memory_limit:
            victim = self._first(Level.MEMORY, lambda _: True)
            if victim in self._spared:
                self._give_up(self._leaf(victim, self._spared.__contains__))
            else:
                self._memory.discard(victim)
                policy.placed(victim, Level.BELOW)
                self._order.put(victim, Level.BELOW)

    def _has_room_for(self, block: bytes) -> bool:
        """Whether SSD takes the block; the one that is worth least leaves for it."""
        if len(self._uses) - len(self._spared) < self._limit:
            return True
        victim = self._first(Level.BELOW, lambda other: other not in self._spared)
        if not self.policy.gives_way(victim, block):
            return False
        self._give_up(self._leaf(victim, lambda other: other not in self._spared))
        return True

    def _leaf(self, block: bytes, accepts: Accepts) -> bytes:
        """The last of those that continue the block, one after the other: it leaves in the block's place."""
        while (child := next(filter(accepts, self._children.get(block, ())), None)) is not None:
            block = child
        return block

    def _first(self, level: Level, accepts: Accepts) -> bytes:
        uid = self._order.first(level, accepts)
        if uid is None:
            raise AssertionError("a policy names nobody while there are others")
        return uid

    def _give_up(self, block: bytes) -> None:
        del self._uses[block]
        parent = self._parents.pop(block, None)
        if parent is not None:
            self._children[parent].pop(block, None)
        self._memory.discard(block)
        self._spared.discard(block)
        self._order.discard(block)
        self.policy.evicted(block)

    def _facts(self, use_count: int) -> Facts:
        # The store knows bytes: to it a block is one row.
        return Facts(self._block_bytes, 1, 0 if use_count else self._block_bytes, self._block_bytes)


class OptimalBlocks(BlockStore):
    """The bound: of all blocks, those of a turn too, the `limit` are kept that are asked for soonest.

    MIN that may refuse: no order of blocks finds more. It knows the future, and asks no policy. Source:
    Belady, A Study of Replacement Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5(2), 1966.
    O(log n) a block.
    """

    def __init__(
        self, policy: Policy, block_tokens: int, token_bytes: int, limit: int, future: "Future"
    ) -> None:
        super().__init__(policy, block_tokens, token_bytes, limit)
        self._future = future
        self._next: dict[bytes, float] = {}
        """The blocks that are held, by when each is asked for next."""
        self._latest: list[tuple[float, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._next)

    def found(self, asked: tuple[bytes, ...]) -> int:
        """See BlockStore."""
        held = self._next
        return next((number for number, block in enumerate(asked) if block not in held), len(asked))

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:  # noqa: ARG002
        """See BlockStore."""
        for place, block in enumerate(request.kept):
            use = self._future.next_use(block)
            if use == NEVER_S:
                self._next.pop(block, None)
            else:
                self.written_count += block not in self._next
                self._next[block] = use
                # Of blocks that are asked for at once the deepest leaves first.
                heappush(self._latest, (-use, -place, block))

    def settle(self) -> None:
        """See BlockStore."""
        while len(self._next) > self._limit:
            use, _, block = heappop(self._latest)
            # Outdated: the block was asked for since, and has another entry.
            if self._next.get(block) == -use:
                del self._next[block]


@dataclass(slots=True)
class _Holder:
    """Holds the first `held_count` of `blocks`."""

    blocks: tuple[bytes, ...] = ()
    held_count: int = 0
    turn_count: int = 0


# The blocks that two sessions hold that begin alike:
#
#     block        b0   b1   b2   b3
#     session A    ▓▓   ▓▓   ▓▓
#     session B    ▓▓   ▓▓        ▓▓
#     prefix b1    ▓▓   ▓▓                made when B asked for b0 and b1 that it did not hold itself
#     `_counts`    3    3    1    1       a block leaves with its last holder
class HeldBlocks(BlockStore):
    """A policy of holders."""

    def __init__(self, policy: Policy, block_tokens: int, token_bytes: int, limit: int) -> None:
        super().__init__(policy, block_tokens, token_bytes, limit)
        self._holders: dict[bytes, _Holder] = {}
        self._counts: dict[bytes, int] = {}
        """How many holders a block has."""
        self._prefixes = Prefixes()

    def __len__(self) -> int:
        return len(self._counts)

    def found(self, asked: tuple[bytes, ...]) -> int:
        """See BlockStore."""
        counts = self._counts
        for number, block in enumerate(asked):
            if block not in counts:
                return number
        return len(asked)

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:
        """See BlockStore."""
        turn, asked = request.turn, request.asked
        uid, own = turn.session, self._holders.get(turn.session)
        # Blocks that this session held itself are no sign of a common prefix.
        own_count = common_count(own.blocks, own.held_count, asked) if own else 0
        prefixes, before = self._prefixes.used(uid, asked, own_count, found, self._counts)
        if before is not None:
            self.policy.continued(before)
        token_bytes, block_bytes = self._token_bytes, self._block_bytes
        for count, prefix in prefixes:
            facts = Facts(count * block_bytes, prefix.use_count, 0, token_bytes, 0, is_prefix=True)
            self._hold(prefix.uid, asked[:count], facts, now_s)
        kept, answer_bytes = request.kept, turn.output_tokens * token_bytes
        if kept:
            self._prefixes.ended(uid, kept[-1])
        new_bytes = turn.input_tokens * token_bytes + answer_bytes
        turn_count = turn.number or (own.turn_count if own else 0) + 1
        facts = Facts(len(kept) * block_bytes, turn_count, new_bytes, token_bytes, answer_bytes)
        self._hold(uid, kept, facts, now_s)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See BlockStore."""
        self.policy.expected(uid, return_s)

    def _hold(self, uid: bytes, blocks: tuple[bytes, ...], facts: Facts, now_s: float) -> None:
        """Let the holder of that name hold these blocks, and no others."""
        counts, holder = self._counts, self._holders.get(uid)
        self.policy.arrived(uid, now_s)
        is_new = holder is None
        if holder is None:
            holder = self._holders[uid] = _Holder()
        held_count = holder.held_count
        common = common_count(holder.blocks, held_count, blocks)
        # Counted up before others are let go: a block that both lists have never falls to 0.
        for block in blocks[common:]:
            holder_count = counts.get(block, 0)
            counts[block] = holder_count + 1
            self.written_count += not holder_count
        if common < held_count:
            self._let_go(holder.blocks[common:held_count], uid)
        holder.blocks, holder.held_count = blocks, len(blocks)
        holder.turn_count = facts.turn_count
        self.policy.idle(uid, facts, now_s)
        if is_new:
            self.policy.placed(uid, Level.BELOW)
            self._order.put(uid, Level.BELOW)

    def _let_go(self, blocks: Iterable[bytes], holder: bytes, most: int | None = None) -> int:
        """Let the holder hold these no more, until `most` are given up by it; returns how many it let go."""
        counts, given_up, let_go = self._counts, list[bytes](), 0
        for block in blocks:
            let_go += 1
            left = counts[block] - 1
            if left:
                counts[block] = left
                continue
            del counts[block]
            given_up.append(block)
            if len(given_up) == most:
                break
        self._prefixes.given_up(holder, given_up)
        return let_go

    def settle(self) -> None:
        """See BlockStore."""
        while (most := len(self._counts) - self._limit) > 0:
            uid = self._order.first(Level.BELOW, lambda _: True)
            if uid is None:
                raise AssertionError("a policy names nobody while something is held")
            # Block by block from its end: what is left of the session is a prefix, and of use.
            holder = self._holders[uid]
            held = holder.blocks[: holder.held_count]
            holder.held_count -= self._let_go(reversed(held), uid, most)
            if not holder.held_count:
                del self._holders[uid]
                self._order.discard(uid)
                self.policy.evicted(uid)


def common_count(some: tuple[bytes, ...], some_count: int, others: tuple[bytes, ...]) -> int:
    """How many blocks the first `some_count` and the others begin with alike.

    A block's name stands for all before it, too. O(log n).
    """
    least, most = 0, min(some_count, len(others))
    # Most often one is the beginning of the other: one look.
    if most and some[most - 1] == others[most - 1]:
        return most
    while least < most:
        middle = (least + most) // 2
        if some[middle] == others[middle]:
            least = middle + 1
        else:
            most = middle
    return least


def next_uses(turns: Iterable[TraceTurn], block_tokens: int) -> "list[array[float]]":
    """By turn, when each block that it leaves behind is next asked for: the number of that turn, or infinity.

    Memory: 8 bytes for each block of each turn.
    """
    reader = BlockReader(block_tokens)
    uses: list[array[float]] = []
    last: dict[bytes, tuple[int, int]] = {}
    for index, turn in enumerate(turns):
        request = reader.request(turn)
        # Only what is asked for is a use; a block that is left behind without being asked for is merely
        # there.
        for block in request.asked:
            known = last.get(block)
            if known is not None:
                uses[known[0]][known[1]] = index
        uses.append(array("d", [NEVER_S]) * len(request.kept))
        last.update((block, (index, place)) for place, block in enumerate(request.kept))
    return uses


def live_block_count(turns: Iterable[TraceTurn], block_tokens: int) -> int:
    """How many blocks at most are there at once that a later turn asks for, where nothing ever leaves."""
    reader = BlockReader(block_tokens)
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    index = -1
    for index, turn in enumerate(turns):
        request = reader.request(turn)
        last.update((block, index) for block in request.asked if block in first)
        for block in request.kept:
            first.setdefault(block, index)
    changes = [0] * (index + 2)
    for block, until in last.items():
        changes[first[block]] += 1
        changes[until] -= 1
    return max(accumulate(changes))


class Future:
    """When a block is asked for next, as of the turn that is being played; `uses` are `next_uses`."""

    def __init__(self, uses: "Iterable[array[float]]") -> None:
        self._uses = iter(uses)
        self._next: dict[bytes, float] = {}

    def turn(self, kept: tuple[bytes, ...]) -> None:
        """Go on to the next turn, which leaves these behind."""
        self._next.update(zip(kept, next(self._uses), strict=True))

    def next_use(self, block: bytes) -> float:
        """The number of the turn; infinity for never."""
        return self._next.get(block, NEVER_S)


class BlockReplay:
    """Plays turns by blocks of `block_tokens`; `run` once. Hits count as SSD's."""

    def __init__(
        self,
        load: Load,
        policy: Policy,
        block_tokens: int,
        *,
        next_arrivals_s: "array[float] | None" = None,
        future: "Future | None" = None,
        is_space: bool = False,
    ) -> None:
        """`is_space`: the blocks are kept as a server keeps a space of them, each ranked by itself.

        SSD is then as large as both tiers, since it has what memory has too.
        """
        self._load, self.block_tokens = load, block_tokens
        self._liar = Liar(load.wrong_hint_share, load.lies)
        self._next_arrivals_s, self._future = next_arrivals_s, future
        self._blocks = BlockReader(block_tokens)
        block_bytes = block_tokens * load.token_bytes
        limit = (load.dram_bytes + load.ssd_bytes) // block_bytes
        self.store: BlockStore
        if is_space:
            memory_limit = load.dram_bytes // block_bytes
            self.store = SpaceBlocks(policy, block_tokens, load.token_bytes, limit, memory_limit)
        elif future is not None:
            self.store = OptimalBlocks(policy, block_tokens, load.token_bytes, limit, future)
        else:
            make = HeldBlocks if policy.ranks_holders else SingleBlocks
            self.store = make(policy, block_tokens, load.token_bytes, limit)
        self.tally = HitTally()

    def run(self, turns: Iterable[TraceTurn], step: Callable[[int], None] = lambda _: None) -> HitTally:
        """Play all turns. `step` hears how many there were, now and then."""
        index = 0
        for index, turn in enumerate(turns, 1):
            self._play(turn, self._next_arrivals_s[index - 1] if self._next_arrivals_s else NEVER_S)
            if index % STEP_TURNS == 0:
                step(index)
        step(index)
        load = self._load
        self.tally.ssd_written_bytes = self.store.written_count * self.block_tokens * load.token_bytes
        return self.tally

    def _play(self, turn: TraceTurn, next_s: float) -> None:
        request, now_s = self._blocks.request(turn), turn.arrival_s
        found = self.store.found(request.asked)
        self._count(request, min(found * self.block_tokens, request.prompt_tokens), now_s)
        # Before the policy hears of these blocks: it asks for their next uses.
        if self._future is not None:
            self._future.turn(request.kept)
        self.store.use(request, found, now_s)
        hints, liar = self._load.hints, self._liar
        ends = (next_s == NEVER_S) is not liar.tells(Lie.HINT, turn)
        if ends and TraceHint.ENDS in hints:
            self.store.expected(turn.session, None)
        elif next_s < NEVER_S and TraceHint.RETURNS in hints:
            self.store.expected(turn.session, liar.return_s(turn, now_s, next_s))
        self.store.settle()

    def _count(self, request: BlockRequest, found_tokens: int, now_s: float) -> None:
        tally = self.tally
        if not tally.turns:
            tally.begin_s = now_s
        tally.end_s = now_s
        tally.turns += 1
        tally.prompt_tokens += request.prompt_tokens
        tally.computed_tokens += request.prompt_tokens - found_tokens
        if not request.is_later:
            return
        history_tokens = request.history_tokens
        # Full blocks can be found of a history that ends within one, and nothing of an answer whose blocks
        # the trace does not name.
        of_history = min(found_tokens, history_tokens)
        whole = min(history_tokens // self.block_tokens, len(request.asked))
        is_hit = whole > 0 and found_tokens >= whole * self.block_tokens
        tally.later_turns += 1
        tally.later_tokens += history_tokens
        tally.hit_tokens += of_history
        tally.recomputed_tokens += history_tokens - of_history
        tally.ssd_hits += is_hit
        tally.regret_turns += not is_hit
        tally.regret_tokens += history_tokens - of_history
