"""The network: can a server listen here, and does one answer at the target."""

import socket

from ctxcache.cli.call import Call
from ctxcache.cli.doctor.finding import Finding, degraded, missing, ok
from ctxcache.errors import CacheError, Unavailable
from ctxcache.settings.config import Settings

ANSWER_TIMEOUT_S = 5.0


def server(call: Call) -> Finding:
    """Does a server answer, and is it healthy."""
    name = f"server at {call.target}"
    try:
        with call.but(None, None, min(call.timeout_s, ANSWER_TIMEOUT_S)).client() as client:
            is_healthy, stats = client.health(), client.stats()
    except Unavailable:
        return missing(name, "no answer", "nothing", "start one with `ctxcache serve`")
    except CacheError as error:
        return degraded(name, f"it fails: {error}", "nothing", "see its log")
    found = f"version {stats.version}, {stats.session_count} sessions, data in {stats.data_directory}"
    if not is_healthy:
        return degraded(name, f"{found}; it takes no work", "nothing", "it starts or drains: try again")
    return ok(name, f"{found}; it takes work", "that server")


def listen_address(settings: Settings) -> Finding:
    """Say whether the TCP address is free. Taken is no failure: it may be the server itself."""
    name = f"address {settings.listen}"
    host, _, port = settings.listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return degraded(
            name, error.strerror or str(error), "whoever listens there", "choose another with --listen"
        )
    return ok(name, "free", "this address, by the next server")
