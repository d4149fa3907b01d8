"""Sessions: the namespace that makes, finds and changes them, and the handle that moves one's rows.

Names are resource names, `sessions/{session_id}` and `models/{model_id}`. The server checks ids, ranges
and times. Worst case: one deadline per call or page.
"""

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice

import numpy as np
import numpy.typing as npt

from ctxcache.client.convert import (
    duration,
    ranges_to_wire,
    timestamp,
    token_range,
)
from ctxcache.client.decode_batch import ROOM_TOKENS, DecodeBatch
from ctxcache.client.messages import read_lookup_result, read_session_info, write_content
from ctxcache.client.prefixes import PrefixCalls, TokenIds
from ctxcache.client.routes import RowRoutes
from ctxcache.client.rows import SessionRows
from ctxcache.client.streamed_rows import BufferedWriter, StreamedRows, append_by_stream
from ctxcache.client.types import CallerModel, Durability, LookupResult, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.client.writer import SessionWriter, check_append
from ctxcache.errors import (
    CorruptSegment,
    InvalidArgument,
    SessionAlreadyExists,
    SessionNotFound,
    Unavailable,
)
from ctxcache.format.streams import TOKENS, Content, Stream
from ctxcache.v1 import session_pb2
from ctxcache.v1.arena_pb2 import AcquireLease

LOOKUP_BATCH = 1000

STREAMS_NAMED = 3
"""How many streams an error names, at most."""


class SessionCalls:
    """Calls about sessions. What can be done with one is on its handle, which `create` and `open` return."""

    def __init__(self, wire: Wire, routes: RowRoutes, prefixes: PrefixCalls) -> None:
        self._wire = wire
        self._routes = routes
        self.prefixes = prefixes

    def create(
        self,
        model: CallerModel,
        *,
        id: str = "",
        layout: Iterable[Stream] | None = None,
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        is_pinned: bool = False,
        salt: bytes = b"",
        copies: int = 0,
        labels: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> "SessionHandle":
        """Create an empty session of `model`; an empty id lets the server choose.

        `layout`: the streams beside token ids that each token has a row in, by default all of the model's;
        empty for token ids alone. `salt`: up to 64 bytes; only sessions of one salt share tokens. `copies`:
        on how many SSD directories each segment shall be, 1 or 2; 0 for the server's setting. `labels`: up
        to 8 keys and values by which `list` finds it. `exist_ok`: a session of this id, model, layout and
        salt that is there already is returned with its tokens, and keeps its expiry, pin, copies and labels.
        A session of another layout or salt is SessionAlreadyExists, which says what differs.
        Raises SessionAlreadyExists, ModelNotFound, InvalidArgument, and with
        `exist_ok` ModelFingerprintMismatch.
        """
        _check_expiration(ttl, expire_time)
        if layout is None:
            layout = (spec.stream for spec in model.spec.streams)
        layout = list(layout)
        request = session_pb2.CreateSessionRequest(
            session_id=id,
            model=model.name,
            layout=ranges_to_wire(layout),
            ttl=duration(ttl),
            expire_time=timestamp(expire_time),
            is_pinned=is_pinned,
            salt=salt,
            copies=copies,
            labels=labels,
        )
        while True:
            try:
                made = read_session_info(self._wire.call(self._wire.sessions.CreateSession, request))
            except SessionAlreadyExists:
                if not exist_ok:
                    raise
                # A session that is gone by now is one that can be made.
                with suppress(SessionNotFound):
                    existing = self.open(f"sessions/{id}", model)
                    _check_same(existing.checked(), layout, salt)
                    return existing
            else:
                return self.open(made, model)

    def open(self, session: str | SessionInfo, model: CallerModel | None = None) -> "SessionHandle":
        """Return a handle on a session, by name or as an earlier call returned it. Sends nothing.

        `model`: the caller's own, which calls that move rows need. A handle by name asks for the session's
        facts when a call first needs them.
        """
        return SessionHandle(self._wire, self._routes, self.prefixes, session, model)

    def decode_batch(
        self, sessions: Sequence[str | SessionInfo], model: CallerModel, *, room_tokens: int = ROOM_TOKENS
    ) -> DecodeBatch:
        """Open B sessions of `model`, all of one layout, for appending a token each per step, in place.

        Room is reserved for `room_tokens` steps at a time. One session's failure is in the batch's
        `failures`. Use it as a context manager. Raises ModelFingerprintMismatch, InvalidArgument, Unavailable
        (not on the server's host).
        """
        snapshots = [self.open(session, model).checked() for session in sessions]
        attachment = self._routes.attach()
        arena = None if attachment is None else attachment.arena.writable()
        if attachment is None or arena is None:
            raise Unavailable(target=self._wire.target, problem="its arena may not be written by this client")
        return DecodeBatch(attachment, arena, model, snapshots, room_tokens)

    def get(self, name: str) -> SessionInfo:
        """Return a session without counting as an access. Raises SessionNotFound."""
        return self.open(name).refresh()

    def list(
        self, model: str = "", *, labels: Mapping[str, str] | None = None, page_size: int = 0
    ) -> Iterator[SessionInfo]:
        """Iterate over sessions by name, all or one model's, asking for a page when one is used up.

        `labels`: only sessions that have all of these.
        """
        # A page's token is the last name, so sessions that come or go meanwhile shift nobody.
        request = session_pb2.ListSessionsRequest(model=model, labels=labels, page_size=page_size)
        while True:
            page = self._wire.call(self._wire.sessions.ListSessions, request)
            yield from map(read_session_info, page.sessions)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def lookup(self, queries: Iterable[tuple[str, bytes]]) -> "builtins.list[LookupResult]":
        """Say for each (name, model fingerprint) what could be restored, in the same order."""
        remaining = iter(queries)
        results: builtins.list[LookupResult] = []
        batch: builtins.list[tuple[str, bytes]] = []
        # Answers are bounded by bytes, not by count: what a batch left out begins the next one.
        while batch := [*batch, *islice(remaining, LOOKUP_BATCH - len(batch))]:
            request = session_pb2.LookupSessionsRequest(
                queries=[
                    session_pb2.LookupQuery(name=name, model_fingerprint=fingerprint)
                    for name, fingerprint in batch
                ]
            )
            answer = self._wire.call(self._wire.sessions.LookupSessions, request)
            results += [read_lookup_result(one) for one in answer.results]
            # A large answer ends early; one without results does not go on.
            batch = batch[len(answer.results) :] if answer.results else []
        return results


class SessionHandle:
    """One session, and the caller's own model: every call that moves rows compares the session with it.

    Without a model the handle moves no rows: it updates, truncates, forks, flushes and deletes.

    Remembers the session's facts as this handle last knew them, and appends behind them. An append behind
    another writer raises WriteOffsetMismatch, behind another content of as many tokens GenerationMismatch;
    `refresh` then reads the facts again. Belongs to one thread at a time, as does what `read` and `writer`
    return.
    """

    def __init__(
        self,
        wire: Wire,
        routes: RowRoutes,
        prefixes: PrefixCalls,
        session: str | SessionInfo,
        model: CallerModel | None,
    ) -> None:
        self.name = session if isinstance(session, str) else session.name
        """Resource name, `sessions/{id}`."""
        self._model = model
        self._wire = wire
        self._routes = routes
        self._prefixes = prefixes
        self._info = None if isinstance(session, str) else session
        self._writer: SessionWriter | None = None

    def __repr__(self) -> str:
        return f"SessionHandle({self.name}, {self._model})"

    @property
    def model(self) -> CallerModel:
        """The caller's own model. Raises InvalidArgument for a handle without one."""
        if self._model is None:
            raise InvalidArgument(field="model", problem="is needed for rows: open(session, model)")
        return self._model

    @property
    def info(self) -> SessionInfo:
        """The session's facts as this handle last knew them; asked for if it knows none.

        Raises SessionNotFound.
        """
        # The newest of what this handle and its writer know; of another uid is a session that has the same
        # name only.
        if self._writer is not None:
            written, known = self._writer.session, self._info
            if known is None or (written.uid == known.uid and written.generation > known.generation):
                self._info = written
        return self.refresh() if self._info is None else self._info

    def refresh(self) -> SessionInfo:
        """Read the session's facts again and return them. Counts as no access. Raises SessionNotFound."""
        request = session_pb2.GetSessionRequest(name=self.name)
        return self._known(self._wire.call(self._wire.sessions.GetSession, request))

    def checked(self) -> SessionInfo:
        """Return `info`. Raises ModelFingerprintMismatch for a session of another model."""
        info = self.info
        self.model.check(info)
        return info

    # -- rows ----------------------------------------------------------------------------------

    def adopt(
        self,
        token_ids: TokenIds,
        *,
        contents: Sequence[Content] = (),
        if_generation_match: int | None = None,
        source: str = "",
    ) -> SessionInfo:
        """Begin with as many of these tokens as another session of its salt has; append the rest behind them.

        `contents`: what lies behind the tokens. `source`: see PrefixCalls.match. For a session that never had
        a token. Its `token_count` says how many it has got: 0, or a multiple of 64. Nothing is copied. Raises
        SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, WriteInProgress, InvalidArgument (it
        has or had tokens), CapacityExceeded, TierFailure.
        """
        self._info = self._prefixes.adopt(
            self.name,
            self.model,
            token_ids,
            contents=contents,
            if_generation_match=if_generation_match,
            source=source,
        )
        return self._info

    def append(
        self,
        rows: Mapping[Stream, npt.NDArray[np.generic]],
        *,
        contents: Sequence[Content] = (),
        durability: Durability = Durability.MEMORY,
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Append T tokens: for every stream of the layout a C-contiguous array of T rows.

        An array has the stream's elements, or is uint8 [T, row_bytes]. All T tokens become visible or none.
        `contents`: what lies behind these tokens, such as pictures, by the tokens' indexes in the session.
        Returns the session. Raises ModelFingerprintMismatch, InvalidArgument, IncompleteAppend,
        GenerationMismatch, WriteInProgress, WriteOffsetMismatch, CapacityExceeded.
        """
        snapshot = self.checked()
        specs = self._routes.specs(snapshot, self.model)
        generation = _content_of(snapshot, if_generation_match)
        views = check_append(rows, specs)
        token_count = len(next(iter(views.values())))
        # Two ways to the same append. All rows are here already, so that a long one goes into long segments:
        #
        #     arena      reserve(all) ──► copy ──► commit          rows are copied once, by this process
        #     otherwise  one request: header, rows, commit         rows are copied by the server, off the wire
        writer = self._routes.reserve(
            snapshot,
            self.model,
            specs,
            token_count,
            generation,
            is_all_coming=True,
            contents=contents,
        )
        if writer is None:
            header = self._append_header(snapshot, generation, contents)
            self._info = append_by_stream(self._routes.transport, header, views, durability)
            return self._info
        with writer:
            # Only then is there a write to disk to wait for, which may begin early.
            writer.write_all(views, is_marked=durability is not Durability.MEMORY)
            self._info = writer.commit(durability=durability)
            return self._info

    def writer(
        self,
        token_count: int,
        *,
        contents: Sequence[Content] = (),
        if_generation_match: int | None = None,
        is_all_coming: bool = False,
    ) -> SessionWriter:
        """Open room for `token_count` tokens after the session's end, to be filled layer by layer.

        `is_all_coming`: all of it will be committed, as of a prompt; the store then keeps it in fewer and
        longer segments. `contents`: as in `append`. Use it as a context manager. Raises as `append` does.
        """
        snapshot = self.checked()
        specs = self._routes.specs(snapshot, self.model)
        generation = _content_of(snapshot, if_generation_match)
        writer: SessionWriter | None = self._routes.reserve(
            snapshot,
            self.model,
            specs,
            token_count,
            generation,
            is_all_coming=is_all_coming,
            contents=contents,
        )
        if writer is None:
            header = self._append_header(snapshot, generation, contents)
            writer = BufferedWriter(self._routes.transport, snapshot, header, token_count, specs)
        self._writer = writer
        return writer

    def read(
        self,
        *,
        streams: Iterable[Stream] | None = None,
        begin: int = 0,
        end: int | None = None,
        if_generation_match: int | None = None,
        leave_on_ssd: bool = False,
        is_quiet: bool = False,
    ) -> SessionRows:
        """Read rows of tokens `[begin, end)`, by default all of all streams. Use it as a context manager.

        `leave_on_ssd`: rows that lie only on SSD are read from the files of the SSD tier and not brought into
        the arena, where this process can open the files (`Client.ssd_files`); the rows are FiledRows then.
        `is_quiet`: the read counts as no access, and comes by stream: for upkeep.
        Raises ModelFingerprintMismatch, TokenRangeOutOfBounds, GenerationMismatch, CorruptSegment,
        CapacityExceeded (only with access `local`; rows that the arena cannot hold come by the transport
        otherwise).
        """
        chosen = tuple(streams or ())
        # A model that is known to be another one is refused here; otherwise the lease compares.
        if self._info is not None:
            self.model.check(self._info)
        # A range on the wire has both ends.
        if begin != 0 and end is None:
            # The session's end now: another writer may have appended since this handle last looked.
            self.refresh()
            end = self.checked().token_count
        wanted = None if end is None else token_range(begin, end)
        lease = AcquireLease(
            session=self.name,
            model_fingerprint=self.model.fingerprint,
            if_generation_match=if_generation_match,
            range=wanted,
            leave_on_ssd=leave_on_ssd,
        )
        # A quiet read counts as no access, which a lease does.
        leased = None if is_quiet else self._routes.lease(lease, chosen)
        if leased is not None:
            return leased
        # The way by stream has to know the bytes of a row, which a lease tells by itself.
        snapshot = self.checked()
        request = session_pb2.ReadSessionRequest(
            name=snapshot.name,
            model_fingerprint=self.model.fingerprint,
            if_generation_match=if_generation_match,
            streams=ranges_to_wire(chosen),
            range=wanted,
            is_quiet=is_quiet,
        )
        token_count = snapshot.token_count if end is None else end
        size_bytes = token_count * sum(self._row_sizes(snapshot).values())
        # Of the session that is read, which may have been made anew with other streams.
        return StreamedRows(self._routes.transport, request, self._row_sizes, size_bytes=size_bytes)

    def token_ids(self) -> tuple[SessionInfo, builtins.list[int]]:
        """The session as it is, and the ids of all of its tokens. Brings nothing to DRAM.

        Takes milliseconds, however large the session's other rows are and wherever they lie. May count as no
        access. Raises what `read` raises.
        """
        # A lease brings whole segments to DRAM, which takes longer for a long session than a look-up may.
        # Where this process cannot read past DRAM itself, a quiet stream does.
        is_quiet = not self._routes.opens_ssd_files()
        try:
            with self.read(streams=[TOKENS], leave_on_ssd=True, is_quiet=is_quiet) as rows:
                return rows.session, rows.token_ids()
        except CorruptSegment:
            # This process found it, and the store has not looked: it does for a lease, and cuts the session.
            with self.read(streams=[TOKENS]) as rows:
                return rows.session, rows.token_ids()

    # -- the session itself --------------------------------------------------------------------

    def update(
        self,
        *,
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        is_pinned: bool | None = None,
        copies: int = 0,
    ) -> SessionInfo:
        """Change expiry, pin or copies (0: as they are); with none, touch.

        Raises SessionNotFound, InvalidArgument, CapacityExceeded.
        """
        _check_expiration(ttl, expire_time)
        request = session_pb2.UpdateSessionRequest(
            name=self.name,
            ttl=duration(ttl),
            expire_time=timestamp(expire_time),
            is_pinned=is_pinned,
            copies=copies,
        )
        return self._known(self._wire.call(self._wire.sessions.UpdateSession, request))

    def keep_recent(
        self,
        token_count: int,
        *,
        sink_token_count: int | None = None,
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Truncate to the newest tokens and the sinks (4 unless said otherwise).

        Raises PositionsNotRelocatable, SessionTooFragmented, GenerationMismatch, WriteInProgress.
        """
        kept = session_pb2.KeepRecent(token_count=token_count, sink_token_count=sink_token_count)
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=self.name, keep_recent=kept, if_generation_match=if_generation_match
            )
        )

    def keep_first(self, token_count: int, *, if_generation_match: int | None = None) -> SessionInfo:
        """Truncate to the first tokens. Raises TokenRangeOutOfBounds, GenerationMismatch, WriteInProgress."""
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=self.name, keep_first=token_count, if_generation_match=if_generation_match
            )
        )

    def drop_ranges(
        self, ranges: Iterable[tuple[int, int]], *, if_generation_match: int | None = None
    ) -> SessionInfo:
        """Truncate by dropping `[begin, end)` ranges, up to 4096 at a time.

        Raises as `keep_recent` and `keep_first` do, and InvalidArgument.
        """
        dropped = session_pb2.DropRanges(ranges=[token_range(begin, end) for begin, end in ranges])
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=self.name, drop=dropped, if_generation_match=if_generation_match
            )
        )

    def fork(
        self,
        *,
        id: str = "",
        token_count: int | None = None,
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        if_generation_match: int | None = None,
        replaces_generation: int | None = None,
        is_rewrite: bool = False,
        former_count: int = 0,
        is_quiet: bool = False,
    ) -> "SessionHandle":
        """Return a handle on a new session that shares the first tokens, all unless said otherwise.

        It has its source's labels, salt and copies, and is not pinned. `replaces_generation`: it takes the
        place of the session `id`, which has the same tokens and is at that generation, in one durable step.
        `is_rewrite`: that session may have other tokens. It stays as a former rendering, of which the name
        has `former_count` at most, up to 16: they have no names, are found by their tokens, and end with the
        session. `is_quiet`: it counts as no access to the source. Raises SessionAlreadyExists,
        TokenRangeOutOfBounds, GenerationMismatch, WriteInProgress, SessionInUse (somebody reads the one to be
        replaced).
        """
        _check_expiration(ttl, expire_time)
        request = session_pb2.ForkSessionRequest(
            name=self.name,
            session_id=id,
            token_count=token_count,
            ttl=duration(ttl),
            expire_time=timestamp(expire_time),
            if_generation_match=if_generation_match,
            replaces_generation=replaces_generation,
            is_rewrite=is_rewrite,
            former_count=former_count,
            is_quiet=is_quiet,
        )
        made = read_session_info(self._wire.call(self._wire.sessions.ForkSession, request))
        return SessionHandle(self._wire, self._routes, self._prefixes, made, self._model)

    def flush(self, *, is_shared: bool = False) -> SessionInfo:
        """Make every committed token durable; `is_shared`: as `Durability.SHARED`.

        Raises CapacityExceeded, TierFailure, FleetNotFound, Unavailable.
        """
        request = session_pb2.FlushSessionRequest(name=self.name, is_shared=is_shared)
        return self._known(self._wire.call(self._wire.sessions.FlushSession, request))

    def delete(self, *, if_generation_match: int | None = None) -> None:
        """Delete the session. Raises SessionNotFound, GenerationMismatch, WriteInProgress."""
        request = session_pb2.DeleteSessionRequest(name=self.name, if_generation_match=if_generation_match)
        self._wire.call(self._wire.sessions.DeleteSession, request)

    def _truncate(self, request: session_pb2.TruncateSessionRequest) -> SessionInfo:
        return self._known(self._wire.call(self._wire.sessions.TruncateSession, request))

    def _known(self, answer: session_pb2.Session) -> SessionInfo:
        self._info = read_session_info(answer)
        return self._info

    def _row_sizes(self, session: SessionInfo) -> Mapping[Stream, int]:
        specs = self._routes.specs(session, self.model)
        return {stream: spec.row_bytes for stream, spec in specs.items()}

    def _append_header(
        self, snapshot: SessionInfo, generation: int, contents: Sequence[Content]
    ) -> session_pb2.AppendHeader:
        return session_pb2.AppendHeader(
            name=snapshot.name,
            model_fingerprint=self.model.fingerprint,
            write_offset=snapshot.token_count,
            if_generation_match=generation,
            contents=[write_content(part) for part in contents] if contents else None,
        )


def _content_of(snapshot: SessionInfo, if_generation_match: int | None) -> int:
    """The generation behind which a handle appends: what it knows, unless its caller says another."""
    # A session that was made anew may have as many tokens: its offset alone does not tell it.
    return snapshot.generation if if_generation_match is None else if_generation_match


def _check_same(session: SessionInfo, layout: Iterable[Stream], salt: bytes) -> None:
    """Raise SessionAlreadyExists, with what differs, for a session of other rows than a caller asks for."""
    asked, held = {TOKENS, *layout}, {TOKENS, *session.streams()}
    if session.salt != salt:
        problem = "another salt: sessions of two salts share no tokens"
    elif asked != held:
        only = {"has": held - asked, "lacks": asked - held}
        parts = [f"{verb} {_words(streams)}" for verb, streams in only.items() if streams]
        problem = f"another layout: it {', and '.join(parts)}"
    else:
        return
    raise SessionAlreadyExists(f"{session.name} already exists with {problem}", session=session.name)


def _words(streams: Iterable[Stream]) -> str:
    """A few by name, and how many more."""
    named = list(map(str, sorted(streams)))
    more = f" and {len(named) - STREAMS_NAMED} more" if len(named) > STREAMS_NAMED else ""
    return ", ".join(named[:STREAMS_NAMED]) + more


def _check_expiration(ttl: timedelta | None, expire_time: datetime | None) -> None:
    if ttl is not None and expire_time is not None:
        raise InvalidArgument(field="expiration", problem="is either ttl or expire_time")
