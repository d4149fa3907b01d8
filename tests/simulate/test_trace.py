"""Traces are read in every documented form, and refused by file, line and field."""

import gzip
import json
import math
from pathlib import Path

import pytest

from ctxcache.simulate.study import look
from ctxcache.simulate.trace import InvalidTrace, Trace, TraceTurn

HEADER = "session_id,arrival_ms,new_input_tokens,output_tokens"
JSON_TURN = {"session_id": 7, "arrival_ms": 1500.5, "new_input_tokens": 10, "output_tokens": 3}


def _written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", f"{HEADER}\n7,1500.5,10,3\n"),
        ("a.csv.gz", f"other,{HEADER}\nx,7,1500.5,10,3\n"),
        ("a.jsonl", json.dumps(JSON_TURN) + "\n"),
        ("a.jsonl.gz", json.dumps(JSON_TURN | {"other": []})),
    ],
)
def test_a_turn_reads_the_same_in_every_form(tmp_path: Path, name: str, text: str) -> None:
    """CSV and JSON lines, gzipped or not, fields of others ignored; what is optional may be missing."""
    assert list(Trace(_written(tmp_path, name, text))) == [TraceTurn(b"7", 1.5005, 10, 3, None, None)]


def test_optional_fields_are_read(tmp_path: Path) -> None:
    """History and turn count when they are there, empty ones as missing."""
    text = f"{HEADER},history_tokens,turn\na,0,1,1,5,2\na,1,1,1,,\n"

    turns = list(Trace(_written(tmp_path, "a.csv", text), arrivals_times=2))

    assert [(turn.history_tokens, turn.number, turn.arrival_s) for turn in turns] == [
        (5, 2, 0),
        (None, None, 0.0005),
    ]


def test_requests_without_sessions_are_sessions_of_their_own(tmp_path: Path) -> None:
    """Azure's traces name no sessions."""
    text = "t_ms,ContextTokens,GeneratedTokens\n0,374,44\n0,374,44\n"

    assert len({turn.session for turn in Trace(_written(tmp_path, "azure.csv", text))}) == 2


@pytest.mark.parametrize(
    ("name", "text", "where", "problem"),
    [
        ("a.csv", "", "line 1, session_id", "missing"),
        ("a.csv", f"{HEADER}\n", "line 1", "no turn"),
        ("a.csv", "session_id,arrival_ms,output_tokens\n", "line 1, new_input_tokens", "missing"),
        ("a.csv", f"{HEADER}\na,0,1\n", "line 2", "3 fields"),
        ("a.csv", f"{HEADER}\na,0,1,1\na,x,1,1\n", "line 3, arrival_ms", "not a number"),
        ("a.csv", f"{HEADER}\na,nan,1,1\n", "line 2, arrival_ms", "not a number"),
        ("a.csv", f"{HEADER}\na,inf,1,1\n", "line 2, arrival_ms", "not within"),
        ("a.csv", f"{HEADER}\na,0,-1,1\n", "line 2, new_input_tokens", "not within"),
        ("a.csv", f"{HEADER}\na,0,1.5,1\n", "line 2, new_input_tokens", "whole"),
        ("a.csv", f"{HEADER}\na,0,{'9' * 20},1\n", "line 2, new_input_tokens", "not within"),
        ("a.csv", f"{HEADER}\na,0,1,{'9' * 5000}\n", "line 2, output_tokens", "whole"),
        ("a.csv", f"{HEADER}\na,5,1,1\nb,4,1,1\n", "line 3, arrival_ms", "sort"),
        ("a.csv", f"{HEADER}\n,5,1,1\n", "line 2, session_id", "empty"),
        ("a.csv", f"{HEADER},turn\na,5,1,1,0\n", "line 2, turn", "less than 1"),
        ("a.jsonl", "{}", "line 1, session_id", "missing"),
        ("a.jsonl", "[1]", "line 1", "not a JSON object"),
        ("a.jsonl", json.dumps(JSON_TURN) + "\n{", "line 2", "not JSON"),
        ("a.jsonl", json.dumps(JSON_TURN | {"output_tokens": True}), "line 1, output_tokens", "whole"),
        ("a.jsonl", json.dumps(JSON_TURN | {"output_tokens": None}), "line 1, output_tokens", "whole"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, where: str, problem: str) -> None:
    """The sentence says file, line and field, and what is wrong with it."""
    path = _written(tmp_path, name, text)

    with pytest.raises(InvalidTrace) as raised:
        list(Trace(path))

    assert str(raised.value).startswith(f"{path}, {where}: ")
    assert problem in str(raised.value)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"not gzip"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, damage: bytes) -> None:
    """Damaged files are refused by name as well."""
    path = tmp_path / ("a.csv" if damage[0] == 0xFF else "a.csv.gz")
    path.write_bytes(damage)

    with pytest.raises(InvalidTrace, match=r"line 1"):
        list(Trace(path))


def test_a_truncated_file_is_refused_where_it_ends(tmp_path: Path) -> None:
    """Half of a gzip file is no shorter trace."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\na,0,1,1\n".encode())[:-6])

    with pytest.raises(InvalidTrace, match="ended"):
        list(Trace(path))


def test_the_future_is_when_a_session_comes_next(tmp_path: Path) -> None:
    """By turn, in seconds; a session's last turn has none."""
    text = f"{HEADER}\na,0,10,0\nb,1000,5,0\na,2000,1,0\nb,3000,1,0\nc,4000,99,0\n"

    assert list(look(Trace(_written(tmp_path, "a.csv", text)))) == [2, 3, math.inf, math.inf, math.inf]
