"""`ctxcache session`, every verb of it, through the real binary against a real server."""

import socket
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from command_line import at_terminal, ctxcache, ctxcache_json
from rich.console import Console
from server_process import ServerProcess
from stored import TOKEN_COUNT, model_spec, store_session

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.tables import session_grid
from ctxcache.client import CallerModel
from ctxcache.client.types import SessionInfo
from ctxcache.format.streams import StateKind, StreamRange
from ctxcache.v1.session_pb2 import Session


@pytest.fixture
def target(running_server: ServerProcess) -> str:
    """Address of a server that runs."""
    return running_server.target


def test_show_prints_every_field_of_the_proto(target: str) -> None:
    """JSON has exactly the proto's field names: numbers as numbers, bytes in hex, enums by name."""
    name = store_session(target, "show-json")

    shown = ctxcache_json(target, "session", "show", "show-json")

    assert list(shown) == [field.name for field in Session.DESCRIPTOR.fields]
    assert shown["name"] == name
    assert (shown["token_count"], shown["is_pinned"], shown["ttl"]) == (TOKEN_COUNT, False, "3600s")
    assert len(bytes.fromhex(shown["model_fingerprint"])) == 32
    assert shown["layout"][1] == {"kind": "STATE_KIND_HIDDEN", "layer_begin": 0, "layer_end": 1}
    assert datetime.fromisoformat(shown["create_time"]).tzinfo is not None


def test_show_prints_a_table_for_people(target: str) -> None:
    """Without --output a session is a table with human sizes and relative times."""
    store_session(target, "show-table")

    shown = ctxcache("--target", target, "session", "show", "sessions/show-table")

    assert shown.exit_code == ExitCode.OK
    assert "sessions/show-table" in shown.stdout
    assert "in 59 min, 1 h after each access" in shown.stdout
    assert "tokens, hidden 0" in shown.stdout
    assert "loss" in shown.stdout
    assert "none" in shown.stdout


def test_a_session_in_few_bits_says_what_they_cost() -> None:
    """The worst of its kinds counts."""
    kinds = (StateKind.TOKENS, StateKind.HIDDEN_INT8, StateKind.KV_INT4)
    session = SessionInfo(layout=tuple(StreamRange(kind, 0, 1) for kind in kinds))
    console = Console(width=100, file=StringIO(), record=True)
    console.print(session_grid(session))

    assert "up to 0.03 nats a token" in console.export_text()


def test_options_work_on_either_side_of_the_command(target: str) -> None:
    """--target and --output mean the same before and after the command, and later ones win."""
    store_session(target, "either-side")
    after = ctxcache(
        "--target", "127.0.0.1:1", "session", "show", "either-side", "--target", target, "-o", "json"
    )
    by_environment = ctxcache("session", "show", "either-side", environment={"CTXCACHE_TARGET": target})

    assert after.document["name"] == "sessions/either-side"
    assert by_environment.exit_code == ExitCode.OK


def test_list_stops_at_its_limit_and_says_so(target: str) -> None:
    """--limit bounds a list, which says that there is more; --all goes through every page."""
    names = [store_session(target, f"list-{i}", token_count=0, model_id="listed") for i in range(4)]

    first = ctxcache_json(target, "session", "list", "--model", "listed", "--limit", "3")
    everything = ctxcache_json(target, "session", "list", "--model", "models/listed", "--all")

    assert ([s["name"] for s in first["sessions"]], first["has_more"]) == (names[:3], True)
    assert ([s["name"] for s in everything["sessions"]], everything["has_more"]) == (names, False)


def test_list_never_cuts_a_name_in_a_pipe(target: str) -> None:
    """A table that goes into a pipe is as wide as it must be."""
    name = store_session(target, "long-" + "x" * 100, token_count=0, model_id="long-names")

    listed = ctxcache("--target", target, "session", "list", "--model", "long-names", "--limit", "1")

    assert f"\n{name.removeprefix('sessions/')} " in listed.stdout


def test_keep_recent_keeps_four_sinks_too(target: str) -> None:
    """--keep-recent keeps the newest tokens and, unless told otherwise, four sinks."""
    store_session(target, "recent")

    with_sinks = ctxcache_json(target, "session", "truncate", "recent", "--keep-recent", "20")
    without = ctxcache_json(target, "session", "truncate", "recent", "--keep-recent", "10", "--sinks", "0")

    assert (with_sinks["token_count"], without["token_count"]) == (24, 10)


def test_keep_first_and_drop_cut_what_they_say(target: str) -> None:
    """--keep-first keeps a prefix; each --drop takes a range out, its end excluded."""
    store_session(target, "cut")

    first = ctxcache_json(target, "session", "truncate", "cut", "--keep-first", "50")
    dropped = ctxcache_json(target, "session", "truncate", "cut", "--drop", "10:20", "--drop", "30:31")

    assert (first["token_count"], dropped["token_count"]) == (50, 39)
    assert dropped["generation"] == first["generation"] + 1


def test_truncate_of_another_generation_is_a_conflict(target: str) -> None:
    """--if-generation refuses a session that has changed since."""
    store_session(target, "generation")

    ran = ctxcache(
        "--target", target, "session", "truncate", "generation", "--keep-first", "1", "--if-generation", "999"
    )

    assert ran.exit_code == ExitCode.CONFLICT
    assert "GENERATION_MISMATCH" in ran.sentence
    assert ctxcache_json(target, "session", "show", "generation")["token_count"] == TOKEN_COUNT


def test_truncate_while_somebody_writes_is_a_conflict(target: str) -> None:
    """An open reservation refuses truncation."""
    store_session(target, "written")
    own = CallerModel(model_spec())
    with (
        connect(target, access="local") as client,
        client.sessions.open("sessions/written", own).writer(1),
    ):
        ran = ctxcache("--target", target, "session", "truncate", "written", "--keep-first", "1")

    assert ran.exit_code == ExitCode.CONFLICT
    assert "WRITE_IN_PROGRESS" in ran.sentence


@pytest.mark.parametrize(
    "arguments",
    [
        ("truncate", "s"),
        ("truncate", "s", "--keep-first", "1", "--drop", "0:1"),
        ("truncate", "s", "--keep-first", "1", "--sinks", "1"),
        ("truncate", "s", "--drop", "2:1"),
        ("expire", "s"),
        ("expire", "s", "--now", "--ttl", "2h"),
        ("expire", "s", "--ttl", "2 hours"),
        ("expire", "s", "--at", "2030-01-31"),
        ("delete",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_said_before_any_server_is_asked(arguments: tuple[str, ...]) -> None:
    """Options that contradict each other or do not parse exit with 2, whoever listens."""
    ran = ctxcache("--target", "127.0.0.1:1", "session", *arguments)

    assert ran.exit_code == ExitCode.USAGE
    assert not ran.stdout


def test_fork_shares_the_first_tokens(target: str) -> None:
    """A fork has the id and as many tokens as it was asked for; an id that exists is a conflict."""
    store_session(target, "source")

    fork = ctxcache_json(target, "session", "fork", "source", "--as", "branch", "--tokens", "7")
    unnamed = ctxcache_json(target, "session", "fork", "source")
    again = ctxcache("--target", target, "session", "fork", "source", "--as", "branch")

    assert (fork["name"], fork["token_count"]) == ("sessions/branch", 7)
    assert unnamed["token_count"] == TOKEN_COUNT
    assert again.exit_code == ExitCode.CONFLICT


def test_fork_of_more_than_there_is_is_refused(target: str) -> None:
    """A fork past the source's end is an invalid argument."""
    store_session(target, "short", token_count=5)

    ran = ctxcache("--target", target, "session", "fork", "short", "--tokens", "6")

    assert ran.exit_code == ExitCode.INVALID_ARGUMENT


def test_pin_and_unpin_hold_and_let_go(target: str) -> None:
    """A pin stays until it is taken off."""
    store_session(target, "pinned", token_count=0)

    pinned = ctxcache_json(target, "session", "pin", "pinned")
    shown = ctxcache_json(target, "session", "show", "pinned")
    unpinned = ctxcache_json(target, "session", "unpin", "pinned")

    assert [s["is_pinned"] for s in (pinned, shown, unpinned)] == [True, True, False]


def test_expire_sets_a_ttl_or_an_instant(target: str) -> None:
    """--ttl slides with accesses, --at does not."""
    store_session(target, "timed", token_count=0)
    instant = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)

    sliding = ctxcache_json(target, "session", "expire", "timed", "--ttl", "1h30m")
    fixed = ctxcache_json(target, "session", "expire", "timed", "--at", instant.isoformat())

    assert sliding["ttl"] == "5400s"
    assert (fixed["ttl"], datetime.fromisoformat(fixed["expire_time"])) == (None, instant)


def test_expire_now_ends_the_session(target: str) -> None:
    """After --now nobody finds the session."""
    store_session(target, "ended")

    expired = ctxcache("--target", target, "session", "expire", "ended", "--now")
    shown = ctxcache("--target", target, "session", "show", "ended")

    assert (expired.exit_code, shown.exit_code) == (ExitCode.OK, ExitCode.NOT_FOUND)


def test_flush_makes_every_token_durable(target: str) -> None:
    """Tokens that only memory had are on disk afterwards."""
    store_session(target, "flushed")

    flushed = ctxcache_json(target, "session", "flush", "flushed")

    assert flushed["durable_token_count"] == TOKEN_COUNT
    assert flushed["ssd_bytes"] > 0


def test_demote_empties_memory(target: str) -> None:
    """A demoted session lies on SSD alone, whole."""
    store_session(target, "demoted")

    demoted = ctxcache_json(target, "session", "demote", "demoted")

    assert (demoted["dram_bytes"], demoted["durable_token_count"]) == (0, TOKEN_COUNT)


@pytest.mark.parametrize(("answer", "exit_code"), [("n", ExitCode.INTERNAL), ("y", ExitCode.OK)])
def test_delete_asks_whoever_sits_at_a_terminal(target: str, answer: str, exit_code: ExitCode) -> None:
    """At a terminal nothing is deleted without a yes."""
    store_session(target, f"asked-{answer}", token_count=0)
    ran = at_terminal(answer, "--target", target, "session", "delete", f"asked-{answer}")

    assert ran.exit_code == exit_code
    assert "Delete 1 session (0 tokens" in ran.stderr
    assert f"sessions/asked-{answer}?" in ran.stderr
    assert ran.stdout.strip() == ("" if answer == "n" else "deleted sessions/asked-y")


def test_a_session_that_is_not_there_is_one_sentence(target: str) -> None:
    """NOT_FOUND is one line with the stable reason, and exit code 3."""
    ran = ctxcache("--target", target, "session", "show", "nobody")

    assert ran.exit_code == ExitCode.NOT_FOUND
    assert ran.sentence == "ctxcache: sessions/nobody does not exist (SESSION_NOT_FOUND)"


def test_a_malformed_name_is_an_invalid_argument(target: str) -> None:
    """The server says which field is wrong; the exit code is 5."""
    ran = ctxcache("--target", target, "session", "show", "no spaces")

    assert ran.exit_code == ExitCode.INVALID_ARGUMENT
    assert "INVALID_FIELD" in ran.sentence


def test_no_server_is_one_sentence_with_advice() -> None:
    """Where nobody listens, the sentence says how to start a server; the exit code is 6."""
    ran = ctxcache("--target", "127.0.0.1:1", "--timeout", "5", "session", "list")

    assert ran.exit_code == ExitCode.UNAVAILABLE
    assert "no answer from 127.0.0.1:1" in ran.sentence
    assert "`ctxcache serve` starts one" in ran.sentence


def test_a_server_that_says_nothing_costs_the_timeout_and_no_more() -> None:
    """Where somebody listens and never answers, --timeout ends the wait; the exit code is 6."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        ran = ctxcache("--target", target, "--timeout", "0.5", "session", "show", "x")

    assert ran.exit_code == ExitCode.UNAVAILABLE
    assert "DEADLINE_EXCEEDED" in ran.sentence
