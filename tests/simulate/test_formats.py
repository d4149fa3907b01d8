"""Traces of others: prefixes become sessions, lengths get arrivals; each by hand."""

import json
from pathlib import Path

import pytest

from ctxcache.simulate.rows import Row
from ctxcache.simulate.trace import ArrivalPace, Conversations, InvalidTrace, Trace, TraceTurn

LENGTHS = "task,doc_id,question,context_tokens,instruction_tokens,output_tokens\n"


def _request(input_tokens: int, output_tokens: int, *blocks: int, at_ms: int = 0) -> dict[str, object]:
    return {
        "timestamp": at_ms, "input_length": input_tokens, "output_length": output_tokens,
        "hash_ids": list(blocks),
    }  # fmt: skip


def _sessions(*requests: dict[str, object], most_blocks: int = 1000) -> list[tuple[bytes, int, int, int]]:
    """Session, number, history and new tokens of every request."""
    conversations = Conversations(most_blocks)
    turns = [conversations.turn(Row(Path("t"), 1, request)) for request in requests]
    return [(t.session, t.number or 0, t.history_tokens or 0, t.input_tokens) for t in turns]


def test_a_request_that_holds_all_full_blocks_continues_its_session() -> None:
    """1,100 tokens have two full blocks; the next holds both, and its history is input and answer."""
    first, second = _request(1100, 50, 0, 1, 2), _request(1600, 9, 0, 1, 3, 4)

    assert _sessions(first, second) == [(b"0", 1, 0, 1100), (b"0", 2, 1150, 450)]


def test_a_history_leaves_one_token_to_compute_unless_every_block_is_known() -> None:
    """The answer may have been longer than what follows; a repeated request is known whole."""
    first = _request(1100, 900, 0, 1, 2)
    assert _sessions(first, _request(1500, 9, 0, 1, 3))[1] == (b"0", 2, 1499, 1)
    assert _sessions(first, first)[1] == (b"0", 2, 1100, 0)


def test_one_that_lacks_a_full_block_branches_off() -> None:
    """It is a session of its own, whose first turn has the shared blocks for a history."""
    first, second = _request(1600, 50, 0, 1, 2, 3), _request(1600, 9, 0, 1, 8, 9)

    assert _sessions(first, second)[1] == (b"1", 1, 1024, 576)


def test_a_second_successor_is_a_fork() -> None:
    """The one that came first goes on; the other session begins with the same turn."""
    first = _request(1100, 50, 0, 1, 2)
    mine, other = _request(1200, 5, 0, 1, 3), _request(1600, 5, 0, 1, 2, 7)

    # The third holds block 2, which only the first request had.
    assert _sessions(first, mine, other)[1:] == [(b"0", 2, 1150, 50), (b"1", 2, 1536, 64)]


def test_the_first_block_alone_makes_no_session() -> None:
    """A system prompt is what everyone has."""
    assert _sessions(_request(600, 5, 0, 1), _request(700, 5, 0, 2))[1] == (b"1", 1, 512, 188)


def test_blocks_that_were_not_seen_for_long_are_forgotten() -> None:
    """Memory is that of the last blocks; what comes back later is another session."""
    first, others = _request(1100, 50, 0, 1, 2), [_request(1024, 1, 10 + n, 20 + n) for n in range(4)]

    assert _sessions(first, *others, first, most_blocks=4)[-1] == (b"5", 1, 0, 1100)


def test_a_trace_of_prefixes_reads_as_turns(tmp_path: Path) -> None:
    """JSON lines, with times in milliseconds."""
    path = tmp_path / "mooncake.jsonl"
    rows = [_request(1100, 50, 0, 1, 2), _request(1600, 9, 0, 1, 3, 4, at_ms=3000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert list(Trace(path, arrivals_times=2)) == [
        TraceTurn(b"0", 0, 1100, 50, 0, 1, (b"0", b"1", b"2")),
        TraceTurn(b"0", 1.5, 450, 9, 1150, 2, (b"0", b"1", b"3", b"4")),
    ]


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        ({"hash_ids": [0, 1]}, "line 2, hash_ids", "2 blocks of 512 for 1100 tokens"),
        ({"hash_ids": [0, 1, "x"]}, "line 2, hash_ids", "not a list of whole numbers"),
        ({"hash_ids": None}, "line 2, hash_ids", "not a list of whole numbers"),
        ({"input_length": -1}, "line 2, input_length", "not within"),
        ({"output_length": 1.5}, "line 2, output_length", "not a whole number"),
        ({"timestamp": 5}, "line 2, timestamp", "sort by arrival"),
    ],
)
def test_what_is_wrong_with_prefixes_is_named(
    tmp_path: Path, change: dict[str, object], where: str, problem: str
) -> None:
    """File, line and field."""
    row = _request(1100, 50, 0, 1, 2, at_ms=10)
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")

    with pytest.raises(InvalidTrace) as raised:
        list(Trace(path))

    assert str(raised.value).startswith(f"{path}, {where}: ")
    assert problem in str(raised.value)


def test_a_line_without_the_fields_of_the_first_is_refused(tmp_path: Path) -> None:
    """A trace is of one format."""
    path = tmp_path / "mixed.jsonl"
    path.write_text(json.dumps(_request(1, 1, 0)) + '\n{"session_id": 1}\n')

    with pytest.raises(InvalidTrace, match="line 2, timestamp: missing"):
        list(Trace(path))


def test_lengths_become_documents_and_questions(tmp_path: Path) -> None:
    """Every later question finds the document alone; questions of two documents mix by their times."""
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS + "qa,1,1,500,20,7\nqa,1,2,500,30,8\nqa,2,1,600,10,9\n")
    turns = list(Trace(path, pace=ArrivalPace(1.0, think_s=1000.0)))

    assert [turn.session for turn in turns] == [b"qa/1", b"qa/2", b"qa/1"]
    assert [(turn.input_tokens, turn.history_tokens, turn.number) for turn in turns] == [
        (520, 0, 1), (610, 0, 1), (30, 500, 2),
    ]  # fmt: skip
    assert turns[2].arrival_s == turns[0].arrival_s + 1000
    assert list(Trace(path, pace=ArrivalPace(1.0, think_s=1000.0))) == turns


def test_lengths_need_a_rate_and_others_take_none(tmp_path: Path) -> None:
    """Neither is guessed."""
    path = tmp_path / "lengths.csv"
    path.write_text(LENGTHS + "qa,1,1,500,20,7\n")
    with pytest.raises(InvalidTrace, match="line 2: lengths without arrivals"):
        list(Trace(path))

    path.write_text("t_ms,ContextTokens,GeneratedTokens\n0,374,44\n")
    with pytest.raises(InvalidTrace, match="line 2: arrivals are in it"):
        list(Trace(path, pace=ArrivalPace(1.0)))
