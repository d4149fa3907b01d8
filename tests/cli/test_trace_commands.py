"""Recordings through the real binary: made of a server that works, played against another, simulated."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import TIMEOUT_S, ctxcache, ctxcache_json
from server_process import COMMAND_LINE, ServerProcess
from stored import TOKEN_COUNT, model_spec, store_session

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from ctxcache.client.types import seconds
from ctxcache.errors import SessionNotFound
from ctxcache.simulate.recorded import KINDS
from tests.nursery import without_settings

PLACES = {"empty": 0, "refused": 0}


@contextmanager
def recording(target: str, path: Path) -> Iterator[None]:
    """Calls within the block are in the file; Ctrl-C ends it."""
    command = [*COMMAND_LINE, "--target", target, "--output", "json", "trace", "record", str(path)]
    environment = without_settings(os.environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        await_line(path, '"format"')
        yield
        process.send_signal(signal.SIGINT)
        written = json.loads(process.stdout.read())
        assert process.wait(TIMEOUT_S) == ExitCode.OK
    assert written["calls"] == len(calls_of(path))
    assert written["lost_calls"] == 0


def await_line(path: Path, text: str) -> None:
    """Wait until a line of the file has it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline_s, text
        time.sleep(0.01)


def calls_of(path: Path) -> list[dict[str, Any]]:
    """Every call in the file."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "call" in line]


def work(target: str) -> None:
    """Ask for everything that can be recorded; `last` is deleted last."""
    name, own = store_session(target, "one"), CallerModel(model_spec())
    with connect(target, access="local") as client:
        for _ in range(2):
            with client.sessions.open(name, own).read(end=70):
                pass
            client.admin.demote_session(name)
        with client.sessions.open(name, own).read():
            client.sessions.lookup(
                [(name, model_spec().fingerprint()), ("sessions/nobody", model_spec().fingerprint())]
            )
        client.sessions.open(name).drop_ranges([(4, 10), (20, 30)])
        client.sessions.open(name).fork(id="other", token_count=50)
        client.sessions.open(name).update(ttl=seconds(600), is_pinned=True)
        client.sessions.open("sessions/other").flush()
        client.hints.retain(name, ttl=seconds(60))
        client.hints.prefetch(name)
        client.hints.expect(name, seconds(30))
        with pytest.raises(SessionNotFound):
            client.sessions.open("sessions/nobody", own).read()
        client.sessions.get(name)
    store_session(target, "last")
    with connect(target, access="remote") as client:
        client.sessions.open("sessions/last").delete()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of that work."""
    directory = tmp_path_factory.mktemp("recorded")
    path = directory / "calls.jsonl"
    with ServerProcess(directory / "data") as server:
        with recording(server.target, path):
            work(server.target)
            await_line(path, '"delete"')
            again = ctxcache("--target", server.target, "trace", "record", str(directory / "again.jsonl"))
            taken = ctxcache("--target", server.target, "trace", "record", str(directory / "again.txt"))
        # The recorder reports its end when it has noticed it.
        server.terminate()
        audited = [line for line in server.stderr.splitlines() if "method=Record" in line]

    assert (again.exit_code, taken.exit_code) == (ExitCode.UNAVAILABLE, ExitCode.USAGE)
    assert not (directory / "again.jsonl").exists()
    assert [line.rpartition("result=")[2] for line in audited] == [
        "BEGUN",
        "BEGUN",
        "TOO_MANY_REQUESTS",
        "ENDED",
    ]
    return path


def test_it_has_every_call_and_no_content(recorded: Path) -> None:
    """Kinds, sizes and times; no name, no token id."""
    calls, text = calls_of(recorded), recorded.read_text()
    kinds = [call["call"] for call in calls]
    reads = [
        (call["tokens"], call.get("dram_tokens", 0))
        for call in calls
        if call["call"] == "read" and "tokens" in call
    ]
    (dropped,) = [call["dropped"] for call in calls if call["call"] == "truncate"]
    (forked,) = [call for call in calls if call["call"] == "fork"]

    # The store's own ends of sessions are kinds as well, and none has come.
    assert set(kinds) == KINDS - {"expire", "evict", "cut"}
    assert reads == [(70, 70), (70, 0), (TOKEN_COUNT, 0)]
    assert dropped == [4, 10, 20, 30]
    assert (forked["source"], forked["tokens"]) == (calls[0]["session"], 50)
    assert len({call["session"] for call in calls}) == 4
    assert len({call["tenant"] for call in calls}) == 1
    assert not any(word in text for word in ("one", "other", "nobody", "last", "default", "tiny"))
    assert [call["at_ms"] for call in calls] == sorted(call["at_ms"] for call in calls)


def test_another_store_gives_what_was_recorded(recorded: Path, tmp_path: Path) -> None:
    """The same hits by tier, and the same calls refused for the same reasons."""
    with ServerProcess(tmp_path / "data") as server:
        figures = ctxcache_json(
            server.target, "trace", "replay", str(recorded), "--speed", "0", "--concurrency", "1"
        )
        table = ctxcache("--target", server.target, "trace", "replay", str(recorded), "--speed", "100")

    before, after = figures["recorded"], figures["replayed"]
    same = ("lookups", "reads", "read_tokens", "dram_tokens", "appended_tokens", "evicted", "expired")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert before["reads"] == {"dram": 1, "ssd": 2, "missed": 1} | PLACES
    assert before["lookups"] == {"dram": 1, "ssd": 0, "missed": 1} | PLACES
    assert all(took["p50_ms"] <= took["p95_ms"] <= took["p99_ms"] for took in figures["latencies"].values())
    assert figures["latencies"]["read"]["p50_ms"] > 0
    assert figures["latencies"]["read"]["count"] == before["calls"]["read"]
    assert (figures["primed_sessions"], figures["is_whole"]) == (0, True)
    assert table.exit_code == ExitCode.OK
    assert "reads in DRAM" in table.stdout


def test_simulate_takes_it_and_what_is_made_of_it(recorded: Path, tmp_path: Path) -> None:
    """The same turns from both; the options are those of the store."""
    made = tmp_path / "turns.jsonl.gz"
    converted = ctxcache("--output", "json", "trace", "convert", str(recorded), str(made))
    options = converted.document["simulate"]
    outcomes = [simulated(path, options) for path in (recorded, made)]

    assert converted.exit_code == ExitCode.OK
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["turns"] == converted.document["turns"] == 3
    # A recording's bytes a token are known without being said.
    place = options.index("--token-bytes")
    unsaid = [simulated(path, options[:place] + options[place + 2 :]) for path in (recorded, made)]
    assert unsaid[0] == outcomes[0] != unsaid[1]
    assert ctxcache("trace", "convert", str(recorded), str(made)).exit_code == ExitCode.CONFLICT


def simulated(path: Path, options: list[str]) -> Mapping[str, Any]:
    """The figures of one replay on a virtual clock."""
    ran = ctxcache("simulate", str(path), "-o", "json", *options)
    assert ran.exit_code == ExitCode.OK, ran.stderr
    return ran.document
