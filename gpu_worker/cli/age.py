"""`ctxcache worker age` and `cost`: idle sessions in smaller forms, and what bringing one back takes.

Both load the model, and say on standard error what they wait for. Worst case: a signal while a long session
is re-encoded, which is carried to its end first. A second one ends the process, and the session stays as it
was.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxcache.cli.options import seconds
from ctxcache.client import ClientTls, connect
from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.cli import options as given
from gpu_worker.cli.serve import LOG_FORMAT
from gpu_worker.planning.layout import Return
from gpu_worker.sidecar.settings import Ca, Certificate, Key, ServerName, TokenFile

if TYPE_CHECKING:
    from gpu_worker.saving.aging import Aged, SessionLook
    from gpu_worker.sidecar.upkeep import SessionUpkeep

ModelDirectory = Annotated[
    Path, typer.Argument(help="A local transformers model directory.", exists=True, file_okay=False)
]
Store = Annotated[str, typer.Option(help="The store.", metavar="TARGET", envvar="CTXCACHE_TARGET")]
StoreTimeout = Annotated[
    float,
    typer.Option(help="How long the store may take to answer.", metavar="TIME", parser=seconds(0.01)),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A model of the store's; several by several.",
        metavar="NAME",
        show_default="those in the directory",
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda:0.")]
Datasheet = Annotated[
    str, typer.Option(help="Prices by a datasheet: see `worker plan`.", show_default="what was measured")
]
DEFAULT_STORE = "127.0.0.1:7420"


def age(
    *,
    model_directory: ModelDirectory,
    every: Annotated[
        float | None,
        typer.Option(
            help="Sweep again so long after a sweep.", metavar="TIME", parser=seconds(1), show_default="once"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing: show all sessions, their prices and forms due.")
    ] = False,
    rent: Annotated[
        float, typer.Option(help="Seconds of this machine that a GB kept for an hour is worth.", min=0)
    ] = 0.059,
    thaw_s: Annotated[
        float,
        typer.Option(
            help="A session used so lately is in use, and gets its first form again.",
            metavar="TIME",
            parser=seconds(0),
        ),
    ] = 300.0,
    returning: Annotated[
        float | None,
        typer.Option(
            help="How likely an idle session comes back.", min=0, max=1, show_default="learned, from 1 on"
        ),
    ] = None,
    returns: Annotated[
        str,
        typer.Option(
            help="Expected returns of new sessions, which say their first form; as of `worker layout`.",
            metavar="TOKENS[xCOUNT],...",
            show_default="half a window, once",
        ),
    ] = "",
    model: Models = None,
    hardware: Datasheet = "",
    profile_file: given.ProfileFile = None,
    directory: given.Directory = None,
    device: Device = "cpu",
    metrics_listen: Annotated[
        str, typer.Option(help="Prometheus metrics by HTTP.", metavar="HOST:PORT", show_default="none")
    ] = "",
    store: Store = DEFAULT_STORE,
    store_timeout_s: StoreTimeout = 30.0,
    store_token_file: TokenFile = None,
    store_ca: Ca = None,
    store_certificate: Certificate = None,
    store_key: Key = None,
    store_server_name: ServerName = None,
    as_json: given.AsJson = False,
) -> None:
    """Give idle sessions of a model the smaller forms that pay, and used ones their first form again."""
    if dry_run and every is not None:
        raise InvalidArgument(field="--every", problem="a dry run is one look")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    with _upkeep(
        store,
        store_timeout_s,
        store_token_file,
        ClientTls.of(store_ca, store_certificate, store_key, store_server_name),
        directory=model_directory,
        models=tuple(model or ()),
        device=device,
        profile_file=profile_file,
        profile_directory=given.profile_directory(directory),
        datasheet=given.datasheet(hardware) if hardware else None,
        expected=tuple(Return(tokens, count=count) for tokens, count in given.returns(returns)),
        rent_s_per_gb_hour=rent,
        thaw_s=thaw_s,
        returning=returning,
        metrics_listen=metrics_listen,
    ) as upkeep:
        if dry_run:
            for look in upkeep.looks():
                _say(upkeep.facts(look, None), as_json=as_json)
            return
        stop = upkeep.stopping()

        def tell(look: "SessionLook", aged: "Aged | None") -> None:
            if aged is not None:
                _say(upkeep.facts(look, aged), as_json=as_json)

        if every is None:
            for look, aged in upkeep.sweep(stop):
                tell(look, aged)
        else:
            upkeep.run(every, stop, tell, _failed)
        counts = upkeep.counts
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.left.items()))
        sys.stderr.write(
            f"ctxcache: {counts.kept + counts.changed + counts.left.total()} looks at sessions: "
            f"{counts.changed} changed, {counts.freed_bytes / 1e6:,.1f} MB less on SSD; "
            f"left alone: {left or 'none'}\n"
        )


def cost(
    *,
    model_directory: ModelDirectory,
    session: Annotated[list[str], typer.Argument(help="Sessions of that model.", metavar="SESSION...")],
    model: Models = None,
    hardware: Datasheet = "",
    profile_file: given.ProfileFile = None,
    directory: given.Directory = None,
    device: Device = "cpu",
    store: Store = DEFAULT_STORE,
    store_timeout_s: StoreTimeout = 30.0,
    store_token_file: TokenFile = None,
    store_ca: Ca = None,
    store_certificate: Certificate = None,
    store_key: Key = None,
    store_server_name: ServerName = None,
    as_json: given.AsJson = False,
) -> None:
    """Say what it would take to bring sessions back now. Nothing moves, and it is no access."""
    with _upkeep(
        store,
        store_timeout_s,
        store_token_file,
        ClientTls.of(store_ca, store_certificate, store_key, store_server_name),
        directory=model_directory,
        models=tuple(model or ()),
        device=device,
        profile_file=profile_file,
        profile_directory=given.profile_directory(directory),
        datasheet=given.datasheet(hardware) if hardware else None,
    ) as upkeep:
        for each in session:
            name = each.removeprefix("sessions/")
            back = upkeep.cost(name)
            facts = {"session": f"sessions/{name}", **asdict(back)}
            if as_json:
                typer.echo(json.dumps(facts))
                continue
            others = ", ".join(f"{way} {_ms(seconds)} ms" for way, seconds in sorted(back.others_s.items()))
            typer.echo(
                f"sessions/{name}: {back.token_count:,} tokens, {back.dram_token_count:,} of them in DRAM: "
                f"{back.size_bytes / 1e6:,.1f} MB, back after {_ms(back.restored_s)} ms, of which "
                f"the device computes {_ms(back.device_s)}; other ways: {others or 'none'}"
            )


@contextmanager
def _upkeep(
    store: str,
    timeout_s: float,
    token_file: Path | None,
    tls: ClientTls | None,
    *,
    metrics_listen: str = "",
    **wanted: Any,
) -> "Iterator[SessionUpkeep]":
    # Any: the fields of upkeep.UpkeepSettings.
    from gpu_worker.sidecar import upkeep  # noqa: PLC0415  --help needs no torch

    with ExitStack() as opened:
        client = connect(store, timeout_s=timeout_s, tls=tls, token_file=token_file)
        opened.callback(client.close)
        sys.stderr.write(f"ctxcache: comparing {wanted['directory']} with the models of {store}\n")
        kept = upkeep.SessionUpkeep(client, upkeep.UpkeepSettings(**wanted))
        opened.callback(kept.close)
        where = kept.serve_metrics(metrics_listen, opened) if metrics_listen else ""
        facts = f"; metrics at {where}" if where else ""
        sys.stderr.write(f"ctxcache: looking after {', '.join(kept.models)}{facts}\n")
        yield kept


def _failed(error: CacheError) -> None:
    sys.stderr.write(f"ctxcache: a sweep ended early, the next one begins anew: {error} ({error.reason})\n")


def _say(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _line(json.dumps(facts))
        return
    due = ""
    if "due" in facts:
        size_mb, back_ms = facts["due_size_bytes"] / 1e6, _ms(facts["due_back_s"])
        due = f" -> {facts['due']} {size_mb:,.3f} MB, back {back_ms} ms"
    reason = f": left alone, {facts['reason']}" if facts.get("reason") else ""
    _line(
        f"{facts['session']}  {facts['token_count']:,} tokens  idle {facts['idle_s'] / 3600:,.2f} h  "
        f"{facts['form']} {facts['size_bytes'] / 1e6:,.3f} MB, {facts['rent_s_per_hour']:.3g} s an hour, "
        f"back {_ms(facts['back_s'])} ms{due}{reason}"
    )


def _line(text: str) -> None:
    typer.echo(text)
    # So that the reader of a pipe sees each session as it is done.
    sys.stdout.flush()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
