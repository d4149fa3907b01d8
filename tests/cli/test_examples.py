"""The examples that help ends with: each is run as it stands, in this process, against a server."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from operated import SESSION, operated_server, prepare
from server_process import ServerProcess
from typer.testing import CliRunner

from ctxcache.cli.examples import TITLE
from ctxcache.cli.main import app
from ctxcache.client import Client

OFFLINE = {"serve", "rebuild", "doctor", "bench", "simulate", "config", "token", "demo", "worker"}
"""Those that ask no server, and what other packages bring."""


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command that has no others below it, and what its help ends with."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command.epilog or ""
        return
    for name, one in below.items():
        yield from _commands(one, (*path, name))


COMMANDS = dict(_commands(typer.main.get_command(app), ("ctxcache",)))
EXAMPLES = [
    line for epilog in COMMANDS.values() if epilog.startswith(TITLE) for line in epilog.split("\n\n")[1:]
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with shares and two SSD paths."""
    with operated_server(tmp_path_factory.mktemp("examples")) as started:
        yield started


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_works(line: str, server: ServerProcess) -> None:
    """It ends well and says something, on a server with one session; /ssd is one of the server's paths."""
    prepare(server.target)
    line = line.replace("/ssd", str(server.data_directory.parent / "ssd"))
    with Client(server.target, access="local") as reader:
        if line.startswith("ctxcache lease"):
            reader.read(f"sessions/{SESSION}")
            line = line.replace("17", str(next(reader.list_leases()).lease_id))
        ran = CliRunner().invoke(app, shlex.split(line)[1:], env={"CTXCACHE_TARGET": server.target})

    assert ran.exit_code == 0, ran.output
    assert ran.stdout


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_of_a_server_has_examples(path: tuple[str, ...]) -> None:
    """Of its own, that begin as it is called."""
    if path[1] in OFFLINE:
        return
    lines = COMMANDS[path].split("\n\n")

    assert lines[0] == TITLE
    assert len(lines) > 1
    assert all(line.startswith(" ".join(path)) for line in lines[1:])
