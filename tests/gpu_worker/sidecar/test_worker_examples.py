"""The examples that the help of `ctxcache worker` ends with.

Each is run as it stands, but for names and addresses.
"""

import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from server_process import COMMAND_LINE as PROGRAM
from tiny_models import build
from typer.testing import CliRunner
from worker_process import WorkerProcess, examples_of

from ctxcache.cli.failures import ExitCode
from gpu_worker.cli.app import app

COMMANDS = [str(command.name) for command in app.registered_commands]
ELSEWHERE = {"serve", "age", "cost", "llamacpp"}
"""Run by test_worker_metrics.py, test_upkeep.py and `make engines`."""
EXAMPLES = [line for name in COMMANDS if name not in ELSEWHERE for line in examples_of(name)]


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_works(
    line: str, worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a worker listens at the user's socket, and a model lies.

    The first of each command by the real program.
    """
    is_first = any(line == examples_of(name)[0] for name in COMMANDS)
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ctxcache").mkdir()
    (tmp_path / "ctxcache" / "worker.sock").symlink_to(worker.path)
    if "/models/smollm2" in line:
        build("llama").save_pretrained(tmp_path / "smollm2")
    line = line.replace("/models", str(tmp_path)).replace("/run/ctxcache/worker.sock", str(worker.path))
    if is_first:
        command = [*PROGRAM, *shlex.split(line)[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        code, said, problem = done.returncode, done.stdout, done.stderr
    else:
        ran = CliRunner().invoke(app, shlex.split(line)[2:])
        code, said, problem = ran.exit_code, ran.stdout, ran.output

    assert code == 0, problem
    assert said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples(name: str) -> None:
    """They are its own, and begin as it is called."""
    lines = examples_of(name)

    assert lines
    assert all(line.startswith(f"ctxcache worker {name}") for line in lines)


@pytest.mark.skipif(find_spec("xllamacpp") is not None, reason="llama.cpp is installed")
def test_llama_cpp_is_missed_by_the_name_of_its_extra() -> None:
    """One sentence says what to install."""
    (line, *_) = examples_of("llamacpp")
    command = [*PROGRAM, *shlex.split(line)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "ctxcache: llama.cpp is not installed: pip install 'ctxcache[llamacpp]'\n"
