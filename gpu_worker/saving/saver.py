"""The saver: an engine's passes come in, sessions' tokens are committed, and the engine never waits.

Its calls take a lock that is never held during a copy or a call of the store. Threads of the sorter take rows
out of staging into the store, a session at a time. Rows that do not fit into staging are shed at once,
counted by the reason. A session with a gap takes no more rows until its engine has looked at it again: rows
behind a gap are of no use. Rows before the gap are saved. Worst case: a store that does not answer holds
every thread until the client's deadline. A session keeps the tokens before the first that was shed or failed;
what staging holds is lost with the process.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.client import CallerModel, Client
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    InvalidArgument,
    TooManyRequests,
    WriteOffsetMismatch,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.probe import ModelProbe
from ctxcache.format.streams import StateKind, Stream
from ctxcache.v1.session_pb2 import DURABILITY_DISK, DURABILITY_MEMORY, Durability, Session
from gpu_worker.errors import DeviceFailed
from gpu_worker.saving.board import Board
from gpu_worker.saving.copies import Copies, copies_from
from gpu_worker.saving.lane import Lane, scratch_for
from gpu_worker.saving.progress import Job, Progress
from gpu_worker.saving.slices import Run, Slice
from gpu_worker.saving.staging import Bytes, Frame, Staging

log = logging.getLogger(__name__)

COPY_TIMEOUT_S = 30.0


class Sorter:
    """Threads that work off a board until it is ended."""

    def __init__(self, client: Client, board: Board, staging: Staging, *, thread_count: int) -> None:
        self._client, self._board, self._staging = client, board, staging
        self._threads = [
            threading.Thread(target=self._run, name=f"ctxcache-save-{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads, until `deadline_s` of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))

    def _run(self) -> None:
        scratch = scratch_for(self._staging)
        while (job := self._board.next()) is not None:
            lane = job.progress.lane
            before = lane.session.token_count
            failure = self._save(job, scratch)
            self._board.settle(job, lane.session.token_count - before, failure)

    def _save(self, job: Job, scratch: Bytes) -> CacheError | None:
        progress, lane = job.progress, job.progress.lane
        try:
            for frame, _ in job.parts:
                frame.wait(COPY_TIMEOUT_S)
            lane.append(self._staging, [run for _, run in job.parts], scratch, is_last=job.is_last)
            if job.is_last:
                lane.close()
                if progress.durability == DURABILITY_DISK and progress.failure is None:
                    self._client.flush_session(progress.name)
        except CacheError as error:
            log.warning("save_failed session=%s reason=%s error=%s", progress.name, error.reason, error)
            failure = error
        except Exception as error:
            log.exception("save_broken session=%s", progress.name)
            failure = CacheError(str(error))
        else:
            return None
        with suppress(CacheError):
            lane.close()
        return failure


STAGING_BYTES = 1 << 30
THREAD_COUNT = 2
SAVE_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


class Saver:
    """Saves what goes through `model`; `streams` are its sessions' layout. A context manager.

    One thread runs passes: `with saver.passing(...)` around each, `put` as the sink of a capture that leaves rows
    on `device`. The other calls come from any thread. `copies` says how rows leave the device, if not as usual.
    """

    def __init__(
        self,
        client: Client,
        model: CallerModel,
        streams: Iterable[Stream],
        *,
        device: torch.device = _CPU,
        copies: Copies | None = None,
        staging_bytes: int = STAGING_BYTES,
        thread_count: int = THREAD_COUNT,
    ) -> None:
        """Raises InvalidArgument for a stream that the model does not have."""
        self._client, self._model = client, model
        self._staging = Staging(
            tuple(model.specs(streams).values()),
            copies or copies_from(device),
            size_bytes=staging_bytes,
            is_pinned=device.type == "cuda",
        )
        self._board = Board(self._staging)
        self._is_closing = False
        # The pass under way: the engine thread's own.
        self._frame: Frame | None = None
        self._failure: CacheError | None = None
        self._sorter = Sorter(client, self._board, self._staging, thread_count=thread_count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def spec(self) -> ModelSpec:
        """The model whose rows it saves."""
        return self._model.spec

    def register(self, probe: ModelProbe) -> None:
        """Register the model with what it computes. Raises ModelFingerprintMismatch, ModelProbeMismatch."""
        self._client.register_model(self._model.spec, probe)

    # -- figures -------------------------------------------------------------------------------------

    @property
    def saved_token_count(self) -> int:
        """Tokens that were committed."""
        return self._board.saved_token_count

    @property
    def shed_token_counts(self) -> Mapping[str, int]:
        """Tokens that were not saved, by the reason of what stopped them or some before them."""
        with self._board.changed:
            return dict(self._board.shed)

    # -- sessions ------------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """Take rows for a session, from its end on, as the store has it now.

        Raises InvalidArgument while it is open from before: `wait` first.
        """
        with self._board.changed:
            if session.name in self._board.sessions:
                raise InvalidArgument(field="session", problem=f"{session.name} is being saved")
            progress = self._board.sessions[session.name] = Progress(Lane(self._client, self._model, session))
            progress.is_finished = progress.is_closed = self._is_closing

    def finish(self, session_name: str, *, durability: Durability.ValueType = DURABILITY_MEMORY) -> None:
        """No more rows come for a session: what it has is committed, as safe as is asked for. Never waits."""
        with self._board.changed:
            progress = self._board.sessions.get(session_name)
            if progress is not None and not progress.is_finished:
                progress.durability = durability
                progress.is_finished = True
                self._board.look_at(progress)

    def flush(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Wait until a session's rows so far are committed; what stopped them, if anything did. Raises DeadlineExceeded."""
        with self._board.changed:
            progress = self._board.sessions.get(session_name)
            if progress is None:
                return None
            progress.is_hurried = bool(progress.parts)
            self._board.look_at(progress)
            self._board.wait(lambda: not progress.is_under_way, session_name, timeout_s)
            return progress.failure

    def wait(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Finish a session and wait until that is done; what stopped its saves, if anything, is then forgotten.

        Raises DeadlineExceeded.
        """
        self.finish(session_name)
        with self._board.changed:
            progress = self._board.sessions.get(session_name)
            if progress is None:
                return None
            self._board.wait(lambda: progress.is_closed, session_name, timeout_s)
            self._board.sessions.pop(session_name, None)
            return progress.failure

    def close(self, *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Finish every session, then end the threads. What is not saved by the deadline is shed."""
        deadline_s = time.monotonic() + timeout_s
        board = self._board
        self._is_closing = True
        for name in list(board.sessions):
            self.finish(name)
        with board.changed:
            board.changed.wait_for(lambda: all(p.is_closed for p in board.sessions.values()), timeout_s)
            for progress in board.sessions.values():
                board.drop(progress, DeadlineExceeded(target=progress.name, timeout_s=str(timeout_s)))
            board.is_ended = True
            board.changed.notify_all()
        self._sorter.join(deadline_s)

    # -- passes: the engine's thread -----------------------------------------------------------------

    @contextmanager
    def passing(self, slices: Sequence[Slice], token_ids: Sequence[int]) -> Iterator[None]:
        """Around a forward pass over `token_ids`: slices say whose they are, in the same order, each session's once.

        A pass that raises is a gap in all of them. Raises InvalidArgument where slices are not the pass.
        """
        ids = np.asarray(token_ids, "<i4")
        if sum(part.count for part in slices) != len(ids):
            raise InvalidArgument(field="slices", problem=f"they are not the {len(ids)} tokens of the pass")
        takers = self._begin(slices, ids)
        try:
            yield
        finally:
            self._end(takers)

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """Take the rows [T, row] of one layer of the pass under way; those of other streams are passed over.

        Raises nothing: what is wrong with them is a gap.
        """
        if self._frame is None or self._failure is not None:
            return
        try:
            self._staging.put(self._frame, Stream(layer, kind), rows)
        except CacheError as error:
            self._failure = error
        except RuntimeError as error:
            self._failure = DeviceFailed(problem=str(error))

    def _begin(self, slices: Sequence[Slice], ids: npt.NDArray[np.int32]) -> "_Takers":
        takers: _Takers = []
        row = 0
        self._failure = None
        with self._board.changed:
            for part in slices:
                progress = self._board.sessions.get(part.session_name)
                if progress is not None and self._takes(progress, part):
                    takers.append((progress, Run(row, row + part.count)))
                row += part.count
            self._frame = self._board.take_frame(ids) if takers else None
            if takers and self._frame is None:
                limit = self._staging.ring.row_count
                self._stop(takers, TooManyRequests(what="tokens waiting to be saved", limit=limit))
        return takers

    def _takes(self, progress: Progress, part: Slice) -> bool:
        failure = progress.failure
        if failure is None and progress.is_finished:
            failure = InvalidArgument(field="session", problem=f"{progress.name} is finished")
        if failure is None and part.token_begin != progress.token_count:
            failure = WriteOffsetMismatch(
                session=progress.name, token_count=progress.token_count, write_offset=part.token_begin
            )
        if failure is not None:
            self._board.stop(progress, part.count, failure)
        return failure is None

    def _stop(self, takers: "_Takers", failure: CacheError) -> None:
        for progress, run in takers:
            self._board.stop(progress, len(run), failure)

    def _end(self, takers: "_Takers") -> None:
        frame, self._frame = self._frame, None
        if frame is None:
            return
        # Always: a frame that is not sealed is never free.
        sealing = self._seal(frame)
        failure = self._failure or sealing
        with self._board.changed:
            if failure is not None:
                self._stop(takers, failure)
                return
            for progress, run in takers:
                begin = frame.rows.begin + run.begin
                self._board.add(progress, frame, Run(begin, begin + len(run)))
            self._board.relieve()

    def _seal(self, frame: Frame) -> CacheError | None:
        try:
            self._staging.seal(frame)
        except CacheError as error:
            return error
        except RuntimeError as error:
            return DeviceFailed(problem=str(error))
        return None


_Takers = list[tuple[Progress, Run]]
"""Sessions that take rows of a pass, and which."""
