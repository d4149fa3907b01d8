"""Documents and the questions asked of them, of which only lengths are known, as in L-Eval.

A document is a session: its first question comes with the whole context, each later one finds that context
and nothing of the questions before it. Documents begin as a Poisson process, the same at every reading; a document's
questions come at even distances. Memory: the turns of documents that have begun.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from ctxcache.simulate.row import Row
from ctxcache.simulate.turn import Turn

FIELDS = ("task", "doc_id", "context_tokens", "instruction_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Pace:
    """How many sessions begin a second, and how long each waits between its turns."""

    sessions_per_s: float
    think_s: float = 30.0


def asked(rows: Iterable[Row], pace: Pace) -> Iterator[Turn]:
    """Every question, in order of arrival. Rows of a document stand together. Raises InvalidTrace."""
    waiting: list[tuple[float, int, Turn]] = []
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


def _gap_s(uid: bytes, pace: Pace) -> float:
    """Time since the document before: an exponential draw, made of the name."""
    return -math.log((zlib.crc32(uid) + 1) / 2**32) / pace.sessions_per_s


def _turn(row: Row, uid: bytes, number: int, arrival_s: float) -> Turn:
    context_tokens = row.count("context_tokens")
    new_tokens = row.count("instruction_tokens") + (0 if number else context_tokens)
    history_tokens = context_tokens if number else 0
    return Turn(uid, arrival_s, new_tokens, row.count("output_tokens"), history_tokens, number + 1)
