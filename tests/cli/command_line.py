"""The command line as a user meets it: a process with arguments, output and an exit code.

The process is forked by a nursery, which saves the imports of each start. Tests of entry points, imports,
signals and broken pipes start processes anew, as `COMMAND_LINE` says.
"""

import json
import os
import pty
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server_process import COMMAND_LINE, FORKED

from tests.nursery import shared, without_settings

TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON line on standard output."""
        (line,) = self.stdout.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document

    @property
    def sentence(self) -> str:
        """The one line on standard error."""
        (line,) = self.stderr.splitlines()
        return line


def ctxcache(*arguments: str, environment: Mapping[str, str] | None = None) -> Ran:
    """Run a command; there is no terminal, and standard input is empty."""
    given = without_settings(os.environ) | dict(environment or {})
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = shared().start(FORKED, arguments, given, stdout=stdout.fileno(), stderr=stderr.fileno())
        try:
            exit_code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return Ran(exit_code, stdout.read(), stderr.read())


def started_anew(*arguments: str, environment: Mapping[str, str] | None = None) -> Ran:
    """As `ctxcache`, by a new interpreter, for what an environment changes of one."""
    return _run([*COMMAND_LINE, *arguments], environment)


def in_bash(*arguments: str, environment: Mapping[str, str] | None = None) -> Ran:
    """As `ctxcache`, for a user of bash: a command that asks which shell it is in looks at its ancestors."""
    # Behind the last command of a line bash would not wait, but become that command.
    return _run(["bash", "-c", f"{shlex.join([*COMMAND_LINE, *arguments])}; exit $?"], environment)


def at_terminal(answer: str, *arguments: str) -> Ran:
    """As `ctxcache`, for a user who sits at a terminal and types an answer."""
    terminal, other_end = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        return _run([*COMMAND_LINE, *arguments], None, stdin=other_end)
    finally:
        os.close(terminal)
        os.close(other_end)


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None, *, stdin: int = subprocess.DEVNULL
) -> Ran:
    process = subprocess.run(
        command,
        env=without_settings(os.environ) | dict(environment or {}),
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Ran(process.returncode, process.stdout, process.stderr)


def ctxcache_json(target: str, *arguments: str) -> dict[str, Any]:
    """Run an online command that must succeed; return the document that it prints."""
    ran = ctxcache("--target", target, "--output", "json", *arguments)
    if ran.exit_code:
        raise AssertionError(ran.stderr)
    return ran.document


def asked(target: str, *arguments: str) -> Ran:
    """As `ctxcache_json`, which may fail."""
    return ctxcache("--target", target, "--output", "json", *arguments)
