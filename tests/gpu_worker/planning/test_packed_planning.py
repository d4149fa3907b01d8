"""Packed kinds in plans and layouts.

Only where a loss is allowed, and then as small as they are said to be.
"""

from dataclasses import replace
from itertools import product

import pytest
from planning_requests import request

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import DELTAS, LOSSES_NATS, LOSSY_KINDS, PACKINGS, loss_nats
from ctxcache.format.streams import TOKEN_ROW_BYTES, StateKind
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.explain import reason
from gpu_worker.planning.holding import EngineAbilities, Holding, LayerHolding
from gpu_worker.planning.layout import (
    Return,
    SessionLayout,
    allowed_loss,
    choose_layout,
    kinds_within,
)
from gpu_worker.planning.plan import Method, Stage
from gpu_worker.planning.planner import LOSSLESS, compare, plan
from gpu_worker.planning.profile import StatePlace
from gpu_worker.planning.shape import LayerKind, ModelShape

HIDDEN, KV = StateKind.HIDDEN, StateKind.KV
HIDDEN_INT8, KV_INT8 = StateKind.HIDDEN_INT8, StateKind.KV_INT8
EIGHT_BITS = frozenset((HIDDEN_INT8, KV_INT8))
MULTI_HEAD = ("llama-2-7b", "llama-2-13b", "opt-30b")
GROUPED = ("llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen2.5-14b")
ALL = (HIDDEN, KV, *PACKINGS)


def _times_smaller(model: str, layout: SessionLayout) -> float:
    """How many times K/V's bytes a token are the layout's, token ids counted on both sides."""
    kv_bytes = TOKEN_ROW_BYTES + sum(layer.kv_row_bytes for layer in known_model(model).layers)
    return kv_bytes / layout.bytes_per_token


def _layout(model: str, lossy_kinds: frozenset[StateKind]) -> SessionLayout:
    """The layout that is saved where bytes are dear, but token ids alone will not do."""
    engine = EngineAbilities(can_recompute=False, lossy_kinds=lossy_kinds)
    return choose_layout(
        known_model(model),
        known_profile("h100"),
        [Return(4096, place=StatePlace.SSD)],
        engine=engine,
        byte_price_s=1.0,
    )


@pytest.mark.parametrize("model", MULTI_HEAD)
def test_multi_head_models_take_a_half_without_and_over_3_5_times_less_with_a_loss(model: str) -> None:
    """The paper has 1.92 to 2.40 times, without; a loss of 4e-4 nats a token is what is asked of 8 bits."""
    exact, lossy = _layout(model, frozenset()), _layout(model, kinds_within(4e-4))

    assert (set(exact.kinds), set(lossy.kinds)) == ({HIDDEN}, {HIDDEN_INT8})
    assert _times_smaller(model, exact) >= 1.9
    assert _times_smaller(model, lossy) >= 3.5
    assert exact.loss_nats == 0
    assert 0 < lossy.loss_nats <= 4e-4


@pytest.mark.parametrize("model", GROUPED)
def test_grouped_heads_take_little_more_than_a_half_of_their_kv(model: str) -> None:
    """Hidden states would be larger than K/V even in 8 bits."""
    layout = _layout(model, kinds_within(4e-4))

    assert set(layout.kinds) == {KV_INT8}
    assert _times_smaller(model, layout) >= 1.8


@pytest.mark.parametrize(
    ("model", "kind", "row_bytes"),
    [
        ("llama-2-7b", HIDDEN_INT8, 4640),
        ("llama-2-13b", HIDDEN_INT8, 5792),
        ("opt-30b", HIDDEN_INT8, 8096),
        ("llama-2-7b", KV_INT8, 8736),
        ("llama-3-8b", KV_INT8, 2208),
        ("qwen2.5-7b", KV_INT8, 1120),
        ("llama-2-7b", StateKind.HIDDEN_INT4, 2592),
        ("llama-3-8b", StateKind.KV_INT4, 1312),
    ],
)
def test_rows_have_the_documented_sizes(model: str, kind: StateKind, row_bytes: int) -> None:
    """A packed row takes the bytes that docs/chunk_format.md adds up, for any type of the model."""
    assert known_model(model).layers[0].row_bytes(kind) == row_bytes
    assert known_model(model, element_bytes=4).layers[0].row_bytes(kind) == row_bytes


@pytest.mark.parametrize("place", [StatePlace.SSD, StatePlace.DRAM])
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-8b", "gemma-3-270m"])
def test_nothing_lossy_is_planned_unless_allowed(model: str, place: StatePlace) -> None:
    """Though it is held, and faster."""
    exact = plan(request(model, 2048, kinds=ALL, place=place))
    without = plan(request(model, 2048, kinds=(HIDDEN, KV), place=place))

    assert all(method is None or method.is_exact for method in exact.methods)
    assert exact.end_s == without.end_s


def test_what_is_held_only_with_a_loss_is_recomputed_or_refused() -> None:
    """A caller who allows none is not handed one."""
    held = request("llama-2-7b", 2048, kinds=(HIDDEN_INT8,))

    assert set(plan(held).methods) == {Method.TOKENS}
    with pytest.raises(InvalidArgument, match="not held and cannot be recomputed"):
        plan(replace(held, engine=EngineAbilities(can_recompute=False)))
    by_loss = plan(replace(held, engine=EngineAbilities(can_recompute=False, lossy_kinds=EIGHT_BITS)))
    assert set(by_loss.methods) == {Method.HIDDEN_INT8}
    assert reason(by_loss, 0) == "only hidden_int8 is held, at a loss of 1e-04 nats a token"


@pytest.mark.parametrize(
    "model", ["llama-2-7b", "opt-30b", "llama-3-8b", "gemma-3-270m", "deepseek-v3", "qwen3-next-80b"]
)
@pytest.mark.parametrize("can_split", [False, True])
def test_an_allowed_loss_is_never_slower(model: str, can_split: bool) -> None:  # noqa: FBT001  # a case of the test
    """More ways can only help; `lossless` in the comparison is the plan without."""
    engine = EngineAbilities(can_split=can_split, lossy_kinds=frozenset(PACKINGS))
    lossy = request(model, 4096, kinds=ALL, engine=engine)
    exact = plan(replace(lossy, engine=replace(engine, lossy_kinds=frozenset())))
    chosen = plan(lossy)

    assert chosen.end_s <= exact.end_s * (1 + 1e-9)
    assert compare(lossy)[LOSSLESS] == exact.end_s
    # The bound lets layers be split at will: a plan of whole layers may miss it by a layer's work.
    layer_s = max(
        max(piece.read_s, piece.copy_s, piece.compute_s) for pieces in chosen.layers for piece in pieces
    )
    assert chosen.bound_s <= chosen.end_s <= chosen.bound_s + layer_s
    for pieces, layer in zip(chosen.layers, known_model(model).layers, strict=True):
        assert pieces[-1].end == 4096
        assert [one.end for one in pieces[:-1]] == [other.begin for other in pieces[1:]]
        assert all(
            piece.method is None or piece.method is Method.TOKENS or piece.method.kind in layer.kinds
            for piece in pieces
        )


@pytest.mark.parametrize("hardware", ["a100-40gb", "h100", "cpu"])
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-8b"])
def test_four_kinds_at_once_are_planned_as_well_as_by_trying(model: str, hardware: str) -> None:
    """Each layer held by one kind only, in every combination: none of them ends earlier."""
    few = ModelShape("few", known_model(model).layers[:3])
    engine = EngineAbilities(can_recompute=False, lossy_kinds=EIGHT_BITS)
    kinds = (HIDDEN, KV, HIDDEN_INT8, KV_INT8)
    together = request(few, 512, profile=hardware, kinds=kinds, engine=engine)
    spans = together.holding.layers[0].kinds[0][1]
    ends = [
        plan(replace(together, holding=Holding(tuple(LayerHolding(((kind, spans),)) for kind in each)))).end_s
        for each in product(kinds, repeat=3)
    ]

    assert plan(together).end_s == pytest.approx(min(ends), rel=1e-12)


def test_a_split_layer_takes_packed_rows_on_both_sides() -> None:
    """The smallest rows of each sort that are held and allowed."""
    model = ModelShape("one", known_model("llama-2-7b").layers[:1])
    engine = EngineAbilities(can_recompute=False, can_split=True, lossy_kinds=EIGHT_BITS)
    chosen = plan(request(model, 8192, kinds=(HIDDEN_INT8, KV_INT8), engine=engine))

    assert [piece.method for piece in chosen.layers[0]] == [Method.HIDDEN_INT8, Method.KV_INT8]
    assert sum(piece.end - piece.begin for piece in chosen.layers[0]) == 8192


def test_unpacking_takes_its_time() -> None:
    """A stage of its own for every packed method, measured or by datasheet; each drifts by itself."""
    layer, profile = known_model("llama-2-7b").layers[0], known_profile("a100-40gb")
    slower = profile.corrected({Stage.PROJECT_INT8: 3.0})

    assert profile.embed_s(layer, 4096, Method.KV_INT8) > profile.embed_s(layer, 4096)
    assert slower.project_s(layer, 4096, Method.HIDDEN_INT8) == 3 * profile.project_s(
        layer, 4096, Method.HIDDEN_INT8
    )
    assert slower.project_s(layer, 4096) == profile.project_s(layer, 4096)
    # Deltas take the stage of 4 bits, rows as they are cached that of K and V.
    methods = [method for method in Method if method is not Method.NOTHING]
    assert len({Stage.of(method) for method in methods}) == len(methods) - 2 - len(DELTAS)


def test_only_attention_layers_are_packed() -> None:
    """Latents, states of linear layers and layers without any state are as they were."""
    kinds = {
        layer.kind: layer.kinds
        for name in ("deepseek-v3", "qwen3-next-80b", "gemma-3-270m")
        for layer in known_model(name).layers
    }

    assert kinds[LayerKind.LATENT] == (HIDDEN, StateKind.LATENT)
    assert kinds[LayerKind.LINEAR] == (HIDDEN, KV)
    assert kinds[LayerKind.SLIDING] == ALL
    assert kinds[LayerKind.FULL] == (*ALL, *DELTAS)


def test_losses_are_allowed_by_bound_and_by_name() -> None:
    """A bound takes all kinds below it; a name one kind."""
    assert set(LOSSES_NATS) == set(LOSSY_KINDS)
    assert allowed_loss("") == allowed_loss("0") == frozenset()
    assert allowed_loss("4e-4") == EIGHT_BITS
    assert allowed_loss("0.1") == frozenset(LOSSY_KINDS)
    assert allowed_loss("kv_int4,hidden_int8") == {StateKind.KV_INT4, HIDDEN_INT8}
    assert loss_nats([HIDDEN, KV]) == loss_nats([]) == 0
    assert loss_nats([HIDDEN, StateKind.KV_INT4]) == LOSSES_NATS[StateKind.KV_INT4]
    for text in ("-1", "nan", "inf", "hidden", "int8"):
        with pytest.raises(InvalidArgument, match="loss"):
            allowed_loss(text)
