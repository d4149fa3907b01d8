"""Addresses: where a server listens, as its settings say it, and which of those others may reach.

Pure but for a log line; binds nothing. Worst case: an address that cannot be, or that is open to others
without TLS, which is refused with the setting's name.
"""

import ipaddress
import logging
import os
from pathlib import Path

from ctxcache.errors import AddressUnusable, InvalidConfiguration
from ctxcache.service.bulk import BulkPlaces
from ctxcache.settings.config import Settings

SOCKET_PATH_LIMIT = 100
"""Longest Unix socket path, in bytes; the kernel's own limit is 107."""
PORT_LIMIT = 65535
log = logging.getLogger(__name__)


def control_path(settings: Settings) -> str:
    """The control socket's path, empty for none. Raises AddressUnusable when it is too long."""
    return _socket_path(settings.control_socket, Path(settings.data_directory) / "control.sock")


def _socket_path(path: str, automatic: Path) -> str:
    """The path of a Unix socket, empty for none. Raises AddressUnusable when it is too long."""
    if path == "auto":
        path = str(automatic.absolute())
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
    """Raise InvalidConfiguration for what is no address, or one that others reach, without TLS, unless that is wanted."""
    is_meant = settings.tls_certificate or settings.insecure_listen
    bulk = settings.bulk_listen if settings.bulk_listen != "auto" else ""
    for source, address in (("listen", settings.listen), ("bulk_listen", bulk)):
        if address and not (_host(address) and address.rpartition(":")[2].isdecimal()):
            raise InvalidConfiguration(source=source, problem=f"{address!r} is not host:port")
        if address and not is_meant and not is_loopback(address):
            problem = f"{address} is not loopback: set tls_certificate and tls_key, or insecure_listen"
            raise InvalidConfiguration(source=source, problem=problem)


def metrics_place(settings: Settings, addresses: tuple[str, ...]) -> tuple[str, int] | None:
    """Host and port of the metrics; None for none. `auto` is one above the TCP port, on loopback. Raises InvalidConfiguration."""
    if settings.metrics_listen == "auto":
        tcp = [address for address in addresses if not address.startswith("unix:")]
        port = int(tcp[0].rpartition(":")[2]) + 1 if tcp and not settings.listen.endswith(":0") else 0
        return "127.0.0.1", port if port <= PORT_LIMIT else 0
    if not settings.metrics_listen:
        return None
    host, _, text = settings.metrics_listen.rpartition(":")
    if not host or not text.isdecimal():
        raise InvalidConfiguration(
            source="metrics_listen", problem=f"{settings.metrics_listen!r} is neither auto nor host:port"
        )
    return _host(settings.metrics_listen), int(text)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a `host:port`."""
    host = _host(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bulk_places(settings: Settings, addresses: tuple[str, ...]) -> BulkPlaces:
    """Beside the gRPC addresses; a host and port of its own where that is set. Raises InvalidConfiguration."""
    if not settings.bulk_listen:
        return BulkPlaces()
    unix_paths = [address.removeprefix("unix:") for address in addresses if address.startswith("unix:")]
    unix_path = f"{unix_paths[0]}.bulk" if unix_paths else ""
    if settings.bulk_listen == "auto":
        tcp = [address for address in addresses if not address.startswith("unix:")]
        return BulkPlaces(_host(tcp[0]) if tcp else None, 0, unix_path)
    host, _, port = settings.bulk_listen.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidConfiguration(
            source="bulk_listen", problem=f"{settings.bulk_listen!r} is neither auto nor host:port"
        )
    return BulkPlaces(_host(settings.bulk_listen), int(port), unix_path)


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")
