"""Deltas between layers: bounds of what comes back, holes, and bases that are not theirs."""

import struct

import numpy as np
import pytest
import torch
from sessions import Session, relative_errors, restored_cache, saved_session
from tiny_models import build
from torch import Tensor

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import DELTAS, PACKINGS, is_on_tokens, packing_of
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import BaseMismatch, RowNotRepresentable, ShapeMismatch
from gpu_worker.forms.deltas import Chain, add_delta, chained_layers, marks_of, pack_delta
from gpu_worker.forms.rounding import Roundings
from gpu_worker.model.proof import adapt
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule

DELTA4, INT8 = StateKind.HIDDEN_DELTA_INT4, StateKind.HIDDEN_INT8
each_kind = pytest.mark.parametrize("kind", DELTAS, ids=lambda kind: kind.name.lower())


def _stack(layers: int, tokens: int, size: int) -> list[Tensor]:
    """Layers' inputs, each a little further than the one below, as a residual stream is."""
    chance = torch.Generator().manual_seed(3)
    steps = [torch.randn(tokens, size, generator=chance) for _ in range(layers)]
    steps[0] = steps[0] * 4
    steps[0][:, 5] = 20_000.0
    return list(torch.stack(steps).cumsum(0).unbind())


def _spec(layer: int, kind: StateKind, size: int) -> StreamSpec:
    if kind is StateKind.HIDDEN:
        return StreamSpec(Stream(layer, kind), 4 * size, DType.FLOAT32)
    return StreamSpec(Stream(layer, kind), packing_of(kind).row_bytes(size), DType.PACKED)


def _saved(inputs: list[Tensor], kinds: list[StateKind]) -> list[Tensor]:
    streams = [Stream(layer, kind) for layer, kind in enumerate(kinds)]
    chain = Chain(chained_layers(streams), len(inputs[0]), inputs[0].shape[1])
    return [
        chain.packed(_spec(layer, kind, rows.shape[1]), rows)
        for layer, (kind, rows) in enumerate(zip(kinds, inputs, strict=True))
    ]


def _read_by_the_document(stored: list[Tensor], kinds: list[StateKind], size: int) -> np.ndarray:
    """The last layer's first row, by docs/chunk_format.md alone; checks every mark."""
    rows, below = np.empty(0, np.float32), b""
    for layer, (kind, tensor) in enumerate(zip(kinds, stored, strict=True)):
        raw = tensor[0].numpy().tobytes()
        if kind is StateKind.HIDDEN:
            rows = np.frombuffer(raw, "<f4").astype(np.float32)
        else:
            packing, groups = DELTAS[kind], -(-size // DELTAS[kind].group_size)
            end = -(-size * packing.bits // 32) * 4
            kept = min(4, max(1, size // 144))
            (mark,) = struct.unpack_from("<I", raw, end)
            near = struct.unpack_from(f"<{kept}e", raw, end + 4)
            marked = struct.unpack_from(f"<{kept}H", raw, end + 4 + 2 * kept)
            outliers = [each * (256 if at >> 15 else 1) for each, at in zip(near, marked, strict=True)]
            places = [at & 0x7FFF for at in marked]
            (largest,) = struct.unpack_from("<e", raw, end + 4 + 4 * kept)
            shares = np.frombuffer(raw, "u1", groups, end + 6 + 4 * kept)
            scales = shares.astype(np.float32) * np.float32(largest) / np.float32(255)
            zeros = np.frombuffer(raw, "u1", groups, end + 6 + 4 * kept + groups)
            words = struct.unpack(f"<{len(below) // 4}I", below)
            sums = sum(word * (2 * i + 1) * 0x9E3779B1 for i, word in enumerate(words))
            assert mark == (sums + layer * 0x85EBCA6B) % 2**32
            for i in range(size):
                if i in places:
                    rows[i] += np.float32(outliers[places.index(i)])
                    continue
                group = i // packing.group_size
                step = np.float32(_code(raw, packing.bits, i, size) - zeros[group] / 16)
                rows[i] += step * np.float32(scales[group])
        below = raw
    return rows


def _code(raw: bytes, bits: int, i: int, size: int) -> int:
    if bits == 4:
        return raw[i // 2] >> (4 * (i % 2)) & 0xF
    low = raw[i // 4] >> (2 * (i % 4)) & 3
    return low | ((raw[size // 4 + i // 8] >> (i % 8) & 1) << 2 if bits == 3 else 0)


@each_kind
@pytest.mark.parametrize("size", [64, 72, 288])
def test_a_stranger_reads_a_chain_by_the_document(kind: StateKind, size: int) -> None:
    """Codes, marks, scales, zeros and outliers lie where the format says."""
    kinds, inputs = [StateKind.HIDDEN, kind, kind], _stack(3, 2, size)
    stored = _saved(inputs, kinds)
    chain = Chain(frozenset((0, 1)), 2, size)

    for layer, (each, rows) in enumerate(zip(kinds, stored, strict=True)):
        found = chain.wide(layer, each, rows, 0)

    np.testing.assert_array_equal(found[0].numpy(), _read_by_the_document(stored, kinds, size))


@each_kind
def test_errors_do_not_add_up_over_layers(kind: StateKind) -> None:
    """Closed loop: the last of 24 layers is off by its own rounding, half a step of its group or less."""
    inputs = _stack(24, 9, 64)
    kinds = [INT8, *[kind] * 23]
    stored = _saved(inputs, kinds)
    chain = Chain(frozenset(range(23)), 9, 64)

    for layer, (each, rows) in enumerate(zip(kinds, stored, strict=True)):
        for begin in (4, 0):
            found = chain.wide(layer, each, rows[begin : 9 if begin else 4], begin)
            off = (found - inputs[layer][begin : begin + len(found)]).abs()
            # The rounded value is a step of about N(0, 1) and the error below: 9 is far out of both.
            assert off.max() <= 9 / ((1 << DELTAS[kind].bits) - 1)


def test_a_delta_to_other_rows_is_refused() -> None:
    """Rows of another token, another layer, a changed base, and no base at all."""
    inputs = _stack(3, 6, 64)
    stored = _saved(inputs, [INT8, DELTA4, DELTA4])

    def chain(base: Tensor, layer: int = 0) -> Chain:
        made = Chain(frozenset((0, 1)), 6, 64)
        made.wide(layer, INT8, base, 0)
        return made

    assert len(chain(stored[0]).wide(1, DELTA4, stored[1], 0)) == 6
    with pytest.raises(BaseMismatch, match="layer 1 hidden_delta_int4 at token 0: it is no delta"):
        chain(stored[0].flip(0)).wide(1, DELTA4, stored[1], 0)
    with pytest.raises(BaseMismatch, match="layer 2 hidden_delta_int4 at token 0"):
        chain(stored[0]).wide(2, DELTA4, stored[2], 0)
    with pytest.raises(BaseMismatch):
        chain(stored[0], layer=1).wide(1, DELTA4, stored[1], 0)
    for byte in range(0, stored[0].shape[1], 7):
        bent = stored[0].clone()
        bent[4, byte] ^= 1
        with pytest.raises((BaseMismatch, ShapeMismatch), match=r"token 4|places in"):
            chain(bent).wide(1, DELTA4, stored[1], 0)
    with pytest.raises(BaseMismatch):
        Chain(frozenset(), 6, 64).wide(1, DELTA4, stored[1], 0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize(
    "plan",
    [
        "hidden_int8:0,hidden_delta_int4:1-2",
        "hidden:0,hidden_delta_int3:1,hidden_delta_int2:2",
        "kv:0,hidden_int8:1,hidden_delta_int4:2",
        "tokens:0,hidden_int4:1,hidden_delta_int4:2",
        "tokens:0,hidden_delta_int4:1-2",
    ],
)
def test_a_cache_comes_back_from_a_chain(name: str, plan: str) -> None:
    """Whole chains, and chains above a hole, by the pipeline that restores sessions."""
    session = saved_session(name)
    wanted = RestorePlan.parse(plan)
    stored = _packed(session, wanted)

    cache = restored_cache(
        session.adapter,
        wanted,
        lambda stream: stored[stream] if stream in stored else session.rows[stream],
        positions=session.positions,
        token_ids=session.token_ids,
    )

    errors = relative_errors(cache, session.restore("hidden:0-2"))
    assert 0 < max(errors) < (0.5 if "int2" not in plan else 1.5)
    if "tokens:0" in plan:
        assert max(errors[:2]) < 1e-6


def _packed(session: Session, wanted: RestorePlan) -> dict[Stream, Tensor]:
    """The session's layer inputs as the plan's streams have them."""
    size, streams = session.adapter.hidden_size, wanted.streams()
    chain = Chain(chained_layers(streams), len(session.positions), size)
    if is_on_tokens(streams):
        chain.take_inputs(session.token_ids, session.rows[Stream(0, StateKind.HIDDEN)], 0)
    return {
        stream: chain.packed(_spec(*stream, size), session.rows[Stream(stream.layer, StateKind.HIDDEN)])
        for stream in streams
        if stream.layer >= 0 and stream.kind is not StateKind.KV
    }


def test_deltas_to_what_token_ids_give_are_refused_for_other_ids() -> None:
    """One token that is another one: no row of a wrong base is announced."""
    session, wanted = saved_session("llama"), RestorePlan.parse("tokens:0,hidden_delta_int4:1-2")
    stored, ids = _packed(session, wanted), session.token_ids.clone()
    ids[41] = (ids[41] + 1) % 97

    with pytest.raises(BaseMismatch, match="layer 1 hidden_delta_int4 at token 41: it is no delta"):
        restored_cache(
            session.adapter, wanted, stored.__getitem__, positions=session.positions, token_ids=ids
        )


def test_a_layer_0_that_sees_other_tokens_gives_no_base() -> None:
    """The loaded model shows it: such a plan is refused, and other kinds are served."""
    model = build("llama")
    own = model.model.embed_tokens

    class Mixing(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = torch.nn.functional.embedding(ids, own.weight)
            return out + 0.1 * out.cumsum(1)

    model.model.embed_tokens = Mixing(*own.weight.shape)
    adapter, wanted = adapt(model), RestorePlan.parse("tokens:0,hidden_delta_int4:1-2")
    session = saved_session("llama")

    assert (adapter.has_token_inputs, adapter.kinds) == (False, session.adapter.kinds)
    assert session.adapter.has_token_inputs
    with pytest.raises(InvalidArgument, match="does not follow from token ids alone"):
        restored_cache(
            adapter,
            wanted,
            _packed(session, wanted).__getitem__,
            positions=session.positions,
            token_ids=session.token_ids,
        )


def test_plans_and_layouts_without_a_base_are_refused() -> None:
    """The first layer, one above K and V, one above a recomputed layer, one cut, and two bases at once."""
    for text in ("hidden_delta_int4:0", "kv:0,hidden_delta_int4:1", "tokens:0-1,hidden_delta_int4:2"):
        with pytest.raises(InvalidArgument, match="is a delta, and the layer below it comes back by"):
            RestorePlan.parse(text)
    with pytest.raises(InvalidArgument, match="needs one kind of the inputs of layer 0, not 2"):
        chained_layers([Stream(0, INT8), Stream(0, StateKind.HIDDEN), Stream(1, DELTA4)])
    with pytest.raises(InvalidArgument, match="needs one kind of the inputs of layer 0, not 0"):
        chained_layers([Stream(0, StateKind.KV), Stream(1, DELTA4)])
    whole = RestorePlan((Method.HIDDEN_INT8, Method.HIDDEN_DELTA_INT4))
    cut = [(Method.HIDDEN_INT8, 0, 64), (Method.HIDDEN, 64, 128)]
    with pytest.raises(InvalidArgument, match="layer 0 does not come back whole by one method"):
        RestoreSchedule.of_pieces([cut, [(Method.HIDDEN_DELTA_INT4, 0, 128)]], 128, (0, 0))
    with pytest.raises(InvalidArgument, match="does not come back whole"):
        RestoreSchedule.of_methods(whole, 128, (64, 0))


@each_kind
def test_outliers_beyond_float16_come_back_to_eleven_bits(kind: StateKind) -> None:
    """Rows of the largest models have them; what is 256 times beyond is refused by its row."""
    delta = torch.zeros(2, 64)
    delta[0, 7], delta[1, 63] = -1_234_567.0, 60_000.0
    marks = marks_of(torch.zeros(2, 64), 0)

    back = add_delta(pack_delta(delta, kind, marks), kind, torch.zeros(2, 64))

    assert ((back - delta).abs() <= delta.abs() * 2.0**-11).all()
    delta[1, 2] = 1e9
    with pytest.raises(RowNotRepresentable, match="row 1 differs from the layer below by more"):
        pack_delta(delta, kind, marks)


def test_rows_that_no_delta_holds_are_refused() -> None:
    """An infinity by its row; a width that three bits do not fill."""
    delta = torch.zeros(3, 64)
    delta[2, 9] = torch.inf
    marks = marks_of(torch.zeros(3, 64), 0)

    with pytest.raises(RowNotRepresentable, match="row 2 has an infinity"):
        pack_delta(delta, DELTA4, marks)
    with pytest.raises(ShapeMismatch, match="a multiple of 8"):
        pack_delta(torch.zeros(3, 66), DELTA4, marks)
    assert not set(DELTAS) & set(PACKINGS)


@pytest.mark.parametrize(("name", "kind"), [("llama", DELTA4), ("neox", StateKind.HIDDEN_DELTA_INT3)])
def test_care_puts_errors_where_k_and_v_do_not_see_them(name: str, kind: StateKind) -> None:
    """Less of them is left in K and V than by the nearest codes, in as many bytes."""
    adapter = adapt(build(name))
    roundings = Roundings(adapter)
    size = adapter.hidden_size
    delta = torch.randn(40, size, generator=torch.Generator().manual_seed(5))
    base, marks = torch.zeros(40, size), torch.arange(40, dtype=torch.int32)
    weights = roundings._weights(1)
    assert weights is not None

    def error(upper: Tensor | None) -> tuple[float, int]:
        packed = pack_delta(delta, kind, marks, upper)
        return float(((add_delta(packed, kind, base) - delta) @ weights).norm()), packed.shape[1]

    careful, nearest = error(roundings.of(1)), error(None)
    assert careful[1] == nearest[1]
    assert careful[0] < 0.9 * nearest[0]
    # The control: made up for by another layer's weights, nothing is gained.
    other = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(6)))[0]
    assert error((other.T @ torch.diag(torch.logspace(-2, 2, size)) @ other).triu())[0] > nearest[0]


def test_care_leaves_exact_rows_exact() -> None:
    """Zeros, rows of one value and rows as small as there are come back as they do without it."""
    upper = Roundings(adapt(build("llama"))).of(1)
    assert upper is not None
    size = upper.shape[0]
    for delta in (torch.zeros(3, size), torch.full((3, size), 1e-30), torch.eye(size)[:3]):
        packed = pack_delta(delta, DELTA4, torch.zeros(3, dtype=torch.int32), upper)
        back = add_delta(packed, DELTA4, torch.zeros(3, size))
        assert bool(back.isfinite().all())
        assert float((back - delta).abs().max()) < 1e-6


def test_what_is_not_linear_is_rounded_to_the_nearest() -> None:
    """Norms of K, and layers that keep no rows."""
    assert Roundings(adapt(build("qwen3"))).of(0) is None
    llama = Roundings(adapt(build("llama")))
    assert llama.of(0) is llama.of(0)
