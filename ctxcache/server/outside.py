"""The parts of a start that lie outside its data directory: addresses, certificates and tokens.

They are checked before the data directory is opened or made: a start that is refused for one of them leaves
no file behind. Nothing is bound and nothing is changed. Worst case: an address is taken between this look and
the listening, which then says so itself.
"""

import errno
import os
import socket
from pathlib import Path
from typing import Any

from ctxcache.errors import AddressUnusable, InvalidConfiguration
from ctxcache.observe.bearer import Bearer
from ctxcache.runtime.sockets import is_stale
from ctxcache.server.listening import bulk_places, check_exposure, control_path, metrics_place, targets
from ctxcache.service.callers import identified_by
from ctxcache.service.tls import load_tls
from ctxcache.settings.config import Settings
from ctxcache.wire.address import Address


def check_outside(settings: Settings) -> None:
    """Raise what a server of these settings would raise when it came to listen.

    InvalidConfiguration for a certificate, a token or an exposed address; AddressUnusable for an address.
    """
    check_exposure(settings)
    identified_by(settings.identities, settings.token_hashes)
    load_tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    load_tls(settings.metrics_tls_certificate, settings.metrics_tls_key, None, prefix="metrics_")
    if settings.metrics_token_file is not None:
        Bearer(settings.metrics_token_file, source="metrics_token_file")
    addresses = tuple(targets(settings))
    if not addresses:
        raise InvalidConfiguration(source="listen", problem="neither a TCP address nor a Unix socket is set")
    bulk, control = bulk_places(settings, addresses), control_path(settings)
    unix_paths = [address.removeprefix("unix:") for address in addresses if address.startswith("unix:")]
    for path in filter(None, (*unix_paths, control, bulk.unix_path)):
        _check_unix(path, settings.data_directory)
    ports = [Address.of(address) for address in addresses if not address.startswith("unix:")]
    if bulk.host:
        ports.append(Address(bulk.host, bulk.port))
    # By default the port beside the server's: it may be another's, and the server does without.
    if settings.metrics_listen != "auto" and (place := metrics_place(settings, addresses)):
        ports.append(Address(*place))
    for port in ports:
        _check_port(port)


def _check_unix(path: str, data_directory: Path) -> None:
    directory = Path(path).parent
    # The start makes its data directory, and no other; its lock says whether a server is there.
    if directory == Path(data_directory).absolute():
        return
    try:
        is_stale(path)
        if os.path.lexists(path) and not Path(path).is_socket():
            raise OSError(errno.EEXIST, "a file that is no socket is there")  # noqa: TRY301
    except OSError as error:
        raise AddressUnusable(address=f"unix:{path}", problem=error.strerror or str(error)) from error
    if not directory.is_dir():
        raise AddressUnusable(address=f"unix:{path}", problem=f"there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        owner, own = directory.stat().st_uid, os.geteuid()
        problem = f"permission denied: {directory} belongs to user {owner}, and this process runs as {own}"
        raise AddressUnusable(address=f"unix:{path}", problem=problem)


def _check_port(address: Address) -> None:
    host = f"[{address.host}]" if ":" in address.host else address.host
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressUnusable(
            address=f"{host}:{address.port}", problem=error.strerror or str(error)
        ) from error
    problems = [problem for family, _, _, _, place in places if (problem := _problem_of(family, place))]
    # A name may have several addresses: gRPC listens on those that it can have.
    if len(problems) == len(places):
        raise AddressUnusable(address=f"{host}:{address.port}", problem=problems[0])


def _problem_of(family: int, place: tuple[Any, ...]) -> str:
    """Why no socket can be bound there; empty where one can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the listeners do: a port whose last connections are being closed is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""
