"""`ctxcache export` and `import` through the real binary, between real servers."""

import json
import os
import pty
import resource
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from carried import SPEC, Rows, assert_rows, keep, names
from command_line import TIMEOUT_S, Ran, asked, ctxcache_json
from server_process import COMMAND_LINE, ServerProcess
from stored import connected

from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from tests.nursery import without_settings

GOLDEN = Path(__file__).parents[1] / "golden" / "archive-v2.ctxarchive"
TOKEN_COUNT = 130


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store that sessions are exported from."""
    with ServerProcess(tmp_path_factory.mktemp("here") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The one that they are imported into."""
    with ServerProcess(tmp_path_factory.mktemp("there") / "data") as started:
        yield started


@pytest.fixture(autouse=True)
def emptied(here: ServerProcess, there: ServerProcess) -> None:
    """Both are empty before each test."""
    for server in (here, there):
        with connected(server.target) as client:
            for session in list(client.sessions.list()):
                client.sessions.open(session.name).delete()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, here: ServerProcess) -> tuple[Path, Mapping[str, Rows]]:
    """A file of three sessions: `a`, `b` that shares its first tokens, `c` that has none."""
    file = tmp_path_factory.mktemp("export") / "three"
    with connected(here.target) as client:
        rows = {"a": keep(client, SPEC, "a", TOKEN_COUNT, ttl=timedelta(hours=2))}
        client.sessions.open("sessions/a").fork(id="b", token_count=70)
        rows["b"] = {stream: part[:70] for stream, part in rows["a"].items()}
        rows["c"] = keep(client, SPEC, "c", 0)
    told = ctxcache_json(here.target, "export", "a", "sessions/b", "c", "a", "--to", str(file))
    assert [(one["session"], one["status"], one["token_count"]) for one in told["sessions"]] == [
        ("sessions/a", "exported", TOKEN_COUNT),
        ("sessions/b", "exported", 70),
        ("sessions/c", "exported", 0),
    ]
    return file, rows


Export = tuple[Path, Mapping[str, Rows]]


def statuses(document: Mapping[str, Any]) -> dict[str, str]:
    """By session."""
    return {one["session"].removeprefix("sessions/"): one["status"] for one in document["sessions"]}


def failing(target: str, *arguments: str) -> tuple[ExitCode, dict[str, Any], str]:
    """Run a command that must fail: its exit code, its document and its sentence."""
    ran = asked(target, *arguments)
    assert ran.exit_code
    error = json.loads(ran.sentence)["error"]
    sentence = f"{error['message']} ({error['reason']})"
    return ExitCode(ran.exit_code), json.loads(ran.stdout or "{}"), sentence


def done(target: str, *arguments: str) -> dict[str, Any]:
    """Run a command that must end well; its document."""
    ran = asked(target, *arguments)
    assert ran.exit_code == 0, ran.stderr
    return ran.document


def test_rows_of_every_kind_come_back_bit_for_bit(export: Export, there: ServerProcess) -> None:
    """On a store that has never seen the model; forks come whole, without leaving anything else."""
    file, rows = export

    told = ctxcache_json(there.target, "import", str(file))

    assert set(statuses(told).values()) == {"imported"}
    assert names(there.target) == ["a", "b", "c"]
    for session_id in "ab":
        assert_rows(there.target, session_id, rows[session_id])
    with connected(there.target) as client:
        a, c = (client.sessions.get(f"sessions/{one}") for one in "ac")
        assert (a.ttl, a.durable_token_count, a.model_fingerprint) == (
            timedelta(hours=2),
            TOKEN_COUNT,
            SPEC.fingerprint(),
        )
        assert (c.ttl, c.token_count, len(c.streams())) == (timedelta(hours=1), 0, len(SPEC.streams) + 1)
        client.sessions.open(a, CallerModel(SPEC)).append(rows["a"])


def test_the_file_is_private_and_not_written_over(
    export: Export, here: ServerProcess, tmp_path: Path
) -> None:
    """Mode 0600; a name that is taken is refused before and replaced with --force."""
    file = tmp_path / "taken"
    file.write_text("mine")
    with connected(here.target) as client:
        keep(client, SPEC, "x", 3)

    code, _, sentence = failing(here.target, "export", "x", "--to", str(file))
    assert (code, file.read_text()) == (ExitCode.CONFLICT, "mine")
    assert sentence.endswith("(FILE_ALREADY_EXISTS)")
    done(here.target, "export", "x", "--to", str(file), "--force")

    assert file.stat().st_mode & 0o777 == 0o600
    assert statuses(done(here.target, "import", str(file), "--check")) == {"x": "whole"}
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_name_that_is_there_is_refused_skipped_or_replaced(export: Export, there: ServerProcess) -> None:
    """As --on-conflict says; refused before anything is imported."""
    file, rows = export
    with connected(there.target) as client:
        mine = keep(client, SPEC, "b", 5)

    code, told, sentence = failing(there.target, "import", str(file))
    assert (code, told, names(there.target)) == (ExitCode.CONFLICT, {}, ["b"])
    assert sentence.endswith("(SESSION_ALREADY_EXISTS)")

    told = done(there.target, "import", str(file), "--on-conflict", "skip")
    assert statuses(told) == {"a": "imported", "b": "skipped", "c": "imported"}
    assert told["sessions"][1]["reason"] == "SESSION_ALREADY_EXISTS"
    assert_rows(there.target, "b", mine)

    told = done(there.target, "import", str(file), "--on-conflict", "replace", "--only", "b")
    assert statuses(told) == {"b": "imported"}
    assert_rows(there.target, "b", rows["b"])


def test_some_by_another_name_and_expiry(export: Export, there: ServerProcess) -> None:
    """--only, --rename and --ttl; a name that the file has not is a usage error."""
    file, rows = export

    told = done(there.target, "import", str(file), "--only", "a", "--rename", "a=z", "--ttl", "3h")
    assert (told["sessions"][0]["target"], names(there.target)) == ("sessions/z", ["z"])
    assert_rows(there.target, "z", rows["a"])
    with connected(there.target) as client:
        assert client.sessions.get("sessions/z").ttl == timedelta(hours=3)
    for wrong in (["--only", "nobody"], ["--rename", "nobody=x"], ["--rename", "a"], ["--rename", "a=b"]):
        assert asked(there.target, "import", str(file), *wrong).exit_code == ExitCode.USAGE, wrong


def test_what_fails_is_told_and_the_others_come_in(
    export: Export, there: ServerProcess, tmp_path: Path
) -> None:
    """A model's id that is another model's there: its sessions fail, those of other models do not."""
    file = tmp_path / "golden"
    file.write_bytes(GOLDEN.read_bytes())
    with connected(there.target) as client:
        client.models.register(replace(SPEC, model_id="every-kind"))

    code, told, sentence = failing(there.target, "import", str(file), "--from-tenant", "acme")

    assert code is ExitCode.CONFLICT
    assert {one["reason"] for one in told["sessions"]} == {"MODEL_FINGERPRINT_MISMATCH"}
    assert set(statuses(told).values()) == {"failed"}
    assert sentence.startswith("4 of 4 sessions failed; sessions/every-kind: models/every-kind is")
    assert names(there.target) == []


def test_an_absolute_expiry_is_kept_or_based_anew(
    here: ServerProcess, there: ServerProcess, tmp_path: Path
) -> None:
    """One that is still to come is kept; one that is past gives as much time as there was at the export."""
    soon = (datetime.now(UTC) + timedelta(hours=5)).replace(microsecond=0)
    with connected(here.target) as client:
        keep(client, SPEC, "x", 3, expire_time=soon)
    done(here.target, "export", "x", "--to", str(tmp_path / "x"))
    done(there.target, "import", str(tmp_path / "x"))
    # Exported in 2017, an hour before its end.
    before = datetime.now(UTC)
    done(here.target, "import", str(GOLDEN), "--only", "long:1", "--from-tenant", "acme")

    with connected(there.target) as client:
        kept = client.sessions.get("sessions/x")
    with connected(here.target) as client:
        anew = client.sessions.get("sessions/long:1")
    assert kept.ttl is None
    assert anew.ttl is None
    assert kept.expire_time == soon
    assert before <= anew.expire_time - timedelta(hours=1) <= datetime.now(UTC)


def test_a_damaged_file_brings_nothing(export: Export, there: ServerProcess, tmp_path: Path) -> None:
    """Cut or changed behind whole sessions: none of them comes in. Of a pipe, those before the damage do."""
    data = export[0].read_bytes()
    for damaged in (data[:-1], data[:-40], data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]):
        (tmp_path / "damaged").write_bytes(damaged)
        code, told, sentence = failing(there.target, "import", str(tmp_path / "damaged"))
        assert (code, told, names(there.target)) == (ExitCode.DATA_LOSS, {}, [])
        assert sentence.endswith("(FILE_DAMAGED)")

    ran = piped(there.target, data[:-1])
    assert ran.exit_code == ExitCode.DATA_LOSS
    assert set(statuses(ran.document).values()) == {"imported"}
    assert names(there.target) == ["a", "b", "c"]


def piped(target: str, data: bytes) -> Ran:
    """Import from standard input."""
    command = [*COMMAND_LINE, "--target", target, "--output", "json", "import", "-"]
    process = subprocess.run(
        command,
        input=data,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        env=without_settings(os.environ),
    )
    return Ran(process.returncode, process.stdout.decode(), process.stderr.decode())


def test_sessions_go_through_a_pipe(export: Export, here: ServerProcess, there: ServerProcess) -> None:
    """`export --to - | import -`: the file on standard output, and what was done on standard error."""
    with connected(here.target) as client:
        rows = keep(client, SPEC, "x", TOKEN_COUNT)
    command = [*COMMAND_LINE, "--target", here.target, "--output", "json", "export", "--all", "--to", "-"]
    exported = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)

    assert statuses(json.loads(exported.stderr)) == {"x": "exported"}
    assert statuses(piped(there.target, exported.stdout).document) == {"x": "imported"}
    assert_rows(there.target, "x", rows)


def test_a_full_disk_leaves_no_file(here: ServerProcess, tmp_path: Path) -> None:
    """A limit on the size of files, or a device that is full: one sentence, and nothing under any name."""
    with connected(here.target) as client:
        keep(client, SPEC, "x", 4000)

    def with_small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [*COMMAND_LINE, "--target", here.target, "export", "x", "--to"]
    ran = subprocess.run(
        [*command, str(tmp_path / "full")],
        preexec_fn=with_small_files,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (ExitCode.RESOURCE_EXHAUSTED, 1)
    assert ran.stderr.endswith("(FILE_FULL)\n")
    assert not list(tmp_path.iterdir())
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            [*command, "-"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (ExitCode.RESOURCE_EXHAUSTED, 1)


def test_a_session_that_is_not_there_is_no_file(here: ServerProcess, tmp_path: Path) -> None:
    """Named, it is an error before anything is written; --all of an empty store is an empty file."""
    code, _, sentence = failing(here.target, "export", "nobody", "--to", str(tmp_path / "x"))
    assert (code, list(tmp_path.iterdir())) == (ExitCode.NOT_FOUND, [])
    assert sentence == "sessions/nobody does not exist (SESSION_NOT_FOUND)"

    assert done(here.target, "export", "--all", "--to", str(tmp_path / "x"))["sessions"] == []
    assert done(here.target, "import", str(tmp_path / "x"))["sessions"] == []
    assert asked(here.target, "export", "--to", str(tmp_path / "y")).exit_code == ExitCode.USAGE


def test_a_bar_is_drawn_at_a_terminal_and_nowhere_else(export: Export, there: ServerProcess) -> None:
    """On standard error, with a total; standard output has one document all the while."""
    leader, follower = pty.openpty()
    command = [*COMMAND_LINE, "--target", there.target, "--output", "json", "import", str(export[0])]
    environment = without_settings(os.environ) | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=follower, timeout=TIMEOUT_S, check=True, env=environment
    )
    os.close(follower)
    drawn = os.read(leader, 1 << 16).decode()
    os.close(leader)

    assert statuses(json.loads(process.stdout)) == {"a": "imported", "b": "imported", "c": "imported"}
    assert "100%" in drawn
    assert "sessions/b" in drawn
