"""Clients that die, freeze, stall, vanish, give up, or speak out of turn.

Their leases and reservations end with them; what they had not committed was never there; what others hold and
read goes on; and no number of them makes the server hold more memory than its bound.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

import ctxcache
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.streams import TOKENS, StateKind, Stream
from ctxcache.v1 import arena_pb2, model_pb2, session_pb2
from ctxcache.v1.arena_pb2_grpc import ArenaServiceStub
from ctxcache.v1.session_pb2_grpc import SessionServiceStub
from tests.faults.blackhole import Blackhole
from tests.faults.client_bench import (
    GONE_WITHIN_S,
    KEEPALIVE_S,
    KV,
    MODEL,
    OWN,
    ROW_BYTES,
    SESSIONS,
    SILENT_GONE_WITHIN_S,
    TIMEOUT_S,
    TOKENS_EACH,
    Bench,
    child,
    holding,
)
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import forked
from tests.faults.rows import rows_of
from tests.server_process import ServerProcess

APPEND_TOKENS = 16
BEGUN_ONE_IN = 10
STREAMS_BESIDE = 16
"""Streams admitted beside stalled ones."""
STALLED_READER_BYTES = 3 << 20
"""The memory that one reader that takes nothing may cost the server.

A message of 1 MiB, made, copied and on its way.
"""
THIEVES = 2


# -- what can happen to clients ------------------------------------------------------------------------


def dead_clients(bench: Bench) -> None:
    """A killed client's leases, reservations and streams end with its connection."""
    for kind in ("lease", "reservation", "read", "append"):
        with holding(bench, kind, bench.names) as process:
            # An append that was begun here may not have arrived there yet.
            bench.wait_until(f"a {kind} of each session", bench.holds_all, TIMEOUT_S)
            process.kill()
            waited_s = bench.wait_until(f"dead {kind} holder gone", bench.holds_nothing, GONE_WITHIN_S)
        bench.report.figures[f"dead_{kind}_holder_gone_s"] = waited_s


def frozen_clients(bench: Bench) -> None:
    """While a client that holds rows is frozen, others read, write and delete as ever."""
    with holding(bench, "lease", bench.names[:3]) as process:
        process.freeze()
        for owner in range(3):
            bench.check_rows(owner, "local")
            bench.check_rows(owner, "remote")
        _append_and_drop(bench, 0)
        bench.report.count("frozen_clients", 1)
    bench.wait_until("the frozen client is gone", bench.holds_nothing, GONE_WITHIN_S)


def thawed_clients(bench: Bench) -> None:
    """A client that is frozen until it is given up, and goes on over others' rows, believes none of them."""
    for _ in range(bench.options.thaws):
        with child(
            "copier", "copies", bench.server.target, bench.names[0], bench.options.control or ""
        ) as copier:
            copier.freeze()
            waited_s = bench.wait_until(
                "a frozen gRPC client is gone", bench.holds_nothing, SILENT_GONE_WITHIN_S
            )
            bench.client.admin.demote_session(bench.names[0])
            thieves = [bench.store(f"thief{i}", SESSIONS + i) for i in range(THIEVES)]
            copier.thaw()
            if (said := copier.word(bench.report.patience_s(TIMEOUT_S))) != "refused foreign":
                bench.report.find(f"a frozen client goes on: its copy was {said or 'good for ever'}")
        for thief in thieves:
            bench.client.sessions.open(thief).delete()
        bench.report.count("thawed_clients")
        bench.report.end_if_found()
    bench.report.figures["frozen_grpc_client_gone_s"] = waited_s


def stalled_readers(bench: Bench) -> None:
    """Readers that take nothing cost a bounded amount of memory each, and nobody else's reads."""
    before_bytes = _rss_bytes(bench.server.pid)
    count = bench.options.stalled
    names = [bench.names[i % SESSIONS] for i in range(count)]
    with holding(bench, "read", names):
        for owner in range(SESSIONS):
            bench.check_rows(owner, "remote")
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
            time.sleep(SILENT_GONE_WITHIN_S * 2)

        call = stub.Access(requests())
        if not next(call).results[0].HasField("lease"):
            bench.report.find("no lease through the proxy: the check below means nothing")
        proxy.cut()
        waited_s = bench.wait_until("the half-open peer is gone", bench.holds_nothing, SILENT_GONE_WITHIN_S)
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
        bench.check_rows(owner, "remote")
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
    bench.wait_until("an append is under way", lambda: not bench.holds_nothing(), TIMEOUT_S)
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
            bench.check_rows(0, "remote")
    # The last read may not have ended there yet.
    bench.wait_until("refused appends leave nothing behind", bench.holds_nothing, GONE_WITHIN_S)


# -- parts ---------------------------------------------------------------------------------------------


def _header(owner: int, **changes: object) -> session_pb2.AppendSessionRequest:
    facts = {
        "name": f"sessions/s{owner}",
        "model_fingerprint": MODEL.fingerprint(),
        "write_offset": TOKENS_EACH,
    }
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
        "a chunk of a stream that is not stored": (
            [header, _chunk(0, Stream(5, StateKind.KV), at, at + 1)],
            invalid,
        ),
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
    }


def _append_and_drop(bench: Bench, owner: int) -> None:
    rows = {s: rows_of(owner, s, TOKENS_EACH, TOKENS_EACH + 8, n) for s, n in ((KV, ROW_BYTES), (TOKENS, 4))}
    bench.client.sessions.open(f"sessions/s{owner}", OWN).append(rows)
    bench.client.sessions.open(f"sessions/s{owner}").keep_first(TOKENS_EACH)


def _used_bytes(bench: Bench) -> list[int]:
    return [tier.used_bytes for tier in bench.client.admin.stats().tiers]


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


# -- the run -------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "dead_clients": dead_clients,
    "frozen_clients": frozen_clients,
    "thawed_clients": thawed_clients,
    "stalled_readers": stalled_readers,
    "cancelled_appends": cancelled_appends,
    "out_of_turn": out_of_turn,
    "half_open": half_open,
}


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    chosen = options.scenarios or list(SCENARIOS)
    with tempfile.TemporaryDirectory(prefix="ctxcache-clients-") as folder:
        given = (
            "--arena-size-bytes",
            "512MiB",
            "--ssd-size-bytes",
            "512MiB",
            "--keepalive-s",
            str(KEEPALIVE_S),
            "--max-concurrent-streams",
            str(options.stalled + STREAMS_BESIDE),
        )
        server = ServerProcess(Path(folder) / "data", *given, program=program)
        with server, ctxcache.connect(server.target, timeout_s=TIMEOUT_S) as client:
            client.models.register(MODEL)
            bench = Bench(server, client, report, options)
            for owner in range(SESSIONS):
                bench.store(f"s{owner}", owner)
            for name in chosen:
                SCENARIOS[name](bench)
        if "Traceback" in server.stderr:
            report.find("the server's log says " + server.stderr[server.stderr.index("Traceback") :][:1500])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="*", choices=list(SCENARIOS), help="which; all without it")
    parser.add_argument("--stalled", type=int, default=60, help="readers that take nothing; long run 1000")
    parser.add_argument("--thaws", type=int, default=2, help="clients over gRPC that are frozen and thawed")
    parser.add_argument("--cancels", type=int, default=150, help="appends given up; long run 10000")


HARNESS = Harness(
    "clients",
    "Kills, freezes, stalls and cuts off clients, and lets them speak out of turn.",
    run,
    {
        "lease_outlives_stream": "what a local client holds is not let go at its end",
        "append_outlives_stream": "a cancelled append keeps its reservation",
        "rows_before_commit": "rows are visible as they arrive",
        "lease_believed": "a client that was frozen believes its lease",
        "readers_unbounded": "a read puts everything into messages, whoever takes them",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
