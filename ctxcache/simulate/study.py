"""A study: every policy at every capacity over one trace, as the command prints it. Knows no terminal.

`look` reads a trace once before its replay and says when each session comes next: 8 bytes a turn and an entry
per session, for Belady, for hints and for capacities as multiples of the live footprint.
"""

import gc
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ctxcache.core.placement.look_ahead import Belady
from ctxcache.core.placement.policy import Capacities, Policy
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.value import MissCost
from ctxcache.simulate.blocks import BlockReplay, Future, live_block_count, next_uses
from ctxcache.simulate.load import Load
from ctxcache.simulate.replay import Replay
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.store import MakePolicy
from ctxcache.simulate.tally import HitTally
from ctxcache.simulate.trace import Trace


def look(turns: Iterable[TraceTurn]) -> "array[float]":
    """Read the whole trace; returns by turn when its session arrives next, in seconds, infinity for never."""
    next_arrivals_s = array("d")
    last: dict[bytes, int] = {}
    for index, turn in enumerate(turns):
        before = last.get(turn.session)
        next_arrivals_s.append(math.inf)
        if before is not None:
            next_arrivals_s[before] = turn.arrival_s
        last[turn.session] = index
    return next_arrivals_s


BELADY = "belady"
ALL_POLICIES = (*RANKED, BELADY)
BOUNDLESS_BYTES = 1 << 60
Step = Callable[[str, int], None]
"""Hears of what is being done, a policy's replay or FOOTPRINT, and how many turns of it are."""
FOOTPRINT = "footprint"
PolicyOf = Callable[[str, Capacities, MissCost], Policy]
"""Makes the policy of a name."""


def served(name: str, capacities: Capacities, miss_cost: MissCost) -> Policy:
    """The policy of that name that a server can place by."""
    return RANKED[name](capacities, miss_cost)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity to try: of the load itself, or a multiple of the live footprint of which DRAM is a share."""

    multiple: float | None = None
    dram_share: float = 0.06

    def of(self, load: Load, footprint_bytes: int) -> Load:
        """The load with this capacity."""
        if self.multiple is None:
            return load
        total_bytes = int(self.multiple * footprint_bytes)
        dram_bytes = int(total_bytes * self.dram_share)
        return replace(load, dram_bytes=dram_bytes, ssd_bytes=total_bytes - dram_bytes)


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """The figures of one policy at one capacity."""

    policy: str
    multiple: float | None
    load: Load
    tally: HitTally

    def to_dict(self) -> dict[str, object]:
        """For JSON; sizes in bytes, times in seconds, money in US dollars."""
        return {
            "policy": self.policy,
            "footprint_multiple": self.multiple,
            "dram_bytes": self.load.dram_bytes,
            "ssd_bytes": self.load.ssd_bytes,
            **self.tally.figures(),
            **self.tally.costs(self.load),
        }


def study(
    trace: Iterable[TraceTurn],
    load: Load,
    policies: Sequence[str],
    capacities: Sequence[Capacity],
    *,
    step: Step,
    block_tokens: int | None = None,
    is_space: bool = False,
    teacher: Trace | None = None,
    policy_of: PolicyOf = served,
) -> Iterator[StudyOutcome]:
    """Replay the trace for each pair. Raises InvalidTrace before anything else where it is wrong.

    The trace is read once for each, and before that for what needs the future: it is no iterator. The live
    footprint is of sessions, and by blocks of blocks: those that later turns ask for, whosever they are.
    With `block_tokens` by prefix blocks, else by sessions; with `is_space` as a server keeps a space of
    blocks. With a `teacher` each policy of blocks begins with
    what it learned from that trace at the same capacity.
    """
    needs_footprint = any(capacity.multiple is not None for capacity in capacities)
    needs_future = needs_footprint or load.hints or BELADY in policies
    # A closed loop knows a session's next turn when its answer is there.
    next_arrivals_s = look(trace) if needs_future and not load.is_closed else None
    peak_bytes = 0
    if needs_footprint and block_tokens:
        peak_bytes = live_block_count(trace, block_tokens) * block_tokens * load.token_bytes
    elif needs_footprint:
        peak_bytes = footprint_bytes(trace, load, next_arrivals_s, step)
    uses = next_uses(trace, block_tokens) if block_tokens and BELADY in policies else None
    for capacity in capacities:
        sized = capacity.of(load, peak_bytes)
        for policy in policies:
            replay = (
                Replay(
                    sized,
                    maker(policy, sized, policy_of),
                    next_arrivals_s=next_arrivals_s,
                )
                if block_tokens is None
                else of_blocks(
                    sized, policy, block_tokens, next_arrivals_s, uses, policy_of, is_space=is_space
                )
            )
            if teacher is not None and isinstance(replay, BlockReplay) and policy != BELADY:
                unhinted = replace(sized, hints=frozenset())
                # Hints of the teacher's trace say nothing of this one's future.
                other = of_blocks(
                    unhinted, policy, replay.block_tokens, None, None, policy_of, is_space=is_space
                )
                _teach(replay, other, teacher)
            with _uncollected():
                tally = replay.run(trace, lambda done, policy=policy: step(policy, done))  # type: ignore[misc]
            yield StudyOutcome(policy, capacity.multiple, sized, tally)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let no cycles be looked for: a replay makes none, and each look is at all turns that are still to come.

    The last replay is one itself, and goes after this.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _teach(replay: BlockReplay, other: BlockReplay, teacher: Trace) -> None:
    """Let the policy of `replay` begin with what that of `other` learns from the trace, without hints."""
    other.run(teacher)
    lessons = other.store.policy.lessons()
    if lessons:
        replay.store.policy.relearn(lessons, math.inf)


def of_blocks(
    load: Load,
    policy: str,
    block_tokens: int,
    next_arrivals_s: "array[float] | None",
    uses: "list[array[float]] | None",
    policy_of: PolicyOf,
    *,
    is_space: bool = False,
) -> BlockReplay:
    """A replay of prefix blocks under the policy of that name; Belady needs the `next_uses`."""
    capacities = Capacities(load.dram_bytes, load.ssd_bytes)
    if policy == BELADY:
        future = Future(uses or [])
        belady = Belady(capacities, future.next_use)
        return BlockReplay(load, belady, block_tokens, future=future)
    made = policy_of(policy, capacities, load.miss_cost)
    return BlockReplay(load, made, block_tokens, next_arrivals_s=next_arrivals_s, is_space=is_space)


def maker(policy: str, load: Load, policy_of: PolicyOf = served) -> MakePolicy:
    """The maker of the policy of that name."""
    if policy == BELADY:
        return Belady
    return lambda capacities, _: policy_of(policy, capacities, load.miss_cost)


def footprint_bytes(
    trace: Iterable[TraceTurn], load: Load, next_arrivals_s: "array[float] | None", step: Step
) -> int:
    """Most bytes of state at once in turns or needed by later ones; found by a replay with room for all."""
    # DRAM and SSD without bound, and a policy that is never asked: only what is live is of interest.
    boundless = replace(
        load, dram_bytes=BOUNDLESS_BYTES, ssd_bytes=BOUNDLESS_BYTES, buffer_share=0.0, hints=frozenset()
    )
    replay = Replay(boundless, maker("lru", boundless), next_arrivals_s=next_arrivals_s, is_footprint=True)
    replay.run(trace, lambda done: step(FOOTPRINT, done))
    return replay.peak_live_bytes
