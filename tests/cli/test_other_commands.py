"""Models, statistics, version and help."""

import inspect
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from command_line import ctxcache, ctxcache_json
from server_process import ServerProcess
from stored import connected, model_spec, store_session
from typer.main import get_command

from ctxcache import __version__
from ctxcache.cli.commands import spare_models
from ctxcache.cli.failures import ExitCode, UsageFailure
from ctxcache.cli.options import with_signature
from ctxcache.settings.words import plain_words
from ctxcache.v1 import session_pb2, session_pb2_grpc
from ctxcache.v1.admin_pb2 import Stats, TenantUse

HEAVY = ("torch", "rocksdict", "pydantic", "grpc", "ctxcache.server.server", "ctxcache.client")
SERVER_ONLY = ("torch", "rocksdict", "ctxcache.settings.config", "ctxcache.server.server")


def test_models_are_listed_and_shown(running_server: ServerProcess) -> None:
    """A registered model appears with its fingerprint in hex and its streams by name."""
    store_session(running_server.target, "of-a-model", token_count=0, model_id="modelled")

    listed = ctxcache_json(running_server.target, "model", "list")
    shown = ctxcache_json(running_server.target, "model", "show", "modelled")
    table = ctxcache("--target", running_server.target, "model", "show", "models/modelled")

    assert shown in listed["models"]
    assert shown["fingerprint"] == model_spec("modelled").fingerprint().hex()
    assert "DTYPE_FLOAT16" in {spec["dtype"] for spec in shown["streams"]}
    assert "TinyForCausalLM" in table.stdout


def test_a_model_that_is_not_there_is_not_found(running_server: ServerProcess) -> None:
    """An unknown model exits with 3."""
    ran = ctxcache("--target", running_server.target, "model", "show", "nobody")

    assert ran.exit_code == ExitCode.NOT_FOUND


def test_stats_have_the_fields_of_the_proto(running_server: ServerProcess) -> None:
    """JSON statistics have the proto's names, both tiers and the server's version."""
    stats = ctxcache_json(running_server.target, "stats")

    assert list(stats) == [field.name for field in Stats.DESCRIPTOR.fields]
    assert [tier["tier"] for tier in stats["tiers"]] == ["TIER_DRAM", "TIER_SSD"]
    assert stats["version"] == __version__


def test_stats_are_a_table_with_human_sizes(running_server: ServerProcess) -> None:
    """People see 64.0 MiB, not 67108864; the Unix socket answers as TCP does."""
    ran = ctxcache("--target", running_server.unix_target, "stats")

    assert ran.exit_code == ExitCode.OK
    assert "64.0 MiB" in ran.stdout


def test_tenants_are_listed_as_the_proto_says(running_server: ServerProcess) -> None:
    """Everybody is the same tenant without a share, which has what the sessions have; people see a table."""
    store_session(running_server.target, "of-a-tenant")
    try:
        listed = ctxcache_json(running_server.target, "tenants")
        ran = ctxcache("--target", running_server.target, "tenants")
    finally:
        ctxcache("--target", running_server.target, "session", "delete", "of-a-tenant", "--yes")

    (use,) = listed["tenants"]
    assert set(use) <= {field.name for field in TenantUse.DESCRIPTOR.fields}
    assert (use["tenant"], use["guaranteed_ssd_bytes"]) == ("default", 0)
    assert use["session_count"] >= 1
    assert use["kept_bytes"] > 0
    assert ran.exit_code == ExitCode.OK
    assert ran.stdout.splitlines()[1].split()[0] == "default"


def test_version_needs_no_server() -> None:
    """The version is this program's own."""
    assert ctxcache("version").stdout == f"ctxcache {__version__}\n"
    assert ctxcache("--version").stdout == f"ctxcache {__version__}\n"
    assert ctxcache("--output", "json", "version").document == {"version": __version__}


def test_the_servers_version_is_asked_for(running_server: ServerProcess) -> None:
    """Beside this program's."""
    ran = ctxcache("--target", running_server.target, "version", "--server", "-o", "json")
    assert ran.document == {"version": __version__, "server_version": __version__}


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    """--help names all commands, the demo too, and is fast because it imports none of their libraries."""
    ran = _imports_of("--help")

    assert not ran & set(HEAVY)
    listed = ctxcache("--help").stdout
    assert all(
        f" {name} " in listed
        for name in ("serve", "doctor", "session", "model", "stats", "version", "demo", "bench")
    )


@pytest.mark.parametrize(
    "words",
    [("version",), ("config", "show"), ("config", "check"), ("config", "reference")],
    ids=" ".join,
)
def test_commands_that_ask_no_server_import_no_client(words: tuple[str, ...]) -> None:
    """They start without gRPC and protobuf, which take longer to import than all else together."""
    imported = _imports_of(*words)

    assert "ctxcache.cli.call" in imported
    assert not imported & {"grpc", "google.protobuf", "ctxcache.client.wire", "ctxcache.client.sessions"}


def test_online_commands_import_no_server() -> None:
    """A command that asks a server brings none along."""
    imported = _imports_of("--target", "127.0.0.1:1", "session", "show", "x")

    assert "ctxcache.client.wire" in imported
    assert not imported & set(SERVER_ONLY)


@pytest.mark.parametrize("output", ["json", "table"])
def test_a_replay_imports_what_it_needs(tmp_path: Path, output: str) -> None:
    """Packages that draw tables or run an event loop take longer to import than a short replay takes."""
    trace = tmp_path / "trace.csv"
    trace.write_text("session_id,arrival_ms,new_input_tokens,output_tokens\na,0,10,5\n")
    imported = _imports_of("simulate", str(trace), "--policies", "lru", "-o", output)

    assert "ctxcache.simulate.replay" in imported
    assert not imported & {*HEAVY, "asyncio", "google.protobuf", "matplotlib"}
    assert ("rich" in imported) == (output == "table")


class Colour(Enum):
    """Names that a parameter may have."""

    RED = "red"
    GREEN = "green"


KINDS: dict[str, tuple[Any, Any]] = {
    "text": (str, typer.Option("none")),
    "needed": (str, typer.Option()),
    "number": (int, typer.Option(3, min=1, max=9)),
    "share": (float, typer.Option(0.5, min=0, max=1)),
    "flag": (bool, typer.Option(default=False)),
    "colour": (Colour, typer.Option(Colour.RED)),
    "colour_or_none": (Colour | None, typer.Option(None)),
    "path": (Path | None, typer.Option(None)),
    "kept": (Path | None, typer.Option(None, exists=True)),
    "no_directory": (Path | None, typer.Option(None, dir_okay=False)),
    "no_file": (Path | None, typer.Option(None, file_okay=False)),
    "several": (list[str], typer.Option([])),
}


WORDS = ("", "red", "RED", "7", "0", "10", "0.25", "1.5", "nan", "true", "-", ".", "FILE", "absent", "é")


@pytest.mark.parametrize("name", KINDS)
def test_values_are_what_typer_makes_of_them(tmp_path: Path, name: str) -> None:
    """Also where its models are spared, and so is what it says of a value that is wrong."""
    file = tmp_path / "file"
    file.touch()
    option = f"--{name.replace('_', '-')}"
    for word in WORDS:
        said = [option] if name == "flag" else [option, str(file) if word == "FILE" else word]
        assert _told(name, said, is_spared=True) == _told(name, said, is_spared=False)
    assert _told(name, [], is_spared=True) == _told(name, [], is_spared=False)


def _told(name: str, said: list[str], *, is_spared: bool) -> object:
    """The value that a command gets, with its type, or what is said in its place."""
    kind, option = KINDS[name]
    given: list[object] = []
    command = with_signature(
        lambda **values: given.extend([type(values[name]), values[name]]),
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)],
        name="command",
        doc=None,
    )
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    made = get_command(app)
    if is_spared:
        spare_models(made)
    try:
        made.main(said, prog_name="command", standalone_mode=False)
    except UsageFailure as failure:
        # Refused alike, in our words.
        return tuple(plain_words(said) for said in (str(failure), getattr(failure, "message", "")))
    assert given
    return given


def test_completion_is_printed_for_a_shell() -> None:
    """--show-completion prints a script for the shell that is named."""
    ran = ctxcache(
        "--show-completion", "bash", environment={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )

    assert ran.exit_code == ExitCode.OK
    assert "_CTXCACHE_COMPLETE" in ran.stdout or "COMPLETE" in ran.stdout


def _imports_of(*arguments: str) -> set[str]:
    """Which modules a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "ctxcache.cli.main", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if "import time:" in line}


def test_why_miss_explains(running_server: ServerProcess) -> None:
    """A sentence and what happened for people, the proto's names for scripts."""
    store_session(running_server.target, "missed")
    with connected(running_server.target) as client:
        client.sessions.open("sessions/missed").keep_first(1)
        client.sessions.open("sessions/missed").delete()

    found = ctxcache_json(running_server.target, "why-miss", "missed")
    ran = ctxcache("--target", running_server.target, "why-miss", "sessions/missed")
    never = ctxcache("--target", running_server.target, "why-miss", "nothing")

    assert found["is_there"] is False
    assert found["reason"] == "MISS_EVENT_DELETED"
    assert [one["event"] for one in found["happenings"]] == ["MISS_EVENT_TRUNCATED", "MISS_EVENT_DELETED"]
    assert "is not there: it was deleted." in ran.stdout
    assert "by request" in ran.stdout
    assert "was never stored" in never.stdout


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE_PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


def test_why_miss_is_asked_by_a_request(running_server: ServerProcess) -> None:
    """By its trace's id or all of its traceparent; what it missed, and why the last of that was missed."""
    name = store_session(running_server.target, "missed-by-a-request")
    with grpc.insecure_channel(running_server.target) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)
        sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=name))
        with pytest.raises(grpc.RpcError):
            sessions.GetSession(
                session_pb2.GetSessionRequest(name=name), metadata=(("traceparent", TRACE_PARENT),)
            )

    found = ctxcache_json(running_server.target, "why-miss", "--request", TRACE_ID)
    ran = ctxcache("--target", running_server.target, "why-miss", "--request", TRACE_PARENT)
    other = ctxcache("--target", running_server.target, "why-miss", "--request", "a" * 32)

    assert [(one["session"], one["access"], one["result"]) for one in found["misses"]] == [
        (name, "lookup", "deleted")
    ]
    assert (found["name"], found["reason"]) == (name, "MISS_EVENT_DELETED")
    assert f"{name} of tenant default is not there: it was deleted." in ran.stdout
    assert "ASKED BY" in ran.stdout
    assert "no miss of aaaa" in other.stdout
    for wrong in ((), ("x", "--request", TRACE_ID), ("--request", "chat-17")):
        assert ctxcache("--target", running_server.target, "why-miss", *wrong).exit_code == ExitCode.USAGE
