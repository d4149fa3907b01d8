"""Settings of a worker beside an engine, with their defaults and bounds."""

import os
from dataclasses import dataclass
from pathlib import Path

from ctxcache.errors import InvalidConfiguration
from gpu_worker.direct import Wanted

MIB = 1 << 20
GIB = 1 << 30
SOCKET_PATH_LIMIT = 96
"""Longest path of a Unix socket, in bytes, so that those beside it fit too: the kernel takes 107."""


def default_socket() -> Path:
    """Where a worker listens unless told otherwise: the user's run-time directory, or state directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = runtime or os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ctxcache" / "worker.sock"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Every knob of `ctxcache worker serve`, with unit and default."""

    store: str = "127.0.0.1:7420"
    """The store, as a gRPC target."""
    store_token_file: Path | None = None
    """File with the token that the store knows this worker by; none: it asks for none."""
    store_ca: Path | None = None
    """The authority that signed the store's certificate, PEM; none: no TLS, unless a certificate is given."""
    store_certificate: Path | None = None
    """This worker's own certificate, PEM, for a store that asks for one."""
    store_key: Path | None = None
    """Its key, PEM."""
    listen: Path | None = None
    """Unix socket to listen at; none: `worker.sock` of the user. Descriptors are passed beside it."""
    metrics_listen: str = ""
    """Where Prometheus may ask, `host:port`; empty: nowhere."""
    metrics_tls_certificate: Path | None = None
    """Certificate of that port with its chain, PEM; none: no TLS there."""
    metrics_tls_key: Path | None = None
    """Its key, PEM."""
    metrics_token_file: Path | None = None
    """Token that Prometheus shows, read again when it changes; none: nobody is asked."""
    trace_endpoint: str = ""
    """Collector of OpenTelemetry (OTLP over gRPC) that spans go to; empty: nothing is traced."""
    trace_ratio: float = 0.0
    """Share of what comes without a trace that is traced; callers decide about the rest."""
    device: str = "cpu"
    """Where to compute, and where engines' caches lie: `cpu` or `cuda:0`."""
    direct: Wanted = Wanted.AUTO
    """How to read what lies on SSD, at best. See docs/worker.md."""
    profile_directory: Path | None = None
    """Where `ctxcache worker profile` keeps its files; none: plans are by datasheet until measured."""
    ring_bytes: int = 192 * MIB
    """Memory that one device's restores are staged in."""
    max_attachments: int = 16
    """Engines at a time; more are refused with a retry delay."""
    max_attached_bytes: int = 1024 * GIB
    """Memory of engines that is mapped at a time."""
    max_concurrent_restores: int = 4
    """Restores under way at a time, a thread each; more are refused with a retry delay."""
    max_concurrent_saves: int = 4
    """Saves under way at a time, a thread each; more are refused with a retry delay."""
    longest_restore_s: float = 30.0
    """A restore that takes longer is a miss."""
    store_timeout_s: float = 5.0
    """How long the store may take to answer."""
    attach_timeout_s: float = 600.0
    """How long an attach may take: it may have to read all weights once."""
    drain_timeout_s: float = 30.0
    """How long restores and saves under way may take to end on shutdown."""

    def __post_init__(self) -> None:
        for name in (
            "ring_bytes",
            "max_attachments",
            "max_attached_bytes",
            "max_concurrent_restores",
            "max_concurrent_saves",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(source=name, problem="is less than 1")
        for name in ("longest_restore_s", "store_timeout_s", "attach_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidConfiguration(source=name, problem="is no time")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise InvalidConfiguration(source="drain_timeout_s", problem="is no time")
        if not 0 <= self.trace_ratio <= 1:
            raise InvalidConfiguration(source="trace_ratio", problem="is not within [0, 1]")
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise InvalidConfiguration(source="listen", problem=f"is longer than {SOCKET_PATH_LIMIT} bytes")

    @property
    def socket(self) -> Path:
        """The socket's absolute path."""
        return (self.listen or default_socket()).absolute()

    @property
    def descriptor_socket(self) -> Path:
        """The descriptor socket's absolute path."""
        return self.socket.with_name(f"{self.socket.name}.fds")
