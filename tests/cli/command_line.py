"""The command line as a user meets it: a process with arguments, output and an exit code."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server_process import COMMAND_LINE, without_settings
from typer.testing import CliRunner

from ctxcache.cli.exit_codes import exit_code_of
from ctxcache.cli.main import app
from ctxcache.cli.sentences import sentence
from ctxcache.errors import CacheError

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
    """Run a command with nobody at the terminal."""
    process = subprocess.run(
        [*COMMAND_LINE, *arguments],
        env=without_settings(os.environ) | dict(environment or {}),
        stdin=subprocess.DEVNULL,
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
    """As `ctxcache_json`, which may fail, within this process: a tenth of the time, and not the entry point."""
    ran = CliRunner().invoke(app, ["--target", target, "--output", "json", *arguments])
    if isinstance(ran.exception, CacheError):
        return Ran(exit_code_of(ran.exception), ran.stdout, f"ctxcache: {sentence(ran.exception)}")
    if ran.exception and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return Ran(ran.exit_code, ran.stdout, ran.stderr)
