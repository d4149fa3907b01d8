"""Operators' commands on a running server, through the real binary.

Tiers, leases, shares, the drain, and what goes on.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import typer
from command_line import ctxcache, ctxcache_json
from operated import SESSION, operated_server, prepare
from server_process import COMMAND_LINE, ServerProcess
from stored import store_session
from stored_model import stored_model
from typer.testing import CliRunner

from ctxcache import connect
from ctxcache.cli.call import CliCall, watched
from ctxcache.cli.documents import as_yaml
from ctxcache.cli.failures import ExitCode
from ctxcache.errors import LeaseNotFound
from tests.nursery import without_settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with shares and two SSD paths."""
    with operated_server(tmp_path_factory.mktemp("operated")) as started:
        yield started


@pytest.fixture
def target(server: ServerProcess) -> str:
    """Its address; it has one session."""
    prepare(server.target)
    return str(server.target)


def test_an_ssd_path_rests_and_is_opened(target: str, server: ServerProcess) -> None:
    """The state and why are told; the last path stays open."""
    ssd, other = (str(server.data_directory.parent / name) for name in ("ssd", "other"))
    rested = ctxcache_json(target, "tier", "rest", ssd)
    last = ctxcache("--target", target, "tier", "rest", other)
    listed = ctxcache("--target", target, "tier", "list")
    opened = ctxcache_json(target, "tier", "open", ssd)

    assert (rested["state"], opened["state"]) == ("PATH_STATE_RESTING", "PATH_STATE_OPEN")
    assert last.exit_code == ExitCode.INVALID_ARGUMENT
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["TIER", "DRAM", "SSD", "SSD"]
    assert "an operator took it out of use" in listed.stdout
    assert ctxcache("--target", target, "tier", "show", "/nowhere").exit_code == ExitCode.USAGE


def test_a_lease_is_found_and_taken_back(target: str) -> None:
    """Its reader learns of it before it could read another's bytes."""
    with connect(target, access="local") as reader:
        held = reader.sessions.open(f"sessions/{SESSION}", stored_model(reader, f"sessions/{SESSION}")).read()
        (lease,) = ctxcache_json(target, "lease", "list")["leases"]
        shown = ctxcache("--target", target, "lease", "show", str(lease["lease_id"]))
        held.array(held.streams[0])
        ended = ctxcache_json(target, "lease", "revoke", str(lease["lease_id"]))

        others = ctxcache_json(target, "lease", "list", "--tenant", "other")["leases"]

        assert others == []
        assert lease["session"] == f"sessions/{SESSION}"
        assert lease["pinned_bytes"] > 0
        assert "local client" in shown.stdout
        assert ended == {"ended_lease_count": 1}
        with pytest.raises(LeaseNotFound):
            held.array(held.streams[0])
    again = ctxcache("--target", target, "lease", "revoke", str(lease["lease_id"]))
    assert again.exit_code == ExitCode.NOT_FOUND


def test_a_share_is_changed(target: str) -> None:
    """Only a tenant that has one can have it changed."""
    use = ctxcache_json(target, "quota", "set", "default", "--share", "0.25", "--limit", "0.5")
    nobody = ctxcache("--target", target, "quota", "set", "nobody", "--limit", "0.5")

    assert (use["guaranteed_ssd_bytes"], use["limit_bytes"]) == (32 << 20, 64 << 20)
    assert nobody.exit_code == ExitCode.INVALID_ARGUMENT
    assert ctxcache("--target", target, "quota", "set", "default").exit_code == ExitCode.USAGE


def test_a_drained_server_takes_no_work_until_it_is_told(target: str) -> None:
    """All is on SSD then; operators are answered all the while."""
    serving = ctxcache("--target", target, "health")
    drained = ctxcache_json(target, "drain")
    not_serving = ctxcache("--target", target, "health")
    refused = ctxcache("--target", target, "session", "show", SESSION)
    undrained = ctxcache("--target", target, "drain", "--undrain")
    shown = ctxcache_json(target, "session", "show", SESSION)

    assert (drained["is_done"], drained["dirty_bytes"]) == (True, 0)
    assert refused.exit_code == ExitCode.UNAVAILABLE
    assert "(DRAINING)" in refused.sentence
    assert undrained.stdout == "work is taken again\n"
    assert (serving.stdout, serving.exit_code) == ("serving\n", ExitCode.OK)
    assert (not_serving.stdout, not_serving.exit_code) == ("not serving\n", ExitCode.UNAVAILABLE)
    assert shown["durable_token_count"] == shown["token_count"] > 0


def test_sessions_and_models_are_given_up(target: str) -> None:
    """`why-miss` knows; a model goes when its sessions have."""
    used = ctxcache("--target", target, "model", "delete", "tiny")
    evicted = ctxcache_json(target, "session", "evict", SESSION)
    why = ctxcache("--target", target, "why-miss", SESSION)
    deleted = ctxcache_json(target, "model", "delete", "tiny")

    assert used.exit_code == ExitCode.CONFLICT
    assert "models/tiny has 1 session: delete what is of it first" in used.sentence
    assert "`ctxcache session delete`" in used.sentence
    assert evicted == {"evicted": [f"sessions/{SESSION}"]}
    assert "it was evicted" in why.stdout
    assert deleted == {"deleted": ["models/tiny"]}


def test_sessions_are_filtered(target: str) -> None:
    """By name, size, idleness and pin, all at once."""
    store_session(target, "other", token_count=0)
    wanted = ("--prefix", "ch", "--larger", "1KiB", "--not-pinned")
    found = ctxcache_json(target, "session", "list", *wanted)
    idle = ctxcache_json(target, "session", "list", "--idle", "1h")

    assert [session["name"] for session in found["sessions"]] == [f"sessions/{SESSION}"]
    assert idle["sessions"] == []


def test_hints_are_sent_and_answered(target: str) -> None:
    """The outcome of each hint is told; one that lasts needs to say how long."""
    (sent,) = ctxcache_json(target, "hint", "send", "prefetch", SESSION)["hints"]

    assert sent["outcome"] == "HINT_OUTCOME_ACCEPTED"
    assert ctxcache("--target", target, "hint", "send", "pin", SESSION).exit_code == ExitCode.USAGE
    assert ctxcache_json(target, "hint", "queues")["engines"] == []


def test_another_tenants_sessions_are_not_the_callers(target: str) -> None:
    """--tenant says whose; why-miss takes it as well."""
    listed = ctxcache_json(target, "session", "list", "--tenant", "other")
    missed = ctxcache_json(target, "why-miss", SESSION, "--tenant", "other")

    assert listed["sessions"] == []
    assert (missed["tenant"], missed["is_there"]) == ("other", False)


@pytest.mark.parametrize("width", [80, 120])
def test_top_fits_its_terminal(target: str, width: int) -> None:
    """One frame, no line longer than asked for, with what there is."""
    ran = ctxcache("--target", target, "top", "--once", "--width", str(width))

    assert ran.exit_code == ExitCode.OK
    assert max(map(len, ran.stdout.splitlines())) <= width
    assert all(
        text in ran.stdout
        for text in ("ready", "DRAM", "64.0 MiB", SESSION, "default", "nothing needs a look")
    )


def test_watch_goes_on_until_it_is_interrupted(target: str) -> None:
    """JSON is a line each time; Ctrl-C is a good end."""
    command = [
        *COMMAND_LINE,
        "--target",
        target,
        "-o",
        "json",
        "tier",
        "list",
        "--watch",
        "--interval",
        "0.01",
    ]
    environment = without_settings(os.environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watching:
        assert watching.stdout is not None
        seen = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait() == 0

    assert all(len(one["paths"]) == 3 for one in seen)


class _PressesCtrlC:
    """Ctrl-C comes while it is dropped, where Python forgets what a signal raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_comes_while_an_object_is_dropped_is_not_lost() -> None:
    """A watch ends behind the answer in which it came."""
    answer_count = 0
    watch = typer.Typer()

    @watch.command()
    @watched
    def _answer(_call: CliCall) -> None:
        nonlocal answer_count
        answer_count += 1
        assert answer_count == 1
        _PressesCtrlC()

    ran = CliRunner().invoke(watch, ["--watch", "--interval", "0.01"])

    assert (ran.exit_code, answer_count) == (0, 1)


def test_an_interval_is_of_a_watch(target: str) -> None:
    """A command that shows its answer once takes no interval."""
    ran = ctxcache("--target", target, "tier", "list", "--interval", "5")

    assert ran.exit_code == ExitCode.USAGE
    assert "--watch" in ran.stderr


def test_yaml_is_what_json_is(target: str) -> None:
    """The same document, laid out."""
    ran = ctxcache("--target", target, "-o", "yaml", "model", "list")

    assert ran.stdout.startswith("---\nmodels:\n  - name: ")
    assert ran.stdout.endswith("has_more: false\n")
    assert '    architecture: "TinyForCausalLM"\n' in ran.stdout


def test_yaml_quotes_what_could_be_something_else() -> None:
    """Empty lists and mappings, lists of lists, and names that are no words."""
    document = as_yaml(
        {"a": "no", "b": [], "c": [1, {"d": None, "e-f": ["x: y"]}], "g": {}, "no": "\N{PARTY POPPER}"}
    )

    assert document.splitlines() == [
        "---", 'a: "no"', "b: []", "c:", "  - 1", "  - d: null", '    "e-f":', '      - "x: y"', "g: {}",
        '"no": "\\U0001f389"',
    ]  # fmt: skip


def test_a_shell_completes_names(target: str) -> None:
    """Names of sessions come from the server; where there is none, nothing is offered and nothing is said."""
    words = {
        "COMP_WORDS": "ctxcache session show ch",
        "COMP_CWORD": "3",
        "_CTXCACHE_COMPLETE": "complete_bash",
    }
    found = ctxcache(environment=words | {"CTXCACHE_TARGET": target})
    nothing = ctxcache(environment=words | {"CTXCACHE_TARGET": "127.0.0.1:1"})

    assert found.stdout.split() == [SESSION]
    assert (nothing.stdout.strip(), nothing.stderr) == ("", "")
