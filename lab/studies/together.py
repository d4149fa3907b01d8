#!/usr/bin/env python3
"""Several sessions that come back at once: the mean time to a first token, by how restores are planned.

    python -m lab.studies.together                     # simulated: models, machines, places; seconds
    python -m lab.studies.together --brute-force 40    # beside every order and every plan of small instances
    python -m lab.studies.together --engine            # SmolLM2-135M on this machine's CPU, replies checked

Simulated: eight sessions, all of 4,096 tokens or of 500 to 16,000, with 100 new tokens each. `alone` plans
each session as if it had the machine to itself and begins all of them at once, their layers by turns.
`in turn` begins the same plans one behind the other, as asked for, without gaps; `shortest` the same with the
shortest first. `--engine` restores and answers eight real sessions, by one `turn` after the other and by
`turns`: the mean time to a first token of each round, the ratio within a round, and an exit status of 1 where
a reply differs.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import permutations, product, zip_longest
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from ctxcache.client import Client
from ctxcache.client.types import Durability
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers_batch import TransformersBatchEngine, TurnRequest
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.assignment import simulate
from gpu_worker.planning.block import NOTHING, START, StreamBlock, step
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding
from gpu_worker.planning.option import layer_options, token_ids_block
from gpu_worker.planning.planner import Plan, PlanRequest, plan
from gpu_worker.planning.profile import StatePlace
from gpu_worker.planning.shape import ModelShape
from gpu_worker.planning.together import in_turn, plan_together
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count
from lab.demo.models import load_model, smollm2

SESSIONS = 8
NEW_TOKENS = 100
MODELS = ("llama-2-13b", "opt-30b", "llama-3-8b", "llama-3-70b")
MACHINES = ("a100-40gb", "h100")
LENGTHS = (500, 1000, 2000, 4000, 8000, 16_000)


def main(
    *,
    brute_force: Annotated[int, typer.Option(help="So many small instances of 2 to 4 sessions.")] = 0,
    engine: Annotated[bool, typer.Option(help="Restore real sessions here.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of --engine that count.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 1,
) -> None:
    """Print JSON lines, one for each case."""
    if engine:
        torch.set_num_threads(physical_core_count())
        cases = _on_engine(rounds)
    elif brute_force:
        cases = _beside_every_plan(brute_force, seed)
    else:
        cases = _simulated(seed)
    is_right = True
    for case in cases:
        print(json.dumps(case), flush=True)
        is_right = is_right and case.get("is_right", True)
    sys.exit(0 if is_right else 1)


def _request(model: ModelShape, machine: Any, place: StatePlace, history: int, **others: Any) -> PlanRequest:
    kinds = (StateKind.HIDDEN, StateKind.KV)
    holding = Holding.alike(len(model.layers), kinds, [HeldSpan(place, 0, history)])
    return PlanRequest(model, holding, history, machine, NEW_TOKENS, **others)


def _simulated(seed: int) -> Iterator[dict[str, Any]]:
    lengths = random.Random(seed)  # noqa: S311
    for name, machine, place in product(MODELS, MACHINES, (StatePlace.DRAM, StatePlace.SSD)):
        for histories in ([4096] * SESSIONS, [lengths.choice(LENGTHS) for _ in range(SESSIONS)]):
            model, profile = known_model(name), known_profile(machine)
            requests = [_request(model, profile, place, history) for history in histories]
            begin = time.perf_counter()
            together = plan_together(requests)
            planned_s = time.perf_counter() - begin
            alone = [plan(each) for each in requests]
            ways = {
                "alone": _by_turns_s(alone),
                "in turn": _mean([line.end_s for line in in_turn(alone)]),
                "shortest": _mean([line.end_s for line in in_turn(sorted(alone, key=lambda x: x.end_s))]),
            }
            yield {
                "model": name,
                "machine": machine,
                "place": place.value,
                "histories": histories,
                "mean_ms": round(together.mean_s * 1e3, 2),
                "less_than": {way: round(1 - together.mean_s / mean_s, 3) for way, mean_s in ways.items()},
                "last_ms": round(max(together.first_token_s) * 1e3, 2),
                "planned_in_ms": round(planned_s * 1e3, 1),
            }


def _by_turns_s(plans: Sequence[Plan]) -> float:
    """All begun at once: a step of each session by turns on every stream."""
    rows = zip_longest(*([timed.step for timed in each.timeline.steps] for each in plans))
    steps = [(number, one) for row in rows for number, one in enumerate(row) if one is not None]
    done = simulate(one for _, one in steps).steps
    return _mean({n: at.compute_end_s for (n, _), at in zip(steps, done, strict=True)}.values())


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _beside_every_plan(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Layers recomputed from the first on, a kind for each other one, in every order of sessions."""
    engine = EngineAbilities(can_split=False)
    for session_count, layer_count in ((2, 3), (3, 2), (4, 2)):
        over = []
        for number in range(count if session_count < 4 else -(-count // 8)):
            generator = random.Random(f"{seed} {session_count} {number}")  # noqa: S311
            shape = known_model(generator.choice(MODELS))
            model = ModelShape("small", shape.layers[:layer_count])
            machine = known_profile(generator.choice(MACHINES))
            places = (StatePlace.DRAM, StatePlace.SSD)
            requests = [
                _request(model, machine, generator.choice(places), generator.choice(LENGTHS), engine=engine)
                for _ in range(session_count)
            ]
            every = [list(_every_block(each)) for each in requests]
            least = min(
                _ends_s([picked[index] for index in order])
                for picked in product(*every)
                for order in permutations(range(session_count))
            )
            over.append(plan_together(requests).mean_s / (least / session_count) - 1)
        yield {
            "sessions": session_count,
            "layers": layer_count,
            "instances": len(over),
            "over_the_best": {"mean": round(_mean(over), 4), "worst": round(max(over), 4)},
            "is_right": max(over) <= 0.1,
        }


def _every_block(request: PlanRequest) -> Iterator[StreamBlock]:
    held = [
        layer_options(layer, holding, request.history, request.profile, request.engine)
        for layer, holding in zip(request.model.layers, request.holding.layers, strict=True)
    ]
    place = request.holding.layers[0].kinds[0][1][0].place
    begin, end = request.history, request.history + request.new_tokens
    last = step(
        compute_s=sum(request.profile.recompute_s(layer, begin, end) for layer in request.model.layers)
    )
    for count in range(len(held) + 1):
        first = [token_ids_block(place, request.history, request.profile)] if count else []
        first += [each.recompute.block(0.0) for each in held[:count] if each.recompute]
        for options in product(*(each.options for each in held[count:])):
            blocks = [*first, *(option.block(0.0) for option in options), last]
            yield reduce(StreamBlock.then, blocks, NOTHING)


def _ends_s(blocks: Sequence[StreamBlock]) -> float:
    state, total_s = START, 0.0
    for block in blocks:
        state = block.after(state)
        total_s += state[2]
    return total_s


REAL_LENGTHS = (1500, 200, 800, 100, 1100, 300, 500, 150)
REAL_NEW_TOKENS = 16


def _on_engine(rounds: int) -> Iterator[dict[str, Any]]:
    model, _ = load_model(smollm2())
    with embedded_store(1 << 30, None) as store:
        yield _measured(model, store.client, rounds)


def _measured(model: PreTrainedModel, client: Client, rounds: int) -> dict[str, Any]:
    ids = torch.randint(10, 40_000, (max(REAL_LENGTHS),), generator=torch.Generator().manual_seed(7)).tolist()
    spec = model_spec(model, model_id="together")
    new = ids[:REAL_NEW_TOKENS]
    ratios, means, is_right = [], [], True
    with TransformersBatchEngine(
        model, client, spec, profile=known_profile("cpu"), durability=Durability.MEMORY
    ) as engine:
        names = [f"s{number}" for number in range(len(REAL_LENGTHS))]

        def back() -> None:
            for name, length in zip(names, REAL_LENGTHS, strict=True):
                engine.wait(name)
                client.sessions.open(f"sessions/{name}").keep_first(length)

        for name, length in zip(names, REAL_LENGTHS, strict=True):
            engine.turn(name, ids[:length], max_new_tokens=0)
        for number in range(rounds + 1):
            back()
            begin = time.perf_counter_ns()
            one_by_one, replies = [], []
            for name in names:
                spent = time.perf_counter_ns() - begin
                turn = engine.turn(name, new, max_new_tokens=1, eos_token_ids=())
                one_by_one.append((spent + turn.first_token_ns) / 1e9)
                replies.append(turn.token_ids)
            back()
            turns = engine.turns([TurnRequest(name, new, 1, eos_token_ids=()) for name in names])
            together = [turn.first_token_ns / 1e9 for turn in turns]
            is_right = is_right and [turn.token_ids for turn in turns] == replies
            is_right = is_right and [turn.reused_token_count for turn in turns] == list(REAL_LENGTHS)
            if number:
                means.append((_mean(one_by_one), _mean(together)))
                ratios.append(_mean(together) / _mean(one_by_one))
    return {
        "model": "smollm2-135m",
        "histories": REAL_LENGTHS,
        "mean_s": {
            "one by one": round(statistics.median(one for one, _ in means), 3),
            "together": round(statistics.median(other for _, other in means), 3),
        },
        "together_over_one_by_one": [round(each, 3) for each in sorted(ratios)],
        "is_right": is_right,
    }


if __name__ == "__main__":
    typer.run(main)
