"""Listening: which addresses a server takes, how gRPC listens there, and which addresses others may reach.

`Ports` binds. The functions below it read settings, and bind nothing for longer than a look. Worst case: an
address that cannot be had, or one that is open to others without TLS; AddressUnusable or InvalidConfiguration
says so with the setting's name.
"""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import grpc

from ctxcache.errors import AddressUnusable, InvalidConfiguration
from ctxcache.runtime.files import check_usable
from ctxcache.runtime.sockets import check_free, remove_stale
from ctxcache.service.bulk import BulkPlaces
from ctxcache.service.rows import CHUNK_BYTES_LIMIT
from ctxcache.service.tls import Tls
from ctxcache.settings.config import Settings
from ctxcache.wire.address import PORT_LIMIT, Address

# -- how gRPC listens --------------------------------------------------------------------------------

PING_INTERVAL_MS = 5000
"""Least time between two pings of an idle client; one that asks more often is cut off."""
CONNECTION_STREAMS_LIMIT = 1024
"""Rpcs that one connection may have open, admitted or not; further ones wait at the client."""
MESSAGE_LIMIT_BYTES = CHUNK_BYTES_LIMIT + (64 << 10)
"""Largest request: a chunk of rows, and what is around it. gRPC refuses a larger one at its first bytes."""
WINDOW_BYTES = 256 << 10
"""The bytes of an rpc's request that may arrive before they are asked for."""
PENDING_LIMIT = 2048
"""Rpcs that the event loop has not looked at yet, of all methods together; probes' have as many more."""
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

    def __init__(self, tls: Tls | None, *, silence_s: float, connection_limit: int) -> None:
        """`silence_s`: of a peer, before it is asked whether it lives.

        `connection_limit`: of each address.
        """
        self._tls = tls
        limit = ("grpc.max_allowed_incoming_connections", connection_limit)
        options = (*OPTIONS, limit, *_keepalive(silence_s))
        self.server = grpc.aio.server(options=options)

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
        # gRPC says RuntimeError for any address that it cannot have, without a reason.
        except RuntimeError as error:
            raise AddressUnusable(address=target, problem="it is in use or not ours to use") from error
        return target if is_unix else f"{target.rpartition(':')[0]}:{port}"

    async def give_up(self) -> None:
        """Let go of what is bound: gRPC does so at the end of a server, once it has begun."""
        await self.server.start()
        await self.server.stop(None)


@contextmanager
def _private() -> Iterator[None]:
    """Files made within the block are for this user alone."""
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


# -- where a server listens --------------------------------------------------------------------------

SOCKET_PATH_LIMIT = 100
"""Longest Unix socket path, in bytes; the kernel's own limit is 107."""
log = logging.getLogger(__name__)


def control_path(settings: Settings) -> str:
    """The control socket's path, empty for none. Raises AddressUnusable when it is too long."""
    return _socket_path(settings.control_socket, Path(settings.data_directory) / "control.sock")


def _socket_path(path: str, automatic: Path) -> str:
    """The path of a Unix socket, empty for none. Raises AddressUnusable when it is too long."""
    if path == "auto":
        path = str(automatic.absolute())
        # `auto` does without a socket where its path is too long; a path that was asked for is refused.
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            log.warning("unix_socket_off path=%s reason=%s", path, "path_too_long")
            path = ""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise AddressUnusable(
            address=f"unix:{path}", problem=f"the path is longer than {SOCKET_PATH_LIMIT} bytes"
        )
    return path and str(Path(path).absolute())


def targets(settings: Settings) -> list[str]:
    """Where gRPC listens, TCP first. Raises AddressUnusable for a socket path that is too long."""
    targets = [settings.listen] if settings.listen else []
    path = _socket_path(settings.unix_socket, Path(settings.data_directory) / "ctxcache.sock")
    return [*targets, f"unix:{path}"] if path else targets


def check_exposure(settings: Settings) -> None:
    """Raise InvalidConfiguration for an address off loopback without TLS, unless `insecure_listen` is set."""
    is_meant = settings.tls_certificate or settings.insecure_listen
    bulk = settings.bulk_listen if settings.bulk_listen != "auto" else ""
    for source, address in (("listen", settings.listen), ("bulk_listen", bulk)):
        if address and not is_meant and not Address.of(address).is_loopback:
            problem = f"{address} is not loopback: set tls_certificate and tls_key, or insecure_listen"
            raise InvalidConfiguration(source=source, problem=problem)


def check_addresses(settings: Settings) -> None:
    """Raise what listening would raise; each address is bound for a moment.

    Raises AddressUnusable, InvalidConfiguration: there is none.
    """
    addresses = targets(settings)
    if not addresses:
        raise InvalidConfiguration(source="listen", problem="neither a TCP address nor a Unix socket is set")
    paths = [address.removeprefix("unix:") for address in addresses if address.startswith("unix:")]
    bulk_paths = [f"{path}.bulk" for path in paths if settings.bulk_listen]
    seen: set[str] = set()
    for path in [*paths, *filter(None, [control_path(settings)]), *bulk_paths]:
        if path in seen:
            raise AddressUnusable(address=f"unix:{path}", problem="it is named twice")
        _check_socket(path, Path(settings.data_directory).absolute())
        seen.add(path)
    # `auto` takes a free port, or does without one.
    named = (settings.listen, settings.bulk_listen, settings.metrics_listen)
    with ExitStack() as probes:
        for address in named:
            if address not in ("", "auto") and Address.of(address).port:
                _probe(address, probes)


def _check_socket(path: str, data_directory: Path) -> None:
    parent = Path(path).parent
    try:
        # It also says which directory above may not be entered.
        check_usable(parent)
        check_free(path)
    except OSError as error:
        raise AddressUnusable(address=f"unix:{path}", problem=error.strerror or str(error)) from error
    # The data directory is made by the start, and no other.
    if not parent.is_dir() and parent != data_directory:
        problem = f"there is no directory {parent}"
        raise AddressUnusable(address=f"unix:{path}", problem=problem)


def _probe(address: str, probes: ExitStack) -> None:
    host, port = Address.of(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        refusals = [_bind(family, place, probes) for family, _, _, _, place in found]
        # Where there is no IPv6, gRPC takes 0.0.0.0 for `::`.
        if host == "::" and refusals[0] and refusals[0].errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            refusals = [_bind(socket.AF_INET, ("0.0.0.0", port), probes)]  # noqa: S104  as was asked for
        # gRPC listens on those addresses of a name that it can have.
        if all(refusals) and refusals[0]:
            raise refusals[0]
    except OSError as error:
        raise AddressUnusable(address=address, problem=error.strerror or str(error)) from error


def _bind(family: int, place: tuple[object, ...], probes: ExitStack) -> OSError | None:
    try:
        probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # A port in TIME_WAIT is free to a server, which binds likewise.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        # Two that only bind share an address; with this one listening, the next is refused.
        probe.listen()
    except OSError as error:
        return error
    return None


def metrics_place(settings: Settings, addresses: tuple[str, ...]) -> tuple[str, int] | None:
    """Host and port of the metrics; None for none. `auto` is one above the TCP port, on loopback."""
    if settings.metrics_listen == "auto":
        tcp = [address for address in addresses if not address.startswith("unix:")]
        # Beside a port that the system chose nothing can be expected, so any free one will do.
        port = Address.of(tcp[0]).port + 1 if tcp and Address.of(settings.listen).port else 0
        return "127.0.0.1", port if port <= PORT_LIMIT else 0
    if not settings.metrics_listen:
        return None
    return Address.of(settings.metrics_listen)


def bulk_places(settings: Settings, addresses: tuple[str, ...]) -> BulkPlaces:
    """Beside the gRPC addresses; a host and port of its own where that is set."""
    if not settings.bulk_listen:
        return BulkPlaces()
    # Beside gRPC's own socket, with the same rights of the directory.
    unix_paths = [address.removeprefix("unix:") for address in addresses if address.startswith("unix:")]
    unix_path = f"{unix_paths[0]}.bulk" if unix_paths else ""
    if settings.bulk_listen == "auto":
        tcp = [address for address in addresses if not address.startswith("unix:")]
        return BulkPlaces(Address.of(tcp[0]).host if tcp else None, 0, unix_path)
    host, port = Address.of(settings.bulk_listen)
    return BulkPlaces(host, port, unix_path)
