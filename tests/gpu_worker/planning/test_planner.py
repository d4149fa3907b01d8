"""The planner: the right kind for every sort of layer, never behind the papers, refusals with a reason."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_requests import request

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.planning.assignment import PREFILL
from gpu_worker.planning.datasheets import MODEL_NAMES, PROFILE_NAMES, known_model, known_profile
from gpu_worker.planning.explain import reason
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.plan import Method, RestorePlan, Stage
from gpu_worker.planning.planner import PlanRequest, compare, plan
from gpu_worker.planning.profile import Curve, Link, StatePlace
from gpu_worker.planning.search import LEAST_FRONT, STEP_LIMIT
from gpu_worker.planning.shape import LayerKind, LayerShape, ModelShape
from lab.restoring.papers import hcache_profile

KV_ONLY = (StateKind.KV,)


def _shared_layer(layer: LayerShape) -> LayerShape:
    """A layer like `layer` that reads the K and V of an earlier one."""
    return LayerShape(
        kind=LayerKind.SHARED,
        hidden_row_bytes=layer.hidden_row_bytes,
        kv_row_bytes=0,
        project_flops=0,
        linear_flops=layer.linear_flops - layer.project_flops,
        attention_flops=layer.attention_flops,
        window=layer.window,
        element_bytes=layer.element_bytes,
    )


def _counts(plan_methods: tuple[Method | None, ...]) -> Counter[Method | None]:
    return Counter(plan_methods)


@settings(max_examples=150)
@given(
    model=st.sampled_from(MODEL_NAMES),
    profile=st.sampled_from(PROFILE_NAMES),
    history=st.integers(1, 20_000),
    new_tokens=st.sampled_from([0, 1, 64, 1000]),
    place=st.sampled_from(StatePlace),
    is_direct=st.booleans(),
    engine=st.builds(
        EngineAbilities, can_recompute=st.booleans(), starts_by_layer=st.booleans(), can_split=st.booleans()
    ),
)
def test_plans_are_never_behind_any_baseline(
    model: str,
    profile: str,
    history: int,
    new_tokens: int,
    place: StatePlace,
    engine: EngineAbilities,
    *,
    is_direct: bool,
) -> None:
    """Not behind HCache, KVPR, the naive hybrid, K/V, hidden states or recomputation, on any machine."""
    asked = request(
        model,
        history,
        profile=replace(known_profile(profile), is_direct=is_direct),
        place=place,
        new_tokens=new_tokens,
        engine=engine,
    )
    found = plan(asked)

    for name, end_s in compare(asked).items():
        assert found.end_s <= end_s * (1 + 1e-9), name
    assert found.bound_s <= found.end_s * (1 + 1e-9)
    assert found.step_count <= STEP_LIMIT + 3 * LEAST_FRONT * 18 * len(found.layers)


def test_plans_for_unlike_layers_are_never_behind_either() -> None:
    """Where the search gives up being exact, it still does what the papers would do, or better."""
    generator = random.Random(1)
    inexact_count = 0
    for _ in range(80):
        asked = _unlike(generator)
        found = plan(asked)
        inexact_count += not found.is_exact
        for name, end_s in compare(asked).items():
            assert found.end_s <= end_s * (1 + 1e-9), name

    assert inexact_count > 8


def _unlike(generator: random.Random) -> PlanRequest:
    """A model of up to 128 layers of several kinds in no order, on some machine."""
    names = ["llama-2-7b", "opt-13b", "smollm2-135m-mha", "llama-2-13b"]
    base = known_model(generator.choice(names)).layers[0]
    kinds = [
        (
            replace(base, kind=LayerKind.SLIDING, window=generator.choice([256, 512, 1024, 2048]))
            if generator.random() < 0.6
            else replace(
                base,
                linear_flops=base.linear_flops * generator.uniform(0.5, 2),
                project_flops=base.project_flops * generator.uniform(0.5, 2),
            )
        )
        for _ in range(generator.randint(2, 5))
    ]
    layers = tuple(generator.choice(kinds) for _ in range(generator.randint(20, 128)))
    history = generator.choice([1000, 4096, 9000])
    engine = EngineAbilities(can_recompute=generator.random() < 0.5, can_split=generator.random() < 0.3)
    machine = replace(known_profile(generator.choice(PROFILE_NAMES)), is_direct=generator.random() < 0.5)
    place = generator.choice([StatePlace.SSD, StatePlace.DRAM])
    return request(ModelShape("unlike", layers), history, profile=machine, place=place, engine=engine)


@pytest.mark.parametrize(
    ("model", "hidden_count", "hcache_ms", "ours_ms"),
    [("llama-2-7b", 30, 11.16, 10.97), ("llama-2-13b", 35, 18.38, 18.15)],
)
def test_plan_is_ahead_of_hcache_on_its_own_machine(
    model: str, hidden_count: int, hcache_ms: float, ours_ms: float
) -> None:
    """The formula rounds a sum up; the pipeline's first copy and last projection count as well."""
    asked = request(model, 1024, profile=hcache_profile(model))
    found = plan(asked)

    assert _counts(found.methods)[Method.HIDDEN] == hidden_count
    assert found.end_s * 1e3 == pytest.approx(ours_ms, abs=0.01)
    assert compare(asked)["hcache"] * 1e3 == pytest.approx(hcache_ms, abs=0.01)


def test_recomputation_fills_computation_while_slow_ssds_read() -> None:
    """13B with one SSD: recomputed layers first, then hidden states; HCache's second branch."""
    found = plan(request("llama-2-13b", 1024, profile=hcache_profile("llama-2-13b", ssd_bytes_per_s=6.9e9)))

    assert found.methods[:10] == (Method.TOKENS,) * 10
    assert found.methods[10:] == (Method.HIDDEN,) * 30


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "smollm2-135m"])
def test_grouped_heads_come_back_as_kv(model: str) -> None:
    """Hidden rows of such models are larger than K/V and cost a projection besides."""
    found = plan(request(model, 4096, profile="h100"))

    assert Method.HIDDEN not in found.methods
    assert "grouped heads" in reason(found, len(found.layers) - 1)


def test_latents_come_back_as_latents() -> None:
    """MLA rows are a twelfth of hidden rows."""
    found = plan(request("deepseek-v3", 4096, profile="h100", engine=EngineAbilities(can_recompute=False)))

    assert set(found.methods) == {Method.LATENT}
    assert "12.4 times" in reason(found, 0)


def test_windows_need_their_last_tokens_only() -> None:
    """A sliding layer's rows before the window are not transferred."""
    found = plan(request("gemma-3-270m", 4096, profile="h100", engine=EngineAbilities(can_recompute=False)))
    sizes = [sum(piece.size_bytes for piece in pieces) for pieces in found.layers]

    assert sizes[0] == 511 * 2 * 256 * 2
    assert sizes[5] == 4096 * 2 * 256 * 2
    assert "the last 511 of 4,096 tokens" in reason(found, 0)


def test_linear_layers_come_back_as_their_state() -> None:
    """The state has a fixed size whatever the history; hidden rows bring it only where none is held."""
    engine = EngineAbilities(can_recompute=False)
    both = plan(request("qwen3-next-80b", 8192, engine=engine))
    hidden = plan(request("qwen3-next-80b", 8192, kinds=(StateKind.HIDDEN,), engine=engine))

    assert both.methods[0] is Method.KV
    assert both.layers[0][0].size_bytes == 2 * 2**20
    assert "whatever the history" in reason(both, 0)
    assert hidden.methods[0] is Method.HIDDEN
    assert "rebuilt from its inputs" in reason(hidden, 0)


def test_layers_without_state_of_their_own_are_skipped() -> None:
    """A layer that reads another one's K/V has nothing to restore, and nothing to wait for."""
    layer = known_model("llama-3-8b").layers[0]
    model = ModelShape("shared", (layer, _shared_layer(layer), layer))
    found = plan(request(model, 1024, engine=EngineAbilities(can_recompute=False)))

    assert found.methods == (Method.KV, None, Method.KV)
    assert found.timeline.restored_s(1) == found.timeline.restored_s(0)
    assert "another layer's" in reason(found, 1)
    with pytest.raises(InvalidArgument, match="no state of its own"):
        found.restore_plan()


@pytest.mark.parametrize("can_recompute", [False, True])
def test_layers_that_all_share_are_planned(can_recompute: bool) -> None:  # noqa: FBT001  # a case of the test
    """A pipeline stage may own none with a state: then there is nothing to restore, nor anything to split."""
    model = ModelShape("shared", (_shared_layer(known_model("llama-3-8b").layers[0]),) * 2)
    asked = request(model, 1024, engine=EngineAbilities(can_recompute=can_recompute, can_split=True))

    assert plan(asked).end_s == 0
    assert plan(asked).methods == (None, None)
    assert compare(asked)["kv"] == 0


def test_only_what_is_held_is_planned() -> None:
    """With K/V alone no layer comes from hidden states, and the reason says so."""
    found = plan(request("llama-2-7b", 4096, kinds=KV_ONLY, engine=EngineAbilities(can_recompute=False)))

    assert set(found.methods) == {Method.KV}
    assert reason(found, 0) == "only kv is held"


def test_what_is_not_held_is_recomputed_from_the_start() -> None:
    """A missing layer in the middle makes all layers up to it recomputed ones."""
    model = known_model("llama-2-7b")
    spans = (HeldSpan(StatePlace.SSD, 0, 512),)
    kv = LayerHolding(((StateKind.KV, spans),))
    lost = replace(kv, kinds=())
    asked = PlanRequest(model, Holding((kv,) * 9 + (lost,) + (kv,) * 22), 512, known_profile("a100-40gb"))
    found = plan(asked)

    assert found.methods[:10] == (Method.TOKENS,) * 10
    assert reason(found, 9) == "nothing of it is held"
    with pytest.raises(InvalidArgument, match="not held and cannot be recomputed"):
        plan(replace(asked, engine=EngineAbilities(can_recompute=False)))


def test_a_gap_makes_a_kind_unusable() -> None:
    """Rows of [0, 64) and [128, 256) are not those of [0, 256), wherever they lie."""
    layer = known_model("llama-2-7b").layers[0]
    gap = LayerHolding(
        ((StateKind.KV, (HeldSpan(StatePlace.DRAM, 0, 64), HeldSpan(StatePlace.SSD, 128, 256))),)
    )
    whole = LayerHolding(
        ((StateKind.KV, (HeldSpan(StatePlace.DRAM, 0, 64), HeldSpan(StatePlace.SSD, 64, 256))),)
    )

    assert gap.sizes(StateKind.KV, 0, 256, layer.kv_row_bytes) is None
    assert gap.sizes(StateKind.KV, 128, 256, 2) == {StatePlace.SSD: 256}
    assert whole.sizes(StateKind.KV, 0, 256, 2) == {StatePlace.DRAM: 128, StatePlace.SSD: 384}


def test_what_lies_in_dram_is_not_read() -> None:
    """Through host memory, SSD rows are read and copied, DRAM rows only copied; direct ones only copied."""
    staged = replace(known_profile("a100-40gb"), is_direct=False)
    engine = EngineAbilities(can_recompute=False)
    dram = plan(request("llama-3-8b", 4096, profile=staged, place=StatePlace.DRAM, engine=engine))
    ssd = plan(request("llama-3-8b", 4096, profile=staged, place=StatePlace.SSD, engine=engine))
    direct = plan(request("llama-3-8b", 4096, place=StatePlace.SSD, engine=engine))

    assert dram.timeline.busy_s["read"] == direct.timeline.busy_s["read"] == 0
    assert ssd.timeline.busy_s["read"] > 0
    assert dram.end_s < ssd.end_s


def test_starting_by_layer_hides_restoration_behind_the_new_tokens() -> None:
    """An engine that begins with layer 0 while later ones are on their way ends before one that waits."""
    waits = request(
        "llama-2-13b", 2048, kinds=KV_ONLY, new_tokens=512, engine=EngineAbilities(can_recompute=False)
    )
    follows = replace(waits, engine=EngineAbilities(can_recompute=False, starts_by_layer=True))
    waiting, following = plan(waits), plan(follows)
    prefill_s = sum(timed.step.compute_s for timed in waiting.timeline.steps if timed.step.what == PREFILL)

    assert following.end_s < waiting.end_s
    assert waiting.end_s == pytest.approx(waiting.restored_s + prefill_s)


def test_splits_end_both_streams_together() -> None:
    """One layer split where the pipeline would otherwise have a bubble; only where the engine can."""
    profile = hcache_profile("llama-2-7b")
    whole = plan(request("llama-2-7b", 1024, profile=profile))
    split = plan(request("llama-2-7b", 1024, profile=profile, engine=EngineAbilities(can_split=True)))

    assert whole.split_layers == ()
    assert len(split.split_layers) == 1
    assert split.end_s < whole.end_s
    assert split.layers[split.split_layers[0]][0].end % 64 == 0


def test_kvpr_is_taken_where_splitting_every_layer_is_better() -> None:
    """On one layer nothing else balances at single tokens."""
    model = ModelShape("one", known_model("opt-6.7b").layers[:1])
    profile = replace(hcache_profile("llama-2-7b"), gemm_flops_per_s=6e13)
    asked = request(model, 50, profile=profile, engine=EngineAbilities(can_split=True, can_recompute=False))
    found = plan(asked)

    assert found.end_s == compare(asked)["kvpr"]
    assert found.split_layers == (0,)


def test_plan_is_what_the_adapter_takes() -> None:
    """A plan of whole layers is a RestorePlan, in its compact form."""
    found = plan(request("llama-2-7b", 1024, profile=hcache_profile("llama-2-7b")))

    assert found.restore_plan() == RestorePlan.parse("hidden:0-29,kv:30-31")


def test_no_history_needs_nothing() -> None:
    """A new session's plan is empty and ends at once."""
    found = plan(request("llama-2-7b", 0))

    assert found.end_s == 0
    assert set(found.methods) == {None}


def test_uniform_128_layers_take_a_handful_of_steps() -> None:
    """Planning time does not explode with depth: counted, not timed."""
    model = ModelShape("deep", known_model("llama-2-7b").layers[:1] * 128)

    assert plan(request(model, 4096)).step_count <= 16
    assert plan(request(model, 4096, engine=EngineAbilities(can_split=True))).step_count <= 64


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Link(0.0),
        lambda: Link(1.0, -1.0),
        lambda: HeldSpan(StatePlace.SSD, 5, 4),
        lambda: replace(known_profile("cpu"), gemm_flops_per_s=0.0),
        lambda: known_profile("cpu", gpu_count=0),
        lambda: replace(request("llama-2-7b", 5), history=-1),
        lambda: replace(request("llama-2-7b", 5), holding=Holding(())),
    ],
)
def test_nonsense_is_refused(broken: object) -> None:
    """An impossible value is refused where it is given, not where it is used."""
    assert callable(broken)
    with pytest.raises(InvalidArgument):
        broken()


def test_shapes_of_the_papers() -> None:
    """Bytes per token of the models that the papers use, in fp16."""
    kv_kib = {
        name: sum(layer.kv_row_bytes for layer in known_model(name).layers) / 1024 for name in MODEL_NAMES
    }

    assert kv_kib["llama-2-7b"] == 512
    assert kv_kib["llama-2-13b"] == 800
    assert kv_kib["opt-30b"] == 1344
    assert kv_kib["llama-3-8b"] == 128
    assert kv_kib["smollm2-135m"] == 22.5
    assert known_model("smollm2-135m", element_bytes=4).layers[0].hidden_row_bytes == 4 * 576
    assert {layer.kind for layer in known_model("qwen3-next-80b").layers} == {
        LayerKind.LINEAR,
        LayerKind.FULL,
    }


def test_tensor_parallel_devices_share_the_work() -> None:
    """Four devices copy, project and recompute four times as fast; SSDs stay as many as there are."""
    one, four = known_profile("a100-40gb"), known_profile("a100-40gb", gpu_count=4, ssd_count=4)

    assert four.gemm_flops_per_s == 4 * one.gemm_flops_per_s
    assert four.ssd == one.ssd


def test_planning_imports_neither_torch_nor_numpy() -> None:
    """The planner runs where torch is not installed."""
    code = (
        "import sys, gpu_worker.planning.explain, gpu_worker.planning.layout, gpu_worker.planning.adaptive;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_was_measured_replaces_the_datasheet() -> None:
    """A curve is taken as it is, straight between its points; a factor multiplies either."""
    layer = known_model("llama-2-7b").layers[0]
    curve = Curve(((100, 1.0), (200, 3.0)))
    profile = replace(known_profile("cpu"), curves={(Stage.PROJECT, layer): curve})
    slower = profile.corrected({Stage.PROJECT: 2.0}).corrected({Stage.PROJECT: 1.5, Stage.COPY: 3.0})

    assert [profile.project_s(layer, tokens) for tokens in (0, 10, 100, 150, 300)] == [
        0.0,
        1.0,
        1.0,
        2.0,
        5.0,
    ]
    assert slower.project_s(layer, 150) == 6.0
    assert slower.transfer_s({StatePlace.DRAM: 1e9})[1] == 3 * profile.transfer_s({StatePlace.DRAM: 1e9})[1]
    assert slower.embed_s(layer, 150) == profile.embed_s(layer, 150)
    with pytest.raises(InvalidArgument, match="no ascending points"):
        Curve(((200, 1.0), (100, 2.0)))
