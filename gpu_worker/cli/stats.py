"""`ctxcache worker stats`: what a running worker has attached and has done; also its probe."""

from pathlib import Path
from typing import Annotated

import typer

from gpu_worker.cli import options as given
from gpu_worker.sidecar.settings import Settings

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
    from google.protobuf.json_format import MessageToDict, MessageToJson  # noqa: PLC0415  --help needs none of it

    from gpu_worker.sidecar.client import WorkerClient  # noqa: PLC0415  as above

    with WorkerClient(Settings(listen=listen).socket, timeout_s=TIMEOUT_S) as client:
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
