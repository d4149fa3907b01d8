"""The wire: one channel to one server, its stubs, and the deadline and errors of every call.

Knows no session and no arena. Worst case: a server that does not answer costs a caller its deadline.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2

from ctxcache.errors import Unavailable
from ctxcache.status import from_rpc_error
from ctxcache.v1 import admin_pb2_grpc, arena_pb2_grpc, model_pb2_grpc, session_pb2_grpc

# A chunk is at most 2 MiB; the rest is room for its envelope and for long lists of locations.
MESSAGE_LIMIT_BYTES = 4 << 20
# A bulk call may take its deadline and the time its bytes need at this pace, the caller's own included.
SLOWEST_BYTES_PER_S = 20e6

_IDEMPOTENT = {
    "ctxcache.v1.ModelService": ("GetModel", "ListModels"),
    "ctxcache.v1.SessionService": ("GetSession", "ListSessions", "LookupSessions"),
    "ctxcache.v1.ArenaService": ("GetArena",),
    "ctxcache.v1.AdminService": ("GetStats",),
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method}
                for service, methods in _IDEMPOTENT.items()
                for method in methods
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
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
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
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Wire:
    """A channel to `target` and the services behind it. Thread-safe."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self.models = model_pb2_grpc.ModelServiceStub(self._channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self.arena = arena_pb2_grpc.ArenaServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.check_health: grpc.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def call(
        self, method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]", request: _Request
    ) -> _Response:
        """Make one unary call within the deadline. Raises the server's error as it raised it."""
        with self.errors():
            return method(request, timeout=self.timeout_s)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what gRPC raises within the block into errors of ours."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        except ValueError as error:
            # The only thing that gRPC says by ValueError: the channel was closed.
            raise Unavailable(target=self.target, problem="the client is closed") from error

    def bulk_timeout_s(self, size_bytes: int) -> float:
        """Return the deadline of a call that moves `size_bytes`."""
        return self.timeout_s + size_bytes / SLOWEST_BYTES_PER_S

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._channel.close()
