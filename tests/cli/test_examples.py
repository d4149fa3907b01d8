"""The examples that help ends with: each is run as it stands, in a process of its own."""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import TIMEOUT_S, ctxcache, in_bash
from operated import SESSION, operated_server, prepare
from recorded_calls import CALLS
from server_process import FORKED, ServerProcess
from stored import store_session
from stored_model import stored_model

from ctxcache import connect
from ctxcache.cli.commands import COMMANDS as LISTED
from ctxcache.cli.commands import imported
from ctxcache.cli.documents import TITLE
from ctxcache.cli.main import app
from tests.nursery import shared, without_settings

PLUGINS = {("bench",), ("demo",), ("trace", "replay"), ("worker",)}
"""Commands of the lab and of gpu_worker: tests/lab and test_worker_command.py run these."""
SMALL = {
    "CTXCACHE_ARENA_SIZE_BYTES": "64MiB",
    "CTXCACHE_SSD_SIZE_BYTES": "64MiB",
    "CTXCACHE_LISTEN": "127.0.0.1:0",
    "CTXCACHE_METRICS_LISTEN": "",
}
TRACE = "session_id,arrival_ms,new_input_tokens,output_tokens\na,0,10,5\nb,1000,10,5\na,2000,10,5\n"
Path_ = tuple[str, ...]


def _commands(command: Any, path: Path_) -> Iterator[tuple[Path_, str]]:
    """Every command that has no others below it, and what its help ends with."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command.epilog or ""
    for name, one in (below or {}).items():
        if (*path, name)[1:] not in PLUGINS:
            yield from _commands(one, (*path, name))


PROGRAM: Any = typer.main.get_command(app)
COMMANDS = {("ctxcache",): PROGRAM.epilog or ""} | {
    path: epilog for name in LISTED for path, epilog in _commands(imported(name), ("ctxcache", name))
}
EXAMPLES = [
    (path, line)
    for path, epilog in COMMANDS.items()
    if epilog.startswith(TITLE)
    for line in epilog.split("\n\n")[1:]
]


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`ctxcache ((?:[a-z][a-z-]* ?)+)")
"""A command within a sentence, up to its first argument that is no word."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_that_a_page_names_is_there(page: Path) -> None:
    """Down to the command of a group; words behind it are arguments."""
    missing = []
    for words in {tuple(match.split()) for match in NAMED.findall(page.read_text())}:
        if any(words[: len(plugin)] == plugin for plugin in PLUGINS):
            continue
        below: Any = dict.fromkeys(LISTED)
        for depth, word in enumerate(words):
            if word not in below:
                missing.append(" ".join(words))
                break
            command = imported(word) if depth == 0 else below[word]
            below = getattr(command, "commands", None)
            if below is None:
                break
    assert missing == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with shares and two SSD paths."""
    with operated_server(tmp_path_factory.mktemp("examples")) as started:
        yield started


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files lie that examples name.

    A configuration, a trace, and the directory of a server that has ended.
    """
    found = tmp_path_factory.mktemp("place")
    (found / "trace.csv").write_text(TRACE)
    (found / "ctxcache.toml").write_text('data_directory = "configured"\n')
    (found / "calls.jsonl").write_text(CALLS)
    (found / "prompt.json").write_text(str(list(range(100))))
    (found / "state").mkdir()
    with ServerProcess(found / "state" / "ctxcache") as ended:
        store_session(ended.target, SESSION)
        ended.terminate()
    return found


@pytest.mark.parametrize(("path", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_works(
    path: Path_,
    line: str,
    server: ServerProcess,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends well and says something, on a server with one session; /ssd is one of the server's paths."""
    prepare(server.target)
    line = line.replace("/ssd", str(server.data_directory.parent / "ssd"))
    line = line.replace("/var/lib/ctxcache", str(place / "state" / "ctxcache"))
    line = line.replace("127.0.0.1:7420", server.target).replace("--duration 1h", "--duration 0.3s")
    # A day of so many is replayed five times.
    line = line.replace("--users 10000", "--users 100").replace("--users 500", "--users 50")
    line = (
        line.replace("s3://kv/fleet", f"file://{tmp_path}/bucket")
        .replace("/new", str(tmp_path / "new"))
        .replace("monday", str(tmp_path / "monday"))
    )
    environment = SMALL | {
        "CTXCACHE_TARGET": server.target,
        "XDG_STATE_HOME": str(place / "state"),
        "HOME": str(place),
    }
    monkeypatch.chdir(place)
    for file in ("chat-17.ctxarchive", "all.ctxarchive") if path == ("ctxcache", "import") else ():
        ctxcache("export", SESSION, "--to", file, "--force", environment=environment)
    if "import" in line and "monday" in line:
        ctxcache("export", "--store", "--to", f"{tmp_path}/monday.ctxarchive", environment=environment)
    with connect(server.target, access="local") as reader:
        if line.startswith("ctxcache lease"):
            model = stored_model(reader, f"sessions/{SESSION}")
            # Kept: a read that nobody has ends its lease.
            rows = reader.sessions.open(f"sessions/{SESSION}", model).read()
            assert rows.token_count
            line = line.replace("17", str(next(reader.admin.list_leases()).lease_id))
        if path == ("ctxcache", "serve"):
            code, said = _served(line, environment)
        else:
            run = in_bash if "--install-completion" in line else ctxcache
            ran = run(*shlex.split(line)[1:], environment=environment)
            code, said = ran.exit_code, ran.stdout + ran.stderr

    assert code == 0, said
    assert said


def _served(line: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a server, and ask it to end as soon as it is ready."""
    given = without_settings(os.environ) | dict(environment)
    with tempfile.TemporaryFile("w+") as stderr:
        process = shared().start(FORKED, shlex.split(line)[1:], given, stderr=stderr.fileno())
        assert process.stdout is not None
        try:
            said = ""
            while " is ready " not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            process.terminate()
            return process.wait(TIMEOUT_S), said + process.stdout.read()
        finally:
            process.kill()
            process.stdout.close()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_examples(path: Path_) -> None:
    """They are its own, and begin as it is called."""
    lines = COMMANDS[path].split("\n\n")

    assert lines[0] == TITLE
    assert len(lines) > 1
    assert all(line.startswith(" ".join(path)) for line in lines[1:])


def test_the_plugins_are_those_that_are_tested_elsewhere() -> None:
    """None else escapes the tests above."""
    names = {(name,) for name in PROGRAM.commands} | {("trace", name) for name in imported("trace").commands}

    assert names - {path[1 : 1 + count] for path in COMMANDS for count in (1, 2)} == PLUGINS


def test_the_table_of_commands_says_what_each_command_says_of_itself() -> None:
    """A command that is only listed is described by the first sentence of its own help."""
    for name, listed in LISTED.items():
        first = (imported(name).help or "").split("\n\n")[0]
        assert " ".join(first.split()) == listed.help, name
