"""Recordings of a live store, read call by call, and the turns that its calls make.

docs/recording.md has the format. A turn begins with a read or with the opening of a session after something
was appended, or when nothing was heard of the session for GAP_S; what is appended belongs to the read before
it, however long that took. Its history is what the session had, whether the store still had it or not; which
of a turn's tokens were asked and which answered no store is told, so that all count as asked. Memory: an
entry per session and per turn. Worst case: InvalidTrace, which names file, line and field.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.simulate.rows import Row, TraceTurn

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
    for field in ("call", "session", "at_ms"):
        if field not in row.values:
            row.refuse(field, "missing")
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
                if talk.turn is not None and not talk.turn.has_appended:
                    talk.turn.history_tokens = min(talk.turn.history_tokens, call.session_tokens)
            case "fork":
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
