"""Turns of recordings: where they begin, what their history is, and which lines are refused."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxcache.client.types import RecordingPart
from ctxcache.errors import FileFull, Unavailable
from ctxcache.recordings import created, write
from ctxcache.simulate.trace import InvalidTrace, Trace

HEADER = {"format": "ctxcache-recording", "version": 1, "store": {}}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    """A recording of these lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def call(at_s: float, kind: str, session_tokens: int, **values: Any) -> dict[str, Any]:
    """One line."""
    told = {
        "at_ms": at_s * 1000,
        "call": kind,
        "session": "0a",
        "tenant": "0b",
        "session_tokens": session_tokens,
    }
    return told | values


def turns(tmp_path: Path, *calls: dict[str, Any]) -> list[tuple[float, int, int, int | None]]:
    """Arrival, history, new tokens and number of every turn."""
    path = written(
        tmp_path / "calls.jsonl", HEADER, {"layout": 0, "streams": [[8, 1]]}, *calls, {"end": True}
    )
    return [
        (turn.arrival_s, turn.history_tokens or 0, turn.input_tokens, turn.number) for turn in Trace(path)
    ]


def test_what_is_appended_belongs_to_the_read_before_it(tmp_path: Path) -> None:
    """However long its answer took, in however many commits; the next read begins the next turn."""
    found = turns(
        tmp_path,
        call(0, "open", 0),
        call(1, "append", 64, tokens=64),
        call(2, "append", 100, tokens=36),
        call(3, "read", 100, tokens=100),
        call(500, "append", 150, tokens=50),
        call(501, "read", 150, tokens=150),
    )

    assert found == [(0, 0, 100, 1), (3, 100, 50, 2), (501, 150, 0, 3)]


def test_a_session_that_was_given_up_goes_on(tmp_path: Path) -> None:
    """Written anew with its history and what is new; one that was deleted begins again."""
    lost = (call(0, "open", 0), call(1, "append", 100, tokens=100), call(2, "evict", 0, tokens=100))
    again = (
        call(5, "lookup", 0, reason="SESSION_NOT_FOUND"),
        call(6, "open", 0),
        call(7, "append", 64, tokens=64),
    )
    whole = (*lost, *again, call(8, "append", 130, tokens=66))
    deleted = call(9, "delete", 0, tokens=130)

    assert turns(tmp_path, *whole) == [(0, 0, 100, 1), (6, 100, 30, 2)]
    assert turns(tmp_path, *whole, deleted, *again)[2:] == [(6, 0, 64, 1)]


def test_silence_ends_a_turn_of_an_engine_that_reads_nothing(tmp_path: Path) -> None:
    """It has the state yet, and only appends; what was refused is no turn."""
    found = turns(
        tmp_path,
        call(0, "open", 0),
        call(1, "append", 10, tokens=10),
        call(30, "append", 20, tokens=10),
        call(100, "append", 25, tokens=5),
        call(200, "append", 25, reason="CAPACITY_EXCEEDED"),
        call(300, "read", 0, reason="TIER_FAILURE"),
    )

    assert found == [(0, 0, 20, 1), (100, 20, 5, 2)]


def test_what_was_there_before_or_is_a_fork_has_had_a_turn(tmp_path: Path) -> None:
    """Its history is what it has; and what was dropped is none."""
    forked = {"session": "0c", "source": "0a", "tokens": 60}
    found = turns(
        tmp_path,
        call(1, "read", 80, tokens=80),
        call(2, "truncate", 50, tokens=30),
        call(3, "append", 60, tokens=10),
        call(4, "fork", 60, **forked),
        call(5, "append", 70, tokens=10, session="0c"),
    )

    assert found == [(1, 50, 10, 2), (5, 60, 10, 2)]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((HEADER | {"version": 2},), "line 1, version: 2; version 1 is known"),
        ((HEADER | {"format": "other"},), "line 1, format: 'other' is not 'ctxcache-recording'"),
        ((HEADER, call(0, "shout", 0)), "line 2, call: 'shout' is no call of version 1"),
        ((HEADER, {"call": "read", "session": "0a"}), "line 2, at_ms: missing"),
        ((HEADER, call(0, "read", -1)), "line 2, session_tokens: -1 is not within"),
        ((HEADER,), "no turn in it"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(
    lines: tuple[dict[str, Any], ...], problem: str, tmp_path: Path
) -> None:
    """And its field."""
    with pytest.raises(InvalidTrace, match=problem):
        list(Trace(written(tmp_path / "calls.jsonl", *lines)))


def test_a_recording_is_whole_where_its_reader_stopped_and_not_where_the_server_went(tmp_path: Path) -> None:
    """Ctrl-C closes it with its last line; a server that goes leaves it without."""

    def parts() -> Iterator[RecordingPart]:
        yield RecordingPart()
        raise Unavailable(target="it", problem="went")

    stopped, cut_off = tmp_path / "stopped.jsonl", tmp_path / "cut_off.jsonl"
    with created(stopped) as lines:
        written = write(parts(), lines)
        next(written)
        written.close()  # type: ignore[attr-defined]
    with created(cut_off) as lines, pytest.raises(Unavailable):
        list(write(parts(), lines))

    assert '"end":true' in stopped.read_text()
    assert "end" not in cut_off.read_text()


def test_a_full_disk_is_told_with_the_recordings_name(tmp_path: Path) -> None:
    """An error of a write names no file, and would be taken for standard output's."""
    with pytest.raises(FileFull, match="No space left") as full, created(tmp_path / "full.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert full.value.facts["path"] == str(tmp_path / "full.jsonl")
