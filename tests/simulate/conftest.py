"""A small trace, made here: half the sessions come once, the others return every few minutes."""

from pathlib import Path

import pytest

HEADER = "session_id,turn,arrival_ms,new_input_tokens,output_tokens,history_tokens\n"


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """800 turns: 400 sessions of one turn, 40 of ten."""
    rows = [(1000 * number, f"once-{number}", 1, 400, 100, 0) for number in range(400)]
    rows += [
        (1000 * session + 40_000 * turn + 500, f"often-{session}", turn + 1, 20, 30, 50 * turn)
        for session in range(40)
        for turn in range(10)
    ]
    lines = (f"{s},{t},{at},{new},{out},{old}\n" for at, s, t, new, out, old in sorted(rows))
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(lines))
    return path
