"""`ctxcache worker serve` and `stats`: a worker beside an engine, and what it has done.

Imports torch when it runs. `stats` is also the worker's probe.
"""

import asyncio
import json
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict, MessageToJson

from ctxcache.cli.options import taking
from gpu_worker.cli import options as given
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.settings import WorkerSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STUCK_EXIT_CODE = 13
"""The exit code of a stuck lane, which is that of a failed device."""


@taking(WorkerSettings)
def serve(settings: WorkerSettings) -> None:
    """Serve engines on this host: restore their KV caches from the store, and save to it."""
    settings = replace(settings, directory=given.profile_directory(settings.directory))
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
    """End the process: stuck work would go on writing to an engine's memory."""
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
        answer = client.stats()
    if as_json:
        typer.echo(
            MessageToJson(
                answer,
                always_print_fields_with_no_presence=True,
                preserving_proto_field_name=True,
                indent=None,
            )
        )
        return
    facts = MessageToDict(answer, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
    attachments = facts.pop("attachments")
    for name, value in facts.items():
        typer.echo(f"{name:22} {value}")
    for attachment in attachments:
        typer.echo("attached  " + "  ".join(f"{name}={value}" for name, value in attachment.items()))
