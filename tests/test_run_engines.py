"""`make engines`: one table of all files, also where one of them fails or ends its process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_engines.py"
TESTS = "tests/engines"

FILES = {
    "vllm_a.py": "def test_a():\n    pass\n",
    "vllm_b.py": "import os\ndef test_b():\n    os._exit(7)\n",
    "vllm_c.py": "import pytest\ndef test_c():\n    assert 0\ndef test_d():\n    pytest.skip('no')\n",
    "vllm_d.py": "def test_named():\n    pass\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A repository whose environment of vLLM is this one, and that has no other."""
    for name in ("tests/engines", "scripts", ".venv-vllm/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.py").write_text("import sys; sys.exit(sys.argv[1:] != ['vllm'])")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return tmp_path


def run(place: Path, *words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and the words of the table's lines by their first, without the time."""
    command = [sys.executable, str(place / "scripts" / SCRIPT.name), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.rpartition("seconds\n")[2].splitlines()]
    return done.returncode, {line[0]: [*line[1:4], " ".join(line[5:])] for line in lines if len(line) > 4}


def test_every_file_has_a_line(place: Path) -> None:
    """Of one that ends its process too, and those behind it run."""
    for name, text in FILES.items():
        (place / TESTS / name).write_text(text)
    code, rows = run(place, "vllm", "--")
    assert code == 1
    assert {name: row for name, row in rows.items() if name.startswith("vllm")} == {
        "vllm_a": ["1", "0", "0", "passed"],
        "vllm_b": ["0", "0", "0", "ended by 7"],
        "vllm_c": ["0", "1", "1", "failed"],
        "vllm_d": ["1", "0", "0", "passed"],
    }


def test_arguments_go_to_pytest(place: Path) -> None:
    """Where they leave some tests, those decide; where they leave none, that is a failure."""
    for name in ("vllm_a.py", "vllm_d.py"):
        (place / TESTS / name).write_text(FILES[name])
    code, rows = run(place, "vllm", "--", "-k", "named")
    assert (code, rows["vllm_a"][-1], rows["vllm_d"][-1]) == (0, "none selected", "passed")
    assert run(place, "vllm", "--", "-k", "nobody")[0] == 1


def test_an_environment_that_cannot_be_made_is_a_failure(place: Path) -> None:
    """The table says so, no test of it runs, and others do."""
    for name in ("sglang_a.py", "vllm_a.py"):
        (place / TESTS / name).write_text(FILES["vllm_a.py"])
    code, rows = run(place, "sglang", "vllm")
    assert code == 1
    assert "sglang_a" not in rows
    assert rows["vllm_a"][-1] == "passed"


def test_an_unknown_part_is_refused(place: Path) -> None:
    """Before anything is made."""
    assert run(place, "nobody") == (2, {})
