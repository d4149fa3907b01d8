"""Decode-time appends: one token of many sessions per step, put in place and committed in one message.

    write, stream by stream ──► a step's rows, token by token ──► added up, put to their slots ──► committed

Room is reserved for many steps at once. Not thread-safe. Worst case: a session fails. Its lane is left out
from then on, and the others go on.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxcache.client.access import ArenaAttachment, ClockPair, give_back
from ctxcache.client.arena import Bytes, SlotLayout, slot_layout
from ctxcache.client.convert import durability_to_wire
from ctxcache.client.types import CallerModel, Durability, SessionInfo
from ctxcache.client.wire import Closing
from ctxcache.client.writer import check_complete, view_rows
from ctxcache.errors import CacheError, CorruptSegment, InvalidArgument, ReservationNotFound
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.streams import Stream
from ctxcache.v1.arena_pb2 import (
    CommitReservations,
    Operation,
    OperationResult,
    ReleaseReservation,
    Reserve,
    Runs,
)

Numbers = npt.NDArray[np.int64]
LANES_LIMIT = 1000
"""Sessions of one batch: a step's commits and its new reservations fit into one message."""
ROOM_TOKENS = 64
"""Steps that room is reserved for, by default: a segment's tokens."""


class _Alike(NamedTuple):
    """Streams that follow one another in the layout and have rows of one size.

    `columns`: their rows in a step's; `offsets_bytes`: where the chunk of each begins in a slot.
    """

    row_bytes: int
    columns: slice
    offsets_bytes: Numbers


# One step of B lanes. Every lane writes one row per stream, each in a segment of its own session:
#
#     lane        0         1         2         …
#     session     s0        s1        s2                    `_slots`: where its slot begins in the arena
#     slot        | … ▓ |   | ▓ … |   | … ▓ |               `_rows`: the row in it that this step writes
#                     └ at _slots + chunk.offset + _rows * row_bytes: all lanes, and all streams whose rows
#                       have one size, by one fancy index
#
#     `_tokens`   [B, bytes of all streams]: the same rows side by side until the commit, whose checksum is of
#                 one token over all streams
#
# Room for `room_tokens` steps is reserved at once. The last step's message commits, and reserves the next
# room:
#
#     step 1 … n-1   commit_many(keep_open)
#     step n         commit_many, reserve, reserve, …        one message, one answer
class DecodeBatch(Closing):
    """Appends to B sessions of one model and layout in lockstep.

    Lane i is the i-th session. A context manager.

    Each step: `write` every stream's [B, row_bytes], then `commit`. Rows of lanes that failed are ignored.
    """

    def __init__(
        self,
        attachment: ArenaAttachment,
        arena: Bytes,
        model: CallerModel,
        sessions: Sequence[SessionInfo],
        room_tokens: int,
    ) -> None:
        count = len(sessions)
        _check_alike(model, sessions)
        self.failures: dict[int, CacheError] = {}
        """Why a lane is left out, by lane."""
        self.token_counts: Numbers = np.array([s.token_count for s in sessions], np.int64)
        """Committed tokens of each lane's session."""
        self.generations: Numbers = np.array([s.generation for s in sessions], np.int64)
        """Each session's generation after its last commit."""
        self._stream, self._arena, self._model = attachment.stream, arena, model
        self._specs = model.specs(sessions[0].streams())
        self._layouts = attachment.layouts
        self._alike: list[_Alike] = []
        self._sessions, self._room_tokens = sessions, room_tokens
        self._reservation_ids: Numbers = np.zeros(count, np.int64)
        self._slots: Numbers = np.zeros(count, np.int64)
        self._rows: Numbers = np.zeros(count, np.int64)
        self._row_ends: Numbers = np.zeros(count, np.int64)
        self._runs: list[Iterator[tuple[int, int, int]]] = [iter(())] * count
        self._steps_left = 0
        self._deadline_ns = self._renew_ns = 0
        self._written: set[Stream] = set()
        # A step's rows, token by token: the checksums of a commit are made of them, and then they are put in
        # place.
        self._tokens = np.empty((count, sum(spec.row_bytes for spec in self._specs.values())), np.uint8)
        self._columns: dict[Stream, slice] = {}
        self._known: dict[Stream, npt.NDArray[np.generic]] = {}
        """Where rows of a stream go, in the type and shape that they had before."""
        begin = 0
        for stream, spec in self._specs.items():
            self._columns[stream] = slice(begin, begin + spec.row_bytes)
            begin += spec.row_bytes
        # This comes last: the finalizer looks at it.
        self._lanes: Numbers = np.arange(count)
        sent = ClockPair.now()
        first = self._reserves()
        for session, operation in zip(sessions, first, strict=True):
            # A session that was made anew may have as many tokens.
            operation.reserve.if_generation_match = session.generation
        try:
            self._take_reservations(self._stream.call(first), sent)
        except BaseException as error:
            self._end_if_interrupted(error)
            self._lanes = self._lanes[:0]
            raise

    @property
    def session_count(self) -> int:
        """B, failed lanes included."""
        return len(self._sessions)

    def write(self, stream: Stream, rows: npt.NDArray[np.generic]) -> None:
        """Write this step's row of every lane, [B, row_bytes] or any C-contiguous array of B rows.

        May be repeated before the commit. Raises InvalidArgument, ReservationNotFound when the room was taken
        back.
        """
        place = self._known.get(stream)
        # Usually the array is like that of the step before, of which everything was checked.
        is_like = place is not None and place.dtype is rows.dtype and place.shape == rows.shape
        if place is None or not is_like or not rows.flags.c_contiguous:
            place, rows = self._checked(stream, rows)
        self._check_held()
        self._written.add(stream)
        place[...] = rows

    def commit(self, durability: Durability = Durability.MEMORY) -> Numbers:
        """Make the step's token visible in every lane's session by one message; returns lanes that have it.

        A lane's failure is in `failures` afterwards. Raises IncompleteAppend for a stream that was not
        written, DeadlineExceeded and Unavailable when it is not known what was committed.
        """
        check_complete(dict.fromkeys(self._written, 1), self._specs, 1)
        self._check_held()
        if not len(self._lanes):
            return self._lanes
        checksums = [rows_checksum(self._tokens[lane].data) for lane in self._lanes.tolist()]
        self._put()
        # A batch that decodes slowly renews its room when half of the room's time is over.
        is_last = self._steps_left == 1 or time.monotonic_ns() >= self._renew_ns
        # The counts move before the answer, as the message needs the new ones. A failed lane goes back by
        # one.
        self.token_counts[self._lanes] += 1
        commit = CommitReservations(
            reservation_ids=self._reservation_ids[self._lanes].tolist(),
            token_counts=self.token_counts[self._lanes].tolist(),
            durability=durability_to_wire(durability),
            keep_open=not is_last,
            checksums=checksums,
        )
        sent = ClockPair.now()
        try:
            first, *others = self._stream.call(
                [Operation(commit_many=commit), *(self._reserves() if is_last else ())]
            )
            self._take_commits(first)
            self._written.clear()
            done = self._without_failed()
            if is_last:
                self._take_reservations(others, sent)
            else:
                self._lanes = done
                self._advance()
        except BaseException as error:
            self._end_if_interrupted(error)
            # The answer is lost: no row has a known place any more.
            self.close()
            raise
        return done

    def close(self) -> None:
        """Give back the room that was not used, without waiting."""
        lanes, self._lanes = self._lanes.tolist(), self._lanes[:0]
        try:
            self._release(lanes)
        except BaseException as error:
            self._end_if_interrupted(error)
            raise

    def __del__(self) -> None:
        # A signal may come before the `with` that would end the batch. A batch whose constructor failed early
        # has no lanes.
        lanes = getattr(self, "_lanes", None)
        if lanes is not None and len(lanes):
            give_back(self._stream, self._releases(lanes.tolist()))

    def _end_if_interrupted(self, error: BaseException) -> None:
        """Close the connection after a signal: reservations may be in an answer that nobody has."""
        if not isinstance(error, Exception):
            self._stream.close()

    def _release(self, lanes: Sequence[int]) -> None:
        """Give lanes' reservations back, without waiting. Those that have ended are no error."""
        self._stream.send(self._releases(lanes))

    def _releases(self, lanes: Sequence[int]) -> list[Operation]:
        return [
            Operation(release_reservation=ReleaseReservation(reservation_id=int(self._reservation_ids[lane])))
            for lane in lanes
        ]

    # -- rows ----------------------------------------------------------------------------------

    def _checked(self, stream: Stream, rows: npt.NDArray[np.generic]) -> tuple[Bytes, Bytes]:
        """Where a step's rows of a stream belong, and the rows, as bytes. Raises InvalidArgument."""
        view, place = view_rows(stream, rows, self._specs), self._tokens[:, self._columns[stream]]
        if len(view) != self.session_count:
            raise InvalidArgument(
                field="rows", problem=f"{len(view)} rows of {stream} for {self.session_count} lanes"
            )
        # numpy copies types of other libraries element by element: those go as bytes each time.
        if rows.dtype.isbuiltin == 1:
            # This is no copy, since the bytes of a row lie one behind the other.
            self._known[stream] = place.view(rows.dtype).reshape(rows.shape)
        return place, view

    def _put(self) -> None:
        """Put the step's rows to their places: all streams whose rows have one size at once."""
        is_all = len(self._lanes) == self.session_count
        tokens = self._tokens if is_all else self._tokens[self._lanes]
        slots, rows = self._slots[self._lanes], self._rows[self._lanes]
        for row_bytes, columns, offsets_bytes in self._alike:
            # Slots and chunks begin on page boundaries, so every row does on a multiple of this.
            unit = math.gcd(ALIGN_BYTES, row_bytes)
            count = row_bytes // unit
            # The index is in units that divide every row: one scatter moves rows of any size.
            first = ((slots + rows * row_bytes)[:, None] + offsets_bytes) // unit
            places = first if count == 1 else first[:, :, None] + np.arange(count)
            self._arena.reshape(-1, unit)[places] = tokens[:, columns].reshape(*places.shape, unit)

    def _alike_of(self, layout: SlotLayout) -> list[_Alike]:
        alike: list[_Alike] = []
        for stream, columns in self._columns.items():
            chunk, offsets = layout.chunks[stream], list[int]()
            if alike and alike[-1].row_bytes == chunk.row_bytes:
                _, before, known = alike.pop()
                columns, offsets = slice(before.start, columns.stop), known.tolist()  # noqa: PLW2901
            alike.append(_Alike(chunk.row_bytes, columns, np.array([*offsets, chunk.offset_bytes], np.int64)))
        return alike

    def _advance(self) -> None:
        self._steps_left -= 1
        self._rows[self._lanes] += 1
        for lane in self._lanes[self._rows[self._lanes] == self._row_ends[self._lanes]].tolist():
            self._next_run(lane)

    def _next_run(self, lane: int) -> None:
        self._slots[lane], self._rows[lane], self._row_ends[lane] = next(self._runs[lane])

    def _check_held(self) -> None:
        if not len(self._lanes):
            return
        is_gone = self._stream.is_in_doubt and not self._stream.still_holds()
        if is_gone or time.monotonic_ns() >= self._deadline_ns:
            raise ReservationNotFound(reservation_id=int(self._reservation_ids[self._lanes[0]]))

    def _without_failed(self) -> Numbers:
        if not self.failures:
            return self._lanes
        return self._lanes[np.isin(self._lanes, list(self.failures), invert=True)]

    # -- messages ------------------------------------------------------------------------------

    def _take_commits(self, result: OperationResult) -> None:
        if result.HasField("error"):
            raise self._stream.error_of(result.error)
        answer = result.committed_many
        generations = np.array(answer.generations, np.int64)
        if not answer.failures:
            self.generations[self._lanes] = generations
            return
        for failed in answer.failures:
            lane = int(self._lanes[failed.index])
            self.failures[lane] = self._stream.error_of(failed.error)
            # A session with a generation in its failure has the token, and is less durable than was asked
            # for.
            self.token_counts[lane] -= not generations[failed.index]
        # A failed lane is left out. Its room would block the session's next writer.
        self._release([int(self._lanes[failed.index]) for failed in answer.failures])
        self.generations[self._lanes] = np.where(generations > 0, generations, self.generations[self._lanes])

    def _reserves(self) -> list[Operation]:
        return [
            Operation(
                reserve=Reserve(
                    session=self._sessions[lane].name,
                    model_fingerprint=self._model.fingerprint,
                    write_offset=int(self.token_counts[lane]),
                    token_count=self._room_tokens,
                    is_brief=True,
                )
            )
            for lane in self._lanes.tolist()
        ]

    # A failure is a lane's, never the batch's: a full tenant must not stop the other sessions.
    def _take_reservations(self, results: Sequence[OperationResult], sent: ClockPair) -> None:
        try:
            self._take_each(results, sent)
        except BaseException:
            # All room of the answer goes back: nobody closes a batch whose constructor failed.
            self._lanes = self._lanes[:0]
            self._stream.send(
                Operation(
                    release_reservation=ReleaseReservation(reservation_id=result.reservation.reservation_id)
                )
                for result in results
                if result.HasField("reservation")
            )
            raise

    def _take_each(self, results: Sequence[OperationResult], sent: ClockPair) -> None:
        deadlines_ns = []
        for lane, result in zip(self._lanes.tolist(), results, strict=True):
            if result.HasField("error"):
                self.failures.setdefault(lane, self._stream.error_of(result.error))
                continue
            made = result.reservation
            if lane in self.failures:
                # The lane's commit failed: none of its rows belong at the reserved place.
                release = ReleaseReservation(reservation_id=made.reservation_id)
                self._stream.send([Operation(release_reservation=release)])
                continue
            # All lanes have one layout, but each session's is checked: it may have been deleted and made
            # anew.
            layout = self._layouts.get_or_make(made.session_uid, partial(slot_layout, made.layout))
            layout.check(self._sessions[lane].name, self._specs)
            self._alike = self._alike or self._alike_of(layout)
            self._reservation_ids[lane] = made.reservation_id
            self._runs[lane] = iter(_checked(made.runs, layout, self._arena.size))
            self._next_run(lane)
            deadlines_ns.append(sent.deadline_ns(made.expire_time))
        # The earliest deadline counts: the server may have waited for room before the others.
        self._deadline_ns = min(deadlines_ns, default=self._deadline_ns)
        self._lanes = self._without_failed()
        self._steps_left = self._room_tokens
        self._renew_ns = (self._deadline_ns + sent.monotonic_ns) // 2


def _check_alike(model: CallerModel, sessions: Sequence[SessionInfo]) -> None:
    if not 1 <= len(sessions) <= LANES_LIMIT:
        raise InvalidArgument(field="sessions", problem=f"{len(sessions)} are not within [1, {LANES_LIMIT}]")
    first = sessions[0]
    for other in sessions:
        model.check(other)
        if other.layout != first.layout:
            raise InvalidArgument(
                field="sessions", problem=f"{other.name} has another layout than {first.name}"
            )


# The slots are written without bounds checks from here on: places outside the arena are refused here.
def _checked(runs: Runs, layout: SlotLayout, arena_bytes: int) -> list[tuple[int, int, int]]:
    if runs.row_capacity:
        raise CorruptSegment(segment_id="?", problem="its room is in segments that were not asked for")
    places = list(zip(runs.offset_bytes, runs.row_begin, runs.row_end, strict=True))
    for offset, begin, end in places:
        is_inside = 0 <= begin < end and 0 <= offset <= arena_bytes - layout.end_bytes(end)
        if not is_inside or offset % ALIGN_BYTES:
            raise CorruptSegment(segment_id="?", problem="lies outside the arena")
    return places
