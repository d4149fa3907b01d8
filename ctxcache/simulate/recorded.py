"""Recordings of a live store, read call by call: what they contain, and the turns that their calls make.

docs/recording.md has the format; `ctxcache.recordings` writes it. A turn begins with a read or with the
opening of a session after something was appended, or when nothing was heard of the session for GAP_S; what is
appended belongs to the read before it, however long that took. Its history is what the session had, whether
the store still had it or not; which of a turn's tokens were asked and which answered no store is told, so
that all count as asked. Memory: an entry per session and per turn; of `contents`, the layouts and an entry
per session. Worst case: InvalidTrace, which names file, line and field.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ctxcache.simulate.rows import InvalidTrace, Row, TraceTurn, rows_of

FORMAT, VERSION = "ctxcache-recording", 1
FIELDS = ("format", "version", "store")
"""The fields of the first line."""
GAP_S = 60.0
KINDS = frozenset(
    (
        "open",
        "reserve",
        "append",
        "finish",
        "lookup",
        "get",
        "read",
        "release",
        "truncate",
        "fork",
        "touch",
        "flush",
        "demote",
        "delete",
        "hint",
        "expire",
        "evict",
        "cut",
    )
)
"""Every kind of call."""


class Called(NamedTuple):
    """One call. `values` has what its kind tells; what is not there is 0, or unset."""

    kind: str
    at_s: float
    session: str
    session_tokens: int
    values: Mapping[str, object]

    def count(self, field: str) -> int:
        """A number of those."""
        value = self.values.get(field, 0)
        return value if isinstance(value, int) else 0

    def text(self, field: str) -> str:
        """A text of those; empty where there is none."""
        return str(self.values.get(field, ""))

    @property
    def is_refused(self) -> bool:
        """Whether nothing came of it."""
        return "reason" in self.values

    @property
    def tokens_before(self) -> int:
        """The session's tokens before the turn."""
        match self.kind:
            case "append":
                return self.session_tokens - self.count("tokens")
            case "truncate" | "cut":
                return self.session_tokens + self.count("tokens")
            case "open" | "fork":
                return 0
        return self.session_tokens


def check_header(row: Row) -> None:
    """Raise InvalidTrace unless a recording begins with it that is known here."""
    if row.values.get("format") != FORMAT:
        row.refuse("format", f"{row.values.get('format')!r} is not {FORMAT!r}")
    if row.values.get("version") != VERSION:
        row.refuse("version", f"{row.values.get('version')!r}; version {VERSION} is known")


def called(row: Row) -> Called | None:
    """The call that a line tells; None for a line of another kind."""
    if "call" not in row.values:
        return None
    for name in ("call", "session", "at_ms"):
        if name not in row.values:
            row.refuse(name, "missing")
    kind, session = row.name("call").decode(), row.name("session").decode()
    if kind not in KINDS:
        row.refuse("call", f"{kind!r} is no call of version {VERSION}")
    return Called(
        kind, row.time_ms("at_ms") / 1000, session, row.optional("session_tokens", 0) or 0, row.values
    )


def turns(rows: Iterable[Row]) -> Iterator[TraceTurn]:
    """Every turn, in order of arrival, from the lines behind the first. Raises InvalidTrace."""
    found = RecordedTurns()
    for row in rows:
        call = called(row)
        if call is not None:
            found.hear(call)
    yield from found.all()


@dataclass(slots=True)
class _Turn:
    session: str
    arrival_s: float
    number: int
    history_tokens: int
    end_tokens: int = 0
    has_appended: bool = False

    def turn(self) -> TraceTurn:
        """As it is now."""
        end_tokens = self.end_tokens if self.has_appended else self.history_tokens
        history_tokens = min(self.history_tokens, end_tokens)
        new_tokens = end_tokens - history_tokens
        return TraceTurn(self.session.encode(), self.arrival_s, new_tokens, 0, history_tokens, self.number)


@dataclass(slots=True)
class _Talk:
    """A session: what it has, if nothing of it was given up, and the turn that it is in."""

    tokens: int = 0
    turn_count: int = 0
    turn: _Turn | None = None
    heard_s: float = 0.0

    # Calls that begin a turn, by the calls of the turn before:
    #
    #     call           nothing appended yet       something appended
    #     open, read     read after 60 s quiet      yes
    #     append         no                         after 60 s quiet
    def is_new_turn(self, call: Called) -> bool:
        """Whether a turn begins with it."""
        if self.turn is None:
            return True
        is_quiet = call.at_s - self.heard_s > GAP_S
        if call.kind == "append":
            return self.turn.has_appended and is_quiet
        return self.turn.has_appended or (call.kind == "read" and is_quiet)


class RecordedTurns:
    """Hears calls and keeps the turns."""

    def __init__(self) -> None:
        self._talks: dict[str, _Talk] = {}
        self._turns: list[_Turn] = []

    def hear(self, call: Called) -> None:
        """The next call."""
        if call.is_refused:
            return
        talk = self._talks.get(call.session)
        if talk is None:
            before = call.tokens_before
            # One that the recording does not see begin has had a turn.
            talk = self._talks[call.session] = _Talk(before, int(before > 0))
        match call.kind:
            case "open" | "read":
                self._turn(talk, call)
            case "append":
                turn = self._turn(talk, call)
                turn.end_tokens, turn.has_appended = call.session_tokens, True
                talk.tokens = call.session_tokens
            case "truncate":
                talk.tokens = call.session_tokens
                # A cut before anything was appended: less of the history was there for this turn.
                if talk.turn is not None and not talk.turn.has_appended:
                    talk.turn.history_tokens = min(talk.turn.history_tokens, call.session_tokens)
            case "fork":
                # A fork has its source's tokens, and counts as a session that has had one turn.
                talk.tokens, talk.turn_count, talk.turn = call.session_tokens, 1, None
            case "delete":
                talk.tokens, talk.turn_count, talk.turn = 0, 0, None
        talk.heard_s = call.at_s

    def all(self) -> Iterator[TraceTurn]:
        """Those with anything in them."""
        for turn in map(_Turn.turn, self._turns):
            if turn.input_tokens or turn.history_tokens:
                yield turn

    def _turn(self, talk: _Talk, call: Called) -> _Turn:
        if talk.turn is None or talk.is_new_turn(call):
            talk.turn_count += 1
            talk.turn = _Turn(call.session, call.at_s, talk.turn_count, talk.tokens)
            self._turns.append(talk.turn)
        return talk.turn


DEFAULT_TTL_S = 3600.0
SIZED = frozenset(("open", "append", "fork"))
"""Calls after which a session takes room."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of a token: bytes of a row, and how many neighbouring streams have such rows."""

    streams: tuple[tuple[int, int], ...]
    segment_bytes: int
    segment_tokens: int


@dataclass(frozen=True, slots=True)
class Before:
    """A session that was there when the recording began, or when it was first heard of."""

    session: str
    layout: int
    tokens: int


@dataclass(slots=True)
class RecordingContents:
    """The contents of a recording."""

    store: Mapping[str, object]
    layouts: dict[int, Layout] = field(default_factory=dict)
    before: list[Before] = field(default_factory=list)
    """In the order in which they were first heard of."""
    call_count: int = 0
    lost_count: int = 0
    elapsed_s: float = 0.0
    ttl_s: float = 0.0
    """The longest that a session was opened with."""
    is_whole: bool = False
    """Whether it has its last line."""
    appended_tokens: Counter[int] = field(default_factory=Counter)
    """By layout."""

    @property
    def token_bytes(self) -> int:
        """The average bytes of an appended token; 1 where none was."""
        size_bytes = sum(
            count * self.layouts[number].segment_bytes // self.layouts[number].segment_tokens
            for number, count in self.appended_tokens.items()
        )
        return max(size_bytes // max(self.appended_tokens.total(), 1), 1)

    def simulate_options(self) -> tuple[str, ...]:
        """Those with which `ctxcache simulate` has this store's sizes."""
        dram_bytes, ssd_bytes = (_whole(self.store.get(name)) for name in ("dram_bytes", "ssd_bytes"))
        said = {
            "--dram": f"{dram_bytes}",
            "--ssd": f"{max(ssd_bytes - dram_bytes, 0)}",
            "--token-bytes": f"{self.token_bytes}",
            "--ttl": f"{self.ttl_s or DEFAULT_TTL_S:g}s",
            "--policies": str(self.store.get("placement_policy", "")),
        }
        return tuple(part for option in said.items() if option[1] for part in option)


def is_recording(path: Path) -> bool:
    """Whether it is one, and no trace of another kind. Raises InvalidTrace where its first line is no row."""
    header = next(rows_of(path), None)
    return header is not None and all(field in header.values for field in FIELDS)


def contents(path: Path) -> RecordingContents:
    """Read all of it once. Raises InvalidTrace."""
    rows = rows_of(path)
    header = next(rows, None)
    if header is None:
        raise InvalidTrace.at(path, 1, None, "no recording")
    check_header(header)
    store = header.values.get("store")
    found = RecordingContents(store if isinstance(store, dict) else {})
    known: set[str] = set()
    for row in rows:
        call = called(row)
        if call is not None:
            # A size that cannot be known would make the whole sum wrong.
            if call.count("layout") not in found.layouts and (call.kind in SIZED or "layout" in call.values):
                row.refuse("layout", "none of those that were told before")
            _count(found, call, known)
        elif "layout" in row.values:
            found.layouts[row.count("layout")] = _layout(row)
        elif "lost" in row.values:
            found.lost_count += row.count("lost")
        elif "end" in row.values:
            found.is_whole = True
            found.elapsed_s = max(found.elapsed_s, row.time_ms("elapsed_ms") / 1000)
    return found


def calls(path: Path) -> Iterator[Called]:
    """Every call, in order. Raises InvalidTrace."""
    for row in rows_of(path):
        call = called(row)
        if call is not None:
            yield call


def _count(found: RecordingContents, call: Called, known: set[str]) -> None:
    found.call_count += 1
    found.elapsed_s = max(found.elapsed_s, call.at_s)
    if call.kind == "append":
        found.appended_tokens[call.count("layout")] += call.count("tokens")
    if call.kind == "open":
        found.ttl_s = max(found.ttl_s, call.count("ttl_ms") / 1000)
    if "layout" not in call.values or call.session in known:
        return
    known.add(call.session)
    if call.tokens_before and not call.is_refused:
        found.before.append(Before(call.session, call.count("layout"), call.tokens_before))


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _layout(row: Row) -> Layout:
    streams = row.values.get("streams")
    if not isinstance(streams, list) or not streams:
        row.refuse("streams", "not a list of bytes and counts")
    pairs = []
    for pair in streams:
        if not (isinstance(pair, list) and [type(part) for part in pair] == [int, int] and min(pair) > 0):
            row.refuse("streams", f"{pair!r} is not bytes of a row and a count")
        pairs.append((pair[0], pair[1]))
    return Layout(tuple(pairs), row.count("segment_bytes"), row.count("segment_tokens"))
