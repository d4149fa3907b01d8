"""Saved sessions of tiny models that lie only on a real store's SSD, and devices that read its files."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch
from sessions import Session
from slow_pipelines import poisoned_target, schedule_of
from stored_model import stored_model
from torch import Tensor
from transformers import Cache

from ctxcache.client import Client
from ctxcache.client.convert import stream_from_wire
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.format.packing import PACKINGS, unpacked
from ctxcache.format.streams import TOKENS, StateKind, Stream
from ctxcache.v1.arena_pb2 import AcquireLease, Operation, ReleaseLease
from gpu_worker.direct import KvikioFound, Wanted
from gpu_worker.direct import storage as storage_module
from gpu_worker.direct.source import DeviceFiles
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.forms.rows import pack, pack_rows
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.target import CacheTarget

CPU = torch.device("cpu")
PATIENCE_S = 30.0
FIRST_TOKENS = 70
"""Appended first: the segment behind them is short."""


def save(client: Client, session: Session, session_id: str, kinds: Sequence[StateKind]) -> SessionInfo:
    """Have the store keep all rows of these kinds, appended in two parts, on SSD only."""
    packed = [kind for kind in kinds if kind in PACKINGS]
    spec = model_spec(session.adapter.model, model_id=f"direct-{session_id}"[:60], packed_kinds=packed)
    model = client.models.register(spec)
    streams = [Stream(layer, kind) for layer in range(len(session.adapter.layers)) for kind in kinds]
    rows = {TOKENS: session.token_ids.to(torch.int32).numpy().view(np.uint8).reshape(-1, 4)}
    for one in (each for each in spec.resolve(streams) if each.stream != TOKENS):
        part = session.rows[Stream(one.stream.layer, unpacked(one.stream.kind))]
        data = (
            pack(part, one.stream.kind).numpy().tobytes()
            if one.stream.kind in PACKINGS
            else pack_rows(part, one)
        )
        rows[one.stream] = np.frombuffer(data, np.uint8).reshape(session.token_count, -1)
    kept = client.sessions.create(model, id=session_id, layout=list(rows)).info
    for begin, end in ((0, FIRST_TOKENS), (FIRST_TOKENS, session.token_count)):
        parts = {stream: part[begin:end] for stream, part in rows.items()}
        kept = client.sessions.open(kept, model).append(parts, durability=Durability.DISK)
        leave(client, kept.name)
    return client.sessions.get(kept.name)


def leave(client: Client, name: str) -> None:
    """Have a session on SSD only."""
    end_s = monotonic() + PATIENCE_S
    while client.sessions.get(name).dram_bytes:
        assert monotonic() < end_s
        client.hints.demote(name)


class FakeReading:
    """A read that has ended, well or not."""

    def __init__(self, outcome: Callable[[], int]) -> None:
        self._outcome = outcome

    def get(self) -> int:
        """See kvikio_files.Reading."""
        return self._outcome()


class FakeFiles:
    """Files read into the memory of a device that is the host, as kvikio would: only the driver is faked.

    `fault`: what its `fault_at`-th read does. A read ends no sooner than so many are `wanted` under way.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = [os.open(path, os.O_RDONLY) for path in paths]
        self.read_count = 0
        self.fault, self.fault_at = "", 0
        self.wanted = 0
        self.may_end = threading.Event()

    def begin(self, path_index: int, offset_bytes: int, into: Tensor) -> FakeReading:
        """See kvikio_files.DeviceFiles."""
        number, self.read_count = self.read_count, self.read_count + 1
        data = os.pread(self._files[path_index], into.nbytes, offset_bytes)
        into.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        fault = self.fault if number == self.fault_at else ""
        if fault == "flipped":
            into[len(into) // 2] ^= 1
        if self.read_count >= self.wanted:
            self.may_end.set()

        def outcome() -> int:
            assert self.may_end.wait(PATIENCE_S)
            return _raise() if fault == "raises" else len(data) - (fault == "short")

        return FakeReading(outcome)

    def close(self) -> None:
        """Close them."""
        for file in self._files:
            os.close(file)


def _raise() -> int:
    raise RuntimeError("planted")


def direct_by(
    client: Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[DirectStorage, list[FakeFiles]]:
    """Direct storage by the store, POSIX, or a device of which the driver is faked; and what it opened."""
    if way != "gds":
        return DirectStorage(client, CPU, Wanted.POSIX if way == "posix" else Wanted.OFF), []
    monkeypatch.setattr(
        storage_module, "probe_kvikio", lambda _device: KvikioFound("", is_gds=True, version="fake")
    )
    opened: list[FakeFiles] = []

    def open_files(paths: Sequence[str], *, is_gds: bool) -> DeviceFiles:
        assert is_gds
        opened.append(FakeFiles(paths))
        return opened[-1]

    monkeypatch.setattr(storage_module, "KvikioFiles", open_files)
    return DirectStorage(client, CPU), opened


def restored(
    direct: DirectStorage,
    pipeline: Pipeline,
    session: Session,
    kept: SessionInfo,
    plan: str,
    *,
    target: CacheTarget | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Cache:
    """The session restored from the store. `meanwhile` is called when the first layer is there.

    Raises why it was not.
    """
    target = target or poisoned_target(session)
    model = stored_model(direct._client, kept.name)
    schedule = schedule_of(session, target, plan)
    compute = Modules(session.adapter, session.positions)
    with (
        direct.read(kept, model, streams=schedule.streams()) as rows,
        direct.source(rows, model) as source,
        pipeline.start(
            schedule,
            source,
            target,
            compute,
            deadline=Deadline.after_s(PATIENCE_S),
            token_ids=session.token_ids,
        ) as restoration,
    ):
        restoration.wait(0)
        if meanwhile is not None:
            meanwhile()
        restoration.wait_all()
    return target.cache


def flip(path: Path, offset_bytes: int) -> None:
    """Damage a byte of a file."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def flip_in_arena(client: Client, kept: SessionInfo, stream: Stream) -> None:
    """Damage a byte of a stream's first row in shared memory, as a process would that maps it."""
    attachment = client.routes.attach()
    assert attachment is not None
    arena = attachment.arena.writable()
    assert arena is not None
    acquire = AcquireLease(session=kept.name, model_fingerprint=kept.model_fingerprint)
    lease = attachment.stream.carry_out(Operation(acquire_lease=acquire)).lease
    (chunk,) = (each for each in lease.layout if stream_from_wire(each.stream) == stream)
    arena[lease.segments[0].offset_bytes + chunk.offset_bytes] ^= 1
    attachment.stream.send([Operation(release_lease=ReleaseLease(lease_id=lease.lease_id))])
