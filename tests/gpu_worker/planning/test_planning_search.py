"""The search: equal to brute force, exact about like layers in any number, bounded about unlike ones."""

import math
import random
from itertools import accumulate

import pytest
from brute_force import Instance, Layer, Seconds, any_order_least_s, block, instance
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.planning.assignment import Step, simulate
from gpu_worker.planning.block import NOTHING, START, StreamBlock, in_order, step
from gpu_worker.planning.search import LEAST_FRONT, STEP_LIMIT, Choices, Solution, bounds, least_end_s, solve

ROUNDING = 1e-9
_TIMES = st.integers(0, 6).map(float)
_STEPS = st.tuples(_TIMES, _TIMES, _TIMES)


def _solve(problem: Instance) -> Solution | None:
    return solve([layer.choices() for layer in problem.layers], token_ids=step(copy_s=problem.token_ids_s))


@pytest.mark.parametrize("seed", range(4))
def test_search_equals_brute_force(seed: int) -> None:
    """On 400 random small instances each, the plan found ends when the best of all plans does."""
    generator = random.Random(seed)
    for problem in (instance(generator) for _ in range(400)):
        least_s, found = problem.least_s(), _solve(problem)
        if found is None:
            assert least_s == math.inf, problem
            continue

        assert found.end_s == pytest.approx(least_s, abs=ROUNDING), problem
        assert found.bound_s <= least_s + ROUNDING, problem
        assert found.is_exact, problem


@pytest.mark.parametrize("seed", range(40))
def test_order_of_like_layers_is_the_best_of_all_orders(seed: int) -> None:
    """Taking like layers one after the other, no order of their transfers would end earlier."""
    generator = random.Random(seed)
    options: list[Seconds] = [(0.0, generator.random(), generator.random()) for _ in range(2)]
    found = solve([Choices(tuple(block((option,)) for option in options))] * 5)

    assert found is not None
    assert found.end_s == pytest.approx(any_order_least_s(options, 5), abs=ROUNDING)


def test_picks_are_those_of_the_end() -> None:
    """The plan that is handed out ends when it says, layer by layer through the pipeline."""
    generator = random.Random(5)
    for problem in (instance(generator) for _ in range(200)):
        found = _solve(problem)
        if found is None:
            continue
        steps = [
            Step(0, "", 0.0, 0.0, layer.recompute_s or 0.0)
            for layer in problem.layers[: found.recomputed_count]
        ]
        needs_ids = bool(steps)
        for layer, pick in zip(problem.layers[found.recomputed_count :], found.picks, strict=True):
            needs_ids |= pick >= len(layer.options) + len(layer.splits)
            steps += [Step(0, "", *piece) for piece in (*layer.options, *layer.splits, *layer.frontier)[pick]]
        ids = [Step(0, "", 0.0, problem.token_ids_s)] if needs_ids else []

        assert simulate([*ids, *steps]).end_s == pytest.approx(found.end_s, abs=ROUNDING), problem


@given(st.lists(_STEPS, min_size=1, max_size=8))
def test_block_is_the_pipeline_condensed(steps: list[Seconds]) -> None:
    """A block of many steps does to the streams what the steps do one by one."""
    whole = simulate(Step(0, "", *seconds) for seconds in steps).steps[-1]

    assert block(tuple(steps)).after(START) == (whole.read_end_s, whole.copy_end_s, whole.compute_end_s)


@given(st.lists(_STEPS, min_size=2, max_size=3), _STEPS, st.integers(0, 60).map(float))
def test_bound_stops_only_where_it_is_too_late(
    choices: list[Seconds], state: Seconds, too_late_s: float
) -> None:
    """The answer whether a way ends in time is that of all bounds, and below that their number."""
    blocks = tuple(block((seconds,)) for seconds in choices)
    limits = bounds([blocks] * 3, [len(blocks)] * 3)
    whole_s = least_end_s(limits, state, 1)
    hasty_s = least_end_s(limits, state, 1, too_late_s)

    assert (hasty_s < too_late_s) == (whole_s < too_late_s)
    assert hasty_s <= whole_s
    assert hasty_s == whole_s or hasty_s >= too_late_s


@given(_STEPS, st.integers(0, 9))
def test_powers_repeat_a_block(seconds: Seconds, count: int) -> None:
    """The n-th power is the block n times."""
    once = block((seconds,))

    assert once.powers(count) == list(accumulate([once] * count, StreamBlock.then, initial=NOTHING))


@given(st.lists(st.tuples(_TIMES, _TIMES), min_size=2, max_size=3, unique=True))
def test_two_streams_always_have_a_better_order(steps: list[tuple[float, float]]) -> None:
    """Johnson's rule: of steps that are only copied and computed on, some order suits every two."""
    assert in_order([step(copy_s=copy_s, compute_s=compute_s) for copy_s, compute_s in steps]) is not None


def test_three_streams_may_have_none_and_are_searched_all_the_same() -> None:
    """Each of two steps through all streams may be the better first; then layers are taken one by one."""
    ways: tuple[Seconds, ...] = ((1.0, 2.0, 1.0), (3.0, 1.0, 3.0))
    problem = Instance((Layer(tuple((way,) for way in ways), (), None, ()),) * 6, 0.0)
    found = _solve(problem)

    assert in_order([block((way,)) for way in ways]) is None
    assert found is not None
    assert found.end_s == problem.least_s()


@pytest.mark.parametrize("layer_count", [32, 128, 1024])
def test_like_layers_take_few_steps_in_any_number(layer_count: int) -> None:
    """Uniform models are planned exactly: the ways looked at do not grow with the number of layers."""
    layer = Choices((step(copy_s=1.0, compute_s=1.3), step(copy_s=2.0)), recompute=step(compute_s=7.0))

    found = solve([layer] * layer_count)

    assert found is not None
    assert found.is_exact
    assert found.step_count <= 16


@given(st.floats(0.1, 2.0), st.floats(0.05, 2.0), st.floats(0.5, 4.0))
def test_hidden_states_are_worth_it_below_the_line(
    hidden_io_s: float, hidden_compute_s: float, token_s: float
) -> None:
    """Beside K/V (1 s) and recomputation they help if IO_H/IO_KV + C_H/C_T < 1, and never else."""
    share, layer_count = hidden_io_s + hidden_compute_s / token_s, 1000
    layer = Choices(
        (step(copy_s=hidden_io_s, compute_s=hidden_compute_s), step(copy_s=1.0)),
        recompute=step(compute_s=token_s),
    )
    without_s = layer_count * token_s / (token_s + 1.0)
    found = solve([layer] * layer_count)

    assert found is not None
    if share >= 1:
        assert found.end_s >= without_s * (1 - ROUNDING)
    if share < 0.8:
        assert found.end_s < without_s


def test_unlike_layers_are_bounded_and_say_so() -> None:
    """128 layers that all differ are planned within a bounded number of steps and near the bound."""
    generator = random.Random(2)
    layers = [
        Choices(
            (
                step(copy_s=generator.uniform(1, 2), compute_s=generator.uniform(1, 3)),
                step(copy_s=generator.uniform(2, 4)),
            )
        )
        for _ in range(128)
    ]

    found = solve(layers)

    assert found is not None
    assert found.step_count <= STEP_LIMIT + 2 * LEAST_FRONT * len(layers)
    assert not found.is_exact
    assert found.end_s <= 1.03 * found.bound_s


def test_more_steps_never_make_it_worse() -> None:
    """A larger limit finds a plan that ends no later, with a bound that is no looser."""
    generator = random.Random(3)
    layers = [
        Choices(
            (
                step(copy_s=1.0, compute_s=generator.choice([1.5, 2.5])),
                step(copy_s=generator.choice([2.0, 3.0])),
            )
        )
        for _ in range(24)
    ]
    hasty, patient = solve(layers, step_limit=8), solve(layers, step_limit=100_000)

    assert hasty is not None
    assert patient is not None
    assert patient.is_exact
    assert hasty.bound_s <= patient.end_s <= hasty.end_s


def test_layer_without_options_asks_for_recomputation_up_to_it() -> None:
    """A layer of which nothing is held is recomputed, and all before it."""
    held = Choices((step(copy_s=1.0),), recompute=step(compute_s=9.0))
    lost = Choices((), recompute=step(compute_s=9.0))

    found = solve([held, lost, held])

    assert found is not None
    assert found.recomputed_count == 2
    assert solve([held, Choices(())]) is None


def test_tokens_ids_count_only_where_something_is_recomputed() -> None:
    """Their copy precedes recomputation and nothing else."""
    both = Choices((step(copy_s=5.0),), recompute=step(compute_s=4.0))

    recomputed, restored = (
        solve([both], token_ids=step(copy_s=0.5)),
        solve([both], token_ids=step(copy_s=2.0)),
    )

    assert recomputed is not None
    assert restored is not None
    assert (recomputed.recomputed_count, recomputed.end_s) == (1, 4.5)
    assert (restored.recomputed_count, restored.end_s) == (0, 5.0)
