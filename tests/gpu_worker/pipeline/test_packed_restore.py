"""Rows in few bits through capture and restore.

Close to the kept cache, and never taken for anything else.
"""

import copy

import pytest
import torch
from sessions import RELATIVE_BOUND, Session, relative_errors, restored_cache, saved_session
from tiny_models import build
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import LOSSY_KINDS, PACKINGS, unpacked
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import ShapeMismatch, UnsupportedDtype
from gpu_worker.families.generation import Capture, prefill
from gpu_worker.forms.rows import pack, widen
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import Restorer
from gpu_worker.planning.plan import Method, RestorePlan

KEPT_BOUNDS = {
    StateKind.HIDDEN_INT8: 0.03,
    StateKind.KV_INT8: 0.01,
    StateKind.HIDDEN_INT4: 0.5,
    StateKind.KV_INT4: 0.15,
}
"""Most difference of any key or value to the one that was kept, over the largest of them."""
KL_BOUNDS = {8: 2e-3, 4: 0.5}
"""Nats a token, by bits; a tiny random model's logits are hot."""


def _restored(session: Session, kinds: list[StateKind]) -> Cache:
    def rows_of(stream: Stream) -> Tensor:
        rows = session.rows[Stream(stream.layer, unpacked(stream.kind))]
        return rows if stream.kind not in PACKINGS else pack(rows, stream.kind)

    plan = RestorePlan(tuple(Method[kind.name] for kind in kinds))
    return restored_cache(session.adapter, plan, rows_of, positions=session.positions)


def _kl_nats(session: Session, cache: Cache) -> float:
    """Divergence of the next tokens' predictions from those on the kept cache."""
    ids = torch.tensor([[5, 3, 8, 40, 41, 2, 90, 7]])
    kept = copy.deepcopy(session.kept_cache)
    with torch.no_grad():
        ours, theirs = (
            session.adapter.model(input_ids=ids, past_key_values=each).logits[0].float().log_softmax(-1)
            for each in (cache, kept)
        )
    return float(functional.kl_div(ours, theirs, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("kind", PACKINGS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("name", ["llama", "qwen3", "neox", "opt"])
def test_a_cache_from_few_bits_is_close_to_the_kept_one(name: str, kind: StateKind) -> None:
    """Keys, values and predictions are within the kind's bounds.

    That they differ says that bits were left out.
    """
    session = saved_session(name)
    cache = _restored(session, [kind] * 3)
    exact = session.restore(f"{unpacked(kind).name.lower()}:0-2")

    worst = max(relative_errors(cache, exact))
    assert RELATIVE_BOUND < worst < KEPT_BOUNDS[kind]
    assert 0 < _kl_nats(session, cache) < KL_BOUNDS[PACKINGS[kind].bits]


def test_layers_mix_packed_and_exact_rows() -> None:
    """Each layer by its own kind: the exact one is as exact as ever."""
    session = saved_session("llama")
    cache = _restored(session, [StateKind.KV, StateKind.HIDDEN_INT8, StateKind.KV_INT8])
    errors = relative_errors(cache, session.restore("kv:0-2"))

    assert errors[:2] == [0, 0]
    assert all(RELATIVE_BOUND < error < 0.03 for error in errors[2:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_rows_are_the_exact_method_on_wide_ones(dtype: torch.dtype) -> None:
    """Bit for bit: nothing is lost but what packing lost."""
    session = saved_session("llama", dtype)
    restorer = Restorer(session.adapter, session.positions)
    for kind in PACKINGS:
        rows = session.rows[Stream(1, unpacked(kind))][7:50]
        packed = pack(rows, kind)
        wide = widen(packed, kind, rows.shape[1], dtype)
        found = restorer.layer(1, Method[kind.name], packed, begin=7)
        expected = restorer.layer(1, Method[unpacked(kind).name], wide, begin=7)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_capture_hands_over_wide_rows_under_the_packed_name() -> None:
    """Packing is not the forward pass's work."""
    adapter = adapt(build("llama"))
    seen: dict[StateKind, Tensor] = {}
    streams = [Stream(1, kind) for kind in StateKind if adapter.element_count(kind, 1) is not None]

    with Capture(adapter, streams, lambda _layer, kind, rows: seen.update({kind: rows.clone()})):
        prefill(adapter.model, DynamicCache(config=adapter.model.config), [1, 2, 3])

    assert set(seen) == {StateKind.HIDDEN, StateKind.KV, *LOSSY_KINDS}
    assert all(torch.equal(rows, seen[unpacked(kind)]) for kind, rows in seen.items())


def test_packed_and_wide_rows_are_not_taken_for_each_other() -> None:
    """By type and by width, also where both widths are one."""
    session = saved_session("llama")
    restorer = Restorer(session.adapter, session.positions)
    wide = session.rows[Stream(1, StateKind.HIDDEN)]
    packed = pack(wide, StateKind.HIDDEN_INT8)

    with pytest.raises(
        ShapeMismatch, match=r"layer 1 hidden_int8 rows at token 0: expected shape \[up to 82, 96\]"
    ):
        restorer.layer(1, Method.HIDDEN_INT8, wide)
    with pytest.raises(UnsupportedDtype, match=r"expected torch\.uint8"):
        restorer.layer(1, Method.HIDDEN_INT8, torch.zeros(3, 96))
    with pytest.raises(UnsupportedDtype, match=r"expected torch\.float32, got torch\.uint8"):
        restorer.layer(1, Method.HIDDEN, packed[:, :64])
    with pytest.raises(ShapeMismatch):
        restorer.layer(1, Method.HIDDEN_INT4, packed)


def test_a_model_with_packed_kinds_is_another_model() -> None:
    """Its fingerprint differs, and without them it is what it always was."""
    model = build("llama")
    plain, packed = model_spec(model, model_id="m"), model_spec(model, model_id="m", packed_kinds=PACKINGS)

    assert packed.streams[: len(plain.streams)] == plain.streams
    assert StreamSpec(Stream(2, StateKind.HIDDEN_INT8), 96, DType.PACKED) in packed.streams
    assert len(packed.streams) == 3 * (2 + len(PACKINGS))
    fingerprints = {
        spec.fingerprint()
        for spec in (plain, packed, model_spec(model, model_id="m", packed_kinds=[StateKind.KV_INT8]))
    }
    assert len(fingerprints) == 3
    with pytest.raises(InvalidArgument, match=r"no stream layer \d hidden_int8"):
        RestorePlan.uniform(Method.HIDDEN_INT8, 3).check(plain)
    RestorePlan.parse("hidden_int8:0-1,kv_int4:2").check(packed)


@pytest.mark.parametrize(("name", "kind"), [("llama", StateKind.HIDDEN), ("deepseek", StateKind.KV_INT8)])
def test_kinds_that_the_model_cannot_pack_are_refused(name: str, kind: StateKind) -> None:
    """A kind that packs nothing, and one of rows that the model does not have."""
    with pytest.raises(InvalidArgument, match=f"has no rows of {kind.name.lower()} to pack"):
        model_spec(build(name), model_id="m", packed_kinds=[kind])
