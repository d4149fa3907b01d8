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

Rows are written where they will stay: into the arena's room, or into a buffer that goes by stream.
Staging keeps them until they are committed, so that they can be written again after a reservation has
ended. Every reservation asks for the generation that the last commit left: another writer of the session
wins.

A session may already have tokens that its engine computes once more, as when a turn is asked for again:

```
   session   a b c d e f g h        rows that come   c d e X Y
                 └ ahead ──┘        c d e are there: not saved again; the session is cut before X
```

It stays whole until then, and for good where nothing differs.

Worst case: a store that does not answer holds every save thread until the client's deadline. A session
keeps the tokens before the first that was shed or failed, and what staging holds is lost with the
process.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    DeadlineExceeded,
    IncompleteAppend,
    InvalidArgument,
    ReservationNotFound,
    TooManyRequests,
    WriteOffsetMismatch,
)
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import DeviceFailed
from gpu_worker.saving.device_ring import RING_BYTES, DeviceRing
from gpu_worker.saving.staging import (
    Bytes,
    Copies,
    DeviceRows,
    RowRun,
    Rows,
    Slice,
    StagedPass,
    StagingBuffers,
    copies_from,
    cut,
    rows_of,
)

PIECE_TOKENS = 512
"""Most rows that are written and committed at a time."""
ROOM_TOKENS = 2 * SEGMENT_TOKENS
"""Room that a session which goes on keeps: the segment that is filled, and one ahead."""


# A session's room in the store while a conversation goes on (segments of 64 tokens):
#
#     committed          │ room: two segments                   │
#     0 ............ 200 │ 200 ......... 256 ............ 328    │
#                          rows are written in place, and commits move the border
#
# Room is asked for once in two segments, and what is left of it is given back at the end.
class SessionAppender:
    """Appends rows of `model` out of `staging` to a session, as it was when it was last looked at."""

    def __init__(self, client: Client, model: CallerModel, session: SessionInfo) -> None:
        self._client, self._model = client, model
        self.session = session
        """As its last commit left it."""
        self.saved_count = 0
        """Tokens that were committed."""
        self.kept_count: int | None = None
        """How many of its tokens it keeps, where the rows to come differ from what it has behind them."""
        self._writer: SessionWriter | None = None

    def append(
        self, staging: StagingBuffers, runs: Sequence[RowRun], scratch: Bytes, *, is_last: bool
    ) -> None:
        """Write rows and commit them. `is_last`: none follow, the rest of the room is given back.

        Raises what an append raises; what is committed then, `session` says.
        """
        if self.kept_count is not None and runs:
            self.session = self._client.sessions.open(self.session.name).keep_first(
                self.kept_count, if_generation_match=self.session.generation
            )
            self.kept_count = None
        while runs:
            # Up to the end of the room: a piece that reached beyond it would have to be split by the writer.
            first, runs = cut(runs, min(PIECE_TOKENS, self._room_left))
            self._append_piece(
                staging, rows_of(first), sum(map(len, first)), scratch, is_last=is_last and not runs
            )

    def close(self) -> None:
        """Give back the room that was not used."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _room_left(self) -> int:
        """Rows of the open writer's room; a new one has room for any."""
        writer = self._writer
        return (
            PIECE_TOKENS
            if writer is None
            else writer.write_offset + writer.token_count - self.session.token_count
        )

    def _append_piece(
        self, staging: StagingBuffers, rows: Rows, count: int, scratch: Bytes, *, is_last: bool
    ) -> None:
        was_open = self._writer is not None
        try:
            self._write(staging, rows, count, scratch, is_last=is_last)
        except ReservationNotFound:
            # It ended by itself, while the session was idle: unless somebody else came, nothing is lost.
            self.close()
            # A reservation that was just made and is gone already would be gone again.
            if not was_open:
                raise
            self._write(staging, rows, count, scratch, is_last=is_last)

    def _write(
        self, staging: StagingBuffers, rows: Rows, count: int, scratch: Bytes, *, is_last: bool
    ) -> None:
        writer = self._writer = self._writer or self._open(count, is_last=is_last)
        # Counted from where the writer's room begins, not from the session's begin.
        begin = self.session.token_count - writer.write_offset
        for stream in staging.specs:
            writer.write(stream, begin, staging.view(stream, rows, scratch))
        self.session = writer.commit(self.session.token_count + count, keep_open=not is_last)
        self.saved_count += count
        if is_last or not self._room_left:
            self._writer = None

    def _open(self, count: int, *, is_last: bool) -> SessionWriter:
        room = count if is_last else max(count, ROOM_TOKENS)
        generation = self.session.generation
        try:
            return self._client.sessions.open(self.session, self._model).writer(
                room, if_generation_match=generation, is_all_coming=room == count
            )
        # Room ahead is a convenience: a store that is short
        # of it gets a smaller request before rows are lost.
        except (CapacityExceeded, TooManyRequests):
            if room == count:
                raise
            return self._client.sessions.open(self.session, self._model).writer(
                count, if_generation_match=generation, is_all_coming=True
            )


def scratch_for(staging: StagingBuffers) -> Bytes:
    """Memory for one thread to put a piece's rows of a stream together."""
    return np.empty(PIECE_TOKENS * staging.widest_bytes, np.uint8)


Part = tuple[StagedPass, RowRun]
"""A session's rows of one pass."""
Takers = list[tuple["Progress", RowRun]]
"""Sessions that take rows of a pass, and which."""


class Progress:
    """A session that is being saved: what of it is in staging, who works on it, what stopped it."""

    def __init__(self, lane: SessionAppender, ahead: Sequence[int], unit_tokens: int) -> None:
        self.lane = lane
        self.name = lane.session.name
        self.token_count = lane.session.token_count - len(ahead)
        """Where its next row belongs: everything before it is in the store, in staging or under way."""
        self._ahead = np.asarray(ahead, "<i4")
        """Tokens that the store has behind `token_count`."""
        self._unit_tokens = unit_tokens
        self.parts: list[Part] = []
        self.failure: CacheError | None = None
        """Why it takes no more rows."""
        self.durability: Durability = Durability.MEMORY
        self.is_finished = False
        """No more rows come."""
        self.is_closed = False
        """Finished, and all that was to be done for it is done."""
        self.is_busy = False
        self.is_hurried = False
        """Rows in staging go next, also if they fill no segment."""

    @property
    def has_work(self) -> bool:
        """Whether a thread would find something to do."""
        return bool(self.parts) or (self.is_finished and not self.is_closed)

    @property
    def is_ripe(self) -> bool:
        """Whether it is time: rows reach the end of a segment, or somebody waits for them."""
        waiting = sum(len(run) for _, run in self.parts)
        # A full segment is sealed and flushed once; rows of a growing one may be flushed several times.
        begin = self.token_count - waiting
        return (
            self.is_finished
            or self.is_hurried
            or self.token_count // SEGMENT_TOKENS > begin // SEGMENT_TOKENS
        )

    @property
    def is_under_way(self) -> bool:
        """Whether rows are not in the store yet that may come to be there."""
        return bool(self.parts) or self.is_busy

    def skip(self, token_ids: npt.NDArray[np.int32]) -> int:
        """How many of the next tokens the store has: they are not saved again.

        Where one differs, the session is to be cut there.
        """
        count = min(len(token_ids), len(self._ahead))
        if not count:
            return 0
        differing = np.flatnonzero(self._ahead[:count] != token_ids[:count])
        if len(differing):
            count = int(differing[0])
        if count < len(token_ids):
            # Units are saved whole: one that the session has a part of, too.
            count -= count % self._unit_tokens
        if count < min(len(token_ids), len(self._ahead)):
            self.lane.kept_count = self.token_count + count
            self._ahead = self._ahead[:0]
        self._ahead = self._ahead[count:]
        self.token_count += count
        return count

    def add(self, frame: StagedPass, run: RowRun) -> None:
        """Rows of a pass are its next tokens."""
        self.parts.append((frame, run))
        frame.holder_count += 1
        self.token_count += len(run)

    def take(self) -> list[Part]:
        """Hand over what is in staging; it stays there until `let_go`."""
        parts, self.parts = self.parts, []
        self.is_hurried = False
        return parts

    def let_go(self, parts: Sequence[Part]) -> int:
        """Staging may have these rows back; how many they are."""
        for frame, _ in parts:
            frame.holder_count -= 1
        return sum(len(run) for _, run in parts)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A thread's share of a session, its alone until it is settled. `is_last`: no rows follow."""

    progress: Progress
    parts: Sequence[Part]
    is_last: bool


log = logging.getLogger(__name__)

CLOSED_LIMIT = 4096
"""Sessions that are saved and that nobody has waited for: what became of the oldest is forgotten."""


# The books of what is saved, all under one lock:
#
#     sessions    by name: open, or finished and not yet waited for
#     _due        those whose turn it is, in order; each at most once
#     _frames     passes in staging, oldest first: their rows go back to the ring in this order
#     _closed     finished and settled: the oldest are forgotten beyond CLOSED_LIMIT
class Board:
    """State that the engine's thread and the save threads share."""

    def __init__(self, staging: StagingBuffers) -> None:
        self.lock = threading.RLock()
        """Over all that follows. Taken by itself, and not by `changed`, whose own `with` a signal may cut."""
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[str, Progress] = {}
        self.shed: Counter[str] = Counter()
        """Tokens, by reason."""
        self.saved_token_count = 0
        self.is_ended = False
        self._staging = staging
        self._due: deque[Progress] = deque()
        self._frames: deque[StagedPass] = deque()
        self._closed: deque[Progress] = deque()

    def take_frame(self, token_ids: npt.NDArray[np.int32]) -> StagedPass | None:
        """Room for a pass; None where there is none now."""
        # Only from the oldest on: the ring takes rows back in the order in which it handed them out.
        self._staging.recover(self._frames[-1] if self._frames else None)
        while self._frames and self._frames[0].is_free:
            self._staging.ring.free(self._frames[0].rows)
            self._frames.popleft()
        frame = self._staging.take(token_ids)
        if frame is not None:
            self._frames.append(frame)
        return frame

    def add(self, progress: Progress, frame: StagedPass, run: RowRun) -> None:
        """A session's rows of a pass are in staging, unless it takes no more by now."""
        # A thread may have failed while the pass was under way.
        if progress.failure is not None:
            self._count(len(run), progress.failure)
            return
        progress.add(frame, run)
        self.look_at(progress)

    def take_back(self, takers: Takers, frame: StagedPass, failure: CacheError) -> None:
        """A pass was not added to the end: none of its sessions has it. Under the lock since it was begun."""
        frame.holder_count = 0
        for progress, run in takers:
            progress.parts = [part for part in progress.parts if part[0] is not frame]
            self.stop(progress, len(run), failure)
        self.changed.notify_all()

    def stop(self, progress: Progress, lost_count: int, failure: CacheError) -> None:
        """A session loses rows of a pass, and takes no more."""
        if progress.failure is None:
            progress.failure = failure
            log.warning("saves_shed session=%s reason=%s error=%s", progress.name, failure.reason, failure)
        self._count(lost_count, progress.failure)

    def look_at(self, progress: Progress) -> None:
        """A session changed: if it is time, it is due."""
        if progress.is_ripe:
            self.make_due(progress)

    def make_due(self, progress: Progress) -> None:
        """A session goes next that has something to do."""
        if progress.has_work and not progress.is_busy:
            if progress not in self._due:
                self._due.append(progress)
            # Also of one that is due already: a signal may have come before its threads were told.
            self.changed.notify_all()

    def relieve(self) -> None:
        """Where staging is half full, who holds its oldest quarter goes next, however little that is."""
        ring = self._staging.ring
        # At half: the other half takes the passes that come while the oldest rows are saved.
        if 2 * ring.used_count < ring.row_count:
            return
        oldest = set()
        row_count = 0
        for frame in self._frames:
            oldest.add(frame)
            row_count += len(frame.rows)
            if 4 * row_count >= ring.row_count:
                break
        for progress in self.sessions.values():
            if progress.parts and progress.parts[0][0] in oldest:
                self.make_due(progress)

    def next(self) -> SaveJob | None:
        """Wait for a session that is due, without the lock held before; None at the end."""
        with self.lock:
            self.changed.wait_for(lambda: self._due or self.is_ended)
            if self.is_ended:
                return None
            progress = self._due.popleft()
            progress.is_busy = True
            # `is_finished` is taken with the rows: rows that come later make the session due again.
            return SaveJob(progress, progress.take(), progress.is_finished)

    def settle(self, job: SaveJob, saved_count: int, failure: CacheError | None) -> None:
        """Settle a job, called without the lock. Rows behind a failure are lost with it."""
        progress = job.progress
        with self.lock:
            progress.is_busy = False
            lost_count = progress.let_go(job.parts) - saved_count
            self.saved_token_count += saved_count
            if failure is not None:
                progress.failure = progress.failure or failure
                self._count(lost_count, failure)
                self.drop(progress, failure)
            if job.is_last:
                self._close(progress)
            self.look_at(progress)
            self.changed.notify_all()

    def _close(self, progress: Progress) -> None:
        progress.is_closed = True
        self._closed.append(progress)
        while len(self._closed) > CLOSED_LIMIT:
            oldest = self._closed.popleft()
            if self.sessions.get(oldest.name) is oldest:
                del self.sessions[oldest.name]

    def drop(self, progress: Progress, failure: CacheError) -> None:
        """A session's rows in staging are lost."""
        self._count(progress.let_go(progress.take()), failure)

    def wait(self, is_so: Callable[[], bool], target: str, timeout_s: float) -> None:
        """Wait until something is so. Raises DeadlineExceeded."""
        if not self.changed.wait_for(is_so, timeout_s):
            raise DeadlineExceeded(target=target, timeout_s=str(timeout_s))

    def _count(self, lost_count: int, failure: CacheError) -> None:
        if lost_count:
            self.shed[failure.reason] += lost_count


COPY_TIMEOUT_S = 30.0


class Sorter:
    """Threads that work off a board until it is ended."""

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
                # Here and not in the engine's thread: only now has the host to have them (rule 2 of staging).
                frame.wait(COPY_TIMEOUT_S)
            lane.append(self._staging, [run for _, run in job.parts], scratch, is_last=job.is_last)
            if job.is_last:
                lane.close()
                # Once, behind the last commit: a flush of each piece
                # would write the growing tail again and again.
                if progress.durability == Durability.DISK and progress.failure is None:
                    self._client.sessions.open(progress.name).flush()
        except CacheError as error:
            log.warning("save_failed session=%s reason=%s error=%s", progress.name, error.reason, error)
            failure = error
        # A thread's supervisor: what broke costs this session its rows, and no other one.
        except Exception as error:
            log.exception("save_broken session=%s", progress.name)
            failure = CacheError(str(error))
        else:
            return None
        # An earlier failure says more than one now.
        with suppress(CacheError):
            lane.close()
        return failure


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A pass that a graph has captured, with so many rows, padding included."""

    row_count: int


STAGING_BYTES = 1 << 30
THREAD_COUNT = 2
SAVE_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


class Saver(Closing):
    """Saves what goes through `model`; `streams` are its sessions' layout. A context manager.

    One thread runs passes: `with saver.passing(...)` around each, `put` as the sink of a capture that
    leaves rows on `device`. The other calls come from any thread. `copies` says how rows leave the device,
    if not as usual.
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
    ) -> None:
        """`ring_bytes`: of the ring on the device; RING_BYTES on a GPU, and without one else.

        `witness` is called behind each pass whose rows are to be saved. What it returns is called before they
        are, by a thread, and raises why they must not be.

        `rounding`: how deltas are rounded, see Chain; with care, a pass waits for it.

        Raises InvalidArgument for a stream that the model does not have.
        """
        self._client, self._model = client, model
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
        # The pass under way: the engine thread's own.
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
        """Tokens that were not saved, by the reason of what stopped them or some before them."""
        with self._board.lock:
            return dict(self._board.shed)

    # -- sessions ------------------------------------------------------------------------------------

    def open(self, session: SessionInfo, *, ahead: Sequence[int] = (), unit_tokens: int = 1) -> None:
        """Take rows for a session, from its end on, as the store has it now; or from before its last tokens.

        `ahead`: the ids of those. Rows that are equal to them are not saved; before the first that differs
        the session is cut, at a multiple of `unit_tokens`, in which its rows come.

        Raises InvalidArgument while it is open from before: `wait` first.
        """
        with self._board.lock:
            if session.name in self._board.sessions:
                raise InvalidArgument(field="session", problem=f"{session.name} is being saved")
            lane = SessionAppender(self._client, self._model, session)
            progress = self._board.sessions[session.name] = Progress(lane, ahead, unit_tokens)
            progress.is_finished = progress.is_closed = self._is_closing

    def finish(self, session_name: str, *, durability: Durability = Durability.MEMORY) -> None:
        """No more rows come for a session: what it has is committed, as safe as is asked for. Never waits."""
        with self._board.lock:
            progress = self._board.sessions.get(session_name)
            if progress is not None and not progress.is_closed:
                if not progress.is_finished:
                    progress.durability = durability
                    progress.is_finished = True
                self._board.look_at(progress)

    def flush(self, session_name: str, *, timeout_s: float = SAVE_TIMEOUT_S) -> CacheError | None:
        """Wait until a session's rows so far are committed; what stopped them, if anything did.

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
        """Finish a session and wait until that is done.

        The error that stopped its saves, if there was one, is then forgotten.

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
        # First: a session that is opened from here on is finished at once.
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

        `replayed`: it is the replay of a graph, see `capturing`, whose first rows these tokens are. A pass
        that raises is a gap in all of them. Raises InvalidArgument where slices are not the pass.
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
            # A replay that did not come to be has the rows of an older one.
            self._failure = self._failure or _unended(len(ids))
            self._end(takers, frame)
            raise
        self._end(takers, frame)

    @property
    def is_taking(self) -> bool:
        """Whether any row of the pass under way is to be saved."""
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
        """Take the rows [T, row] of one layer of the pass under way; those of other streams are passed over.

        They are to stay as they are until the pass ends. Raises nothing: what is wrong with them is a gap.
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
        """Why a pass has no room on the device, if it needs any; one longer than the ring does not."""
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
        # One that a signal left in the middle may end when its traceback does, within a later pass.
        if frame is None or frame is not self._frame:
            return
        self._frame = None
        # Always: a frame that is not sealed is never free.
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
                # A signal's: half of it may be noted.
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
