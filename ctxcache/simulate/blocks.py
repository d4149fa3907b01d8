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

from ctxcache.core.placement.policy import Facts, Level, Policy
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
            count = uses.get(block, 0) + 1
            policy.arrived(block, now_s)
            policy.idle(block, Facts(self._block_bytes, count, self._block_bytes, self._token_bytes), now_s)
        new_count = sum(block not in uses for block in mine)
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


@dataclass(slots=True)
class _Holder:
    """Holds the first `held_count` of `blocks`. `use_count`: turns of a session, uses of a prefix."""

    blocks: tuple[bytes, ...] = ()
    held_count: int = 0
    use_count: int = 0


# The blocks that two sessions hold that begin alike:
#
#     block        b0   b1   b2   b3
#     session A    ▓▓   ▓▓   ▓▓
#     session B    ▓▓   ▓▓        ▓▓
#     prefix b1    ▓▓   ▓▓                made when B found b0 and b1 that it did not hold itself
#     `_counts`    3    3    1    1       a block leaves with its last holder
class HeldBlocks(BlockStore):
    """A policy of holders."""

    def __init__(self, policy: Policy, block_tokens: int, token_bytes: int, limit: int) -> None:
        super().__init__(policy, block_tokens, token_bytes, limit)
        self._holders: dict[bytes, _Holder] = {}
        self._counts: dict[bytes, int] = {}
        """How many holders a block has."""
        self._prefixes: dict[bytes, bytes] = {}
        """Holders that are prefixes, by the last block of each."""

    def __len__(self) -> int:
        return len(self._counts)

    def found(self, asked: tuple[bytes, ...]) -> int:
        """See BlockStore."""
        counts = self._counts
        return next((number for number, block in enumerate(asked) if block not in counts), len(asked))

    def use(self, request: BlockRequest, found: int, now_s: float) -> None:
        """See BlockStore."""
        turn, own = request.turn, self._holders.get(request.turn.session)
        # Blocks that this session held itself are no sign of a common prefix.
        own_count = _common(own.blocks[: own.held_count], request.asked) if own else 0
        for number in range(own_count, found):
            uid = self._prefixes.get(request.asked[number])
            # Only the longest prefix that was found becomes a holder. A shorter one that is a holder already
            # is used again.
            if uid is None and number == found - 1:
                uid = self._prefixes[request.asked[number]] = b"prefix " + request.asked[number]
            if uid is not None:
                self._hold(uid, request.asked[: number + 1], 0, now_s)
        new_bytes = (turn.input_tokens + turn.output_tokens) * self._token_bytes
        answer_bytes = turn.output_tokens * self._token_bytes
        self._hold(turn.session, request.kept, new_bytes, now_s, answer_bytes, turn.number)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See BlockStore."""
        self.policy.expected(uid, return_s)

    def _hold(
        self,
        uid: bytes,
        blocks: tuple[bytes, ...],
        new_bytes: int,
        now_s: float,
        answer_bytes: int = 0,
        number: int | None = None,
    ) -> None:
        """Let the holder of that name hold these blocks, and no others."""
        counts, holder = self._counts, self._holders.get(uid)
        self.policy.arrived(uid, now_s)
        is_new = holder is None
        if holder is None:
            holder = self._holders[uid] = _Holder()
        held = holder.blocks[: holder.held_count]
        common = _common(held, blocks)
        # Counted up before others are let go: a block that both lists have never falls to 0.
        for block in blocks[common:]:
            counts[block] = counts.get(block, 0) + 1
        for block in held[common:]:
            self._let_go(block)
        holder.blocks, holder.held_count = blocks, len(blocks)
        holder.use_count = number or holder.use_count + 1
        size_bytes = len(blocks) * self._block_bytes
        facts = Facts(size_bytes, holder.use_count, new_bytes, self._token_bytes, answer_bytes)
        self.policy.idle(uid, facts, now_s)
        if is_new:
            self.policy.placed(uid, Level.BELOW)
            self._order.put(uid, Level.BELOW)

    def _let_go(self, block: bytes) -> None:
        left = self._counts[block] - 1
        if left:
            self._counts[block] = left
        else:
            del self._counts[block]

    def settle(self) -> None:
        """See BlockStore."""
        while len(self._counts) > self._limit:
            uid = self._order.first(Level.BELOW, lambda _: True)
            if uid is None:
                raise AssertionError("a policy names nobody while something is held")
            # Block by block from its end: what is left of the session is a prefix, and of use.
            holder = self._holders[uid]
            while holder.held_count and len(self._counts) > self._limit:
                holder.held_count -= 1
                self._let_go(holder.blocks[holder.held_count])
            if not holder.held_count:
                del self._holders[uid]
                # A prefix goes with its last block, and is made anew when it is found again. A session that
                # ends in that block is no prefix.
                if holder.blocks and self._prefixes.get(holder.blocks[-1]) == uid:
                    del self._prefixes[holder.blocks[-1]]
                self._order.discard(uid)
                self.policy.evicted(uid)


def _common(some: tuple[bytes, ...], others: tuple[bytes, ...]) -> int:
    """How many of the first are the same."""
    length = min(len(some), len(others))
    if some[:length] == others[:length]:
        return length
    return next(number for number in range(length) if some[number] != others[number])


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
    ) -> None:
        self._load, self.block_tokens = load, block_tokens
        self._liar = Liar(load.wrong_hint_share, load.lies)
        self._next_arrivals_s, self._future = next_arrivals_s, future
        self._blocks = BlockReader(block_tokens)
        block_bytes = block_tokens * load.token_bytes
        make = HeldBlocks if policy.ranks_holders else SingleBlocks
        limit = (load.dram_bytes + load.ssd_bytes) // block_bytes
        self.store: BlockStore = make(policy, block_tokens, load.token_bytes, limit)
        self.tally = HitTally()

    def run(self, turns: Iterable[TraceTurn], step: Callable[[int], None] = lambda _: None) -> HitTally:
        """Play all turns. `step` hears how many there were, now and then."""
        index = 0
        for index, turn in enumerate(turns, 1):
            self._play(turn, self._next_arrivals_s[index - 1] if self._next_arrivals_s else NEVER_S)
            if index % STEP_TURNS == 0:
                step(index)
        step(index)
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
