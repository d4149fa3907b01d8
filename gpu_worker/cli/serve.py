"""`ctxcache worker serve` and `stats`: a worker beside an engine, and what it has done.

Imports torch when it runs. `stats` is also the worker's probe.
"""

import asyncio
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict, MessageToJson

from gpu_worker.cli import options as given
from gpu_worker.direct import Wanted
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.settings import MIB, WorkerSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STUCK_EXIT_CODE = 13
"""As a device that failed."""
_DEFAULTS = WorkerSettings()


def _store_file(variable: str, sentence: str) -> Any:
    # Any: an annotation, as typer reads it. The variables are those of the other commands that call a store.
    return typer.Option(help=sentence, envvar=variable, metavar="FILE", show_default="none")


TokenFile = Annotated[
    Path | None, _store_file("CTXCACHE_TOKEN_FILE", "Token that says to the store who calls.")
]
Ca = Annotated[Path | None, _store_file("CTXCACHE_TLS_CA", "TLS: who signed the store's certificate.")]
Certificate = Annotated[
    Path | None, _store_file("CTXCACHE_TLS_CLIENT_CERTIFICATE", "Certificate to show the store.")
]
Key = Annotated[Path | None, _store_file("CTXCACHE_TLS_CLIENT_KEY", "Its key.")]


def serve(
    *,
    store: Annotated[
        str, typer.Option(help="The store.", metavar="TARGET", envvar="CTXCACHE_TARGET")
    ] = _DEFAULTS.store,
    store_token_file: TokenFile = None,
    store_ca: Ca = None,
    store_certificate: Certificate = None,
    store_key: Key = None,
    listen: Annotated[
        Path | None,
        typer.Option(
            help="Unix socket to listen at.", metavar="PATH", show_default="worker.sock of the user"
        ),
    ] = None,
    metrics_listen: Annotated[
        str, typer.Option(help="Prometheus metrics by HTTP.", metavar="HOST:PORT", show_default="none")
    ] = _DEFAULTS.metrics_listen,
    metrics_tls_certificate: Annotated[
        Path | None,
        typer.Option(help="Certificate of the metrics' port, PEM.", metavar="FILE", show_default="none"),
    ] = None,
    metrics_tls_key: Annotated[
        Path | None, typer.Option(help="Its key, PEM.", metavar="FILE", show_default="none")
    ] = None,
    metrics_token_file: Annotated[
        Path | None, typer.Option(help="Token that Prometheus shows.", metavar="FILE", show_default="none")
    ] = None,
    trace_endpoint: Annotated[
        str,
        typer.Option(help="Collector that spans go to, OTLP over gRPC.", metavar="URL", show_default="none"),
    ] = _DEFAULTS.trace_endpoint,
    trace_ratio: Annotated[
        float, typer.Option(help="Share of what comes without a trace that is traced.")
    ] = _DEFAULTS.trace_ratio,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda:0.")] = _DEFAULTS.device,
    direct: Annotated[Wanted, typer.Option(help="How to read what lies on SSD, at best.")] = _DEFAULTS.direct,
    directory: given.Directory = None,
    ring_mib: Annotated[
        int, typer.Option(help="Memory that restores are staged in, in MiB.", min=1)
    ] = _DEFAULTS.ring_bytes // MIB,
    max_attachments: Annotated[
        int, typer.Option(help="Engines at a time.", min=1)
    ] = _DEFAULTS.max_attachments,
    max_attached_mib: Annotated[
        int, typer.Option(help="Memory of engines mapped at a time, in MiB.", min=1)
    ] = _DEFAULTS.max_attached_bytes // MIB,
    max_concurrent_restores: Annotated[
        int, typer.Option(help="Restores at a time.", min=1)
    ] = _DEFAULTS.max_concurrent_restores,
    max_concurrent_saves: Annotated[
        int, typer.Option(help="Saves at a time.", min=1)
    ] = _DEFAULTS.max_concurrent_saves,
    longest_restore_s: Annotated[
        float, typer.Option(help="A restore that takes longer is a miss.")
    ] = _DEFAULTS.longest_restore_s,
    store_timeout_s: Annotated[
        float, typer.Option(help="How long the store may take to answer.")
    ] = _DEFAULTS.store_timeout_s,
    attach_timeout_s: Annotated[
        float, typer.Option(help="How long an attach may take, which may read all weights once.")
    ] = _DEFAULTS.attach_timeout_s,
    drain_timeout_s: Annotated[
        float, typer.Option(help="How long what is under way may take to end on shutdown.")
    ] = _DEFAULTS.drain_timeout_s,
) -> None:
    """Serve engines on this host: restore their KV caches from the store, and save to it."""
    settings = WorkerSettings(
        store=store,
        store_token_file=store_token_file,
        store_ca=store_ca,
        store_certificate=store_certificate,
        store_key=store_key,
        listen=listen,
        metrics_listen=metrics_listen,
        metrics_tls_certificate=metrics_tls_certificate,
        metrics_tls_key=metrics_tls_key,
        metrics_token_file=metrics_token_file,
        trace_endpoint=trace_endpoint,
        trace_ratio=trace_ratio,
        device=device,
        direct=direct,
        profile_directory=given.profile_directory(directory),
        ring_bytes=ring_mib * MIB,
        max_attachments=max_attachments,
        max_attached_bytes=max_attached_mib * MIB,
        max_concurrent_restores=max_concurrent_restores,
        max_concurrent_saves=max_concurrent_saves,
        longest_restore_s=longest_restore_s,
        store_timeout_s=store_timeout_s,
        attach_timeout_s=attach_timeout_s,
        drain_timeout_s=drain_timeout_s,
    )
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    from gpu_worker.sidecar import server  # noqa: PLC0415  --help needs none of it

    asyncio.run(server.serve(settings, partial(_announce, settings), _end_stuck))
    sys.stderr.write("ctxcache: stopped: no engine's memory is mapped any more\n")


def _announce(settings: WorkerSettings, metrics_address: str, direct_path: str) -> None:
    facts = {
        "pid": os.getpid(),
        "listen": f"unix:{settings.socket}",
        "descriptor_socket": str(settings.descriptor_socket),
        "metrics_address": metrics_address,
        "store": settings.store,
        "device": settings.device,
        "direct_path": direct_path,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _end_stuck(error: Exception) -> None:
    """End the process: what cannot be brought to an end would go on writing to memory that is an engine's."""
    sys.stderr.write(f"ctxcache: {error}: this process ends, so that nothing more is written\n")
    sys.stderr.flush()
    os._exit(STUCK_EXIT_CODE)


TIMEOUT_S = 5.0


def stats(
    *,
    listen: Annotated[
        Path | None,
        typer.Option(
            help="Unix socket of the worker.", metavar="PATH", show_default="worker.sock of the user"
        ),
    ] = None,
    as_json: given.AsJson = False,
) -> None:
    """Show what a worker has attached, and what it did since it started. Fails where none answers."""
    with WorkerClient(WorkerSettings(listen=listen).socket, timeout_s=TIMEOUT_S) as client:
        found = client.stats()
    if as_json:
        typer.echo(
            MessageToJson(
                found,
                always_print_fields_with_no_presence=True,
                preserving_proto_field_name=True,
                indent=None,
            )
        )
        return
    facts = MessageToDict(found, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
    attachments = facts.pop("attachments")
    for name, value in facts.items():
        typer.echo(f"{name:22} {value}")
    for attachment in attachments:
        typer.echo("attached  " + "  ".join(f"{name}={value}" for name, value in attachment.items()))
