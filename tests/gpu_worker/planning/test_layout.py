"""The layout of a new session: the state whose return costs least, and no more bytes than that needs."""

from itertools import product

import pytest

from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.layout import Return, choose_layout
from gpu_worker.planning.planner import PlanRequest, plan
from gpu_worker.planning.profile import StatePlace
from gpu_worker.planning.shape import ModelShape
from lab.restoring.papers import hcache_profile

HIDDEN, KV = StateKind.HIDDEN, StateKind.KV


def test_multi_head_models_save_mostly_hidden_states() -> None:
    """7B on HCache's machine: half the bytes of K/V but for two layers; token ids always."""
    layout = choose_layout(
        known_model("llama-2-7b"), hcache_profile("llama-2-7b"), [Return(1024, place=StatePlace.SSD)]
    )

    assert layout.kinds == (HIDDEN,) * 30 + (KV,) * 2
    assert layout.bytes_per_token == 4 + 30 * 8192 + 2 * 16384
    assert layout.streams()[:2] == (TOKENS, Stream(0, HIDDEN))


def test_recomputed_layers_are_not_saved() -> None:
    """13B with one SSD: what will be recomputed needs no bytes."""
    profile = hcache_profile("llama-2-13b", ssd_bytes_per_s=6.9e9)
    layout = choose_layout(known_model("llama-2-13b"), profile, [Return(1024, place=StatePlace.SSD)])

    assert layout.kinds == (None,) * 10 + (HIDDEN,) * 30


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "smollm2-135m"])
def test_grouped_heads_save_kv(model: str) -> None:
    """Hidden states would be larger and slower."""
    layout = choose_layout(known_model(model), known_profile("h100"), [Return(8192, place=StatePlace.DRAM)])

    assert HIDDEN not in layout.kinds


def test_latents_are_saved_as_they_are() -> None:
    """MLA's own rows, a twelfth of the others."""
    layout = choose_layout(
        known_model("deepseek-v3"),
        known_profile("h100"),
        [Return(8192)],
        engine=EngineAbilities(can_recompute=False),
    )

    assert set(layout.kinds) == {StateKind.LATENT}


def test_a_session_that_does_not_return_keeps_its_token_ids_only() -> None:
    """Nothing expected: the smallest layout, or the smallest that can come back at all."""
    model, profile = known_model("llama-2-7b"), known_profile("a100-40gb")
    alone = choose_layout(model, profile, [])
    cannot_recompute = choose_layout(
        model,
        profile,
        [Return(1024, count=1e-9)],
        engine=EngineAbilities(can_recompute=False),
        byte_price_s=1.0,
    )

    assert alone.streams() == (TOKENS,)
    assert alone.bytes_per_token == 4
    assert set(cannot_recompute.kinds) == {HIDDEN}


def test_dear_bytes_are_saved_on() -> None:
    """The same returns keep fewer bytes where storage is worth more."""
    model, profile = known_model("llama-2-7b"), known_profile("a100-40gb")
    sizes = [
        choose_layout(model, profile, [Return(2048)], byte_price_s=price).bytes_per_token
        for price in (0.0, 1e-12, 1e-9, 1e-6)
    ]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 4


def test_long_returns_weigh_against_recomputation() -> None:
    """A prefix that is cheap to recompute at 256 tokens is not at 16,384: the mix decides."""
    model, profile = known_model("llama-2-13b"), hcache_profile("llama-2-13b", ssd_bytes_per_s=6.9e9)

    def recomputed(*returns: Return) -> int:
        return choose_layout(model, profile, returns).kinds.count(None)

    short, long = (
        Return(256, place=StatePlace.SSD, count=1.0),
        Return(16_384, place=StatePlace.SSD, count=1.0),
    )

    assert recomputed(short) > recomputed(long)
    assert recomputed(short, long) == recomputed(long)


def test_layout_is_the_best_of_all_for_one_return() -> None:
    """Against every assignment of kinds to six layers, nothing restores faster."""
    layer = known_model("llama-2-13b").layers[0]
    model, profile = ModelShape("six", (layer,) * 6), hcache_profile("llama-2-13b", ssd_bytes_per_s=1e10)
    each = Return(1024, place=StatePlace.SSD)
    best_s = float("inf")
    for kinds in product((None, HIDDEN, KV), repeat=6):
        spans = (HeldSpan(StatePlace.SSD, 0, 1024),)
        held = tuple(LayerHolding(() if kind is None else ((kind, spans),)) for kind in kinds)
        best_s = min(best_s, plan(PlanRequest(model, Holding(held), 1024, profile)).end_s)

    assert choose_layout(model, profile, [each]).restore_s == pytest.approx(best_s)
