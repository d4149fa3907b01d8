"""Settings that change while the server runs: by the file, a signal or an operator; all of them or none."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import ctxcache, ctxcache_json
from server_process import ServerProcess

from ctxcache import connect
from ctxcache.settings.knobs import KNOBS

BEFORE = {"max_sessions": 1000, "default_ttl_s": 600, "tail_age_s": 30, "max_concurrent_rpcs": 64}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all; it has a share for one tenant, too."""
    directory = tmp_path_factory.mktemp("reload")
    write(directory / "ctxcache.toml", **BEFORE)
    arguments = ("--config", str(directory / "ctxcache.toml"))
    with ServerProcess(
        directory / "data", *arguments, environment={"CTXCACHE_TENANT_SHARES": "a=0.2"}
    ) as running:
        yield running


@pytest.fixture
def file(server: ServerProcess) -> Path:
    """The server's settings, as they are before each test."""
    path = Path(server.ready["data_directory"]).parent / "ctxcache.toml"
    write(path, **BEFORE)
    with connect(server.target) as client:
        client.admin.reload_settings()
    return path


def write(path: Path, **settings: object) -> None:
    """Write a settings' file."""
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))


def values(server: ServerProcess) -> dict[str, object]:
    """The settings that the server runs with."""
    with connect(server.target) as client:
        return {s.name: json.loads(s.value_json) for s in client.admin.settings()}


def until(holds: Callable[[], bool]) -> None:
    """Wait for the server to get there, asking it again and again."""
    while not holds():
        pass


@pytest.mark.usefixtures("file")
def test_a_server_says_what_it_runs_with(server: ServerProcess) -> None:
    """Every setting, in the order of the document, and which of them are live."""
    found = ctxcache_json(server.target, "config", "running")

    assert list(found) == list(KNOBS)
    assert {name: found[name]["value"] for name in BEFORE} == BEFORE
    assert [name for name in found if found[name]["can_reload"]] == [
        name for name, knob in KNOBS.items() if knob.can_reload
    ]
    assert "max_sessions" in ctxcache("--target", server.target, "config", "running").stdout


def test_what_is_live_changes_and_the_rest_is_named(server: ServerProcess, file: Path) -> None:
    """A new session has the new life; what needs a restart is said, each time."""
    write(file, **BEFORE | {"max_sessions": 2000, "default_ttl_s": 900, "max_concurrent_rpcs": 65})

    first = ctxcache_json(server.target, "config", "reload")
    second = ctxcache_json(server.target, "config", "reload")

    assert first == {"changed": ["default_ttl_s", "max_sessions"], "pending": ["max_concurrent_rpcs"]}
    assert second == {"changed": [], "pending": ["max_concurrent_rpcs"]}
    assert values(server)["max_sessions"] == 2000
    assert values(server)["max_concurrent_rpcs"] == 64


def test_a_signal_does_the_same(server: ServerProcess, file: Path) -> None:
    """SIGHUP, which ends a process that does not know it."""
    write(file, **BEFORE | {"tail_age_s": 5})
    server.signal(signal.SIGHUP)
    until(lambda: "settings_reloaded changed=tail_age_s" in server.stderr)
    assert values(server)["tail_age_s"] == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_sessions = 0\n", "max_sessions: 1 is the least"),
        ("max_sesions = 5\n", "did you mean max_sessions?"),
        ("= 5", "is not TOML"),
        ("dirty_watermark = 0.9\nmax_sessions = 5\n", "is below dirty_watermark"),
    ],
)
def test_what_cannot_be_changes_nothing(server: ServerProcess, file: Path, text: str, said: str) -> None:
    """The operator hears why; after a signal the log has it; all is as it was."""
    before = values(server)
    file.write_text(text)

    ran = ctxcache("--target", server.target, "config", "reload")
    count = server.stderr.count("settings_refused error=")
    server.signal(signal.SIGHUP)
    until(lambda: server.stderr.count("settings_refused error=") > count)

    assert ran.exit_code == 11
    assert said in ran.stderr
    assert values(server) == before


@pytest.mark.usefixtures("file")
def test_a_reload_is_audited(server: ServerProcess) -> None:
    """The audit log names the operator and the outcome; looking is not written down."""
    before = len(server.stderr.splitlines())
    values(server)
    with connect(server.target) as client:
        client.admin.reload_settings()
    lines = [line for line in server.stderr.splitlines()[before:] if "ctxcache.audit" in line]
    assert len(lines) == 1
    assert "ReloadSettings" in lines[0]
