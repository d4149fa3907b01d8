"""Clients that die, freeze, stall, vanish, give up, or speak out of turn.

What they held ends with them; what they had not committed was never there; what others hold and
read goes on; and no number of them makes the server hold more memory than its bound.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from ctxcache.client import Client
from ctxcache.format.identity import wire_checksum
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import arena_pb2, model_pb2, session_pb2
from ctxcache.v1.arena_pb2_grpc import ArenaServiceStub
from ctxcache.v1.session_pb2_grpc import SessionServiceStub
from tests.faults.blackhole import Blackhole
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import command
from tests.faults.rows import first_difference, rows_of
from tests.server_process import COMMAND_LINE, ServerProcess

KV = Stream(0, StateKind.KV)
ROW_BYTES = 1 << 16
TOKENS_EACH = 512
SESSIONS = 6
APPEND_TOKENS = 16
TIMEOUT_S = 20.0
GONE_WITHIN_S = 10.0
BEGUN_ONE_IN = 10
KEEPALIVE_S = 2
HALF_OPEN_WITHIN_S = 3.0 * KEEPALIVE_S
"""A peer that answers no ping is given up after one and a half times the keep-alive time; twice that for slow timers."""
STALLED_READER_BYTES = 3 << 20
"""What one reader that takes nothing may cost the server: a message of 1 MiB, made, copied and on its way."""
MODEL = ModelSpec(
    model_id="clients", architecture="Clients", revision="", weights_digest="", tokenizer_digest="",
    dtype=DType.FLOAT16, layer_count=1, hidden_size=8, kv_head_count=1, head_size=4, rope="", norm="",
    is_relocatable=True, streams=(StreamSpec(KV, ROW_BYTES, DType.FLOAT16),),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """The server under test, an honest client, and where findings go."""

    server: ServerProcess
    client: Client
    report: Report
    options: argparse.Namespace

    @property
    def names(self) -> list[str]:
        """The sessions there are, each with its content."""
        return [f"sessions/s{owner}" for owner in range(SESSIONS)]

    def wait_until(self, what: str, is_so: Callable[[], bool], within_s: float) -> float:
        """Seconds until it is so; a finding when that is too long."""
        began_s = time.monotonic()
        while not is_so():
            if time.monotonic() - began_s > within_s:
                self.report.find(f"{what} is not so after {within_s:g} s")
                self.report.end_if_found()
                break
            time.sleep(0.05)
        return round(time.monotonic() - began_s, 2)

    def holds_nothing(self) -> bool:
        """Whether no lease and no reservation is left."""
        stats = self.client.stats()
        return not stats.lease_count and not stats.reservation_count

    def holds_all(self) -> bool:
        """Whether there is a lease or a reservation for each session."""
        stats = self.client.stats()
        return stats.lease_count + stats.reservation_count == SESSIONS


@contextmanager
def _holding(bench: Bench, kind: str, names: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    arguments = [sys.executable, "-m", "tests.faults.holder", bench.server.target, kind, *names]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or process.stdout.readline() != "held\n":
            raise RuntimeError(f"the {kind} holder did not start")
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# -- what can happen to clients ------------------------------------------------------------------------


def dead_clients(bench: Bench) -> None:
    """A killed client's leases, reservations and streams end with its connection."""
    for kind in ("lease", "reservation", "read", "append"):
        with _holding(bench, kind, bench.names) as process:
            # An append that was begun here may not have arrived there yet.
            bench.wait_until(f"a {kind} of each session", bench.holds_all, GONE_WITHIN_S)
            process.kill()
            process.wait()
            waited_s = bench.wait_until(f"dead {kind} holder gone", bench.holds_nothing, GONE_WITHIN_S)
        bench.report.figures[f"dead_{kind}_holder_gone_s"] = waited_s


def frozen_clients(bench: Bench) -> None:
    """While a client that holds rows is frozen, others read, write and delete as ever."""
    with _holding(bench, "lease", bench.names[:3]) as process:
        process.send_signal(signal.SIGSTOP)
        for owner in range(3):
            _check_rows(bench, owner, "local")
            _check_rows(bench, owner, "remote")
        _append_and_drop(bench, 0)
        bench.report.count("frozen_clients", 1)
    bench.wait_until("the frozen client is gone", bench.holds_nothing, GONE_WITHIN_S)


def stalled_readers(bench: Bench) -> None:
    """Readers that take nothing cost a bounded amount of memory each, and nobody else's reads."""
    before_bytes = _rss_bytes(bench.server.pid)
    count = bench.options.stalled
    names = [bench.names[i % SESSIONS] for i in range(count)]
    with _holding(bench, "read", names):
        for owner in range(SESSIONS):
            _check_rows(bench, owner, "remote")
        growth_bytes = _rss_bytes(bench.server.pid) - before_bytes
    bench.report.figures["stalled_readers"] = count
    bench.report.figures["stalled_reader_rss_bytes"] = growth_bytes // count
    if growth_bytes > count * STALLED_READER_BYTES:
        bench.report.find(f"{count} stalled readers cost {growth_bytes} B")
    bench.wait_until("stalled readers are gone", bench.holds_nothing, GONE_WITHIN_S)


def half_open(bench: Bench) -> None:
    """A peer behind a cut cable is found out, and what it held ends."""
    with Blackhole(bench.server.target) as proxy, grpc.insecure_channel(proxy.target) as channel:
        stub = ArenaServiceStub(channel)
        acquire = arena_pb2.AcquireLease(session=bench.names[0], model_fingerprint=MODEL.fingerprint())
        asked = arena_pb2.AccessRequest(request_id=1, operations=[arena_pb2.Operation(acquire_lease=acquire)])

        def requests() -> Iterator[arena_pb2.AccessRequest]:
            yield asked
            time.sleep(HALF_OPEN_WITHIN_S * 2)

        call = stub.Access(requests())
        if not next(call).results[0].HasField("lease"):
            bench.report.find("no lease through the proxy: the check below means nothing")
        proxy.cut()
        waited_s = bench.wait_until("the half-open peer is gone", bench.holds_nothing, HALF_OPEN_WITHIN_S)
        call.cancel()
    bench.report.figures["half_open_gone_s"] = waited_s


def cancelled_appends(bench: Bench) -> None:
    """An append that is given up at any moment leaves the session as it was and keeps no room."""
    draw = random.Random(bench.options.seed)
    used = _used_bytes(bench)
    with grpc.insecure_channel(bench.server.target) as channel:
        stub = SessionServiceStub(channel)
        for i in range(bench.options.cancels):
            owner = i % SESSIONS
            if i % BEGUN_ONE_IN:
                call = stub.AppendSession.future(_slow_append(owner, draw))
                time.sleep(draw.random() * 0.04)
                call.cancel()
            else:
                _cancel_a_begun_one(bench, stub, owner)
            progress(i + 1, bench.options.cancels, "cancelled appends")
    bench.report.count("cancelled_appends", bench.options.cancels)
    bench.wait_until("cancelled appends are gone", bench.holds_nothing, GONE_WITHIN_S)
    for owner in range(SESSIONS):
        _check_rows(bench, owner, "remote")
    bench.wait_until(
        "the room of cancelled appends is back", lambda: _used_bytes(bench) == used, GONE_WITHIN_S
    )


def _cancel_a_begun_one(bench: Bench, stub: SessionServiceStub, owner: int) -> None:
    """Cancel an append that the server is known to have room reserved for."""
    over = threading.Event()

    def messages() -> Iterator[session_pb2.AppendSessionRequest]:
        yield _header(owner)
        yield _chunk(owner, KV, TOKENS_EACH, TOKENS_EACH + APPEND_TOKENS)
        over.wait()

    bench.wait_until("cancelled appends are gone", bench.holds_nothing, GONE_WITHIN_S)
    call = stub.AppendSession.future(messages())
    bench.wait_until("an append is under way", lambda: not bench.holds_nothing(), GONE_WITHIN_S)
    call.cancel()
    over.set()


def out_of_turn(bench: Bench) -> None:
    """Messages in a wrong order, of a wrong size or with a wrong sum are refused, and change nothing."""
    with grpc.insecure_channel(bench.server.target) as channel:
        stub = SessionServiceStub(channel)
        for name, (messages, code) in _wrong_appends().items():
            try:
                stub.AppendSession(iter(messages), timeout=TIMEOUT_S)
                bench.report.find(f"append with {name} is taken")
            except grpc.RpcError as error:
                if error.code() != code:
                    bench.report.find(f"append with {name}: {error.code()}, not {code}: {error.details()}")
            bench.report.count("wrong_appends")
            _check_rows(bench, 0, "remote")
    if not bench.holds_nothing():
        bench.report.find("refused appends leave something behind")


# -- parts ---------------------------------------------------------------------------------------------


def _header(owner: int, **changes: object) -> session_pb2.AppendSessionRequest:
    facts = {
        "name": f"sessions/s{owner}", "model_fingerprint": MODEL.fingerprint(), "write_offset": TOKENS_EACH,
    }  # fmt: skip
    return session_pb2.AppendSessionRequest(header=session_pb2.AppendHeader(**(facts | changes)))  # type: ignore[arg-type]


def _chunk(
    owner: int, stream: Stream, begin: int, end: int, **changes: object
) -> session_pb2.AppendSessionRequest:
    data = rows_of(owner, stream, begin, end, ROW_BYTES if stream == KV else 4).tobytes()
    name = model_pb2.StreamName(layer=stream.layer, kind=model_pb2.StateKind.ValueType(stream.kind))
    facts = {"stream": name, "token_begin": begin, "data": data, "checksum": wire_checksum(data)}
    return session_pb2.AppendSessionRequest(chunk=session_pb2.Chunk(**(facts | changes)))  # type: ignore[arg-type]


def _commit(token_count: int) -> session_pb2.AppendSessionRequest:
    return session_pb2.AppendSessionRequest(commit=session_pb2.AppendCommit(token_count=token_count))


def _slow_append(owner: int, draw: random.Random) -> Iterator[session_pb2.AppendSessionRequest]:
    yield _header(owner)
    for begin in range(TOKENS_EACH, TOKENS_EACH + 48, APPEND_TOKENS):
        for stream in (KV, TOKENS):
            yield _chunk(owner, stream, begin, begin + APPEND_TOKENS)
            time.sleep(draw.random() * 0.004)


def _wrong_appends() -> dict[str, tuple[list[session_pb2.AppendSessionRequest], grpc.StatusCode]]:
    invalid, aborted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    at, header = TOKENS_EACH, _header(0)
    kv, tokens = _chunk(0, KV, at, at + 2), _chunk(0, TOKENS, at, at + 2)
    return {
        "nothing at all": ([], invalid),
        "a commit first": ([_commit(at)], invalid),
        "a chunk first": ([kv, header], invalid),
        "two headers": ([header, header], invalid),
        "an empty message": ([header, session_pb2.AppendSessionRequest()], invalid),
        "a chunk that does not follow": ([header, _chunk(0, KV, at + 1, at + 3)], aborted),
        "a chunk twice": ([header, kv, kv], aborted),
        "a chunk of a stream that is not stored": ([header, _chunk(0, Stream(5, StateKind.KV), at, at + 1)], invalid),
        "half a row": ([header, _chunk(0, KV, at, at + 1, data=b"x" * 100)], invalid),
        "no rows": ([header, _chunk(0, KV, at, at + 1, data=b"")], invalid),
        "a wrong sum": ([header, _chunk(0, KV, at, at + 1, checksum=1)], invalid),
        "a commit of rows that did not come": ([header, kv, tokens, _commit(at + 3)], precondition),
        "a commit of one stream only": ([header, kv, _commit(at + 2)], precondition),
        "a commit behind the last one": ([header, _commit(at - 1)], invalid),
        "rows and no commit": ([header, kv, tokens], precondition),
        "another offset": ([_header(0, write_offset=at - 1)], aborted),
        "another generation": ([_header(0, if_generation_match=1 << 40)], aborted),
        "another model": ([_header(0, model_fingerprint=bytes(32))], precondition),
        "no such session": ([_header(99)], grpc.StatusCode.NOT_FOUND),
    }  # fmt: skip


def _check_rows(bench: Bench, owner: int, access: str) -> None:
    with (
        Client(bench.server.target, timeout_s=TIMEOUT_S, access="local" if access == "local" else "remote") as client,
        client.read(f"sessions/s{owner}") as rows,
    ):  # fmt: skip
        found = np.concatenate([np.asarray(piece) for piece in rows.pieces(KV)])
        if len(found) != TOKENS_EACH or first_difference(found, owner, KV, 0) is not None:
            bench.report.find(f"s{owner} ({access}): {len(found)} tokens, or other bytes than were written")
    bench.report.count("sessions_checked")


def _append_and_drop(bench: Bench, owner: int) -> None:
    rows = {s: rows_of(owner, s, TOKENS_EACH, TOKENS_EACH + 8, n) for s, n in ((KV, ROW_BYTES), (TOKENS, 4))}
    bench.client.append(f"sessions/s{owner}", rows)
    bench.client.keep_first(f"sessions/s{owner}", TOKENS_EACH)


def _used_bytes(bench: Bench) -> list[int]:
    return [tier.used_bytes for tier in bench.client.stats().tiers]


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


# -- the run -------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "dead_clients": dead_clients,
    "frozen_clients": frozen_clients,
    "stalled_readers": stalled_readers,
    "cancelled_appends": cancelled_appends,
    "out_of_turn": out_of_turn,
    "half_open": half_open,
}


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = command([options.control]) if options.control else COMMAND_LINE
    chosen = options.scenarios or list(SCENARIOS)
    with tempfile.TemporaryDirectory(prefix="ctxcache-clients-") as folder:
        arena = (
            "--arena-size-bytes",
            "512MiB",
            "--ssd-size-bytes",
            "512MiB",
            "--keepalive-s",
            str(KEEPALIVE_S),
        )
        server = ServerProcess(Path(folder) / "data", *arena, program=program)
        with server, Client(server.target, timeout_s=TIMEOUT_S) as client:
            client.register_model(MODEL)
            for owner in range(SESSIONS):
                client.create_session("models/clients", session_id=f"s{owner}", layout=[KV])
                rows = {s: rows_of(owner, s, 0, TOKENS_EACH, n) for s, n in ((KV, ROW_BYTES), (TOKENS, 4))}
                client.append(f"sessions/s{owner}", rows)
                client.flush_session(f"sessions/s{owner}")
            for name in chosen:
                SCENARIOS[name](Bench(server, client, report, options))
        if "Traceback" in server.stderr:
            report.find("the server's log says " + server.stderr[server.stderr.index("Traceback") :][:1500])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="*", choices=list(SCENARIOS), help="which; all without it")
    parser.add_argument("--stalled", type=int, default=60, help="readers that take nothing; long run 1000")
    parser.add_argument("--cancels", type=int, default=150, help="appends given up; long run 10000")


HARNESS = Harness(
    "clients",
    "Kills, freezes, stalls and cuts off clients, and lets them speak out of turn.",
    run,
    {
        "lease_outlives_stream": "what a local client holds is not let go at its end",
        "append_outlives_stream": "a cancelled append keeps its reservation",
        "rows_before_commit": "rows are visible as they arrive",
        "readers_unbounded": "a read puts everything into messages, whoever takes them",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
