"""Ports: where gRPC listens, how, and for how long silent peers are kept. Owned by the server.

Worst case: an address that cannot be had, which is AddressUnusable with the system's words.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import grpc

from ctxcache.errors import AddressUnusable
from ctxcache.service.appending import CHUNK_BYTES_LIMIT
from ctxcache.service.edge import Edge
from ctxcache.service.tls import Tls
from ctxcache.service.unix_path import remove_stale

PING_INTERVAL_MS = 5000
"""Least time between two pings of an idle client; one that asks more often is cut off."""
CONNECTION_STREAMS_LIMIT = 1024
"""Rpcs that one connection may have open, admitted or not; further ones wait at the client."""
MESSAGE_LIMIT_BYTES = CHUNK_BYTES_LIMIT + (64 << 10)
"""Largest request: a chunk of rows, and what is around it. gRPC refuses a larger one at its first bytes."""
WINDOW_BYTES = 256 << 10
"""What may come of an rpc's request before it is asked for."""
PENDING_LIMIT = 512
"""Rpcs that the event loop has not looked at yet."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""How long a connection may take for TLS and its first frame; one that says nothing is closed."""
IDLE_MS = 600_000
"""How long a connection may be there without an rpc; its client connects again when it has one."""
OPTIONS = (
    # Two servers must not share a port without knowing.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_concurrent_streams", CONNECTION_STREAMS_LIMIT),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    # It would widen the window of whoever sends much.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.server.max_pending_requests", PENDING_LIMIT),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_LIMIT),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
)


class Ports:
    """TCP addresses and Unix sockets of one gRPC server. Bind them, then start the server."""

    def __init__(self, edge: Edge, tls: Tls | None, *, silence_s: float, connection_limit: int) -> None:
        """`silence_s`: of a peer, before it is asked whether it lives. `connection_limit`: of each address."""
        self._tls = tls
        limit = ("grpc.max_allowed_incoming_connections", connection_limit)
        options = (*OPTIONS, limit, *_keepalive(silence_s))
        self.server = grpc.aio.server(interceptors=[edge], options=options)

    def bind(self, target: str) -> str:
        """Take an address; as clients name it, the port filled in. Raises AddressUnusable."""
        is_unix = target.startswith("unix:")
        try:
            if is_unix:
                # By itself gRPC takes the path of a server that lives.
                remove_stale(target.removeprefix("unix:"))
            if self._tls and not is_unix:
                port = self.server.add_secure_port(target, self._tls.credentials)
            else:
                # gRPC does not say who is at the other end of a Unix socket; its mode lets in nobody else.
                with _private() if is_unix else nullcontext():
                    port = self.server.add_insecure_port(target)
        except OSError as error:
            raise AddressUnusable(address=target, problem=error.strerror or str(error)) from error
        except RuntimeError as error:
            raise AddressUnusable(address=target, problem="it is in use or not ours to use") from error
        return target if is_unix else f"{target.rpartition(':')[0]}:{port}"

    async def give_up(self) -> None:
        """Let go of what is bound: gRPC does so at the end of a server, once it has begun."""
        await self.server.start()
        await self.server.stop(None)


@contextmanager
def _private() -> Iterator[None]:
    """What is made within the block is for this user alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _keepalive(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Find out peers behind a cut cable, and let clients find out us."""
    silence_ms = int(silence_s * 1000)
    return (
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", silence_ms // 2),
        # A keep-alive ping that follows any other ping waits as long as that one would: a minute by itself.
        ("grpc.http2.ping_timeout_ms", silence_ms // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own limit of one ping in five minutes would cut off clients that do the same.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", min(silence_ms, PING_INTERVAL_MS)),
    )
