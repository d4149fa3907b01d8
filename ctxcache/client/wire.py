"""The wire: one channel to one server, its stubs, and the deadline and errors of every call.

The caller's trace goes with its calls. OpenTelemetry is not imported here: a process that has not done so has
no trace to pass on. Knows no session and no arena. Worst case: a server that does not answer costs a caller
its deadline.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, Self, TypeAlias, TypeVar

import grpc
import grpc.experimental
from grpc_health.v1 import health_pb2

from ctxcache.client.credentials import AuthorizedChannel, ClientTls, OwnTokenFile, tls_problem
from ctxcache.client.process_forks import end_in_children, of_parent
from ctxcache.errors import CacheError, TlsFailed, Unavailable
from ctxcache.format.wire_chunk import WireChunk, scan_chunk
from ctxcache.v1 import (
    admin_pb2_grpc,
    arena_pb2_grpc,
    block_pb2_grpc,
    bulk_pb2_grpc,
    hints_pb2_grpc,
    model_pb2_grpc,
    peer_pb2_grpc,
    prefix_pb2_grpc,
    session_pb2_grpc,
)
from ctxcache.v1.session_pb2 import AppendSessionResponse, ReadSessionRequest, ReadSessionResponse
from ctxcache.wire.address import tcp_target
from ctxcache.wire.methods import PACKAGE, unchanging
from ctxcache.wire.status import from_rpc_error

API = "opentelemetry.trace"
_NOTHING = nullcontext()


def trace_parent() -> str:
    """The current span as W3C's `traceparent`; empty where there is none."""
    # Looked up, never imported: the import costs tens of milliseconds, and a process without it traces
    # nothing.
    api = sys.modules.get(API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """The metadata of an rpc: `traceparent` and, where there is one, `tracestate`."""
    parent = trace_parent()
    if not parent:
        return None
    state = sys.modules[API].get_current_span().get_span_context().trace_state.to_header()
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


def span(name: str, **facts: str | int) -> AbstractContextManager[object]:
    """A span of the caller's own tracer, current in the block; nothing where it has none."""
    api = sys.modules.get(API)
    if api is None:
        return _NOTHING
    made: AbstractContextManager[object] = api.get_tracer("ctxcache.client").start_as_current_span(
        f"ctxcache.{name}", attributes={f"ctxcache.{key}": fact for key, fact in facts.items()}
    )
    return made


# A chunk is at most 2 MiB; the rest is room for its envelope, and for batches of operations.
MESSAGE_LIMIT_BYTES = 4 << 20
# Lists of locations are longer.
ANSWER_LIMIT_BYTES = 64 << 20
# A bulk call may take its deadline and the time its bytes need at this pace, the caller's own included.
SLOWEST_BYTES_PER_S = 20e6

SERVICES = (
    "ModelService",
    "SessionService",
    "ArenaService",
    "PrefixService",
    "BlockService",
    "AdminService",
)
# Retried by gRPC itself where the server could not be reached: calls that change nothing. A call that changes
# something may have been carried out though its answer was lost, and is the caller's to repeat.
#
# Three attempts, about 0.1 s and 0.2 s apart: less than a caller's patience.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": f"{PACKAGE}.{service}", "method": method}
                for service in SERVICES
                for method in unchanging(service)
            ],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
TENANT_HEADER = "ctxcache-tenant"
KEEPALIVE_MS = 20_000
TLS_TIMEOUT_S = 2.0
"""How long one looks, after a call that found no server, whether it is TLS."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # A server that restarts is back within seconds; the default backs off for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # An environment's web proxy would be asked for loopback addresses too.
    ("grpc.enable_http_proxy", 0),
    # Otherwise clients of one process share a connection, and one client's break is the other's.
    ("grpc.use_local_subchannel_pool", 1),
    # A server behind a cut cable is found out between two calls, not at the next one's deadline.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS // 2),
    # A read's messages are drawn by the thread that wants them, not handed over by one of gRPC's.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)

ReadMessage: TypeAlias = WireChunk | ReadSessionResponse
"""A message of a read: a chunk around its bytes, or any other message."""
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _decode_read(encoded: bytes) -> ReadMessage:
    # A chunk is read around its bytes, where they lie in the message: protobuf would copy them once more.
    return scan_chunk(encoded) or ReadSessionResponse.FromString(encoded)


class Closing(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Closable(Protocol):
    """An object to close before the channel."""

    def close(self) -> None:
        """End it."""


def _options(tls: ClientTls) -> list[tuple[str, int | str]]:
    named = [] if tls.server_name is None else [("grpc.ssl_target_name_override", tls.server_name)]
    return [*CHANNEL_OPTIONS, *named]


class Wire:
    """A channel to `target` and the services behind it. Thread-safe."""

    def __init__(
        self,
        target: str,
        timeout_s: float,
        tls: ClientTls | None = None,
        token: OwnTokenFile | None = None,
        tenant: str = "",
    ) -> None:
        """`tenant`: whose sessions an operator's calls are about; empty for its own."""
        self.target, self.address = target, tcp_target(target)
        self._is_forked = False
        self._metadata = ((TENANT_HEADER, tenant),) if tenant else ()
        self.open_streams: set[Closable] = set()
        """Reads and queues that were not closed: each would keep the connection beyond the channel's end."""
        self.timeout_s = timeout_s
        self.tls = tls
        self.tls_context = None if tls is None else tls.context()
        self.token = token
        self._channel: grpc.Channel = (
            grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options=_options(tls))
        )
        if token is not None:
            self._channel = AuthorizedChannel(self._channel, token)
        self.models = model_pb2_grpc.ModelServiceStub(self._channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self.prefixes = prefix_pb2_grpc.PrefixServiceStub(self._channel)
        self.blocks = block_pb2_grpc.BlockServiceStub(self._channel)
        self.arena = arena_pb2_grpc.ArenaServiceStub(self._channel)
        self.bulk = bulk_pb2_grpc.BulkServiceStub(self._channel)
        self.hints = hints_pb2_grpc.HintServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.peers = peer_pb2_grpc.PeerServiceStub(self._channel)
        # The two calls that move rows have their own coders: the generated stubs would parse and copy every
        # chunk.
        self.read_session: grpc.UnaryStreamMultiCallable[ReadSessionRequest, ReadMessage] = (
            self._channel.unary_stream(
                "/ctxcache.v1.SessionService/ReadSession",
                request_serializer=ReadSessionRequest.SerializeToString,
                response_deserializer=_decode_read,
            )
        )
        self.append_session: grpc.StreamUnaryMultiCallable[bytes, AppendSessionResponse] = (
            self._channel.stream_unary(
                "/ctxcache.v1.SessionService/AppendSession",
                request_serializer=bytes,
                response_deserializer=AppendSessionResponse.FromString,
            )
        )
        self.check_health: grpc.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        end_in_children(self)

    def call(
        self, method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]", request: _Request
    ) -> _Response:
        """Make one unary call within the deadline. Raises the server's error as it raised it."""
        with self.errors():
            return method(
                request, timeout=self.timeout_s, metadata=(*(trace_metadata() or ()), *self._metadata)
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what gRPC raises within the block into errors of ours."""
        if self._is_forked:
            raise of_parent(self.target)
        try:
            yield
        except grpc.RpcError as error:
            raise self._told(error) from error
        except ValueError as error:
            # The only thing that gRPC says by ValueError: the channel was closed.
            raise Unavailable(target=self.target, problem="the client is closed") from error

    def _told(self, error: grpc.RpcError) -> CacheError:
        """The error that the server raised; of one that was not reached, what TLS has to do with it."""
        told = from_rpc_error(error, self.target)
        # Only for the bare error: a server that answered has been reached, whatever it speaks.
        if type(told) is not Unavailable or self.address is None:
            return told
        problem = tls_problem(self.address, self.tls, min(self.timeout_s, TLS_TIMEOUT_S))
        return TlsFailed(target=self.target, problem=problem) if problem else told

    def bulk_timeout_s(self, size_bytes: int) -> float:
        """Return the deadline of a call that moves `size_bytes`."""
        return self.timeout_s + size_bytes / SLOWEST_BYTES_PER_S

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        # The calls of a parent are not a child's to cancel.
        if self._is_forked:
            return
        # A copy of the set: each `close` takes itself out of it.
        for stream in list(self.open_streams):
            stream.close()
        self._channel.close()

    def forked(self) -> None:
        """See Shared."""
        self._is_forked = True
