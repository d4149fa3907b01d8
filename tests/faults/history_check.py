"""Linearizability of one session name's history, against a small sequential model of a session.

Every operation has taken effect at one moment between its call and its return; the checker looks for an order
that explains all answers, as Wing and Gong (1993) do with Lowe's memory of states that were tried. Operations
without an answer may have taken effect at any moment after their call, or not at all. A crash is an operation
too: it takes back commits that nobody was told were durable, whole, and the newest first.

Knows no server and no client. Worst case: a history with too many operations at once, which is given up after
`STEPS_AT_MOST` and said to be undecided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER_NS = 1 << 62
STEPS_AT_MOST = 300_000
CLOCK_NS = 50_000_000
"""How far the instant of an expiry may be off: two clocks are read one after the other."""

LOOKS = ("absent", "present", "seen", "read", "told", "out_of_bounds")
"""Operations that change no session, wherever they come."""

Runs = tuple[tuple[int, int], ...]
"""Tokens by their tags: `(first, count)` of each run of ascending ones."""


def count_of(runs: Runs) -> int:
    """How many tokens these are."""
    return sum(count for _, count in runs)


def cut(runs: Runs, begin: int, end: int) -> Runs:
    """Tokens `[begin, end)` of these."""
    found, index = [], 0
    for first, count in runs:
        low, high = max(begin - index, 0), min(end - index, count)
        if low < high:
            found.append((first + low, high - low))
        index += count
    return joined(found)


def joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """The same tokens in as few runs as there can be."""
    found: list[tuple[int, int]] = []
    for first, count in runs:
        if found and found[-1][0] + found[-1][1] == first:
            found[-1] = found[-1][0], found[-1][1] + count
        elif count:
            found.append((first, count))
    return tuple(found)


Bound = tuple[tuple[int, int, int], ...]
"""Which tokens are which: `(of whom only that they exist was known, their tags, count)`."""


def matched(runs: Runs, found: Runs) -> tuple[Runs, Bound] | None:
    """The tokens that were found where `runs` are, if they may be the same; negative tags may be any."""
    known: list[tuple[int, int]] = []
    bound: list[tuple[int, int, int]] = []
    ours, theirs = list(reversed(runs)), list(reversed(found))
    while ours and theirs:
        (tag, count), (other, other_count) = ours.pop(), theirs.pop()
        step = min(count, other_count)
        if count > step:
            ours.append((tag + step, count - step))
        if other_count > step:
            theirs.append((other + step, other_count - step))
        if tag < 0:
            bound.append((tag, other, step))
        elif tag != other:
            return None
        known.append((other, step))
    return None if ours or theirs else (joined(known), tuple(bound))


class Image(NamedTuple):
    """A state of a session that a crash may leave."""

    uid: str
    runs: Runs
    ttl_ns: int
    due: tuple[int, int]


class State(NamedTuple):
    """A session name between two operations.

    `uid` is empty until somebody is told, `generation` -1 (then it is `least` or more). `cuts`: token counts
    that a crash may cut it to. `stale`: what a crash may leave besides, of changes that nobody was told of.
    `due`: not before, and not after which moment it expires; `is_over`: somebody was told that it has. A fork
    begins with tokens of negative tags, until they are read: `bound` says what was read, and `lent` what its
    own forks began with.
    """

    is_there: bool = False
    is_over: bool = False
    uid: str = ""
    runs: Runs = ()
    cuts: tuple[int, ...] = ()
    generation: int = -1
    least: int = 0
    ttl_ns: int = 0
    due: tuple[int, int] = (NEVER_NS, NEVER_NS)
    stale: frozenset[Image | None] = frozenset()
    bound: Bound = ()
    lent: tuple[tuple[int, Runs], ...] = ()

    def images(self) -> frozenset[Image | None]:
        """The states that a crash may leave."""
        if not self.is_there:
            return self.stale | {None}
        return self.stale | {Image(self.uid, cut(self.runs, 0, c), self.ttl_ns, self.due) for c in self.cuts}

    def changed(self, runs: Runs, cuts: Sequence[int]) -> "State":
        """One change further."""
        generation = self.generation + 1 if self.generation >= 0 else -1
        cuts = tuple(sorted({*cuts, count_of(runs)}))
        return self._replace(runs=runs, cuts=cuts, generation=generation, least=self.least + 1)


@dataclass(slots=True, eq=False)
class Op:
    """One operation on one session name. `is_known` off: its end is not, `returned_ns` NEVER_NS.

    `kind`: see `Model`. `generation` of an append: the one that it asked for. `after`: an operation that
    comes before it in any order. `text` says it to people.
    """

    kind: str
    called_ns: int
    returned_ns: int = NEVER_NS
    is_known: bool = False
    uid: str = ""
    generation: int = -1
    count: int = -1
    runs: Runs = ()
    begin: int = 0
    known: Bound = ()
    tag: int = 0
    sinks: int = 0
    ttl_ns: int = 0
    due: tuple[int, int] = (NEVER_NS, NEVER_NS)
    is_durable: bool = False
    after: "Op | None" = None
    text: str = ""


@dataclass(slots=True)
class Outcome:
    """Whether there is an order; if not, what could not be explained. `is_decided` off: given up."""

    is_linearizable: bool
    is_decided: bool = True
    problem: str = ""
    step_count: int = 0
    bound: Bound = ()
    lent: tuple[tuple[int, Runs], ...] = ()


class Model:
    """A session as a sequence of operations sees it: each kind yields the states that it may lead to."""

    def after(self, state: State, op: Op) -> Iterator[State]:
        """The states behind an operation whose answer is possible in `state`; none where it is not."""
        step = getattr(self, op.kind)
        yield from step(state, op)

    # -- looking -----------------------------------------------------------------------------------

    def absent(self, state: State, op: Op) -> Iterator[State]:
        """Told that there is no such session."""
        if not state.is_there or (state.is_over and state.due[0] - CLOCK_NS <= op.returned_ns):
            yield state
        elif state.due[0] - CLOCK_NS <= op.returned_ns:
            yield state._replace(is_over=True)

    def present(self, state: State, op: Op) -> Iterator[State]:
        """Told that there is one."""
        if self._is_live(state, op):
            yield state

    def seen(self, state: State, op: Op) -> Iterator[State]:
        """Told of its generation and count, without an access."""
        if self._is_live(state, op):
            yield from self._bound(state, op)

    def read(self, state: State, op: Op) -> Iterator[State]:
        """All of its rows."""
        if self._is_live(state, op) and (found := matched(state.runs, op.runs)):
            runs, bound = found
            for known in self._bound(state._replace(runs=runs, bound=state.bound + bound), op):
                yield self._touched(known, op)

    def told(self, state: State, op: Op) -> Iterator[State]:
        """The answer to a change tells of the changed session at some moment before the answer."""
        if state.is_there and (not state.uid or state.uid == op.uid):
            yield from self._bound(state, op)
        else:
            yield state

    def out_of_bounds(self, state: State, op: Op) -> Iterator[State]:
        """Told that it has fewer tokens than `count`."""
        if self._is_live(state, op) and count_of(state.runs) < op.count:
            yield state

    # -- changing ----------------------------------------------------------------------------------

    def create(self, state: State, op: Op) -> Iterator[State]:
        """A new one; `runs`: what it begins with, as a fork."""
        if state.is_there and not state.is_over and op.returned_ns < state.due[0] - CLOCK_NS:
            return
        due = (op.called_ns + op.ttl_ns, NEVER_NS) if op.ttl_ns else op.due
        stale = frozenset() if op.is_known else state.images()
        yield State(
            is_there=True,
            uid=op.uid,
            runs=op.runs,
            cuts=(count_of(op.runs),),
            ttl_ns=op.ttl_ns,
            due=due,
            stale=stale,
            bound=state.bound,
            lent=state.lent,
        )

    def append(self, state: State, op: Op) -> Iterator[State]:
        """Rows behind the first `begin`."""
        if not self._is_live(state, op) or count_of(state.runs) != op.begin:
            return
        if op.generation >= 0 and state.generation not in (-1, op.generation):
            return
        runs = joined((*state.runs, *op.runs))
        if op.is_durable and op.is_known:
            changed = state._replace(stale=frozenset()).changed(runs, ())
        else:
            changed = state.changed(runs, state.cuts)
        yield self._touched(changed, op)

    def keep_first(self, state: State, op: Op) -> Iterator[State]:
        """The first `count` tokens stay."""
        yield from self._drop(state, op, op.count, count_of(state.runs))

    def keep_recent(self, state: State, op: Op) -> Iterator[State]:
        """The last `count` tokens stay, and the first `sinks`."""
        total = count_of(state.runs)
        yield from self._drop(state, op, min(op.sinks, total), max(total - op.count, 0))

    def update(self, state: State, op: Op) -> Iterator[State]:
        """Another expiry."""
        if self._is_live(state, op):
            due = (op.called_ns + op.ttl_ns, NEVER_NS) if op.ttl_ns else op.due
            yield self._written(state, op)._replace(ttl_ns=op.ttl_ns, due=due)

    def delete(self, state: State, op: Op) -> Iterator[State]:
        """It is gone."""
        if self._is_live(state, op):
            yield State(
                stale=frozenset() if op.is_known else state.images(), bound=state.bound, lent=state.lent
            )

    def flush(self, state: State, op: Op) -> Iterator[State]:
        """Committed tokens are durable."""
        if self._is_live(state, op):
            yield state._replace(cuts=(count_of(state.runs),))

    def source(self, state: State, op: Op) -> Iterator[State]:
        """A fork of it was made, of `count` tokens; `known`.

        `(index, tags, count)` of those that were read there.
        """
        total = count_of(state.runs)
        if not self._is_live(state, op) or total < op.count:
            return
        for index, tag, count in op.known:
            found = matched(cut(state.runs, index, index + count), ((tag, count),))
            if found is None:
                return
            runs = joined((*cut(state.runs, 0, index), *found[0], *cut(state.runs, index + count, total)))
            state = state._replace(runs=runs, bound=state.bound + found[1])
        lent = (*state.lent, (op.tag, cut(state.runs, 0, op.count)))
        yield self._touched(state._replace(cuts=(total,), lent=lent), op)

    def crash(self, state: State, _: Op) -> Iterator[State]:
        """The server has ended where it stood. Generations go on above all that were told."""
        known = max(state.generation, state.least)
        for image in state.images():
            if image is None:
                yield State(bound=state.bound, lent=state.lent)
            else:
                is_same = image.uid == state.uid and image.runs == state.runs
                # Accesses are written down now and then.
                due = (0 if image.ttl_ns else image.due[0], image.due[1])
                yield State(
                    is_there=True,
                    uid=image.uid,
                    runs=image.runs,
                    cuts=(count_of(image.runs),),
                    least=known + (not is_same),
                    ttl_ns=image.ttl_ns,
                    due=due,
                    bound=state.bound,
                    lent=state.lent,
                )

    def ended(self, state: State, _: Op) -> Iterator[State]:
        """The server has ended in order: all is kept."""
        least = max(state.generation, state.least)
        yield state._replace(cuts=(count_of(state.runs),), generation=-1, least=least, stale=frozenset())

    # -- parts -------------------------------------------------------------------------------------

    def _is_live(self, state: State, op: Op) -> bool:
        return state.is_there and not state.is_over and op.called_ns <= state.due[1] + CLOCK_NS

    def _bound(self, state: State, op: Op) -> Iterator[State]:
        if op.count >= 0 and op.count != count_of(state.runs):
            return
        if op.uid and state.uid and op.uid != state.uid:
            return
        if op.generation >= 0:
            if state.generation >= 0 and state.generation != op.generation:
                return
            if state.generation < 0 and op.generation < state.least:
                return
            state = state._replace(generation=op.generation, least=0)
        yield state._replace(uid=op.uid or state.uid)

    def _touched(self, state: State, op: Op) -> State:
        if not state.ttl_ns:
            return state
        return state._replace(due=(max(state.due[0], op.called_ns + state.ttl_ns), NEVER_NS))

    def _written(self, state: State, op: Op) -> State:
        """With its record written, where the answer says so; without, a crash may take the change back."""
        return state._replace(stale=frozenset() if op.is_known else state.images())

    def _drop(self, state: State, op: Op, begin: int, end: int) -> Iterator[State]:
        total = count_of(state.runs)
        if not self._is_live(state, op) or not 0 <= begin <= total:
            return
        if begin >= end:
            yield self._touched(state, op)
            return
        runs = joined((*cut(state.runs, 0, begin), *cut(state.runs, end, total)))
        cuts = [c - max(0, min(c, end) - begin) for c in state.cuts]
        yield self._touched(self._written(state, op).changed(runs, cuts), op)


@dataclass(slots=True)
class Search:
    """Looks for an order of one history."""

    ops: list[Op]
    model: Model = field(default_factory=Model)
    step_count: int = 0
    best_mask: int = 0
    best_state: State = field(default_factory=State)

    def run(self) -> Outcome:
        """Decide."""
        self.ops.sort(key=lambda op: op.called_ns)
        index = {id(op): i for i, op in enumerate(self.ops)}
        needs = [1 << index[id(op.after)] if op.after else 0 for op in self.ops]
        goal = sum(1 << i for i, op in enumerate(self.ops) if op.is_known)
        tried: set[tuple[int, State]] = set()
        stack = [(0, State())]
        while stack:
            mask, state = stack.pop()
            if mask & goal == goal:
                return Outcome(
                    is_linearizable=True, step_count=self.step_count, bound=state.bound, lent=state.lent
                )
            if (mask, state) in tried:
                continue
            tried.add((mask, state))
            self.step_count += 1
            if self.step_count > STEPS_AT_MOST:
                return Outcome(is_linearizable=False, is_decided=False, step_count=self.step_count)
            if (mask & goal).bit_count() > (self.best_mask & goal).bit_count():
                self.best_mask, self.best_state = mask, state
            stack += self._following(mask, state, needs)
        return Outcome(is_linearizable=False, problem=self._problem(), step_count=self.step_count)

    def _following(self, mask: int, state: State, needs: Sequence[int]) -> list[tuple[int, State]]:
        """The operations that may come next, the likeliest last.

        Each was called before any other one ended.
        """
        left = [i for i in range(len(self.ops)) if not mask >> i & 1]
        first_end_ns = min(self.ops[i].returned_ns for i in left)
        able = [i for i in left if self.ops[i].called_ns <= first_end_ns and needs[i] & mask == needs[i]]
        able.sort(key=lambda i: self.ops[i].returned_ns, reverse=True)
        found: list[tuple[int, State]] = []
        for i in able:
            states = list(self.model.after(state, self.ops[i]))
            if states == [state] and self.ops[i].kind in LOOKS:
                # An operation that only looks, and finds nothing new, may as well come first: no order is
                # lost by that.
                return [(mask | 1 << i, state)]
            found += [(mask | 1 << i, after) for after in states]
        return found

    def _problem(self) -> str:
        left = [op for i, op in enumerate(self.ops) if op.is_known and not self.best_mask >> i & 1]
        first_end_ns = min(op.returned_ns for op in left)
        next_ones = [op.text or op.kind for op in left if op.called_ns <= first_end_ns]
        state = self.best_state
        found = f"generation {state.generation}, {state.runs}" if state.is_there else "no session"
        return f"{found} is not followed by {' nor by '.join(next_ones)}, whatever came before"


def check(ops: Sequence[Op]) -> Outcome:
    """Whether the history of one session name is linearizable."""
    return Search(list(ops)).run()
