"""Exit codes: one for every error class, and the same table for people."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from server_process import COMMAND_LINE

from ctxcache import errors
from ctxcache.cli.failures import ExitCode, exit_code_of, sentence
from ctxcache.errors import CacheError
from tests.nursery import without_settings

COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"
CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, CacheError)
]


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda error_class: error_class.__name__)
def test_every_error_class_has_an_exit_code(error_class: type[CacheError]) -> None:
    """A new class of errors must choose a code; only the base is INTERNAL, and none is OK or USAGE."""
    code = exit_code_of(error_class())

    assert (code is ExitCode.INTERNAL) == (error_class is CacheError)
    assert code not in {ExitCode.OK, ExitCode.USAGE}


def test_a_class_that_is_not_listed_exits_as_its_base() -> None:
    """An error is never success, however new it is."""

    class Newer(errors.TierFailure):
        """An error of a later version."""

    assert exit_code_of(Newer()) is ExitCode.DEVICE


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda error_class: error_class.__name__)
def test_every_error_is_one_line_that_ends_with_its_reason(error_class: type[CacheError]) -> None:
    """Even a detail of several lines is one sentence."""
    line = sentence(error_class("first\n  second"))

    assert line.startswith("first second")
    assert line.endswith(f"({error_class.reason})")


def test_the_documented_table_is_the_table() -> None:
    """docs/commands.md lists every code with its name and exactly the reasons that it stands for."""
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (.*?) \|", COMMANDS.read_text(), re.MULTILINE)
    documented = {int(code): (name, set(re.findall(r"`([A-Z_]+)`", reasons))) for code, name, reasons in rows}

    expected = {
        int(code): (code.name, {c.reason for c in CLASSES if exit_code_of(c()) is code}) for code in ExitCode
    }
    assert documented == expected


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("config", "show", "--output", "json")])
def test_a_full_device_behind_the_output_is_a_sentence(arguments: tuple[str, ...]) -> None:
    """Whether it is noticed while something is printed, or at the end."""
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [*COMMAND_LINE, *arguments],
            env=without_settings(os.environ),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    (line,) = ran.stderr.splitlines()
    assert "standard output: No space left on device" in line
    assert "FILE_FULL" in line
    assert ran.returncode == ExitCode.RESOURCE_EXHAUSTED
