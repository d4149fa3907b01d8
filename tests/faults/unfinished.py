"""Unfinished: callers without a token begin messages and never end them; the server's memory stays as it was.

One real server that knows callers by their tokens, and 200 raw HTTP/2 connections that show none. Each begins
a small call and an append, says that a message of 2 MiB comes, and sends as much of it as the server
gives room for, in frames of 24 bytes: each costs a receiver that keeps them many times its size. Meanwhile a
caller with a token is served. The judgement: memory of the process besides the arena stays below what the
chart gives it, and comes back once the connections are gone.

Worst case: a machine so slow that the connections send little; how much they sent is told, and too little is
a finding.
"""

import argparse
import asyncio
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import grpc

from ctxcache.identity import ArenaGrant, Token, digest_of
from ctxcache.v1 import session_pb2, session_pb2_grpc
from tests.faults.harness import Harness, Report
from tests.faults.overload import Memory, rss_bytes
from tests.faults.planted import command
from tests.raw_http2 import RawClient
from tests.server_process import COMMAND_LINE, ServerProcess

CHART = Path(__file__).parents[2] / "helm/ctxcache/values.yaml"
MESSAGE_BYTES, FRAME_BYTES, FIRST_ROOM_BYTES, MOST_BYTES = 2 << 20, 24, 65535, 160 << 10
"""Announced bytes of a message; what a frame has; a connection's room at first; the most that it sends."""
LEFT_BYTES = 64 << 20
"""How much more than before may stay: free memory that a server keeps is not asked back at once."""
LEAST_SHARE = 0.5
"""The least share of the connections' bytes that must arrive: less proves nothing."""
PATIENCE_S, RETURN_S, CALL_TIMEOUT_S = 60.0, 60.0, 30.0
STREAMS = {1: "/ctxcache.v1.SessionService/GetSession", 3: "/ctxcache.v1.SessionService/AppendSession"}
Code = grpc.StatusCode


async def _begin(target: str) -> RawClient:
    """Begin a message of each method."""
    client = await RawClient.open(target)
    for stream, method in STREAMS.items():
        client.begin(stream, method)
        client.say(stream, struct.pack("!BI", 0, MESSAGE_BYTES))
    await client.writer.drain()
    return client


async def _go_on(client: RawClient, seconds: float) -> int:
    """Send of both messages what there is room for; how much that was."""
    sent_bytes = 0
    with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(seconds):
            while sent_bytes < MOST_BYTES:
                for stream in STREAMS:
                    pieces = min(client.room(stream) // 2, MOST_BYTES - sent_bytes) // FRAME_BYTES
                    for _ in range(pieces):
                        client.say(stream, bytes(FRAME_BYTES))
                    sent_bytes += pieces * FRAME_BYTES
                await client.writer.drain()
                await client.take()
    return sent_bytes


async def _attack(server: ServerProcess, options: argparse.Namespace, report: Report) -> None:
    """Hold all connections while a caller with a token is served."""
    async with asyncio.timeout(PATIENCE_S):
        clients = await asyncio.gather(*(_begin(server.target) for _ in range(options.connections)))
    sent_bytes = sum(await asyncio.gather(*(_go_on(client, options.seconds) for client in clients)))
    report.figures["sent_bytes"] = sent_bytes
    if sent_bytes < LEAST_SHARE * options.connections * FIRST_ROOM_BYTES:
        report.find(f"the connections sent {sent_bytes} B: too little to tell anything")
    await asyncio.to_thread(_ask, server.target, report)
    for client in clients:
        client.writer.close()


def _ask(target: str, report: Report) -> None:
    """A small call with a token is answered by what there is to say: there is no such session."""
    with grpc.insecure_channel(target) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        try:
            stub.GetSession(
                session_pb2.GetSessionRequest(name="sessions/none"),
                metadata=(("authorization", "Bearer known"),),
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code is not Code.NOT_FOUND:
                report.find(f"a caller with a token was answered {code}")


def _chart_bytes() -> int:
    """The memory that the chart gives the process besides the arena, by default."""
    line = next(each for each in CHART.read_text().splitlines() if "memoryOverheadMiB:" in each)
    return int(line.split(":")[1]) << 20


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    limit_bytes = _chart_bytes()
    with tempfile.TemporaryDirectory(prefix="ctxcache-unfinished-") as folder:
        hashes = Path(folder) / "hashes"
        hashes.write_text(Token("known", digest_of("known"), ArenaGrant("known")).line())
        hashes.chmod(0o600)
        server = ServerProcess(
            Path(folder) / "data",
            "--token-hashes",
            str(hashes),
            program=command([options.control]) if options.control else COMMAND_LINE,
        )
        with server:
            _ask(server.target, report)
            before_bytes = rss_bytes(server.pid)
            memory = Memory(server.pid)
            memory.start()
            asyncio.run(_attack(server, options, report))
            until_s = time.monotonic() + report.patience_s(RETURN_S)
            while (after_bytes := rss_bytes(server.pid)) > before_bytes + LEFT_BYTES:
                if time.monotonic() > until_s:
                    report.find(f"{after_bytes - before_bytes} B more than before stayed")
                    break
                time.sleep(0.5)
            peak_bytes = memory.end()
    report.figures |= {
        "limit_mib": limit_bytes >> 20,
        "before_mib": before_bytes >> 20,
        "peak_mib": peak_bytes >> 20,
        "after_mib": after_bytes >> 20,
    }
    if peak_bytes > limit_bytes:
        report.find(f"{peak_bytes} B of memory, and the chart gives {limit_bytes} B")
    allowed_bytes = before_bytes + 2 * LEFT_BYTES
    if peak_bytes > allowed_bytes:
        report.find(f"memory rose to {peak_bytes} B, from {before_bytes} B")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=200, help="how many at once (default 200)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how long they take what room they are given (default 5)"
    )


HARNESS = Harness(
    "unfinished",
    "Callers without a token begin messages and never end them.",
    run,
    {
        "reads_first": "a message is received before its caller is known, as gRPC does by itself",
        "keeps_refused": "each call that is refused leaves memory behind",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
