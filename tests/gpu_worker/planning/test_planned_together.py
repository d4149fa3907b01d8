"""Several restores at once: beside every order, every plan and every interleaving of small instances."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from planning_requests import request

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.planning.assignment import Step, simulate
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities
from gpu_worker.planning.plan import Method
from gpu_worker.planning.planner import PlanRequest, plan
from gpu_worker.planning.profile import Link, Profile, StatePlace
from gpu_worker.planning.shape import ModelShape
from gpu_worker.planning.together import PlannedTogether, in_turn, plan_together

WHOLE_LAYERS = EngineAbilities(can_split=False)
PLACES = (StatePlace.DRAM, StatePlace.SSD)


def _machine(generator: random.Random) -> Profile:
    """Machines on which each stream may be the narrow one."""
    return replace(
        known_profile("a100-40gb"),
        copy=Link(10 ** generator.uniform(9.7, 10.8)),
        ssd=Link(10 ** generator.uniform(9.3, 10.5)),
        gemm_flops_per_s=10 ** generator.uniform(13.3, 14.6),
        attention_flops_per_s=10 ** generator.uniform(13.3, 14.3),
        is_direct=generator.random() < 0.3,
    )


def _sessions(generator: random.Random, count: int, layer_count: int) -> list[PlanRequest]:
    shape = known_model(generator.choice(["llama-2-7b", "llama-3-8b"]))
    model, profile = ModelShape("small", shape.layers[:layer_count]), _machine(generator)
    return [
        request(
            model,
            generator.choice([500, 1000, 2000, 4000, 8000]),
            profile=profile,
            kinds=generator.choice([(StateKind.HIDDEN,), (StateKind.KV,), (StateKind.HIDDEN, StateKind.KV)]),
            place=generator.choice(PLACES),
            new_tokens=generator.choice([0, 50, 500]),
            engine=WHOLE_LAYERS,
        )
        for _ in range(count)
    ]


def _plans(each: PlanRequest) -> Iterator[list[Step]]:
    """Every plan of one session, written out: the first layers recomputed, a kind for each other one."""
    profile, history = each.profile, each.history
    last = [
        Step(0, "new", compute_s=profile.recompute_s(layer, history, history + each.new_tokens))
        for layer in each.model.layers
        if each.new_tokens
    ]
    for recomputed in range(len(each.model.layers) + 1):
        ids = [Step(-1, "ids", *profile.transfer_s({_place(each): history * 4}))] if recomputed else []
        first = [
            Step(0, "tokens", compute_s=profile.recompute_s(layer, 0, history))
            for layer in each.model.layers[:recomputed]
        ]
        held = [[kind for kind, _ in holding.kinds] for holding in each.holding.layers[recomputed:]]
        for kinds in product(*held):
            rest = [
                Step(0, kind.name, *profile.transfer_s({_place(each): history * layer.row_bytes(kind)}),
                     _compute_s(each, layer, kind))
                for kind, layer in zip(kinds, each.model.layers[recomputed:], strict=True)
            ]  # fmt: skip
            yield [*ids, *first, *rest, *last]


def _place(each: PlanRequest) -> StatePlace:
    return each.holding.layers[0].kinds[0][1][0].place


def _compute_s(each: PlanRequest, layer: object, kind: StateKind) -> float:
    by = each.profile.project_s if kind is StateKind.HIDDEN else each.profile.embed_s
    return by(layer, each.history, Method[kind.name])  # type: ignore[arg-type]


def _mean_s(sessions: Sequence[Sequence[Step]]) -> float:
    """The mean end of sessions one behind the other."""
    ends, done = [], simulate([each for steps in sessions for each in steps]).steps
    place = 0
    for steps in sessions:
        place += len(steps)
        ends.append(done[place - 1].compute_end_s)
    return sum(ends) / len(ends)


def _least_mean_s(requests: Sequence[PlanRequest]) -> float:
    plans = [list(_plans(each)) for each in requests]
    return min(
        _mean_s([chosen[index] for index in order])
        for chosen in product(*plans)
        for order in permutations(range(len(requests)))
    )


def _again_s(found: PlannedTogether) -> list[float]:
    """When the new tokens of each session are computed, by its plan's steps in the order found."""
    lines = in_turn([found.plans[index] for index in found.order])
    ends = dict(zip(found.order, (line.end_s for line in lines), strict=True))
    return [ends[index] for index in range(len(ends))]


@pytest.mark.parametrize(("count", "layers", "seeds"), [(2, 3, 12), (3, 2, 8), (4, 1, 8)])
def test_within_a_tenth_of_every_order_and_every_plan(count: int, layers: int, seeds: int) -> None:
    """Up to four sessions; the seconds told are those of the steps."""
    for seed in range(seeds):
        requests = _sessions(random.Random(f"{count} {seed}"), count, layers)
        found = plan_together(requests)
        assert sorted(found.order) == list(range(count))
        assert found.first_token_s == pytest.approx(_again_s(found))
        assert found.mean_s <= 1.1 * _least_mean_s(requests), seed


def test_layers_of_two_sessions_in_any_order_gain_little() -> None:
    """At most a fifth where each layer may come before or behind each of the other session's."""
    for seed in range(3):
        requests = _sessions(random.Random(f"mixed {seed}"), 2, 2)
        least_s = math.inf
        for one, other in product(*map(_plans, requests)):
            size = len(one) + len(other)
            for mine in combinations(range(size), len(one)):
                places = set(mine)
                first, second = iter(one), iter(other)
                merged = [next(first) if place in places else next(second) for place in range(size)]
                done = simulate(merged).steps
                last = max(place for place in range(size) if place not in places)
                least_s = min(least_s, (done[mine[-1]].compute_end_s + done[last].compute_end_s) / 2)
        assert plan_together(requests).mean_s <= 1.2 * least_s, seed


def test_one_alone_is_planned_as_ever_and_several_no_worse_than_as_they_come() -> None:
    """Never worse than the best plan of each, one behind the other."""
    for seed in range(20):
        generator = random.Random(f"alone {seed}")
        requests = _sessions(generator, generator.randint(1, 9), 4)
        first = plan_together(requests[:1])
        assert first.mean_s <= plan(requests[0]).end_s * (1 + 1e-9)
        as_they_come = [line.end_s for line in in_turn(map(plan, requests))]
        assert plan_together(requests).mean_s <= sum(as_they_come) / len(requests) * (1 + 1e-9)


def test_the_short_do_not_wait_for_the_long() -> None:
    """Nor does a session that recomputes hold up one that is read."""
    long, short = (request("llama-2-7b", history, new_tokens=100) for history in (16_000, 500))
    assert plan_together([long, short, long]).order[0] == 1
    assert plan_together([]).order == ()
    assert plan_together([]).mean_s == 0.0


def test_sessions_that_are_alike_come_back_in_ways_that_do_not_meet() -> None:
    """Alone each would use bus and device alike; together some recompute while others are copied."""
    one = request("llama-3-70b", 4000, profile="h100", place=StatePlace.DRAM, new_tokens=100)
    alone, together = plan(one), plan_together([one] * 8)
    assert len({each.methods for each in together.plans}) > 1
    as_they_come_s = sum(line.end_s for line in in_turn([alone] * 8)) / 8
    assert together.mean_s < 0.8 * as_they_come_s


def test_sessions_of_several_machines_are_refused() -> None:
    """And what can neither be restored nor recomputed."""
    one = request("llama-2-7b", 1000)
    with pytest.raises(InvalidArgument) as raised:
        plan_together([one, request("llama-2-7b", 1000, profile="h100")])
    assert raised.value.field == "profile"
    lost = request("llama-2-7b", 1000, kinds=(), engine=EngineAbilities(can_recompute=False))
    with pytest.raises(InvalidArgument) as raised:
        plan_together([one, lost])
    assert raised.value.field == "holding"
