"""Landing: whole chunks read from files straight into memory of the device, and verified there.

What is no whole chunk comes by way of the host, verified there, and so does what is in the arena. Worst case: chunks that
are not what their headers say, which `Landed.verify` raises before anything is computed from them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ctxcache.client.filed_rows import FiledRows, Run
from ctxcache.client.ssd_slot import StoredChunk
from ctxcache.errors import TierFailure
from ctxcache.format.identity import bound_checksum
from ctxcache.format.streams import Stream
from gpu_worker.direct.kvikio_files import DeviceFiles, Reading
from gpu_worker.kernels.chunk_checksum import reference

Checksums = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""See kernels/chunk_checksum/reference.py."""
WORD_BYTES = 8


class _Landing(NamedTuple):
    """A chunk on its way to `offset_bytes` of the buffer."""

    run: Run
    chunk: StoredChunk
    offset_bytes: int
    reading: Reading


class Landed:
    """Rows of one stream that lie on the device. `verify` is called once, on a lane of the device."""

    def __init__(self, data: Tensor, stream: Stream, chunks: list[_Landing], checksums: Checksums) -> None:
        self._data, self._stream, self._chunks, self._checksums = data, stream, chunks, checksums

    def verify(self) -> None:
        """Raise CorruptSegment, or LeaseNotFound, unless all chunks are what their headers say. Waits for the device."""
        if not self._chunks:
            return
        rows = [(each.offset_bytes, each.chunk.size_bytes, 0) for each in self._chunks]
        offsets, sizes, seeds = torch.tensor(rows, dtype=torch.int64, device=self._data.device).unbind(1)
        found = self._checksums(self._data, offsets.contiguous(), sizes.contiguous(), seeds.contiguous())
        for each, checksum in zip(self._chunks, found.tolist(), strict=True):
            bound = bound_checksum(each.chunk.seed, self._stream, reference.unsigned(checksum))
            if bound != each.chunk.checksum and each.run.slot is not None:
                raise each.run.slot.differs(self._stream)


def land(
    rows: FiledRows, files: DeviceFiles, stream: Stream, tokens: tuple[int, int], into: Tensor, checksums: Checksums
) -> Landed:  # fmt: skip
    """Bring rows of tokens [begin, end) into [end - begin, row_bytes] on the device; they are there when it returns.

    Not verified yet, but for what came by way of the host. Raises TierFailure, CorruptSegment, LeaseNotFound.
    """
    begun: list[_Landing] = []
    failures: list[Exception] = []
    try:
        for run in rows.runs(*tokens):
            place = into[run.token_begin - tokens[0] : run.token_end - tokens[0]]
            offset_bytes = (run.token_begin - tokens[0]) * into.shape[1]
            if run.slot is None or not run.is_whole or offset_bytes % WORD_BYTES:
                _by_host(rows, stream, run, place)
                continue
            chunk = run.slot.chunk(stream)
            reading = files.begin(chunk.path_index, chunk.offset_bytes, place.reshape(-1))
            begun.append(_Landing(run, chunk, offset_bytes, reading))
    finally:
        # Also behind a failure: nothing may come into this memory later.
        for each in begun:
            failures += _failure(rows, each)
    if failures:
        raise failures[0]
    return Landed(into.reshape(-1), stream, begun, checksums)


def _failure(rows: FiledRows, landing: _Landing) -> list[Exception]:
    path = rows.files.paths[landing.chunk.path_index]
    try:
        count = landing.reading.get()
    except Exception as error:  # noqa: BLE001  # a driver's own, of whatever class
        return [TierFailure(path=path, problem=f"kvikio: {type(error).__name__}: {error}")]
    if count != landing.chunk.size_bytes:
        problem = f"{count} of {landing.chunk.size_bytes} B at byte {landing.chunk.offset_bytes}"
        return [TierFailure(path=path, problem=f"kvikio read {problem}")]
    return []


def _by_host(rows: FiledRows, stream: Stream, run: Run, place: Tensor) -> None:
    host = torch.empty(place.shape, dtype=torch.uint8)
    rows.copy(stream, run, host.numpy())
    # Waits for the device: the memory is nobody else's then.
    place.copy_(host)
    if place.is_cuda:
        torch.cuda.current_stream(place.device).synchronize()
