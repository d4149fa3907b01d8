"""Rows that a device takes straight from the arena: copied once, and verified there.

The driver's calls that pin memory are faked, and CUDA's streams; the store, its arena and leases are real.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cuda import Driver, FakeGpu, driver
from fake_cuda import Stream as FakeStream
from on_ssd import CPU, direct_by, flip_in_arena, restored, save
from sessions import contents, saved_session
from slow_pipelines import SMALL, slowed
from torch import Tensor

from ctxcache.client import Client
from ctxcache.client.arena import Bytes, SlotLayout, SlotRows
from ctxcache.client.rows import LeasedRows
from ctxcache.client.types import SessionInfo
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.errors import RestoreFailed
from gpu_worker.kernels.chunk_checksum.reference import ChunkSums
from gpu_worker.pipeline import sources
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.sources import ArenaPins, ArenaSource, BatchLanding, Cuts, LeasedSource

__all__ = ["driver"]
PLAN = "kv:0-2"
HALVES = replace(SMALL, batch_tokens=32)
"""The first segment comes in two batches, the others in one."""


class FakePins:
    """A driver that writes down what it pins, and refuses where it is told to."""

    def __init__(self, problem: str = "") -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_broken = False
        self._problem = problem

    def use(self, device: int) -> None:
        """See HostPins."""
        assert device == 0

    def register_host(self, address: int, size_bytes: int) -> None:
        """See HostPins."""
        assert address % 16 == 0
        self.calls.append(("register", size_bytes))
        if self._problem:
            raise OSError(801, self._problem)

    def unregister_host(self, address: int) -> None:
        """See HostPins."""
        self.calls.append(("unregister", address))

    def bring_planes(
        self, target: int, source: int, source_pitch: int, *, plane_bytes: int, plane_count: int, stream: int
    ) -> None:
        """See PlaneBringer. At once: the device is the host."""
        assert stream == FakeStream.cuda_stream
        self.calls.append(("bring", plane_count))
        if self.is_broken:
            raise OSError(1, "invalid argument")
        for plane in range(plane_count):
            ctypes.memmove(target + plane * plane_bytes, source + plane * source_pitch, plane_bytes)


class Transfers:
    """Copies onto the device, as they are begun and as they end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun_bytes = self.ended_bytes = 0
        self.addresses: list[tuple[int, int]] = []
        copy = sources._copy_all

        def counted(into: Tensor, copies: Sequence[tuple[int, Bytes]]) -> None:
            copy(into, copies)
            for run in (run for _, rows in copies for run in (rows if rows.ndim == 3 else [rows])):
                self.ended_bytes += run.nbytes
                self.addresses.append((run.ctypes.data, run.nbytes))

        patch.setattr(sources, "_copy_all", counted)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """Watch copies onto the device."""
    return Transfers(monkeypatch)


def _pinned(
    client: Client, patch: pytest.MonkeyPatch, pins: FakePins | None = None
) -> tuple[DirectStorage, FakePins]:
    direct, _ = direct_by(client, "store", patch)
    pins = pins or FakePins()
    direct.pins = ArenaPins(CPU, pins)
    return direct, pins


def _saved(client: Client, session_id: str, kind: StateKind = StateKind.KV) -> SessionInfo:
    return save(client, saved_session("llama"), session_id, [kind])


@pytest.fixture
def kept(client: Client, session_id: str) -> SessionInfo:
    """K/V of a session on SSD. Before a fake device: models are proven by restores on the real one."""
    return _saved(client, session_id)


def _is_right(cache: object) -> bool:
    kept = saved_session("llama").kept_cache
    return all(
        torch.equal(mine, theirs)
        for layer in range(3)
        for mine, theirs in zip(contents(cache, layer), contents(kept, layer), strict=True)  # type: ignore[arg-type]
    )


def _stop() -> None:
    raise ZeroDivisionError


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a thread of ours copied rows")


def test_rows_are_copied_once_and_by_the_device(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, transfers: Transfers
) -> None:
    """From the arena itself, every byte once, though chunks are longer than batches; no thread copies any."""
    kept = _saved(client, session_id)
    direct, pins = _pinned(client, monkeypatch)
    arena = client.routes.attach().arena.readable  # type: ignore[union-attr]
    row_bytes = saved_session("llama").rows[Stream(0, StateKind.KV)][0].nbytes
    with slowed(settings=HALVES) as pipeline, monkeypatch.context() as patch:
        patch.setattr(LeasedSource, "fill", _never)
        patch.setattr(LeasedRows, "copy_verified", _never)
        patch.setattr(np, "copyto", _never)
        cache = restored(direct, pipeline, saved_session("llama"), kept, PLAN)

    assert _is_right(cache)
    assert transfers.ended_bytes == 3 * kept.token_count * row_bytes
    begin, end = arena.ctypes.data, arena.ctypes.data + arena.nbytes
    assert all(begin <= address and address + size <= end for address, size in transfers.addresses)
    assert pins.calls == [("register", arena.nbytes)]


@pytest.mark.parametrize("is_broken", [False, True])
def test_rows_come_by_the_drivers_own_copies(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    kept: SessionInfo,
    transfers: Transfers,
    driver: Driver,
    *,
    is_broken: bool,
) -> None:
    """Torch copies the rows that the driver refuses."""
    pins = FakePins()
    pins.is_broken = is_broken
    direct, _ = _pinned(client, monkeypatch, pins)
    monkeypatch.setattr(sources, "ArenaSource", lambda rows, sums, _: ArenaSource(rows, sums, pins))
    with Pipeline(FakeGpu(driver, ()), SMALL) as pipeline:
        assert _is_right(restored(direct, pipeline, saved_session("llama"), kept, PLAN))

    row_bytes = saved_session("llama").rows[Stream(0, StateKind.KV)][0].nbytes
    assert any(name == "bring" for name, _ in pins.calls)
    # The last segment is no whole chunk of blocks: the host verifies its rows, and torch copies them.
    assert (transfers.ended_bytes == 3 * kept.token_count * row_bytes) == is_broken


def test_slots_at_equal_distances_come_by_one_copy(driver: Driver, transfers: Transfers) -> None:
    """The second of three calls is refused: torch copies that span, and the one behind it, run by run."""
    arena = np.arange(4096, dtype=np.uint8)
    # Rows of 8 bytes, two to a slot; slots of 256 bytes. Of one run, the stride says nothing.
    views = [
        np.ndarray((count, 2, 8), np.uint8, arena, begin, (stride, 8, 1))
        for count, begin, stride in ((3, 16, 256), (1, 2048, 0), (2, 2304, 512))
    ]
    into, pins = torch.zeros(12, 8, dtype=torch.uint8), FakePins()
    landing = BatchLanding(into, ChunkSums(), planes=list(zip((0, 6, 8), views, strict=True)), bringer=pins)
    landing.bring()
    expected = np.concatenate([view.reshape(-1, 8) for view in views])

    assert pins.calls == [("bring", 3), ("bring", 1), ("bring", 2)]
    assert np.array_equal(into.numpy(), expected)
    assert transfers.ended_bytes == 0

    bring = pins.bring_planes

    def broken(*given: int, **named: int) -> None:
        pins.is_broken = named["plane_count"] == 1
        bring(*given, **named)

    pins.bring_planes = broken  # type: ignore[method-assign]
    again = torch.zeros(12, 8, dtype=torch.uint8)
    BatchLanding(again, ChunkSums(), planes=list(zip((0, 6, 8), views, strict=True)), bringer=pins).bring()
    driver.settle()

    assert np.array_equal(again.numpy(), expected)
    assert transfers.ended_bytes == 3 * 2 * 8


def test_a_lease_outlives_the_copies_under_it(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    kept: SessionInfo,
    transfers: Transfers,
    driver: Driver,
) -> None:
    """It is given back when the device has made every copy; also of a restore that is cancelled."""
    direct, _ = _pinned(client, monkeypatch)
    given_back: list[tuple[int, int]] = []
    issued = [0]
    launch, close = driver.launch, LeasedRows.close

    def counted(kernel: object) -> None:
        issued[0] += 1
        launch(kernel)  # type: ignore[arg-type]

    def closed(rows: LeasedRows) -> None:
        given_back.append((issued[0], done[0]))
        close(rows)

    done = [0]
    copy = sources._copy_all

    def ended(into: Tensor, copies: Sequence[tuple[int, Bytes]]) -> None:
        copy(into, copies)
        done[0] += 1

    monkeypatch.setattr(sources, "_copy_all", ended)
    monkeypatch.setattr(sources, "_transfer", lambda into, copies: counted(lambda: ended(into, copies)))
    monkeypatch.setattr(LeasedRows, "close", closed)
    with Pipeline(FakeGpu(driver, ["copy"]), SMALL) as pipeline:
        assert _is_right(restored(direct, pipeline, saved_session("llama"), kept, PLAN))
        with pytest.raises(ZeroDivisionError):
            restored(direct, pipeline, saved_session("llama"), kept, PLAN, meanwhile=_stop)

    assert len(given_back) == 2
    assert all(begun == ended > 0 for begun, ended in given_back)


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_byte_that_changed_in_memory_is_found_on_the_device(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, *, is_summed: bool
) -> None:
    """A miss; the store mends it from SSD, and the next restore is right. Without the sums it is not seen."""
    kept = _saved(client, session_id)
    direct, _ = _pinned(client, monkeypatch)
    session = saved_session("llama")
    with slowed(settings=SMALL) as pipeline:
        assert _is_right(restored(direct, pipeline, session, kept, PLAN))
        before = client.admin.stats().mended_segment_count
        flip_in_arena(client, kept, Stream(1, StateKind.KV))
        if not is_summed:
            monkeypatch.setattr(BatchLanding, "sum_up", lambda _landing: None)
            assert not _is_right(restored(direct, pipeline, session, kept, PLAN))
            return
        with pytest.raises(RestoreFailed, match="was mended"):
            restored(direct, pipeline, session, kept, PLAN)
        assert client.admin.stats().mended_segment_count == before + 1
        assert _is_right(restored(direct, pipeline, session, kept, PLAN))


def test_a_refusal_to_pin_is_a_reason_and_no_failure(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """Rows come by way of staging, as without a GPU; it is not tried again at each restore."""
    kept = _saved(client, session_id)
    direct, pins = _pinned(client, monkeypatch, FakePins("operation not supported"))
    with slowed(settings=SMALL) as pipeline:
        for _ in range(2):
            assert _is_right(restored(direct, pipeline, saved_session("llama"), kept, PLAN))

    assert [name for name, _ in pins.calls] == ["register"]
    assert "cannot be pinned: operation not supported" in direct.pins.problem
    assert direct.pins.pinned_bytes == 0


def _rows_in(arena: Bytes) -> LeasedRows:
    rows = object.__new__(LeasedRows)
    rows._slots, rows._verifier = SlotRows(arena, SlotLayout(()), []), None
    return rows


def test_an_arena_is_pinned_once_and_let_go_behind_its_last_restore() -> None:
    """Another arena, of a store that was started again, takes its place when nobody copies from the first."""
    driver = FakePins()
    pins = ArenaPins(CPU, driver)
    first, second = (np.zeros(size, np.uint8) for size in (4096, 8192))
    with pins.source(_rows_in(first)) as one, pins.source(_rows_in(first)) as two:
        with pins.source(_rows_in(second)) as three:
            assert {type(one), type(two), type(three)} == {ArenaSource}
        assert driver.calls == [("register", 4096), ("register", 8192)]
    with pins.source(_rows_in(np.zeros(4096, np.uint8))):
        assert driver.calls[2:4] == [
            ("unregister", first.ctypes.data),
            ("unregister", second.ctypes.data),
        ]
    pins.close()

    assert [name for name, _ in driver.calls[4:]] == ["register", "unregister"]
    assert pins.pinned_bytes == 0


@pytest.mark.parametrize(
    ("cuts", "chunk", "row_bytes", "is_whole"),
    [
        (Cuts(0, 256, 64), (0, 256), 16, True),
        (Cuts(0, 256, 64), (64, 128), 16, True),
        (Cuts(32, 256, 64), (64, 128), 32, True),
        (Cuts(32, 256, 64), (64, 128), 16, False),  # cut within a block
        (Cuts(0, 200, 64), (192, 256), 64, False),  # its end never comes
        (Cuts(10, 256, 64), (0, 64), 64, False),  # nor its begin
        (Cuts(0, 256, 64), (0, 65), 32, False),  # its last piece is shorter than what is read of it
        (Cuts(0, 64, 64), (0, 64), 2, False),  # so short that the device does not know it
    ],
)
def test_a_chunk_comes_whole_or_by_the_host(
    cuts: Cuts, chunk: tuple[int, int], row_bytes: int, *, is_whole: bool
) -> None:
    """No chunk is begun on the device that the batches could not end there."""
    assert cuts.pieces(*chunk, row_bytes) == is_whole
