"""The rounds of lab/studies/restore.py: which cases there are, their turns, and what is said of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ctxcache.format.streams import StateKind
from gpu_worker.pipeline.planned import alone, lead, pass_seconds
from gpu_worker.planning import explain
from gpu_worker.planning.adaptive import AdaptivePlanner, DriftBounds
from gpu_worker.planning.baselines import HCACHE, HIDDEN, KV, KVPR, NAIVE_HYBRID, RECOMPUTE
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding
from gpu_worker.planning.planner import Plan, PlanRequest, alternatives, plan
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import ModelShape
from lab.restoring.bed import Bed, Bounds, Case, Taken, bounds, noise
from lab.restoring.figures import (
    FIRST,
    HIDDEN_INT8,
    LEAD,
    PLANNED,
    VERIFIED,
    WHOLE,
    Ceilings,
    Work,
    spread,
)

CALIBRATIONS = 3
_ENGINE = EngineAbilities(can_recompute=True, starts_by_layer=True, can_split=True)
_INT8 = EngineAbilities(
    can_recompute=False, starts_by_layer=True, lossy_kinds=frozenset({StateKind.HIDDEN_INT8})
)
_FROM_SSD = (KV, HIDDEN, HIDDEN_INT8, PLANNED)
_QUICK = DriftBounds(enter=1.05, leave=1.02, least_count=2, weight=0.5)
Row = dict[str, Any]
"""One line of the results; Any: it is JSON."""


class Rounds:
    """One model's measurement."""

    def __init__(self, bed: Bed, machine: Ceilings, rounds: int, facts: Mapping[str, Any]) -> None:
        self._bed, self._ceilings, self._rounds, self._facts = bed, machine, rounds, facts

    def measure(
        self, token_ids: Sequence[int], new_ids: Sequence[int], profile: Profile, *, with_ssd: bool
    ) -> Iterator[Row]:
        """Rows of one length."""
        bed, history = self._bed, len(token_ids)
        bed.save(token_ids, new_ids)
        known = calibrated(bed, profile, history, len(new_ids))
        places = (StatePlace.DRAM, StatePlace.SSD) if with_ssd else (StatePlace.DRAM,)
        named: dict[tuple[str, str, str], Case] = {(RECOMPUTE, "", ""): Case(None)}
        for place in places:
            for name, each in plans(bed.shape, known, history, len(new_ids), place).items():
                if place is StatePlace.DRAM or name in _FROM_SSD:
                    for start in starts(name, place):
                        named[name, place.value, start] = Case(each, place, start)
        # Two names for one plan are one case.
        cases = {identity(case): case for case in named.values()}
        taken: dict[object, list[Taken]] = {key: [] for key in cases}
        for number in range(self._rounds + 1):
            order = list(cases)
            shift = number % len(order)
            for key in order[shift:] + order[:shift]:
                taken[key].append(bed.run(cases[key]))
        numbers = {key: index for index, key in enumerate(cases)}
        own = noise(taken[identity(Case(None))])
        for (name, place_name, start), case in named.items():
            key = identity(case)
            row = {
                "what": "restore",
                **self._facts,
                "history": history,
                "new_tokens": len(new_ids),
                "method": name,
            }
            yield (
                row
                | {"place": place_name, "start": start, "case": numbers[key]}
                | self._figures(case, taken[key], own)
            )

    def _figures(self, case: Case, taken: Sequence[Taken], own: Bounds) -> Row:
        limits = bounds(case, self._bed.model.dtype, own)
        problem = next((each.problem(limits) for each in taken if each.problem(limits)), "")
        checked = {
            "problem": problem,
            "cache_error": max(each.cache_error for each in taken),
            "kl_nats": max(each.kl_nats for each in taken),
            "bounds": asdict(limits),
        }
        if problem:
            return checked
        counted = taken[1:]
        rounds: dict[str, list[float]] = {
            name: [getattr(each, name) for each in counted] for name in ("ttft_s", "restore_s", "lease_s")
        }
        found = checked | {name: spread(values) for name, values in rounds.items()} | {"rounds": rounds}
        if case.plan is None:
            return found
        work = Work.of(case.plan, case.place)
        limit_s, limit_by = work.limit_s(self._ceilings)
        return found | {
            "plan": described(case.plan),
            **predicted(case),
            "lead_layers": lead(case.plan).layer_count,
            "work": asdict(work),
            "limit_s": limit_s,
            "limit_by": limit_by,
            "share_of_limit": spread([limit_s / seconds for seconds in rounds["restore_s"]]),
            "checksum_share": work.copied_bytes
            / self._ceilings.checksum_bytes_per_s
            / spread(rounds["restore_s"])["median"],
        }


def calibrated(bed: Bed, profile: Profile, history: int, new_tokens: int) -> Profile:
    """The machine as stages of the pipeline turn out to take, by restores of the context in use."""
    planner = AdaptivePlanner(bed.shape, profile, engine=_ENGINE, bounds=_QUICK)
    for _ in range(CALIBRATIONS):
        for name in (KV, HIDDEN, NAIVE_HYBRID, HIDDEN_INT8):
            each = plans(bed.shape, planner.profile, history, new_tokens, StatePlace.DRAM)[name]
            bed.run(Case(each, StatePlace.DRAM, WHOLE), planner)
    return planner.profile


def starts(name: str, place: StatePlace) -> tuple[str, ...]:
    """When the engine begins, by case."""
    if name == RECOMPUTE:
        return ()
    if name in (KV, HIDDEN) and place is StatePlace.DRAM:
        return (WHOLE, FIRST, LEAD, VERIFIED)
    return (WHOLE,) if name in (HCACHE, KVPR) else (WHOLE, LEAD)


def identity(case: Case) -> object:
    """Equal for cases in which the same is done."""
    layers = (
        None
        if case.plan is None
        else tuple((p.method, p.begin, p.end) for each in case.plan.layers for p in each)
    )
    return (layers, case.place, case.start)


def plans(
    shape: ModelShape, profile: Profile, history: int, new_tokens: int, place: StatePlace
) -> Mapping[str, Plan]:
    """The papers' plans, the planner's own and that of 8-bit hidden states, by name."""

    def request(kinds: tuple[StateKind, ...], engine: EngineAbilities) -> PlanRequest:
        holding = Holding.alike(len(shape.layers), kinds, [HeldSpan(place, 0, history)])
        return PlanRequest(shape, holding, history, profile, new_tokens, engine)

    wide = request((StateKind.HIDDEN, StateKind.KV), _ENGINE)
    packed = request((StateKind.HIDDEN_INT8,), _INT8)
    return {**alternatives(wide), PLANNED: plan(wide), HIDDEN_INT8: plan(packed)}


def predicted(case: Case) -> dict[str, float]:
    """The planner's prediction: the restore by itself, and the first token by when the engine starts."""
    if case.plan is None:
        return {}
    restore_s = alone(case.plan).end_s
    is_ahead = case.start in (FIRST, LEAD)
    ttft_s = case.plan.end_s if is_ahead else restore_s + sum(pass_seconds(case.plan))
    return {"predicted_restore_s": restore_s, "predicted_ttft_s": ttft_s}


def described(chosen: Plan) -> str:
    """Layers by method."""
    return ", ".join(f"{row.begin}-{row.end - 1} {row.method}" for row in explain.rows(chosen))
