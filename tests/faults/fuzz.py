"""Fuzz: whatever arrives gets a proper status, and what it does not name stays as it was.

Requests of every rpc, unary and streaming, drawn from the contract's descriptors and damaged in
part; garbage on the sockets themselves. Nothing may crash, hang, be answered INTERNAL or UNKNOWN,
or be refused without a reason; sessions that no request names keep every byte; and when the
fuzzer's own sessions are deleted, all space is back.
"""

import argparse
import importlib
import pkgutil
import random
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor, MethodDescriptor

import ctxcache
import ctxcache.v1
from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import arena_pb2_grpc
from ctxcache.v1.arena_pb2 import AccessRequest, AccessResponse, AcquireLease, Operation
from ctxcache.wire.status import DETAILS_KEY
from tests.faults.fuzz_control import fuzz_control
from tests.faults.harness import Harness, Report, progress
from tests.faults.messages import MessageMaker, Plausible, hostile_texts
from tests.faults.planted import forked
from tests.faults.rows import first_difference, rows_of
from tests.model_specs import small_model
from tests.server_process import ServerProcess

CALL_TIMEOUT_S = 30.0
AS_LONG = ("Verify", "Drain", "Backup", "Record")
AS_SLOW_AS_ASKED = {f"/ctxcache.v1.AdminService/{name}": 0.1 for name in AS_LONG} | {
    "/ctxcache.v1.BlockService/SubscribeBlocks": 0.1
}
"""Rpcs that take as long as a field of theirs says, or others do, and how long we wait, in seconds.

A byte per second is a rate.
"""
REFUSES_OTHERS = {"/ctxcache.v1.AdminService/Drain": "/ctxcache.v1.AdminService/Undrain"}
"""Rpcs after which others are refused, as they should be, and what ends that: never among the others."""
DRAINS = 10
CANARIES = 8
CANARY_TOKENS = 150
RSS_GROWTH_LIMIT_BYTES = 96 << 20
SETTLE_S = 10.0
ROUNDS = 10
CONTROL_SHARE = 50
"""Requests for each connection to the control socket, which carries a dozen frames."""
STREAMS = tuple(StreamSpec(Stream(layer, StateKind.KV), 96, DType.FLOAT16) for layer in range(3))
# Refusals of gRPC itself carry no reason of ours: messages beyond its limit.
WITHOUT_REASON = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
NEVER = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
NEVER_NUMBERS = {int(code.value[0]) for code in NEVER}


@dataclass(frozen=True, slots=True)
class Rpc:
    """One rpc of the contract."""

    path: str
    request: Descriptor
    is_access: bool
    takes_stream: bool
    gives_stream: bool


def rpcs() -> list[Rpc]:
    """Every rpc of every service in `ctxcache.v1`."""
    found = []
    for module in pkgutil.iter_modules(ctxcache.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"ctxcache.v1.{module.name}").DESCRIPTOR
            found += [_rpc(m) for service in file.services_by_name.values() for m in service.methods]
    return found


def _rpc(method: MethodDescriptor) -> Rpc:
    path = f"/{method.containing_service.full_name}/{method.name}"
    is_access = method.output_type.full_name == AccessResponse.DESCRIPTOR.full_name
    return Rpc(path, method.input_type, is_access, method.client_streaming, method.server_streaming)


class Fuzzer:
    """One thread's calls over a channel of its own."""

    def __init__(self, target: str, seed: int, plausible: Plausible, report: Report) -> None:
        self._draw = random.Random(seed)
        self._maker = MessageMaker(self._draw, plausible)
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._report = report
        self._by_path = {rpc.path: rpc for rpc in rpcs()}
        self._rpcs = [rpc for rpc in self._by_path.values() if rpc.path not in REFUSES_OTHERS]
        self.answers: Counter[str] = Counter()

    def run(self, request_count: int) -> None:
        """Send so many requests, one after the other."""
        with self._channel:
            for _ in range(request_count):
                self._one(self._draw.choice(self._rpcs))

    def sweep(self) -> None:
        """Send every hostile text in every text field of every rpc that takes one message. Raises Found."""
        with self._channel:
            for rpc in self._rpcs:
                for message in () if rpc.takes_stream else hostile_texts(rpc.request):
                    self._send(rpc, [message.SerializeToString()])
                self._report.end_if_found()

    def refuse_others(self, count: int) -> None:
        """Send so many requests of each rpc that others would notice, and end it each time."""
        with self._channel:
            for path, ending in REFUSES_OTHERS.items():
                for _ in range(count):
                    self._one(self._by_path[path])
                    self._one(self._by_path[ending])
                # One that was not damaged: whoever comes next is let in.
                self._send(self._by_path[ending], [b""])

    def _one(self, rpc: Rpc) -> None:
        self._send(rpc, [self._maker.encoded(rpc.request) for _ in range(self._length(rpc))])

    def _send(self, rpc: Rpc, requests: Sequence[bytes]) -> None:
        self.answers["requests"] += 1
        try:
            responses = self._call(rpc, requests)
        except grpc.RpcError as error:
            self._judge(rpc, requests, error)
            return
        self.answers["OK"] += 1
        if rpc.is_access:
            for raw in responses:
                self.judge_operations(AccessResponse.FromString(raw))

    def _length(self, rpc: Rpc) -> int:
        return self._draw.choice((0, 1, 1, 2, 3, 8)) if rpc.takes_stream else 1

    def _call(self, rpc: Rpc, requests: Sequence[bytes]) -> list[bytes]:
        kinds = {
            (False, False): self._channel.unary_unary,
            (True, False): self._channel.stream_unary,
            (False, True): self._channel.unary_stream,
            (True, True): self._channel.stream_stream,
        }
        call: Any = kinds[rpc.takes_stream, rpc.gives_stream](rpc.path)
        sent = iter(requests) if rpc.takes_stream else requests[0]
        answer = call(sent, timeout=AS_SLOW_AS_ASKED.get(rpc.path, CALL_TIMEOUT_S))
        return list(answer) if rpc.gives_stream else [answer]

    def _judge(self, rpc: Rpc, requests: Sequence[bytes], error: grpc.RpcError) -> None:
        code = error.code()
        self.answers[code.name] += 1
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and rpc.path in AS_SLOW_AS_ASKED:
            return
        if code in NEVER:
            shown = [request[:60].hex() for request in requests]
            self._report.find(f"{rpc.path}: {code.name} {error.details()!r} for {shown}")
        elif code not in WITHOUT_REASON and not _has_details(error):
            self._report.find(f"{rpc.path}: {code.name} without a reason")

    def judge_operations(self, response: AccessResponse) -> None:
        """Every refused operation has a reason, and none is our fault."""
        for result in response.results:
            if result.HasField("error"):
                self.answers[f"operation {result.error.reason}"] += 1
                if result.error.code in NEVER_NUMBERS or not result.error.reason:
                    self._report.find(f"access: {result.error}")


def _has_details(error: grpc.RpcError) -> bool:
    metadata: Any = error.trailing_metadata() or ()  # pairs, whatever its type says
    return any(key == DETAILS_KEY for key, _ in metadata)


# -- garbage on the sockets ------------------------------------------------------------------------


def throw_garbage(target: str, count: int, draw: random.Random) -> None:
    """Open connections to a gRPC target and say things that are not gRPC, or not even HTTP/2."""
    for _ in range(count):
        with _connect(target) as connection:
            try:
                for part in _garbage(draw):
                    connection.sendall(part)
            except OSError:
                continue  # the server has hung up on us: as it should
            if draw.random() < 0.3:
                # Reset instead of an orderly end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _connect(target: str) -> socket.socket:
    if target.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CALL_TIMEOUT_S)
        _connect_unix(connection, target.removeprefix("unix:"))
        return connection
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), CALL_TIMEOUT_S)


def _connect_unix(connection: socket.socket, path: str) -> None:
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            # The queue of those who wait to be let in is full: a TCP client would wait by itself.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _garbage(draw: random.Random) -> Iterator[bytes]:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"
    kind = draw.randrange(6)
    if kind == 0:
        yield draw.randbytes(draw.randrange(2000))
    elif kind == 1:
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    elif kind == 2:
        yield preface[: draw.randrange(len(preface))]
    else:
        yield preface + settings
        for _ in range(draw.randrange(20)):
            length = draw.choice((0, 1, 8, 200, 16384, 2**24 - 1))
            head = struct.pack(">I", length)[1:] + bytes((draw.randrange(12), draw.randrange(256)))
            yield (
                head + struct.pack(">I", draw.choice((0, 1, 3, 2**31 - 1))) + draw.randbytes(min(length, 64))
            )


# -- the run ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    with tempfile.TemporaryDirectory(prefix="ctxcache-fuzz-") as folder:
        server = ServerProcess(Path(folder) / "data", program=program)
        with server, ctxcache.connect(server.target, timeout_s=CALL_TIMEOUT_S) as client:
            _run(options, report, server, client)


def _run(options: argparse.Namespace, report: Report, server: ServerProcess, client: Client) -> None:
    _make_canaries(client)
    plausible = _make_plausible(client)
    used_bytes = _used_bytes(client)
    _break_off_with_leases(server.target, plausible)
    # Before anything else may take leases, and may take long.
    _check_let_go(report, client)
    report.end_if_found()
    sweeper = Fuzzer(server.target, options.seed, plausible, report)
    sweeper.sweep()
    _count(report, [sweeper])
    _check_canaries(report, client)
    report.end_if_found()
    first_rss_bytes = _rss_bytes(server.pid)
    with ThreadPoolExecutor(options.threads) as pool:
        for i in range(ROUNDS):
            each = max(1, options.requests // ROUNDS // options.threads)
            seeds = [options.seed * 10_000 + i * options.threads + n for n in range(options.threads)]
            fuzzers = [Fuzzer(server.target, seed, plausible, report) for seed in seeds]
            list(pool.map(Fuzzer.run, fuzzers, [each] * len(fuzzers)))
            _count(report, fuzzers)
            report.end_if_found()
            progress(i + 1, ROUNDS, "rounds of requests")
    drainer = Fuzzer(server.target, options.seed, plausible, report)
    drainer.refuse_others(DRAINS)
    _count(report, [drainer])
    draw = random.Random(options.seed)
    _fuzz_control(options, report, server, plausible)
    for target in (*server.ready["listen_addresses"], *server.ready["bulk_addresses"]):
        throw_garbage(target, options.connections // 4, draw)
        report.count("garbage_connection_count", options.connections // 4)
    _check_after(report, server, client, used_bytes)
    growth_bytes = _rss_bytes(server.pid) - first_rss_bytes
    report.figures["rss_growth_bytes"] = growth_bytes
    if growth_bytes > RSS_GROWTH_LIMIT_BYTES:
        report.find(f"the server grew by {growth_bytes} B")


def _break_off_with_leases(target: str, plausible: Plausible) -> None:
    """Acquire leases as a good client would, and go away without a word: drawn messages seldom get so far."""
    leases = [
        Operation(acquire_lease=AcquireLease(session=name, model_fingerprint=plausible.fingerprints[0]))
        for name in plausible.sessions
    ]
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = arena_pb2_grpc.ArenaServiceStub(channel).Access(iter([AccessRequest(operations=leases)]))
        next(call)
        call.cancel()


def _fuzz_control(
    options: argparse.Namespace, report: Report, server: ServerProcess, plausible: Plausible
) -> None:
    draw = random.Random(options.seed)
    fuzzer = Fuzzer(server.target, options.seed, plausible, report)
    maker, path = MessageMaker(draw, plausible), server.ready["control_socket"]
    connections = max(1, options.requests // CONTROL_SHARE)
    sent = fuzz_control(path, draw, maker, connections, fuzzer.judge_operations, report.find)
    report.count("control_frame_count", sent)
    _count(report, [fuzzer])


def _count(report: Report, fuzzers: Sequence[Fuzzer]) -> None:
    for fuzzer in fuzzers:
        for answer, count in fuzzer.answers.items():
            report.count(f"answered {answer}" if answer != "requests" else "request_count", count)


def _make_canaries(client: Client) -> None:
    own = client.models.register(_model("canary"))
    for owner in range(CANARIES):
        client.sessions.create(own, id=f"canary-{owner}", layout=[s.stream for s in STREAMS])
        rows = {s.stream: rows_of(owner, s.stream, 0, CANARY_TOKENS, s.row_bytes) for s in STREAMS}
        rows[TOKENS] = rows_of(owner, TOKENS, 0, CANARY_TOKENS, 4)
        client.sessions.open(f"sessions/canary-{owner}", own).append(rows)
        client.sessions.open(f"sessions/canary-{owner}").flush()


def _make_plausible(client: Client) -> Plausible:
    spec = _model("fuzzed")
    client.models.register(spec)
    names = [f"sessions/fz{i}" for i in range(12)]
    for name in names[:6]:
        client.sessions.create(
            CallerModel(spec), id=name.removeprefix("sessions/"), layout=[STREAMS[0].stream]
        )
    return Plausible(names, ["models/fuzzed", "models/none"], [spec.fingerprint(), bytes(32)])


def _model(model_id: str) -> ModelSpec:
    return small_model(
        *STREAMS,
        model_id=model_id,
        architecture="Fuzz",
        revision=model_id,
        layer_count=3,
        hidden_size=48,
        head_size=24,
    )


def _used_bytes(client: Client) -> list[int]:
    return [tier.used_bytes for tier in client.admin.stats().tiers]


def _check_after(report: Report, server: ServerProcess, client: Client, used_bytes: list[int]) -> None:
    if not client.admin.health():
        report.find("the server is not healthy afterwards")
    _check_canaries(report, client)
    names = [s.name for s in client.sessions.list() if not s.name.startswith("sessions/canary-")]
    for name in names:
        try:
            client.sessions.open(name).delete()
        except CacheError as error:
            report.find(f"{name} cannot be deleted: {error}")
    _check_let_go(report, client)
    if (session_count := client.admin.stats().session_count) != CANARIES:
        report.find(f"left behind: {session_count} sessions")
    after = _used_bytes(client)
    if any(now > before for now, before in zip(after, used_bytes, strict=True)):
        report.find(f"space is not back: {used_bytes} B before, {after} B after")
    for word in ("Traceback", "internal_error"):
        if word in server.stderr:
            report.find(f"the server's log says {word}")


def _check_let_go(report: Report, client: Client) -> None:
    """No lease and no reservation outlives the stream that it came by."""
    stats = client.admin.stats()
    deadline = time.monotonic() + report.patience_s(SETTLE_S)
    while time.monotonic() < deadline and (stats.lease_count or stats.reservation_count):
        time.sleep(0.1)
        stats = client.admin.stats()
    if stats.lease_count or stats.reservation_count:
        report.find(f"left behind: {stats.lease_count} leases, {stats.reservation_count} reservations")


def _check_canaries(report: Report, client: Client) -> None:
    """Sessions that no request names are as they were made."""
    for owner in range(CANARIES):
        _check_canary(report, client, owner)


def _check_canary(report: Report, client: Client, owner: int) -> None:
    try:
        with client.sessions.open(f"sessions/canary-{owner}", CallerModel(_model("canary"))).read() as rows:
            for spec in STREAMS:
                found = np.concatenate([np.asarray(piece) for piece in rows.pieces(spec.stream)])
                if len(found) != CANARY_TOKENS or first_difference(found, owner, spec.stream, 0) is not None:
                    report.find(f"canary-{owner} has changed")
    except CacheError as error:
        report.find(f"canary-{owner}: {error}")


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=5000, help="how many; the long run takes 100000")
    parser.add_argument("--connections", type=int, default=400, help="garbage connections; long run 50000")
    parser.add_argument("--threads", type=int, default=4, help="clients at a time")


HARNESS = Harness(
    "fuzz",
    "Throws hostile and damaged requests at every rpc, and garbage at the sockets.",
    run,
    {
        "unmapped_error": "a validation error that is not one of ours",
        "reason_left_out": "refusals lose their reason",
        "any_name_goes": "session names are not checked, and one of them reaches other sessions",
        "lease_outlives_stream": "what a stream holds is not let go at its end",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
