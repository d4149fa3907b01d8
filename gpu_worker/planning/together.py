"""Several restores at once: their order, and how each comes back so that the mean first token is earliest.

Reads, copies and computation are those of one machine. Sessions take each of them one behind the other, in
one order, so that the second session is read while the first one still computes. The order decides who waits,
and each session's plan decides what the others wait for: a session that recomputes leaves the bus to those
behind it, and one that is read leaves them the device.

    read      [a][b][c      ]
    copy       [a][b][c      ]
    compute     [a ]   [b ] [c      ][c's new tokens]

Each session has a few plans to choose from: the best ones where others use a part of the bus or of the
device, and the papers'. A session's plan is a block (`block.py`), however many layers it has, so that
thousands of choices cost milliseconds. Pure. Worst case: plans that only a search over all layers of all
sessions would find; `lab/studies/together.py` compares with that.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.assignment import Step, Timeline, simulate
from gpu_worker.planning.block import NOTHING, START, State, StreamBlock, step
from gpu_worker.planning.option import LayerPiece
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.planner import Plan, PlanRequest, alternatives, plan

# A session alone would use all of bus and device. A dear device favours plans that copy, a cheap one those
# that compute: these leave the other stream to the sessions behind.
PRICES = (0.3, 3.0)
"""How many times as long computation seems to take when a session's plans are looked for."""
WIDTH = 8
"""Choices of plans that are followed at a time; each may turn out to be the best one's beginning."""
BLOCK_LIMIT = 10_000
"""Blocks that are put together while orders are compared: some tens of milliseconds."""

_TRANSFERS = (Stage.READ, Stage.COPY)


@dataclass(frozen=True, slots=True)
class PlannedTogether:
    """Sessions in the `order` in which they are restored, as indexes of the requests.

    `plans` and `first_token_s` are by request: seconds from the common begin until a session's new tokens
    have been computed, or until it is restored where there are none.
    """

    order: tuple[int, ...]
    plans: tuple[Plan, ...]
    first_token_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Mean seconds to a first token; 0 for none."""
        return sum(self.first_token_s) / max(len(self.first_token_s), 1)


class Way(NamedTuple):
    """One plan of a session, and what it does to the streams."""

    plan: Plan
    block: StreamBlock


class _Chosen(NamedTuple):
    """The first sessions of an order, with a way each."""

    state: State
    total_s: float
    picks: tuple[int, ...]


def plan_together(requests: Sequence[PlanRequest]) -> PlannedTogether:
    """Decide for sessions that are restored on one machine from now on.

    One request alone is planned as `plan` does. Raises InvalidArgument(field="profile") for requests of
    several machines, and what `plan` raises.
    """
    if any(request.profile != requests[0].profile for request in requests):
        raise InvalidArgument(field="profile", problem="sessions that come back together share one machine")
    known: dict[object, tuple[Way, ...]] = {}
    sessions = []
    for request in requests:
        key = (id(request.model), request.holding, request.history, request.new_tokens, request.engine)
        if key not in known:
            known[key] = ways(request)
        sessions.append(known[key])
    return arranged(sessions)


def ways(request: PlanRequest) -> tuple[Way, ...]:
    """Plans for one session, the best one alone first, without those that another beats on all streams."""
    plans = [plan(request)]
    for price in PRICES:
        with suppress(InvalidArgument):
            plans.append(_priced(request, price))
    if request.history:
        with suppress(InvalidArgument):
            plans.extend(alternatives(request).values())
    kept: list[Way] = []
    for candidate in plans:
        way = Way(candidate, reduce(StreamBlock.then, map(_block, candidate.timeline.steps), NOTHING))
        if not any(other.block.never_later_than(way.block) for other in kept):
            kept.append(way)
    return tuple(kept)


def arranged(sessions: Sequence[Sequence[Way]]) -> PlannedTogether:
    """The order of sessions, and a way for each, of those given."""
    blocks = [[way.block for way in some] for some in sessions]
    # Shortest first is best for one stream.
    shortest = sorted(range(len(blocks)), key=lambda index: blocks[index][0].read_to_compute_s)
    as_given = list(range(len(blocks)))
    order, best = as_given, _followed(blocks, as_given)
    # Three beginnings, of which the best is improved on, so that the result is no worse than the first:
    #
    #     as asked for, plans as if alone  │  shortest first, plans chosen  │  as asked for, plans chosen
    for other in (shortest, as_given):
        chosen = _choose(blocks, other)
        if chosen.total_s < best.total_s:
            order, best = other, chosen
    order, best = _improved(blocks, order, best)
    plans = {index: sessions[index][pick].plan for index, pick in zip(order, best.picks, strict=True)}
    ends: dict[int, float] = {}
    state = START
    for index, pick in zip(order, best.picks, strict=True):
        state = blocks[index][pick].after(state)
        ends[index] = state[2]
    return PlannedTogether(
        tuple(order), tuple(plans[index] for index in as_given), tuple(ends[index] for index in as_given)
    )


def in_turn(plans: Iterable[Plan]) -> list[Timeline]:
    """Each plan's steps through the shared streams, one session behind the other."""
    steps = [(number, timed.step) for number, each in enumerate(plans) for timed in each.timeline.steps]
    timed = simulate(each for _, each in steps).steps
    count = 1 + max((number for number, _ in steps), default=-1)
    places_of: list[list[int]] = [[] for _ in range(count)]
    for place, (number, _) in enumerate(steps):
        places_of[number].append(place)
    return [Timeline(tuple(timed[place] for place in places)) for places in places_of]


def _followed(blocks: Sequence[Sequence[StreamBlock]], order: Sequence[int]) -> _Chosen:
    """Every session by its first way."""
    state, total_s = START, 0.0
    for index in order:
        state = blocks[index][0].after(state)
        total_s += state[2]
    return _Chosen(state, total_s, (0,) * len(order))


def _choose(blocks: Sequence[Sequence[StreamBlock]], order: Sequence[int]) -> _Chosen:
    """A way for each session of an order, so that the sum of their ends is least; near it for many ways."""
    front = [_Chosen(START, 0.0, ())]
    for place, index in enumerate(order, 1):
        longer = []
        for chosen in front:
            for pick, block in enumerate(blocks[index]):
                state = block.after(chosen.state)
                longer.append(_Chosen(state, chosen.total_s + state[2], (*chosen.picks, pick)))
        front = _kept(longer, left=len(order) - place)
    return min(front, key=lambda chosen: chosen.total_s)


def _kept(candidates: list[_Chosen], *, left: int) -> list[_Chosen]:
    """The most promising candidates, `WIDTH` at most, without those that another beats."""
    # Sessions behind wait for the streams: the mean of the three is a guess of how long.
    candidates.sort(key=lambda chosen: (chosen.total_s + left * sum(chosen.state) / len(START), chosen.state))
    kept: list[_Chosen] = []
    for chosen in candidates:
        if len(kept) == WIDTH:
            break
        if not any(_beats(other, chosen) for other in kept):
            kept.append(chosen)
    return kept


def _beats(one: _Chosen, other: _Chosen) -> bool:
    return one.total_s <= other.total_s and all(
        mine <= theirs for mine, theirs in zip(one.state, other.state, strict=True)
    )


def _improved(
    blocks: Sequence[Sequence[StreamBlock]], order: list[int], best: _Chosen
) -> tuple[list[int], _Chosen]:
    """Move one session at a time to where the sum of ends is less, until none helps or enough was tried."""
    cost = WIDTH * sum(len(some) for some in blocks)
    left = BLOCK_LIMIT // max(cost, 1)
    is_better = True
    while is_better and left > 0:
        is_better = False
        # The first change that helps is kept, and the search goes on from it.
        for begin, end in ((i, j) for i in range(len(order)) for j in range(len(order)) if i != j):
            left -= 1
            if left < 0:
                break
            other = order.copy()
            other.insert(end, other.pop(begin))
            chosen = _choose(blocks, other)
            if chosen.total_s < best.total_s:
                order, best, is_better = other, chosen, True
    return order, best


def _priced(request: PlanRequest, price: float) -> Plan:
    """The best plan where computation takes `price` times as long, with the seconds that it really takes."""
    # The planner knows one session. Others that use the device, or the bus, are told to it as this price.
    factors = {stage: price for stage in Stage if stage not in _TRANSFERS}
    # Chosen by the price, then told in true seconds: prices must not add up in the sum of ends.
    seeming = plan(replace(request, profile=request.profile.corrected(factors)))
    timeline = simulate(
        Step(each.layer, each.what, each.read_s, each.copy_s, each.compute_s / price)
        for each, *_ in seeming.timeline.steps
    )
    layers = tuple(tuple(_at(piece, price) for piece in pieces) for pieces in seeming.layers)
    return Plan(request, layers, timeline, bound_s=0.0, is_exact=False, step_count=seeming.step_count)


def _at(piece: LayerPiece, price: float) -> LayerPiece:
    return replace(piece, compute_s=piece.compute_s / price, gather_s=piece.gather_s / price)


def _block(timed: tuple[Step, float, float, float]) -> StreamBlock:
    work = timed[0]
    return step(read_s=work.read_s, copy_s=work.copy_s, compute_s=work.compute_s)
