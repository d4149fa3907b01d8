"""The papers' formulas, and the schedules that they print."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.format.streams import StateKind
from gpu_worker.planning.baselines import (
    LayerTimes,
    MethodCounts,
    hcache_schedule,
    kvpr_split,
    kvpr_time_s,
    naive_hybrid_schedule,
)
from gpu_worker.planning.datasheets import PM9A3_BYTES_PER_S, known_model
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, LayerHolding
from gpu_worker.planning.option import layer_options
from gpu_worker.planning.plan import Method
from gpu_worker.planning.profile import Link, Profile, StatePlace
from lab.restoring.papers import hcache_profile, read_buffer_bytes

TOKENS = 1024
_SECONDS = st.floats(0.01, 10.0)


def hcache_times(model: str, profile: Profile) -> LayerTimes:
    """One layer of a model with multi-head attention, in the formulas' words."""
    spans = (HeldSpan(StatePlace.SSD, 0, TOKENS),)
    held = LayerHolding(((StateKind.HIDDEN, spans), (StateKind.KV, spans)))
    options = layer_options(known_model(model).layers[0], held, TOKENS, profile, EngineAbilities())
    pieces = {option.method: option.pieces[0] for option in options.options}
    assert options.recompute is not None
    return LayerTimes(
        hidden_io_s=pieces[Method.HIDDEN].copy_s,
        kv_io_s=pieces[Method.KV].copy_s,
        hidden_compute_s=pieces[Method.HIDDEN].compute_s,
        token_compute_s=options.recompute.compute_s,
    )


@pytest.mark.parametrize(
    ("model", "layer_count", "schedule"),
    [("llama-2-7b", 32, MethodCounts(0, 31, 1)), ("llama-2-13b", 40, MethodCounts(0, 36, 4))],
)
def test_hcache_table_3(model: str, layer_count: int, schedule: MethodCounts) -> None:
    """The paper's schedules follow from its bandwidths: 26 GB/s of bus, 24 and 21 GB/s of balance."""
    assert hcache_schedule(layer_count, hcache_times(model, hcache_profile(model))) == schedule


@pytest.mark.parametrize("ssd_gb_per_s", [15.6, 16.0, 16.7])
def test_hcache_table_3_for_opt_30b_asks_for_slower_ssds(ssd_gb_per_s: float) -> None:
    """40 + 8 is the formula's answer where four devices read 16 GB/s together, 4 GB/s for each SSD."""
    times = hcache_times("opt-30b", hcache_profile("opt-30b", ssd_bytes_per_s=ssd_gb_per_s * 1e9))

    assert hcache_schedule(48, times) == MethodCounts(8, 40, 0)


def test_hcache_figure_11_for_opt_30b_is_what_its_ssds_give() -> None:
    """At the SSDs' 6.9 GB/s each, the formula says 46 + 2.

    96/46 = 2.09 times faster than K/V, as printed there.
    """
    times = hcache_times("opt-30b", hcache_profile("opt-30b", ssd_bytes_per_s=4 * PM9A3_BYTES_PER_S))
    schedule = hcache_schedule(48, times)

    assert schedule == MethodCounts(2, 46, 0)
    assert 48 * times.kv_io_s / (schedule.hidden * times.hidden_io_s) == pytest.approx(2.09, abs=0.005)


def test_hcache_section_6_3_2() -> None:
    """13B with one SSD: 31 layers from hidden states, 9 recomputed."""
    times = hcache_times("llama-2-13b", hcache_profile("llama-2-13b", ssd_bytes_per_s=PM9A3_BYTES_PER_S))

    assert hcache_schedule(40, times) == MethodCounts(9, 31, 0)


@given(st.integers(1, 64), _SECONDS, _SECONDS, _SECONDS, _SECONDS)
def test_hcache_formula_is_the_ceiling_of_the_balance(
    layer_count: int, hidden_io_s: float, kv_io_s: float, hidden_compute_s: float, token_compute_s: float
) -> None:
    """With one hidden layer fewer the other stream could end later than the one it relieves."""
    times = LayerTimes(hidden_io_s, kv_io_s, hidden_compute_s, token_compute_s)
    schedule = hcache_schedule(layer_count, times)
    hidden, others = schedule.hidden - 1, schedule.recomputed + schedule.kv + 1

    assert schedule.recomputed + schedule.hidden + schedule.kv == layer_count
    if schedule.kv:
        assert hidden * hidden_compute_s <= hidden * hidden_io_s + others * kv_io_s + 1e-6
    if schedule.recomputed:
        assert hidden * hidden_io_s <= hidden * hidden_compute_s + others * token_compute_s + 1e-6


@given(st.integers(1, 64), _SECONDS, _SECONDS)
def test_naive_hybrid_is_the_best_of_all_counts(
    layer_count: int, kv_io_s: float, token_compute_s: float
) -> None:
    """No other number of recomputed layers balances recomputation and K/V better."""
    schedule = naive_hybrid_schedule(layer_count, LayerTimes(1.0, kv_io_s, 1.0, token_compute_s))
    ends = [max(count * token_compute_s, (layer_count - count) * kv_io_s) for count in range(layer_count + 1)]

    assert max(schedule.recomputed * token_compute_s, schedule.kv * kv_io_s) == min(ends)


def _kvpr_profile() -> Profile:
    """KVPR's A100 machine: peak rates of its section 4, as its Table 1 uses them."""
    link = Link(32e9)
    return Profile(
        name="kvpr testbed",
        copy=link,
        ssd=link,
        remote=link,
        gemm_flops_per_s=312e12,
        attention_flops_per_s=312e12,
    )


@pytest.mark.parametrize(
    ("model", "split", "transfers_activations"),
    [
        ("opt-6.7b", 721, True),
        ("opt-13b", 671, True),
        ("opt-30b", 590, True),
        ("opt-6.7b", 721, False),
        ("opt-13b", 672, False),
        ("opt-30b", 590, False),
    ],
)
def test_kvpr_split_of_table_1(model: str, split: int, *, transfers_activations: bool) -> None:
    """Batch 32, 1,024 tokens, fp16, 32 GB/s, 312 TFLOPS: l of equation 10 for both schedules."""
    layer, profile, batch = known_model(model).layers[0], _kvpr_profile(), 32
    activation_s = profile.copy.seconds(batch * layer.hidden_row_bytes)
    kv_s = profile.copy.seconds(batch * layer.kv_row_bytes)
    recompute_s = batch * layer.project_flops / profile.gemm_flops_per_s
    found = kvpr_split(
        TOKENS,
        activation_s=activation_s,
        recompute_s=recompute_s,
        kv_s=kv_s,
        transfers_activations=transfers_activations,
    )
    x = activation_s * transfers_activations
    times = [kvpr_time_s(TOKENS, each, x, recompute_s, kv_s) for each in range(TOKENS + 1)]

    assert found == split
    assert times[found] == min(times)


def test_kvpr_table_1_sizes() -> None:
    """The table's K/V of one layer and its time on the bus: 512, 640 and 896 MB in 15.6, 19.5 and 27.3 ms."""
    for model, size_mib, copy_ms in (("opt-6.7b", 512, 15.6), ("opt-13b", 640, 19.5), ("opt-30b", 896, 27.3)):
        size_bytes = 32 * TOKENS * known_model(model).layers[0].kv_row_bytes

        assert size_bytes == size_mib * 2**20
        # The paper counts a GB/s as 1,024 MB/s.
        assert size_bytes / (32 * 2**30) * 1e3 == pytest.approx(copy_ms, abs=0.1)


@given(st.integers(1, 400), _SECONDS, _SECONDS, _SECONDS)
def test_kvpr_split_is_the_best_of_all(
    token_count: int, activation_s: float, recompute_s: float, kv_s: float
) -> None:
    """Also where an activation is larger than its K/V, as with grouped heads: then none is sent."""
    split = kvpr_split(token_count, activation_s=activation_s, recompute_s=recompute_s, kv_s=kv_s)
    times = [
        kvpr_time_s(token_count, each, activation_s, recompute_s, kv_s) for each in range(token_count + 1)
    ]

    assert kvpr_time_s(token_count, split, activation_s, recompute_s, kv_s) == pytest.approx(min(times))
    assert split == 0 or kv_s * (1 + 1e-9) >= activation_s


def test_read_buffer_is_what_prefill_does_not_hide() -> None:
    """S = B (T_load L_hist - T_pref L_new), and nothing where the new tokens take longer."""
    gap = read_buffer_bytes(
        bytes_per_s=26e9, load_s=2e-5, history_tokens=1000, prefill_s=1e-4, new_tokens=100
    )
    none = read_buffer_bytes(
        bytes_per_s=26e9, load_s=2e-5, history_tokens=1000, prefill_s=1e-4, new_tokens=300
    )

    assert math.isclose(gap, 26e9 * 0.01)
    assert none == 0
