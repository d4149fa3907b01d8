"""Settings of a worker beside an engine: each is an option of `ctxcache worker serve`, declared once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ctxcache.cli.options import seconds
from ctxcache.errors import InvalidConfiguration
from gpu_worker.direct import Wanted

MIB = 1 << 20
SOCKET_PATH_LIMIT = 96
"""Longest path of a Unix socket, in bytes, so that those beside it fit too: the kernel takes 107."""


def default_socket() -> Path:
    """Where a worker listens unless told otherwise: the user's run-time directory, or state directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = runtime or os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ctxcache" / "worker.sock"


def _file(sentence: str, variable: str | None = None) -> Any:
    # Any: an annotation, as typer reads it. The variables are those of the other commands that call a store.
    return typer.Option(help=sentence, envvar=variable, metavar="FILE", show_default="none")


TokenFile = Annotated[Path | None, _file("Token that says to the store who calls.", "CTXCACHE_TOKEN_FILE")]
Ca = Annotated[
    Path | None,
    _file("TLS: who signed the store's certificate; `system`: one of the machine's own.", "CTXCACHE_TLS_CA"),
]
Certificate = Annotated[
    Path | None, _file("Certificate to show the store.", "CTXCACHE_TLS_CLIENT_CERTIFICATE")
]
Key = Annotated[Path | None, _file("Its key.", "CTXCACHE_TLS_CLIENT_KEY")]
ServerName = Annotated[
    str | None,
    typer.Option(
        help="Name in the store's certificate, where it is not the store's host.",
        envvar="CTXCACHE_TLS_SERVER_NAME",
        metavar="NAME",
        show_default="none",
    ),
]


def _seconds(sentence: str, least: float = 0.001) -> Any:
    # `min` is for `_BOUNDS`: a parser has its own.
    return typer.Option(help=sentence, min=least, parser=seconds(least), metavar="TIME")


def _count(sentence: str) -> Any:
    return typer.Option(help=sentence, min=1)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Every knob of `ctxcache worker serve`. Raises InvalidConfiguration for a value out of its bounds."""

    store: Annotated[str, typer.Option(help="The store.", metavar="TARGET", envvar="CTXCACHE_TARGET")] = (
        "127.0.0.1:7420"
    )
    store_token_file: TokenFile = None
    store_ca: Ca = None
    store_certificate: Certificate = None
    store_key: Key = None
    store_server_name: ServerName = None
    # Descriptors are passed at another socket beside it.
    listen: Annotated[
        Path | None,
        typer.Option(
            help="Unix socket to listen at.", metavar="PATH", show_default="worker.sock of the user"
        ),
    ] = None
    metrics_listen: Annotated[
        str, typer.Option(help="Prometheus metrics by HTTP.", metavar="HOST:PORT", show_default="none")
    ] = ""
    metrics_tls_certificate: Annotated[
        Path | None, _file("Certificate of the metrics' port with its chain, PEM.")
    ] = None
    metrics_tls_key: Annotated[Path | None, _file("Its key, PEM.")] = None
    metrics_token_file: Annotated[
        Path | None, _file("Token that Prometheus shows, read again when it changes.")
    ] = None
    trace_endpoint: Annotated[
        str,
        typer.Option(help="Collector that spans go to, OTLP over gRPC.", metavar="URL", show_default="none"),
    ] = ""
    trace_ratio: Annotated[
        float, typer.Option(help="Share of what comes without a trace that is traced.", min=0, max=1)
    ] = 0.0
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda:0.")] = "cpu"
    direct: Annotated[Wanted, typer.Option(help="How to read what lies on SSD, at best.")] = Wanted.AUTO
    directory: Annotated[
        Path | None,
        typer.Option(help="Where profiles are kept.", show_default="~/.cache/ctxcache/profiles"),
    ] = None
    ring_mib: Annotated[int, _count("Memory that one device's restores are staged in, in MiB.")] = 192
    max_attachments: Annotated[int, _count("Engines at a time; more are refused with a retry delay.")] = 16
    max_attached_mib: Annotated[int, _count("Memory of engines mapped at a time, in MiB.")] = 1 << 20
    max_concurrent_restores: Annotated[
        int, _count("Restores at a time, a thread each; more are refused with a retry delay.")
    ] = 4
    max_concurrent_saves: Annotated[
        int, _count("Saves at a time, a thread each; more are refused with a retry delay.")
    ] = 4
    longest_restore_s: Annotated[float, _seconds("A restore that takes longer is a miss.")] = 30.0
    store_timeout_s: Annotated[float, _seconds("How long the store may take to answer.")] = 5.0
    attach_timeout_s: Annotated[
        float, _seconds("How long an attach may take, which may read all weights once.")
    ] = 600.0
    drain_timeout_s: Annotated[
        float, _seconds("How long what is under way may take to end on shutdown.", 0)
    ] = 30.0

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not isfinite(value) or value < least or value > most:
                bounds = f"within [{least:g}, {most:g}]" if isfinite(most) else f"a number from {least:g} on"
                raise InvalidConfiguration(source=name, problem=f"is not {bounds}")
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


def _bounds() -> Mapping[str, tuple[float, float]]:
    """The least and the most of each setting that has bounds, as typer has them."""
    hints = get_type_hints(WorkerSettings, include_extras=True)
    options = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return {
        name: (option.min, float("inf") if option.max is None else option.max)
        for name, option in options.items()
        if option.min is not None
    }


_BOUNDS = _bounds()
