"""`ctxcache worker llamacpp`: llama.cpp's server, whose conversations the store keeps."""

import json
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxcache.cli.options import seconds
from ctxcache.errors import InvalidArgument
from ctxcache.wire.address import Address
from gpu_worker.cli.serve import LOG_FORMAT
from gpu_worker.engines.llamacpp import LlamaSettings
from gpu_worker.planning.ahead import SHARE
from gpu_worker.sidecar.settings import Ca, Certificate, Key, ServerName, TokenFile

if TYPE_CHECKING:
    from gpu_worker.engines.llamacpp.proxy import LlamaProxy

DEFAULT_LISTEN = "127.0.0.1:8080"
USAGE = 2
"""The exit code of a command that cannot run as it is called."""


def llamacpp(
    model: Annotated[Path, typer.Argument(help="The model, a GGUF file, or the first of its shards.")],
    *,
    listen: Annotated[str, typer.Option(help="Where the API listens.", metavar="HOST:PORT")] = DEFAULT_LISTEN,
    slots: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 4,
    context: Annotated[
        int,
        typer.Option(
            "--ctx-size", help="Tokens of all slots together.", min=0, show_default="as many as the model"
        ),
    ] = 0,
    param: Annotated[
        list[str] | None,
        typer.Option(
            help="A parameter of llama.cpp as xllamacpp calls it: cpuparams.n_threads=8.",
            metavar="NAME=VALUE",
            show_default="none",
        ),
    ] = None,
    store: Annotated[
        str, typer.Option(help="The store.", metavar="TARGET", envvar="CTXCACHE_TARGET")
    ] = "127.0.0.1:7420",
    store_token_file: TokenFile = None,
    store_ca: Ca = None,
    store_certificate: Certificate = None,
    store_key: Key = None,
    store_server_name: ServerName = None,
    store_timeout_s: Annotated[
        float,
        typer.Option(help="How long the store may take to answer.", metavar="TIME", parser=seconds(0.01)),
    ] = 1.0,
    ttl_s: Annotated[
        float | None,
        typer.Option(
            help="How long a conversation is kept after its last turn.",
            metavar="TIME",
            parser=seconds(1),
            show_default="while there is room",
        ),
    ] = None,
    durability: Annotated[
        str, typer.Option(help="When a conversation counts as saved: memory or disk.")
    ] = "disk",
    ahead: Annotated[
        float,
        typer.Option(
            help="The most of the time that edited conversations are computed ahead in; 0: never.",
            metavar="SHARE",
            min=0,
            max=1,
        ),
    ] = SHARE,
    slot_directory: Annotated[
        Path | None,
        typer.Option(
            help="Where states lie for a moment: room for one per slot.",
            file_okay=False,
            exists=True,
            show_default="the system's temporary directory",
        ),
    ] = None,
) -> None:
    """Serve a model by llama.cpp, and keep its conversations in the store."""
    try:
        host, port = Address.of(listen)
    except ValueError as error:
        raise InvalidArgument(field="--listen", problem=str(error)) from error
    parameters = {}
    for text in param or []:
        name, is_setting, value = text.partition("=")
        if not is_setting:
            raise InvalidArgument(field="--param", problem=f"{text!r} is not NAME=VALUE")
        parameters[name] = value
    settings = LlamaSettings(
        model=model,
        host=host,
        port=port,
        slot_count=slots,
        context_tokens=context,
        parameters=parameters,
        store=store,
        store_token_file=store_token_file,
        store_ca=store_ca,
        store_certificate=store_certificate,
        store_key=store_key,
        store_server_name=store_server_name,
        store_timeout_s=store_timeout_s,
        ttl_s=ttl_s,
        durability=durability,
        ahead=ahead,
        directory=slot_directory,
    )
    if find_spec("xllamacpp") is None:
        sys.stderr.write("ctxcache: llama.cpp is not installed: pip install 'ctxcache[llamacpp]'\n")
        raise typer.Exit(USAGE)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    from gpu_worker.engines.llamacpp import proxy  # noqa: PLC0415  --help needs no llama.cpp

    proxy.serve(settings, _announce)


def _announce(proxy: "LlamaProxy") -> None:
    host, port = proxy.server_address[:2]
    sys.stdout.write(json.dumps({"pid": os.getpid(), "listen": f"http://{host!s}:{port}"}) + "\n")
    sys.stdout.flush()
