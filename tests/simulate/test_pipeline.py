"""Layers that come back one behind another, and sessions of which DRAM has the first layers alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playing import ROOMY, played, turn

from ctxcache.simulate.store import Fetch, Layers

TIMES = st.floats(0, 10)
LAYERS = st.integers(1, 12).flatmap(
    lambda count: st.builds(Layers, st.just(count), st.integers(0, count), TIMES, TIMES)
)


def _stepped_s(layers: Layers, fetch: Fetch) -> float:
    """The same, layer by layer."""
    copied_s = computed_s = 0.0
    for number in range(layers.layer_count):
        there_s = fetch.ready_s
        if number >= layers.resident_count:
            done = (number - layers.resident_count + 1) / (layers.layer_count - layers.resident_count)
            there_s = max(there_s, fetch.begin_s + fetch.read_s * done)
        copied_s = max(copied_s, there_s) + layers.copy_s / layers.layer_count
        computed_s = max(computed_s, copied_s) + layers.prefill_s / layers.layer_count
    return computed_s


@given(layers=LAYERS, fetch=st.builds(Fetch, TIMES, TIMES, TIMES))
def test_the_first_token_comes_when_the_last_layer_is_through(layers: Layers, fetch: Fetch) -> None:
    """One formula for what every layer's way through SSD, copy and prefill comes to."""
    assert layers.first_token_s(fetch) == pytest.approx(_stepped_s(layers, fetch), abs=1e-9)


@given(layers=LAYERS, read_all_s=st.floats(0.01, 10))
def test_so_many_layers_hide_the_read_of_the_others_and_no_fewer(layers: Layers, read_all_s: float) -> None:
    """With them the first token comes as with all in DRAM; with one fewer it does not."""

    def first_token_s(resident: int) -> float:
        read_s = read_all_s * (layers.layer_count - resident) / layers.layer_count
        return _stepped_s(layers._replace(resident_count=resident), Fetch(read_s=read_s))

    resident = layers.hidden(read_all_s)
    assert first_token_s(resident) == pytest.approx(layers.at_once_s, abs=1e-7)
    if resident:
        assert first_token_s(resident - 1) > layers.at_once_s


@given(layers=LAYERS, read_all_s=st.floats(0.01, 10))
def test_first_tokens_do_nearly_as_well(layers: Layers, read_all_s: float) -> None:
    """If only the last tokens of each layer are read, the first token is at most one slower stage late."""
    slower_s = max(layers.copy_s, layers.prefill_s)
    missing_share = slower_s / read_all_s if read_all_s > slower_s else 1.0
    late_s = (
        _stepped_s(layers._replace(resident_count=0), Fetch(read_s=read_all_s * missing_share))
        - layers.at_once_s
    )
    assert late_s <= max(layers.copy_s, layers.prefill_s) / layers.layer_count + 1e-9


def test_dram_has_the_first_layers_of_twice_as_many() -> None:
    """Two sessions of 1,000 B fit by half; of what hits in DRAM the rest is read, hidden by the copies."""
    load = replace(
        ROOMY,
        dram_bytes=1000,
        is_inclusive=True,
        is_timed=True,
        layer_count=4,
        ssd_read_bytes_per_s=1000,
        dram_bytes_per_s=1000,
        prefill_tokens_per_s=1e9,
        decode_tokens_per_s=1e9,
    )
    turns = [turn("a", 0), turn("b", 10), turn("a", 20, 0), turn("b", 30, 0)]

    whole = played(load, turns)
    halves = played(replace(load, resident_layer_count=2), turns)

    assert (whole.dram_hits, whole.ssd_hits) == (0, 2)
    assert (halves.dram_hits, halves.ssd_hits) == (2, 0)
    # A copy takes 1 s; from SSD the first of four layers is there after a quarter of that.
    assert whole.ttft.sum_s == pytest.approx(2 * 1.25, rel=1e-3)
    assert halves.ttft.sum_s == pytest.approx(2 * 1.0, rel=1e-3)
