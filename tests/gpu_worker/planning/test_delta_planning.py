"""Plans and layouts with deltas between layers: chains whole, holes where the planner puts bases."""

from dataclasses import replace
from itertools import product

import pytest

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import DELTAS, LOSSY_KINDS
from ctxcache.format.streams import TOKEN_ROW_BYTES, StateKind
from gpu_worker.pipeline.planned import schedule_of
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.layout import Return, allowed_loss, choose_layout
from gpu_worker.planning.plan import Method
from gpu_worker.planning.planner import PlanRequest, plan
from gpu_worker.planning.profile import Link, StatePlace
from gpu_worker.planning.shape import LayerKind, ModelShape

INT8, DELTA4, KV = StateKind.HIDDEN_INT8, StateKind.HIDDEN_DELTA_INT4, StateKind.KV
ENGINE = EngineAbilities(lossy_kinds=frozenset(LOSSY_KINDS), can_split=True)


def _request(kinds: list[tuple[StateKind, ...]], history: int = 1024, **others: object) -> PlanRequest:
    spans = (HeldSpan(StatePlace.SSD, 0, history),)
    holding = Holding(tuple(LayerHolding(tuple((kind, spans) for kind in each)) for each in kinds))
    model = known_model("llama-2-7b")
    model = replace(model, layers=model.layers[: len(kinds)])
    request = PlanRequest(model, holding, history, known_profile("a100-40gb"), engine=ENGINE)
    return replace(request, **others)  # type: ignore[arg-type]


def _is_whole(methods: tuple[Method | None, ...]) -> bool:
    return all(
        method is None or not method.is_delta or (below is not None and below.unpacked is Method.HIDDEN)
        for below, method in zip((None, *methods), methods, strict=False)
    )


@pytest.mark.parametrize(("ssd", "layer_count"), [(1e8, 4), (1e9, 5), (7e9, 4), (1e11, 4)])
def test_plans_never_use_a_delta_without_its_base(ssd: float, layer_count: int) -> None:
    """For every layout of so many layers that can be written: executable, and recomputed only up to bases."""
    profile = replace(known_profile("a100-40gb"), ssd=Link(ssd))
    for kinds in product([(INT8,), (DELTA4,), (KV,), (KV, DELTA4)], repeat=layer_count):
        request = _request(list(kinds), profile=profile)
        chosen = plan(request)
        assert _is_whole(chosen.methods)
        schedule_of(chosen, (0,) * layer_count)


@pytest.mark.parametrize("ssd", [1e8, 1e11])
def test_token_ids_are_a_base_where_the_model_has_shown_it(ssd: float) -> None:
    """For every layout above a layer 0 that is not held; elsewhere all is recomputed, or nothing can be."""
    profile = replace(known_profile("a100-40gb"), ssd=Link(ssd))
    for kinds in product([(INT8,), (DELTA4,), (KV,)], repeat=3):
        request = _request([(), *kinds], profile=profile)
        shown = replace(request, model=replace(request.model, has_token_inputs=True))
        chosen, before = plan(shown), plan(request)
        schedule = schedule_of(chosen, (0,) * 4)
        assert _is_whole(chosen.methods[1:]) or schedule.is_on_tokens
        assert not schedule_of(before, (0,) * 4).is_on_tokens
        assert chosen.end_s <= before.end_s * (1 + 1e-9)
        if kinds == ((DELTA4,),) * 3 and ssd > 1e9:
            assert chosen.methods == (Method.TOKENS, *[Method.HIDDEN_DELTA_INT4] * 3)
        if kinds[0] == (DELTA4,):
            with pytest.raises(InvalidArgument, match="not held"):
                plan(replace(shown, engine=replace(ENGINE, can_recompute=False)))


def test_chains_are_planned_as_well_as_by_trying_all() -> None:
    """Like layers with bases every four: no count of recomputed layers at a base ends earlier."""
    kinds: list[tuple[StateKind, ...]] = [((DELTA4,) if layer % 4 else (INT8,)) for layer in range(12)]
    unusable = (StateKind.KV_INT4,)
    for ssd in (1e8, 1e9, 7e9):
        profile = replace(known_profile("a100-40gb"), ssd=Link(ssd))
        engine = EngineAbilities(lossy_kinds=frozenset((INT8, DELTA4)))
        chosen = plan(_request(kinds, profile=profile, engine=engine))
        counts = {
            count: plan(_request([unusable] * count + kinds[count:], profile=profile, engine=engine)).end_s
            for count in (0, 4, 8, 12)
        }
        assert chosen.end_s == pytest.approx(min(counts.values()))


def test_deltas_that_are_not_allowed_are_as_good_as_not_held() -> None:
    """Without recomputation there is then no way back."""
    engine = EngineAbilities(can_recompute=False, lossy_kinds=frozenset((INT8,)))
    with pytest.raises(InvalidArgument, match="not held"):
        plan(_request([(INT8,), (DELTA4,)], engine=engine))
    allowed = replace(engine, lossy_kinds=frozenset((INT8, DELTA4)))
    assert plan(_request([(INT8,), (DELTA4,)], engine=allowed)).methods == (
        Method.HIDDEN_INT8,
        Method.HIDDEN_DELTA_INT4,
    )


@pytest.mark.parametrize(
    ("kind", "least_times"),
    [(DELTA4, 6.8), (StateKind.HIDDEN_DELTA_INT3, 9.4), (StateKind.HIDDEN_DELTA_INT2, 11.6)],
)
def test_a_layout_of_deltas_is_so_many_times_smaller_than_multi_head_k_and_v(
    kind: StateKind, least_times: float
) -> None:
    """Where bytes are dear: one base, and deltas above it."""
    model: ModelShape = known_model("llama-2-7b")
    engine = EngineAbilities(can_recompute=False, lossy_kinds=frozenset((INT8, kind)))
    returns = [Return(4096, place=StatePlace.SSD)]

    layout = choose_layout(model, known_profile("h100"), returns, engine=engine, byte_price_s=1.0)

    assert layout.kinds == (INT8, *[kind] * 31)
    kv_bytes = TOKEN_ROW_BYTES + sum(layer.kv_row_bytes for layer in model.layers)
    assert kv_bytes / layout.bytes_per_token > least_times


@pytest.mark.parametrize(("kind", "least_times"), [(DELTA4, 7.0), (StateKind.HIDDEN_DELTA_INT3, 9.8)])
def test_a_layout_on_token_ids_stores_no_base(kind: StateKind, least_times: float) -> None:
    """The kind itself is the only loss that has to be allowed; an engine that cannot embed has a base."""
    model = replace(known_model("llama-2-7b"), has_token_inputs=True)
    for can_recompute, base in ((True, None), (False, INT8)):
        engine = EngineAbilities(
            can_recompute=can_recompute, lossy_kinds=frozenset((kind,) if base is None else (INT8, kind))
        )
        # Reading K/V takes longest, then recomputing all layers.
        slow = replace(known_profile("h100"), gemm_flops_per_s=1e14, ssd=Link(1e9))
        returns = [Return(4096, place=StatePlace.SSD)]
        layout = choose_layout(model, slow, returns, engine=engine, byte_price_s=1e-10)
        assert layout.kinds == (base, *[kind] * 31)
    kv_bytes = TOKEN_ROW_BYTES + sum(layer.kv_row_bytes for layer in model.layers)
    engine = EngineAbilities(lossy_kinds=frozenset((kind,)))
    layout = choose_layout(model, slow, returns, engine=engine, byte_price_s=1e-10)
    assert kv_bytes / layout.bytes_per_token > least_times


def test_sliding_and_latent_layers_have_no_deltas() -> None:
    """A window keeps fewer rows than a delta above it needs."""
    full = known_model("llama-2-7b").layers[0]
    for layer in (replace(full, kind=LayerKind.SLIDING, window=512), replace(full, kind=LayerKind.LATENT)):
        assert set(DELTAS).issubset(full.kinds)
        assert not set(DELTAS).intersection(layer.kinds)
    assert allowed_loss("hidden_delta_int3") == {StateKind.HIDDEN_DELTA_INT3}
