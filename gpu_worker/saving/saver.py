"""The saver: an engine's passes come in, sessions' tokens are committed, and the engine never waits.

```
   engine's thread                    board (one lock)                  save threads
   passing ─► put ─► seal  ──add──►  sessions with rows in staging
                                     session: waiting ─► due ──next──► busy: write, commit
                                                 ▲                       │
                                                 └──────── settle ───────┘
                                     finished and settled: closed
```

The lock is never held during a copy or a call of the store. Rows that do not fit into staging are shed at
once, and counted by the reason. A session with a gap takes no more rows until its engine has looked at it
again: rows behind a gap are of no use, and rows before it are saved.

Worst case: a store that does not answer holds every save thread until the client's deadline. A session
keeps the tokens before the first that was shed or failed, and what staging holds is lost with the
process.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    FleetNotFound,
    IncompleteAppend,
    InvalidArgument,
    TooManyRequests,
    WriteOffsetMismatch,
)
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import DeviceFailed
from gpu_worker.saving.appender import Cutting, SessionAppender, scratch_for
from gpu_worker.saving.board import Board, Progress, SaveJob, Takers
from gpu_worker.saving.device_ring import RING_BYTES, DeviceRing
from gpu_worker.saving.staging import (
    Bytes,
    Copies,
    DeviceRows,
    RowRun,
    Slice,
    StagedPass,
    StagingBuffers,
    copies_from,
)

log = logging.getLogger(__name__)

COPY_TIMEOUT_S = 30.0


class Sorter:
    """Save threads: each takes the board's next session and saves its rows, until the board is ended."""

    def __init__(self, client: Client, board: Board, staging: StagingBuffers, *, thread_count: int) -> None:
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
            before = lane.saved_count
            failure = self._save(job, scratch)
            self._board.settle(job, lane.saved_count - before, failure)

    def _save(self, job: SaveJob, scratch: Bytes) -> CacheError | None:
        progress, lane = job.progress, job.progress.lane
        try:
            for frame, _ in job.parts:
                # The engine's thread does not wait for the copy: the host reads the rows only here.
                frame.wait(COPY_TIMEOUT_S)
            lane.append(self._staging, [run for _, run in job.parts], scratch, is_last=job.is_last)
            if job.is_last:
                lane.close()
                # One flush, behind the last commit: a flush of each piece would write the growing tail anew.
                if progress.durability != Durability.MEMORY and progress.failure is None:
                    self._flush(progress.name, is_shared=progress.durability == Durability.SHARED)
        except CacheError as error:
            log.warning("save_failed session=%s reason=%s error=%s", progress.name, error.reason, error)
            failure = error
        # Any error costs this session its rows, and no other session.
        except Exception as error:
            log.exception("save_broken session=%s", progress.name)
            failure = CacheError(str(error))
        else:
            return None
        # An error of `close` would say less than the first one.
        with suppress(CacheError):
            lane.close()
        return failure

    def _flush(self, name: str, *, is_shared: bool) -> None:
        session = self._client.sessions.open(name)
        try:
            session.flush(is_shared=is_shared)
        except FleetNotFound:
            # A store that is alone has a disk all the same.
            session.flush()
            raise


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A pass that a graph has captured. `row_count`: with padding."""

    row_count: int


STAGING_BYTES = 1 << 30
THREAD_COUNT = 2
SAVE_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


class Saver(Closing):
    """Saves what goes through `model`; `streams` are its sessions' layout. A context manager.

    One thread runs passes: `with saver.passing(...)` around each, `put` as the sink of a capture that
    leaves rows on `device`. The other calls come from any thread.
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
        ring_bytes: int | None = None,
        thread_count: int = THREAD_COUNT,
        rounding: Callable[[int], Tensor | None] = lambda _layer: None,
        witness: Callable[[], Callable[[], None]] | None = None,
        cutting: Cutting | None = None,
    ) -> None:
        """`copies`: how rows leave the device, by default as its kind does.

        `ring_bytes`: of the ring on the device, by default RING_BYTES on a GPU, and no ring elsewhere.

        `witness` is called behind each pass whose rows are to be saved. A save thread calls its result before
        it saves them; that raises the reason why they must not be saved.

        `rounding`: how deltas are rounded, see Chain; with care, a pass waits for it.

        `cutting` cuts a session before rows of other tokens; by default its own call does.

        Raises InvalidArgument for a stream that the model does not have.
        """
        self._client, self._model, self._cutting = client, model, cutting
        if ring_bytes is None and device.type == "cuda":
            ring_bytes = RING_BYTES
        self._staging = StagingBuffers(
            tuple(model.specs(streams).values()),
            copies or copies_from(device),
            size_bytes=staging_bytes,
            is_pinned=device.type == "cuda",
            rounding=rounding,
            make_ring=None
            if ring_bytes is None
            else lambda groups: DeviceRing(groups, device, size_bytes=ring_bytes),
        )
        self._board = Board(self._staging)
        self._witness = witness
        self._is_closing = False
        # The pass under way. Only the engine's thread uses these two.
        self._frame: StagedPass | None = None
        self._failure: CacheError | None = None
        self._sorter = Sorter(client, self._board, self._staging, thread_count=thread_count)

    @property
    def spec(self) -> ModelSpec:
        """The model whose rows it saves."""
        return self._model.spec

    def register(self, probe: ModelProbe) -> None:
        """Register the model with what it computes. Raises ModelFingerprintMismatch, ModelProbeMismatch."""
        self._client.models.register(self._model.spec, probe)

    # -- figures -------------------------------------------------------------------------------------

    @property
    def saved_token_count(self) -> int:
        """Tokens that were committed."""
        return self._board.saved_token_count

    @property
    def shed_token_counts(self) -> Mapping[str, int]:
        """Tokens that were not saved, by the reason of the error that stopped their session."""
        with self._board.lock:
            return dict(self._board.shed)

    # -- sessions ------------------------------------------------------------------------------------

    def open(self, session: SessionInfo, *, ahead: Sequence[int] = (), unit_tokens: int = 1) -> None:
        """Take rows for a session, from its end on, as the store has it now.

        `ahead`: ids of its last tokens, where the rows begin before these. Rows of equal tokens are not saved
        again. The session is cut before the first token that differs, at a multiple of `unit_tokens`.

        Raises InvalidArgument while the session is open from before: `wait` first.
        """
        with self._board.lock:
            if session.name in self._board.sessions:
                raise InvalidArgument(field="session", problem=f"{session.name} is being saved")
            lane = SessionAppender(self._client, self._model, session, self._cutting)
            progress = self._board.sessions[session.name] = Progress(lane, ahead, unit_tokens)
            progress.is_finished = progress.is_closed = self._is_closing

    def finish(self, session_name: str, *, durability: Durability = Durability.MEMORY) -> None:
        """Commit the rest of a session's rows, with this durability. No more rows come. Never waits."""
        with self._board.lock:
            progress = self._board.sessions.get(session_name)
            if progress is not None and not progress.is_closed:
                if not progress.is_finished:
                    progress.durability = durability
                    progress.is_finished = True
                self._board.look_at(progress)

    def flush(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Wait until a session's rows so far are committed. Returns the error that stopped saves, if any.

        Raises DeadlineExceeded.
        """
        with self._board.lock:
            progress = self._board.sessions.get(session_name)
            if progress is None:
                return None
            progress.is_hurried = bool(progress.parts)
            self._board.look_at(progress)
            self._board.wait(lambda: not progress.is_under_way, session_name, timeout_s)
            return progress.failure

    def wait(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Finish a session, wait for it and forget it. Returns the error that stopped saves, if any.

        Raises DeadlineExceeded.
        """
        self.finish(session_name)
        with self._board.lock:
            progress = self._board.sessions.get(session_name)
            if progress is None:
                return None
            self._board.wait(lambda: progress.is_closed, session_name, timeout_s)
            self._board.sessions.pop(session_name, None)
            return progress.failure

    def close(self, *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Finish every session, then end the threads. Rows that are not saved by the deadline are shed."""
        deadline_s = time.monotonic() + timeout_s
        board = self._board
        # Before the loop: a session that is opened from here on is finished at once.
        self._is_closing = True
        for name in list(board.sessions):
            self.finish(name)
        with board.lock:
            board.changed.wait_for(lambda: all(p.is_closed for p in board.sessions.values()), timeout_s)
            for progress in board.sessions.values():
                board.drop(progress, DeadlineExceeded(target=progress.name, timeout_s=str(timeout_s)))
            board.is_ended = True
            board.changed.notify_all()
        self._sorter.join(deadline_s)

    # -- passes: the engine's thread -----------------------------------------------------------------

    @contextmanager
    def passing(
        self,
        slices: Sequence[Slice],
        token_ids: Sequence[int],
        *,
        replayed: CapturedPass | None = None,
    ) -> Iterator[None]:
        """Enclose a forward pass over `token_ids`. `slices` say whose tokens they are, in the pass's order.

        `replayed`: the pass is the replay of a graph, see `capturing`, whose first rows these tokens are. A
        pass that raises is a gap in each of its sessions. Raises InvalidArgument where slices do not fit.
        """
        ids = np.asarray(token_ids, "<i4")
        if sum(part.count for part in slices) != len(ids):
            raise InvalidArgument(field="slices", problem=f"they are not the {len(ids)} tokens of the pass")
        if replayed is not None and len(ids) > replayed.row_count:
            problem = f"the pass that was captured has {replayed.row_count} rows, this one {len(ids)}"
            raise InvalidArgument(field="token_ids", problem=problem)
        takers = self._begin(slices, ids, is_replayed=replayed is not None)
        frame = self._frame
        try:
            yield
        except BaseException:
            # A replay that did not run leaves the rows of an older one in place.
            self._failure = self._failure or _unended(len(ids))
            self._end(takers, frame)
            raise
        self._end(takers, frame)

    @property
    def is_taking(self) -> bool:
        """Whether a row of the pass under way is to be saved."""
        return self._frame is not None

    @contextmanager
    def capturing(self, row_count: int) -> Iterator[CapturedPass]:
        """Enclose a pass of `row_count` rows, padding included, while a CUDA graph captures it.

            with torch.cuda.graph(graph), saver.capturing(64) as captured:
                model(...)                      # its hooks call `put`, for the only time
            with saver.passing(slices, ids, replayed=captured):
                graph.replay()                  # its rows are those tokens', padding is nobody's

        Graphs are replayed on one stream, that of `passing`. A replay outside of it saves nothing. Raises
        InvalidArgument without a ring, for more rows than it has, and for packed kinds; IncompleteAppend for
        a stream without rows; and what `put` finds wrong.
        """
        with self._staging.capturing(row_count) as frame:
            self._frame, self._failure = frame, None
            try:
                yield CapturedPass(row_count)
            finally:
                self._frame = None
            if self._failure is not None:
                raise self._failure

    def put(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """Take the rows [T, row] of one layer of the pass under way. Ignores streams that are not saved.

        The rows must not change until the pass ends. Raises nothing: wrong rows are a gap.
        """
        if self._frame is None or self._failure is not None:
            return
        try:
            self._staging.put(self._frame, Stream(layer, kind), rows)
        except CacheError as error:
            self._failure = error
        except RuntimeError as error:
            self._failure = DeviceFailed(problem=str(error))

    def _begin(self, slices: Sequence[Slice], ids: npt.NDArray[np.int32], *, is_replayed: bool) -> Takers:
        takers: Takers = []
        row = 0
        self._failure = None
        with self._board.lock:
            for part in slices:
                progress = self._board.sessions.get(part.session_name)
                end = row + part.count
                if progress is not None and self._takes(progress, part):
                    begin = row + progress.skip(ids[row:end])
                    if begin < end:
                        takers.append((progress, RowRun(begin, end)))
                row = end
            self._frame = self._board.take_frame(ids) if takers else None
            if takers and self._frame is None:
                limit = self._staging.ring.row_count
                self._stop(takers, TooManyRequests(what="tokens waiting to be saved", limit=limit))
        ring = self._staging.device_ring
        if ring is not None and self._frame is not None:
            # Without the lock: it may wait for the device.
            self._failure = self._enter(ring, self._frame, is_replayed=is_replayed)
        return takers

    @staticmethod
    def _enter(ring: DeviceRows, frame: StagedPass, *, is_replayed: bool) -> CacheError | None:
        """Take the pass's rows in the ring. Returns why there is no room. A longer pass needs none there."""
        if is_replayed:
            # A graph writes its rows: `put` brings none.
            frame.targets.clear()
        if not ring.holds(len(frame.rows)):
            return None
        try:
            frame.in_ring = ring.take(len(frame.rows))
        except CacheError as error:
            return error
        except RuntimeError as error:
            return DeviceFailed(problem=str(error))
        if frame.in_ring is not None:
            return None
        return TooManyRequests(what="tokens on the device waiting to be copied", limit=ring.row_count)

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

    def _stop(self, takers: Takers, failure: CacheError) -> None:
        for progress, run in takers:
            self._board.stop(progress, len(run), failure)

    def _end(self, takers: Takers, frame: StagedPass | None) -> None:
        # A pass that a signal broke off may end here within a later pass, when its traceback is freed.
        if frame is None or frame is not self._frame:
            return
        self._frame = None
        # Also after a failure: a frame that is not sealed is never free.
        sealing = self._seal(frame)
        failure = self._failure or sealing
        with self._board.lock:
            try:
                if failure is not None:
                    self._stop(takers, failure)
                    return
                for progress, run in takers:
                    begin = frame.rows.begin + run.begin
                    self._board.add(progress, frame, RowRun(begin, begin + len(run)))
                self._board.relieve()
            except BaseException:
                # After a signal, only some of the sessions may have the pass.
                self._board.take_back(takers, frame, _unended(len(frame.rows)))
                raise

    def _seal(self, frame: StagedPass) -> CacheError | None:
        try:
            if self._witness is not None:
                frame.check = self._witness()
            self._staging.seal(frame)
        except CacheError as error:
            return error
        except RuntimeError as error:
            return DeviceFailed(problem=str(error))
        return None


def _unended(token_count: int) -> IncompleteAppend:
    return IncompleteAppend(stream="a pass that did not end", row_count=0, token_count=token_count)
