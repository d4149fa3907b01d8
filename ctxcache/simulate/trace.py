"""Traces: turns of sessions in order of arrival, from CSV or JSON lines, gzipped or not. Streams.

Fields, by name: session_id, arrival_ms, new_input_tokens, output_tokens; optional history_tokens (what the
session held before the turn, else the sum of its turns), turn (from 1) and think_ms (from the answer before
to this request). Other forms of a trace are requests without sessions (Azure: t_ms, ContextTokens,
GeneratedTokens), conversations of named prefixes (Mooncake), documents of which only lengths are known
(L-Eval), and recordings of a live store (`recorded`). Other fields are ignored. Worst case: InvalidTrace,
which names file, line and field.

Memory: of documents, the turns of those that have begun; of conversations, the MOST_BLOCKS blocks seen last
and their requests.
"""

import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from ctxcache.simulate import recorded
from ctxcache.simulate.rows import InvalidTrace, Row, TraceTurn, rows_of

DOCUMENT_FIELDS = ("task", "doc_id", "context_tokens", "instruction_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class ArrivalPace:
    """How many sessions begin a second, and how long each waits between its turns."""

    sessions_per_s: float
    think_s: float = 30.0


def questions(rows: Iterable[Row], pace: ArrivalPace) -> Iterator[TraceTurn]:
    """Questions asked of documents, in order of arrival. Rows of a document stand together.

    Raises InvalidTrace.

    A document is a session: its first question comes with the whole context, each later question finds that
    context and nothing of the questions before it. Documents begin as a Poisson process, the same at every
    reading. A document's questions come at even distances.
    """
    waiting: list[tuple[float, int, TraceTurn]] = []
    begin_s, session, number = 0.0, b"", 0
    for count, row in enumerate(rows):
        uid = row.name("task") + b"/" + row.name("doc_id")
        if uid != session:
            session, number = uid, 0
            begin_s += _gap_s(uid, pace)
            while waiting and waiting[0][0] <= begin_s:
                yield heappop(waiting)[2]
        turn = _turn(row, uid, number, begin_s + number * pace.think_s)
        heappush(waiting, (turn.arrival_s, count, turn))
        number += 1
    while waiting:
        yield heappop(waiting)[2]


def _gap_s(uid: bytes, pace: ArrivalPace) -> float:
    """Time since the document before: an exponential draw, made of the name."""
    return -math.log((zlib.crc32(uid) + 1) / 2**32) / pace.sessions_per_s


def _turn(row: Row, uid: bytes, number: int, arrival_s: float) -> TraceTurn:
    context_tokens = row.count("context_tokens")
    new_tokens = row.count("instruction_tokens") + (0 if number else context_tokens)
    history_tokens = context_tokens if number else 0
    return TraceTurn(uid, arrival_s, new_tokens, row.count("output_tokens"), history_tokens, number + 1)


BLOCK_TOKENS = 512
MOST_BLOCKS = 1 << 20
PREFIX_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(slots=True)
class _Request:
    session: int
    number: int
    input_tokens: int
    output_tokens: int
    is_continued: bool = False


# How requests become sessions. An id names a block and all before it:
#
#     request 1   a b c        a session of its own
#     request 2   a b c d      holds all full blocks of request 1: its second turn
#     request 3   a b c e      request 1 was continued already: forked, a session that begins with turn 2
#     request 4   a x          only the first block is known, which everyone has: a session of its own
class Conversations:
    """Requests in order of arrival, which say what prefixes they hold in blocks, as Mooncake's traces do.

    An id stands for a block and for all blocks before it. A request continues the request that last held its
    longest known prefix, if it holds all full blocks of that one. A request that was continued before is
    forked: the new session begins with a later turn. Blocks of answers are not named, so a history is the
    input and the answer of the predecessor, as far as the new input goes.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS, *, block_tokens: int = BLOCK_TOKENS) -> None:
        self._most_blocks = most_blocks
        self._block_tokens = block_tokens
        self._holders: OrderedDict[int, _Request] = OrderedDict()
        self._session_count = 0

    def turn(self, row: Row) -> TraceTurn:
        """Read the next request. Raises InvalidTrace."""
        input_tokens, output_tokens = row.count("input_length"), row.count("output_length")
        blocks = row.whole_numbers("hash_ids")
        if len(blocks) != -(-input_tokens // self._block_tokens):
            row.refuse("hash_ids", f"{len(blocks)} blocks of {self._block_tokens} for {input_tokens} tokens")
        request, history_tokens = self._placed(blocks, input_tokens, output_tokens)
        for block in blocks:
            # The last request that held a block: whoever continues it continues that one.
            self._holders[block] = request
            self._holders.move_to_end(block)
        while len(self._holders) > self._most_blocks:
            self._holders.popitem(last=False)
        return TraceTurn(
            b"%d" % request.session,
            row.time_ms("timestamp") / 1000,
            input_tokens - history_tokens,
            output_tokens,
            history_tokens,
            request.number,
            tuple([b"%d" % block for block in blocks]),
        )

    def _placed(self, blocks: list[int], input_tokens: int, output_tokens: int) -> tuple[_Request, int]:
        """The request in its session, and how many tokens of history it has."""
        shared = next((n for n, block in enumerate(blocks) if block not in self._holders), len(blocks))
        shared_tokens = min(shared * self._block_tokens, input_tokens)
        # The first block is a system prompt that everyone has.
        before = self._holders[blocks[shared - 1]] if shared > 1 else None
        is_later = before is not None and shared >= before.input_tokens // self._block_tokens
        if before is None or not is_later:
            return self._begun(1, input_tokens, output_tokens), shared_tokens
        if before.is_continued:
            return self._begun(before.number + 1, input_tokens, output_tokens), shared_tokens
        before.is_continued = True
        # At least one token of the prompt is new.
        held_tokens = min(before.input_tokens + before.output_tokens, input_tokens - 1)
        request = _Request(before.session, before.number + 1, input_tokens, output_tokens)
        return request, max(held_tokens, shared_tokens)

    def _begun(self, number: int, input_tokens: int, output_tokens: int) -> _Request:
        self._session_count += 1
        return _Request(self._session_count - 1, number, input_tokens, output_tokens)


__all__ = ["ArrivalPace", "InvalidTrace", "Trace", "TraceTurn"]

_SESSIONS = ("session_id", "arrival_ms", "new_input_tokens", "output_tokens")
_REQUESTS = ("t_ms", "ContextTokens", "GeneratedTokens")
_TIMES = ("arrival_ms", "t_ms", "timestamp")


class Trace:
    """A file of turns; each iteration reads it anew. `arrivals_times` packs arrivals that much closer.

    `pace` is for traces that say no arrivals, and only for them. `block_tokens` is the size of the blocks
    that a trace names.
    """

    def __init__(
        self,
        path: Path,
        *,
        arrivals_times: float = 1.0,
        pace: ArrivalPace | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.path = path
        self._block_tokens = block_tokens
        self._arrivals_times = arrivals_times
        self._pace = pace

    def __iter__(self) -> Iterator[TraceTurn]:
        """Every turn, in order of arrival. Raises InvalidTrace."""
        count = 0
        for turn in self._turns(self._rows()):
            count += 1
            if self._arrivals_times != 1:
                think_s = None if turn.think_s is None else turn.think_s / self._arrivals_times
                turn = turn._replace(arrival_s=turn.arrival_s / self._arrivals_times, think_s=think_s)  # noqa: PLW2901
            yield turn
        if not count:
            raise InvalidTrace.at(self.path, 1, None, "no turn in it")

    def _turns(self, rows: Iterator[Row]) -> Iterator[TraceTurn]:
        first = next(rows, None)
        if first is None:
            return
        if not _has(first, DOCUMENT_FIELDS):
            if self._pace is not None:
                first.refuse(None, "arrivals are in it; a rate of sessions is for traces without")
            yield from (
                self._recorded(first, rows) if _has(first, recorded.FIELDS) else self._arriving(first, rows)
            )
            return
        if self._pace is None:
            first.refuse(None, "lengths without arrivals: say how many sessions begin a second")
        yield from questions(_chained(first, rows, DOCUMENT_FIELDS), self._pace)

    def _recorded(self, first: Row, rows: Iterator[Row]) -> Iterator[TraceTurn]:
        recorded.check_header(first)
        yield from recorded.turns(rows)

    def _arriving(self, first: Row, rows: Iterator[Row]) -> Iterator[TraceTurn]:
        """Turns of a format that says when they come, which must be in order."""
        fields, read = _format(first, self._block_tokens)
        time = next(field for field in _TIMES if field in fields)
        latest_s = 0.0
        for row in _chained(first, rows, fields):
            turn = read(row)
            if turn.arrival_s < latest_s:
                problem = f"{turn.arrival_s * 1000:g} comes after {latest_s * 1000:g}: sort by arrival"
                row.refuse(time, problem)
            latest_s = turn.arrival_s
            yield turn

    def _rows(self) -> Iterator[Row]:
        return rows_of(self.path, _format)


def _format(row: Row, block_tokens: int = BLOCK_TOKENS) -> tuple[tuple[str, ...], Callable[[Row], TraceTurn]]:
    """The fields that every row of the trace must have, and what reads one."""
    if _has(row, PREFIX_FIELDS):
        return PREFIX_FIELDS, Conversations(block_tokens=block_tokens).turn
    if _has(row, _REQUESTS):
        return _REQUESTS, _request
    if not _has(row, DOCUMENT_FIELDS):
        _check(row, _SESSIONS)
    return _SESSIONS, _session_turn


def names_blocks(path: Path) -> bool:
    """Whether the trace names the blocks of its prompts. Raises FileUnusable, InvalidTrace."""
    first = next(rows_of(path), None)
    return first is not None and _has(first, PREFIX_FIELDS)


def _has(row: Row, fields: Iterable[str]) -> bool:
    return all(field in row.values for field in fields)


def _check(row: Row, fields: tuple[str, ...]) -> None:
    for field in fields:
        if field not in row.values:
            row.refuse(field, f"missing; needed: {', '.join(fields)}")


def _chained(first: Row, rows: Iterable[Row], fields: tuple[str, ...]) -> Iterator[Row]:
    yield first
    names = first.values.keys()
    for row in rows:
        # Lines of CSV have all fields of their header; of JSON each has its own.
        if row.values.keys() != names:
            _check(row, fields)
        yield row


def _request(row: Row) -> TraceTurn:
    arrival_s = row.time_ms("t_ms") / 1000
    input_tokens, output_tokens = row.count("ContextTokens"), row.count("GeneratedTokens")
    return TraceTurn(b"line %d" % row.line, arrival_s, input_tokens, output_tokens, None, None)


def _session_turn(row: Row) -> TraceTurn:
    values = row.values
    think_ms = row.optional_ms("think_ms") if "think_ms" in values else None
    return TraceTurn(
        row.name("session_id"),
        row.time_ms("arrival_ms") / 1000,
        row.count("new_input_tokens"),
        row.count("output_tokens"),
        row.optional("history_tokens", 0) if "history_tokens" in values else None,
        row.optional("turn", 1) if "turn" in values else None,
        think_s=None if think_ms is None else think_ms / 1000,
    )
