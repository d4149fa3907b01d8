"""Requests of lab/studies/skew.py: each hits the kept caches or restores from the store, by each method.

Sessions are drawn by Zipf's law, and the engine keeps the caches of those that were used last. All methods
get the same requests and keep caches of their own, so that they hit and miss alike. Every cache is compared
with recomputation's, the kept ones at each use. Worst case: a difference beyond the bounds, and no figures.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import Cache

from gpu_worker.planning.baselines import HIDDEN, KV, RECOMPUTE
from lab.restoring.bed import Bed, Case, Saved, Taken, bounds, noise
from lab.restoring.figures import PLANNED, ratio, spread
from lab.restoring.rounds import Row, described, identity


def shares(session_count: int, skew: float) -> NDArray[np.float64]:
    """Each session's share of the requests: of the one of rank r, from 1, in proportion to r ** -skew.

    Skew 0: all alike.
    """
    weights: NDArray[np.float64] = np.arange(1, session_count + 1, dtype=np.float64) ** -skew
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def draw(session_count: int, skew: float, request_count: int, generator: np.random.Generator) -> list[int]:
    """Session numbers, each drawn by itself; the most popular is 0."""
    found: list[int] = generator.choice(session_count, request_count, p=shares(session_count, skew)).tolist()
    return found


_Cache = TypeVar("_Cache")


class Front(Generic[_Cache]):
    """At most `room_count` caches by session number; the least recently used one leaves."""

    def __init__(self, room_count: int) -> None:
        self._room_count = room_count
        self._kept: OrderedDict[int, _Cache] = OrderedDict()

    def get(self, session: int) -> _Cache | None:
        """Its cache, the most recently used one then; None is a miss."""
        if session in self._kept:
            self._kept.move_to_end(session)
        return self._kept.get(session)

    def put(self, session: int, cache: _Cache) -> None:
        """Keep it, as the most recently used."""
        self._kept[session] = cache
        self._kept.move_to_end(session)
        while len(self._kept) > self._room_count:
            self._kept.popitem(last=False)


_PAPER = {(KV, 0.0): "1.67", (KV, 2.0): "1.15", (RECOMPUTE, 2.0): "1.98"}
"""HCache, section 6.4.

Llama-2-7B, L-Eval, four SSDs, 15 % of requests on the GPU without skew, 94 % at 2.0.
"""


@dataclass(frozen=True, slots=True)
class Served:
    """One request; `is_hit`: its cache was still there."""

    taken: Taken
    is_hit: bool


class Skewed:
    """One model's sessions and the ways to a first token; one case may have two names."""

    def __init__(
        self,
        bed: Bed,
        sessions: Sequence[Saved],
        cases: Mapping[str, Case],
        room_count: int,
        facts: Mapping[str, Any],
    ) -> None:
        self._bed, self._sessions, self._room_count, self._facts = bed, sessions, room_count, facts
        self._named = cases
        self._cases = {identity(case): case for case in cases.values()}

    def measure(self, skew: float, request_count: int, rounds: int) -> Iterator[Row]:
        """A row for each method, then the paper's ratios.

        A round has requests of its own; the first only fills the caches.
        """
        generator = np.random.default_rng(round(skew * 1000))
        fronts: dict[object, Front[Cache]] = {key: Front(self._room_count) for key in self._cases}
        served: dict[object, list[list[Served]]] = {key: [] for key in self._cases}
        for _ in range(rounds + 1):
            requests = draw(len(self._sessions), skew, request_count, generator)
            for key, found in self._round(requests, fronts).items():
                served[key].append(found)
        rows = [
            {**self._facts, "what": "skew", "skew": skew, "method": name, **self._figures(case, served)}
            for name, case in self._named.items()
        ]
        yield from rows
        compared_rows = compared(rows, skew)
        yield from ({**self._facts, "what": "compared", "skew": skew, **each} for each in compared_rows)

    def _round(
        self, requests: Sequence[int], fronts: Mapping[object, Front[Cache]]
    ) -> Mapping[object, list[Served]]:
        served: dict[object, list[Served]] = {key: [] for key in self._cases}
        for number, session in enumerate(requests):
            order = list(self._cases)
            shift = number % len(order)
            for key in order[shift:] + order[:shift]:
                served[key].append(self._serve(session, self._cases[key], fronts[key]))
        return served

    def _serve(self, session: int, case: Case, front: Front[Cache]) -> Served:
        saved, kept = self._sessions[session], front.get(session)
        self._bed.use(saved)
        taken, cache = self._bed.restore(case) if kept is None else self._bed.go_on(kept)
        # The kept part is the history: each request continues it anew.
        cache.crop(-len(saved.new_ids))
        front.put(session, cache)
        return Served(taken, is_hit=kept is not None)

    def _figures(self, case: Case, served: Mapping[object, list[list[Served]]]) -> Row:
        key = identity(case)
        recomputed = served[identity(self._named[RECOMPUTE])]
        own = noise(each.taken for found in recomputed for each in found)
        limits = bounds(case, self._bed.model.dtype, own)
        every = [each.taken for found in served[key] for each in found]
        checked = {
            "case": list(self._cases).index(key),
            "plan": described(case.plan) if case.plan else "",
            "problem": next((each.problem(limits) for each in every if each.problem(limits)), ""),
            "cache_error": max(each.cache_error for each in every),
            "kl_nats": max(each.kl_nats for each in every),
            "bounds": asdict(limits),
        }
        return checked if checked["problem"] else checked | figures(served[key][1:])


def figures(rounds: Sequence[Sequence[Served]]) -> Row:
    """Rounds of one method.

    Shares of hits, mean and median of seconds to the first token, and of hits and misses by themselves.
    """
    seconds = [[each.taken.ttft_s for each in found] for found in rounds]
    values = {
        "hit_rate": [fmean(each.is_hit for each in found) for found in rounds],
        "mean_ttft_s": [fmean(found) for found in seconds],
        "median_ttft_s": [median(found) for found in seconds],
    }
    by_outcome = {
        name: [each.taken.ttft_s for found in rounds for each in found if each.is_hit == is_hit]
        for name, is_hit in (("hit_ttft_s", True), ("miss_ttft_s", False))
    }
    return (
        {name: spread(each) for name, each in values.items()}
        | {name: spread(each) if each else None for name, each in by_outcome.items()}
        | {"rounds": values}
    )


def compared(rows: Sequence[Row], skew: float) -> Iterator[Row]:
    """D8 at one skew: mean time to first token over that of hidden states, and of the plan, round by round.

    Without red rows.
    """
    known = {row["method"]: row for row in rows if not row["problem"]}
    for over, under in ((KV, HIDDEN), (RECOMPUTE, HIDDEN), (KV, PLANNED), (RECOMPUTE, PLANNED)):
        if over in known and under in known and known[over]["case"] != known[under]["case"]:
            means = (known[name]["rounds"]["mean_ttft_s"] for name in (over, under))
            paper = _PAPER.get((over, skew), "") if under == HIDDEN else ""
            figure = f"mean TTFT, {over} over {under}"
            yield {"row": "D8", "figure": figure, "ratio": ratio(*means), "paper": paper}
