"""Engines' requests, and the refusals of impossible ones."""

import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attached import BLOCKS, saved_case
from google.protobuf.message import Message
from paged_engine import BLOCK_COUNT, BLOCK_TOKENS, PROMPT_TOKENS, conversation, running_engine, write_weights
from server_process import ServerProcess
from stored_model import stored_model

import ctxcache
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    ModelFingerprintMismatch,
    ModelProbeMismatch,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.errors import MemoryInUse
from gpu_worker.v1 import attachment_pb2, worker_pb2

Change = Callable[[attachment_pb2.AttachHello], object]


def _set(path: str, value: object) -> Change:
    """A hello with one field changed; a number in the path is an index."""

    def change(hello: attachment_pb2.AttachHello) -> None:
        *owners, name = path.split(".")
        at: Message = hello
        for owner in owners:
            at = at[int(owner)] if owner.isdigit() else getattr(at, owner)  # type: ignore[index]
        setattr(at, name, value)

    return change


WRONG_HELLOS: dict[str, tuple[Change, str]] = {
    "no name": (_set("engine", ""), "engine"),
    "a name with a space": (_set("engine", "an engine"), "engine"),
    "no model": (lambda hello: hello.ClearField("model"), "model.name"),
    "no weights": (lambda hello: hello.ClearField("weights"), "weights.source"),
    "weights nowhere": (_set("weights.safetensors_directory", "/nonexistent"), "safetensors_directory"),
    "another dtype": (_set("kv_cache.dtype", 3), "kv_cache.dtype"),
    "fewer heads": (_set("kv_cache.head_count", 1), "kv_cache.head_count"),
    "a longer head": (_set("kv_cache.key_size", 17), "kv_cache.key_size"),
    "no blocks": (_set("kv_cache.block_count", 0), "kv_cache.block_count"),
    "more blocks than there is room for": (_set("kv_cache.block_count", BLOCK_COUNT + 1), "kv_cache"),
    "huge blocks": (_set("kv_cache.block_count", 1 << 40), "kv_cache.block_count"),
    "a layer too few": (lambda hello: hello.kv_cache.layers.pop(), "kv_cache.layers"),
    "no order and no strides": (_set("kv_cache.order", 0), "strides"),
    "an order that nobody knows": (_set("kv_cache.order", 9), "kv_cache.order"),
    "layers that overlap": (_set("kv_cache.layers.1.keys.offset_bytes", 4), "overlaps"),
    "an odd offset": (_set("kv_cache.layers.1.keys.offset_bytes", 3), "multiples"),
    "a negative offset": (_set("kv_cache.layers.0.keys.offset_bytes", -4), "multiples"),
    "another region": (_set("kv_cache.layers.0.keys.region", 1), "region"),
    "strides of nothing": (lambda hello: hello.kv_cache.layers[0].keys.strides.SetInParent(), "strides"),
    "memory nowhere": (_set("kv_cache.regions.0.shared_memory_name", "/nonexistent"), "shared_memory_name"),
    "memory by a path": (
        _set("kv_cache.regions.0.shared_memory_name", "/../etc/passwd"),
        "shared_memory_name",
    ),
    "less memory than said": (_set("kv_cache.regions.0.size_bytes", 1 << 30), "shared_memory_name"),
    "memory of no size": (_set("kv_cache.regions.0.size_bytes", 0), "kv_cache"),
    "no memory": (lambda hello: hello.kv_cache.regions.pop(), "region"),
    "a handle of nothing": (lambda hello: hello.kv_cache.regions[0].ClearField("handle"), "handle"),
    "a descriptor that nobody passed": (
        lambda hello: hello.kv_cache.regions[0].memory_descriptor.SetInParent(),
        "memory_descriptor",
    ),
    "memory of a GPU": (lambda hello: hello.kv_cache.regions[0].cuda_ipc.SetInParent(), "cuda_ipc"),
    "a save area of a GPU": (lambda hello: hello.save_area.cuda_vmm.SetInParent(), "cuda_vmm"),
}


@pytest.mark.parametrize("name", WRONG_HELLOS)
def test_a_wrong_attach_is_refused_by_what_is_wrong(client: WorkerClient, weights: Path, name: str) -> None:
    """The field is named, nothing is attached, and not a byte was written."""
    change, named = WRONG_HELLOS[name]
    with running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights))
        change(hello)

        with pytest.raises(InvalidArgument) as refused:
            client.attach(hello)

        assert named in f"{refused.value}"
        assert not client.stats().attachments
        assert bool((engine.cache.data == 0xFF).all())


@pytest.mark.parametrize("field", ["weights_digest", "settings", "rope", "norm", "revision", "fingerprint"])
def test_another_models_weights_are_refused(client: WorkerClient, weights: Path, field: str) -> None:
    """Whatever of the fingerprint differs from what the files hold, or from itself."""
    with running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights))
        other = {"weights_digest": f"tensors:{'0' * 64}", "fingerprint": bytes(32)}
        setattr(hello.model, field, other.get(field, "other"))
        if field == "revision":
            # The revision is the engine's own to say, and makes another model.
            hello.weights.safetensors_directory = str(write_weights("qwen2", weights))

        with pytest.raises(ModelFingerprintMismatch):
            client.attach(hello)

        assert not client.stats().attachments


def test_an_engine_that_computes_something_else_is_refused(client: WorkerClient, weights: Path) -> None:
    """The fingerprint is the same, the probe is not.

    Nothing is attached, and the first engine's probe is kept.
    """
    with running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights))
        with client.attach(hello):
            pass
        other = attachment_pb2.AttachHello()
        other.CopyFrom(hello)
        values = np.frombuffer(hello.model.probe.values, "<f4").copy()
        values[-hello.model.probe.group_size :] *= 1.5
        other.model.probe.values = values.tobytes()

        with pytest.raises(ModelProbeMismatch):
            client.attach(other)
        assert not client.stats().attachments
        with client.attach(hello) as attached:
            assert attached.plan(16).methods == "kv:0-2"


def test_fuzzed_attaches_change_nothing(client: WorkerClient, weights: Path) -> None:
    """Bytes changed anywhere in a hello: refused, or attached as it says; the worker goes on either way."""
    chance = random.Random(5)
    with running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights))
        # The store keeps the probe of the first engine: not from a fuzzed one.
        with client.attach(hello):
            good = hello.SerializeToString()
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(chance.randint(1, 4)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            request = b"\x0a" + _varint(len(bad)) + bytes(bad)
            _send(client, request[: chance.randint(1, len(request))])
            _send(client, request)

        assert bool((engine.cache.data == 0xFF).all())
        with client.attach(engine.hello(write_weights("llama", weights))) as attached:
            assert attached.plan(16).methods == "kv:0-2"


def _send(client: WorkerClient, encoded: bytes) -> None:
    call = client._channel.stream_stream(
        "/gpu_worker.v1.WorkerService/Attach", request_serializer=bytes, response_deserializer=bytes
    )(iter([encoded]), timeout=10)
    try:
        with client.errors():
            list(call)
    except CacheError:
        pass


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


WRONG_RESTORES: dict[str, tuple[dict[str, object], str]] = {
    "a block too few": ({"block_ids": BLOCKS[:-1]}, "block_ids"),
    "a block that is not there": ({"block_ids": [*BLOCKS[:-1], BLOCK_COUNT]}, "block_ids"),
    "a negative block": ({"block_ids": [*BLOCKS[:-1], -1]}, "block_ids"),
    "a block twice": ({"block_ids": [*BLOCKS[:-1], BLOCKS[0]]}, "block_ids"),
    "no tokens": ({"token_begin": PROMPT_TOKENS}, "token_end"),
    "a negative token": ({"token_begin": -1}, "token_end"),
    "token ids of others": ({"token_ids": [1, 2]}, "token_ids"),
    "no session": ({"session": "conversation"}, "session"),
}


def test_wrong_requests_are_refused_and_the_rest_are_misses(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """A request that cannot be right is an error; what the store cannot give is a miss with its reason."""
    with saved_case(client, weights, session_id) as case:
        asked = {"session": case.session, "block_ids": BLOCKS, "token_end": PROMPT_TOKENS}
        for change, field in WRONG_RESTORES.values():
            with pytest.raises(InvalidArgument) as refused:
                case.attached.restore(**{**asked, **change})  # type: ignore[arg-type]
            assert refused.value.field == field
        misses: dict[str, dict[str, object]] = {
            "SESSION_NOT_FOUND": {"session": "sessions/nobody"},
            "TOKEN_RANGE_OUT_OF_BOUNDS": {"token_end": PROMPT_TOKENS + 1},
            "GENERATION_MISMATCH": {"if_generation_match": 1 << 40},
            "TOKENS_DIFFER": {"token_ids": [*case.token_ids[:20], 0, *case.token_ids[21:]]},
        }
        for reason, change in misses.items():
            result = case.attached.restore(**{**asked, **change})  # type: ignore[arg-type]
            assert (result.is_restored, result.reason) == (False, reason)
            assert not result.invalid_block_ids
            assert result.common_token_count == (20 if reason == "TOKENS_DIFFER" else 0)
        assert case.is_untouched()

        corrupted = _corrupted(store, case.session)
        result = case.restore()
        assert corrupted
        assert (result.is_restored, result.reason) == (False, "CORRUPT_SEGMENT")
        missed = client.stats().missed_counts
        assert {*misses, "CORRUPT_SEGMENT"} <= set(missed)


def _corrupted(store: ServerProcess, session: str) -> bool:
    """Flip a bit of a session's rows on disk, and have the store forget its copy in memory."""
    with ctxcache.connect(store.target) as direct:
        with direct.sessions.open(session, stored_model(direct, session)).read() as rows:
            row = rows.array(Stream(1, StateKind.KV))[3].tobytes()
        direct.admin.demote_session(session)
    path = next(Path(store.data_directory).rglob("segments.dat"))
    data = path.read_bytes()
    # Other tests' sessions have the same rows: those of before are nobody's any more, the last is this one's.
    at = data.rfind(row)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([row[0] ^ 1]))
    return at >= 0


def test_tokens_that_are_there_already_are_not_touched(
    client: WorkerClient, weights: Path, session_id: str
) -> None:
    """A restore from some token on writes behind it alone."""
    with saved_case(client, weights, session_id) as case:
        begin = 2 * BLOCK_TOKENS + 5

        result = case.attached.restore(case.session, BLOCKS, token_begin=begin, token_end=PROMPT_TOKENS)

        assert result.is_restored
        rows = case.engine.rows(BLOCKS, PROMPT_TOKENS)
        assert all(bool(part[:begin].isnan().all()) for part in rows)
        assert not any(bool(part[begin:].isnan().any()) for part in rows)


def test_any_name_of_the_store_is_one_here(client: WorkerClient, weights: Path, session_id: str) -> None:
    """Engines name sessions by a user and a number, such as `alice:3`."""
    with saved_case(client, weights, f"{session_id}:3") as case:
        assert case.restore().is_restored


def test_memory_may_be_a_sealed_memfd(client: WorkerClient, weights: Path, session_id: str) -> None:
    """Passed on the descriptor socket; one that could shrink is refused."""
    with saved_case(client, weights, session_id) as case:
        size = case.engine.cache.data.nbytes
        fd = os.memfd_create("cache", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        hello = case.engine.hello(write_weights("llama", weights), engine="by-descriptor")
        with client.pass_descriptors([fd]) as passed:
            hello.kv_cache.regions[0].memory_descriptor.CopyFrom(passed.descriptor(0))
            with pytest.raises(InvalidArgument, match="sealed"):
                client.attach(hello)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            attached = client.attach(hello)

        with attached:
            result = attached.restore(case.session, BLOCKS, token_end=PROMPT_TOKENS)

        assert result.is_restored
        held = conversation("llama")[2]
        case.engine.put(held, BLOCKS, PROMPT_TOKENS)
        written = torch.frombuffer(bytearray(os.pread(fd, size, 0)), dtype=torch.float32)
        expected = case.engine.cache.data.view(torch.float32)
        is_written = ~written.isnan() & (written != 0)
        torch.testing.assert_close(written[is_written], expected[is_written], rtol=1e-5, atol=1e-6)
        with pytest.raises(InvalidArgument, match="descriptor"):
            client.attach(hello)
        os.close(fd)


def test_memory_of_another_engine_is_refused(client: WorkerClient, weights: Path, session_id: str) -> None:
    """Two attachments that could write to the same blocks are not told of each other's restores.

    There is one.
    """
    with saved_case(client, weights, session_id) as case:
        other = case.engine.hello(write_weights("llama", weights), engine="other")

        with pytest.raises(MemoryInUse, match="engine engine is attached"):
            client.attach(other)

        assert case.restore().is_restored
        case.attached.close()
        assert case.attached.ended.wait(30)
        with client.attach(other):
            assert [each.engine for each in client.stats().attachments] == ["other"]


def test_engines_may_have_blocks_of_their_own_in_one_memory(client: WorkerClient, weights: Path) -> None:
    """An allocation that is shared out: each attaches with its part of every tensor."""
    with running_engine("llama") as engine:
        lower = engine.hello(write_weights("llama", weights), engine="lower")
        upper = engine.hello(write_weights("llama", weights), engine="upper")
        half = BLOCK_COUNT // 2
        for hello in (lower, upper):
            hello.kv_cache.block_count = half
        for layer in upper.kv_cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor.offset_bytes += half * BLOCK_TOKENS * engine.heads * engine.key_size * 4

        with client.attach(lower), client.attach(upper):
            assert len(client.stats().attachments) == 2


def test_saves_that_do_not_fit_are_refused(client: WorkerClient, weights: Path, session_id: str) -> None:
    """Rows outside the save area, streams of no model, tokens that do not follow: nothing is appended."""
    with saved_case(client, weights, session_id) as case:
        area = case.engine.save_area.data.nbytes
        stream = Stream(0, StateKind.KV)
        for offsets in ({stream: area - 8}, {stream: -1}, {Stream(9, StateKind.KV): 0}, {}):
            with pytest.raises(InvalidArgument):
                case.attached.save(case.session, offsets, write_offset=PROMPT_TOKENS, token_count=4)
        whole = {Stream(layer, StateKind.KV): 0 for layer in range(3)}
        with pytest.raises(WriteOffsetMismatch):
            case.attached.save(case.session, whole, write_offset=3, token_count=4)

        assert client.stats().failed_save_counts["WRITE_OFFSET_MISMATCH"] >= 1
        assert case.restore().is_restored


def test_plans_profiles_and_stats(client: WorkerClient, tmp_path: Path) -> None:
    """A plan names every layer's way and why; after measuring, plans are by what was measured."""
    with (
        running_engine("llama") as engine,
        # Weights of this test alone: a model that others restored plans by what their restores took.
        client.attach(engine.hello(write_weights("llama", tmp_path))) as attached,
    ):
        plan = attached.plan(64)
        assert plan.methods == "kv:0-2"
        assert [each.method for each in plan.layers] == ["kv"] * 3
        assert all(each.reason for each in plan.layers)
        assert not attached.profile().is_measured

        measured = attached.profile([16, 64])

        assert measured.is_measured
        assert measured.copy_bytes_per_s > 0
        (stats,) = client.stats().attachments
        assert stats.model == "models/sidecar-llama"
        assert stats.mapped_bytes == engine.cache.data.nbytes + engine.save_area.data.nbytes
        held = worker_pb2.PlanRequest(
            attachment_id=attached.attachment_id,
            token_count=64,
            kinds=[int(StateKind.HIDDEN)],  # type: ignore[list-item]
        )
        assert client.call(client.stub.Plan, held).methods == "hidden:0-2"
