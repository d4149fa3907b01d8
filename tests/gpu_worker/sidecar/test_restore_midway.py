"""Restores that end while they write: the blocks are named, and nothing is written behind the result."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_engine import PROMPT_TOKENS, PagedEngine, conversation, running_engine, write_weights

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.client.rows import RowPiece
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, CorruptSegment, LeaseNotFound
from ctxcache.format.streams import StateKind, Stream, ranges_of
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.forms.rows import pack_rows
from gpu_worker.sidecar.attachments import Attachments
from gpu_worker.sidecar.handles.host import DescriptorSocket
from gpu_worker.sidecar.model import AttachedModels
from gpu_worker.sidecar.regions import Opener
from gpu_worker.sidecar.restoring import Pipelines
from gpu_worker.sidecar.service import WorkerService
from gpu_worker.sidecar.settings import WorkerSettings
from gpu_worker.v1 import worker_pb2

BLOCKS = [3, 1, 9, 5, 0, 8]
CPU = torch.device("cpu")


class HeldRows(SessionRows):
    """Rows of one session whose second layer comes when it may, or fails."""

    is_local = True

    def __init__(self, engine: PagedEngine, error: CacheError | None = None) -> None:
        rows = conversation(engine.family)[1]
        self._rows = {
            spec.stream: (
                np.frombuffer(pack_rows(rows[spec.stream], spec), np.uint8).reshape(PROMPT_TOKENS, -1)
            )
            for spec in engine.spec.streams
            if spec.stream.kind is StateKind.KV
        }
        self.begin, self.end, self.streams = 0, PROMPT_TOKENS, tuple(self._rows)
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.error, self.lease_error = error, None  # type: CacheError | None, CacheError | None

    def row_bytes(self, stream: Stream) -> int:
        """See SessionRows."""
        return self._rows[stream].shape[1]

    def pieces(self, stream: Stream) -> Sequence[Bytes]:
        """See SessionRows."""
        if stream.layer == 1:
            self.reached.set()
            self.may_go_on.wait(30)
            if self.error is not None:
                raise self.error
        return [self._rows[stream]]

    def chunks(self) -> Iterator[RowPiece]:
        """See SessionRows."""
        raise NotImplementedError

    def check(self) -> None:
        """See SessionRows."""
        if self.lease_error is not None:
            raise self.lease_error

    def close(self) -> None:
        """See SessionRows."""


class OneSession:
    """A store that has one session: what restores use of a Client's models, sessions and handles."""

    def __init__(self, engine: PagedEngine, rows: HeldRows) -> None:
        self.models = self.sessions = self
        self._rows = rows
        self._session = SessionInfo(
            name="sessions/one",
            token_count=PROMPT_TOKENS,
            model_fingerprint=engine.spec.fingerprint(),
            layout=tuple(ranges_of(rows.streams)),
        )

    def register(self, spec: object, probe: object) -> None:
        """See ModelCalls."""

    def get(self, name: str) -> SessionInfo:
        """See SessionCalls."""
        assert name == self._session.name
        return self._session

    def open(self, session: SessionInfo, _model: object) -> "OneSession":
        """See SessionCalls."""
        assert session is self._session
        return self

    def read(self, **_: object) -> HeldRows:
        """See SessionHandle."""
        return self._rows


@asynccontextmanager
async def _service(engine: PagedEngine, rows: HeldRows, weights: Path) -> Any:  # an async generator
    client: Any = OneSession(engine, rows)
    settings, pipelines = WorkerSettings(), Pipelines(CPU, 1 << 20)
    attachments = Attachments(settings, client, AttachedModels(CPU, None), Opener(CPU, DescriptorSocket("")))
    direct = DirectStorage(client, CPU)
    service = WorkerService(settings, client, direct, pipelines, attachments, on_stuck=_stuck)
    attachment = await attachments.attach(engine.hello(write_weights("llama", weights)))
    request = worker_pb2.RestoreRequest(
        attachment_id=attachment.attachment_id,
        restore_id="this",
        session="sessions/one",
        token_end=PROMPT_TOKENS,
        block_ids=BLOCKS,
        announces_layers=True,
    )
    stream = service.Restore(request, None)  # type: ignore[arg-type]  # a servicer's context is not looked at
    try:
        yield service, request, stream
    finally:
        rows.may_go_on.set()
        await attachments.detach(attachment)
        service.close()
        pipelines.close()


def _stuck(error: CacheError) -> None:
    pytest.fail(str(error))


async def _rest(stream: Any) -> tuple[list[int], worker_pb2.RestoreResult]:
    layers: list[int] = []
    async for response in stream:
        if response.HasField("result"):
            return layers, response.result
        layers.append(response.layer_usable.layer)
    raise AssertionError("it ended without a result")


async def test_cancelled_while_it_writes_it_names_its_blocks(weights: Path) -> None:
    """Cancel returns when the pipeline has come to rest; layers that were not reached are as they were."""
    with running_engine("llama") as engine:
        rows = HeldRows(engine)
        async with _service(engine, rows, weights) as (service, request, stream):
            first = await anext(stream)
            assert first.layer_usable.layer == 0
            await asyncio.to_thread(rows.reached.wait, 30)
            cancelling = asyncio.ensure_future(
                service.Cancel(
                    worker_pb2.CancelRequest(attachment_id=request.attachment_id, restore_id="this"), None
                )
            )
            # It waits: something may be written yet.
            await asyncio.wait({cancelling}, timeout=0.01)
            assert not cancelling.done()
            rows.may_go_on.set()

            layers, result = await _rest(stream)

            assert (await cancelling).was_running
            assert (result.is_restored, result.reason, layers) == (False, "RESTORE_CANCELLED", [])
            assert list(result.invalid_block_ids) == BLOCKS
            written = [not bool(part.isnan().all()) for part in engine.rows(BLOCKS, PROMPT_TOKENS)]
            assert written == [True, True, False, False, False, False]
            assert service.counts.missed["RESTORE_CANCELLED"] == 1


@pytest.mark.parametrize("fails", ["rows", "lease"])
async def test_what_fails_while_it_writes_names_its_blocks(weights: Path, fails: str) -> None:
    """Bad rows and a lease that ended: no later layer is announced, whatever lies in memory by then."""
    error = CorruptSegment(segment_id=1, problem="planted") if fails == "rows" else None
    with running_engine("llama") as engine:
        rows = HeldRows(engine, error)
        async with _service(engine, rows, weights) as (_, _, stream):
            await anext(stream)
            rows.lease_error = None if error else LeaseNotFound(lease_id=1)
            rows.may_go_on.set()

            layers, result = await _rest(stream)

            expected = "CORRUPT_SEGMENT" if error else "LEASE_NOT_FOUND"
            assert (result.is_restored, result.reason, layers) == (False, expected, [])
            assert list(result.invalid_block_ids) == BLOCKS


async def test_memory_that_is_written_yet_is_not_given_to_the_next(weights: Path) -> None:
    """An engine that left while a restore wrote for it, and came back.

    It is attached when nothing is written any more.
    """
    with running_engine("llama") as engine:
        rows = HeldRows(engine)
        async with _service(engine, rows, weights) as (service, request, stream):
            await anext(stream)
            attachments = service._attachments
            attachments.detach(attachments.get(request.attachment_id))
            hello = engine.hello(write_weights("llama", weights), engine="another-name")
            attaching = asyncio.ensure_future(attachments.attach(hello))
            await asyncio.wait({attaching}, timeout=0.05)
            assert not attaching.done()
            rows.may_go_on.set()

            attachment = await attaching

            assert service.restores.taken == 0
            await attachments.detach(attachment)


async def test_a_stream_that_is_left_ends_the_restore(weights: Path) -> None:
    """An engine that drops the call has its restore cancelled.

    Its name is free when nothing is written any more.
    """
    with running_engine("llama") as engine:
        rows = HeldRows(engine)
        async with _service(engine, rows, weights) as (service, request, stream):
            await anext(stream)
            (running,) = service._attachments.get(request.attachment_id).running.values()

            await stream.aclose()
            assert service.restores.taken == 1
            rows.may_go_on.set()
            await running.ended

            assert service.restores.taken == 0
            assert bool(engine.rows(BLOCKS, PROMPT_TOKENS)[4].isnan().all())
