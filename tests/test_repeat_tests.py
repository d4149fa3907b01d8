"""`make stable`: names what fails, ends what it started, and goes on where it was interrupted."""

import json
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "repeat_tests.py"
# Fails in the second run only; the file counts the runs.
SECOND_FAILS = """
echo run >> {count}
test "$(wc -l < {count})" != 2 && exit 0
echo 'FAILED tests/x.py::test_y[a b] - AssertionError: assert 1 == 2'
echo 'ERROR  a line of a log'
exit 1
"""


def _start(logs: Path, *arguments: str, script: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPT), "--logs", str(logs), *arguments, "--", "sh", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _lines(logs: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (logs / "runs.jsonl").read_text().splitlines()]


def test_a_test_that_fails_once_is_named(tmp_path: Path) -> None:
    """With all of its parameters; two of four runs are beside busy loops."""
    run = _start(
        tmp_path, "--runs", "4", "--busy-runs", "2", script=SECOND_FAILS.format(count=tmp_path / "n")
    )
    said, _ = run.communicate()

    assert run.returncode == 1
    assert said.splitlines() == [
        "quiet: 2 of 2 runs green",
        "busy: 1 of 2 runs green",
        "  1x tests/x.py::test_y[a b]",
        "NOT green: 3 of 4 runs, 4 wanted",
    ]
    assert [line["is_busy"] for line in _lines(tmp_path)] == [False, True, False, True]


def test_an_interrupted_session_goes_on(tmp_path: Path) -> None:
    """Runs that ended count; what the interrupted one had started is gone with it."""
    pids, go = tmp_path / "pids", tmp_path / "go"
    script = f"echo $$ >> {pids}; test $(wc -l < {pids}) != 2 || test -e {go} || exec sleep 600"
    with _start(tmp_path, "--runs", "3", "--busy-runs", "0", script=script) as first:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("2/3"))
        while len(pids.read_text().split()) < 2:
            pass
        first.send_signal(signal.SIGTERM)
        assert first.stdout is not None
        assert "green so far: 1 of 1 runs, 3 wanted" in first.stdout.read()
    assert first.returncode == 130
    assert not Path("/proc", pids.read_text().split()[1]).exists()
    assert len(_lines(tmp_path)) == 1

    go.touch()
    second = _start(tmp_path, "--runs", "3", "--busy-runs", "0", "--resume", script=script)
    said, shown = second.communicate()

    assert (second.returncode, len(_lines(tmp_path)), len(pids.read_text().split())) == (0, 3, 4)
    assert "green: 3 of 3 runs, 3 wanted" in said
    assert not shown.startswith("1/3")


def test_another_command_is_not_gone_on_with(tmp_path: Path) -> None:
    """Runs of one thing say nothing about another; nor is anything lost of them."""
    _start(tmp_path, "--runs", "1", "--busy-runs", "0", script="true").communicate()
    before = _lines(tmp_path)
    other = _start(tmp_path, "--runs", "2", "--busy-runs", "0", "--resume", script="false")
    _, shown = other.communicate()

    assert other.returncode == 2
    assert "another commit or command" in shown
    assert _lines(tmp_path) == before
