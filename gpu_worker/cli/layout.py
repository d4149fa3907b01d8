"""`ctxcache worker layout`: which state of a new session to save. Needs no torch."""

import json
from itertools import groupby
from typing import Annotated

import typer

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKEN_ROW_BYTES
from gpu_worker.cli import options as given
from gpu_worker.planning.layout import Layout, Return, choose_layout


def layout(
    *,
    model: given.ModelName,
    returns: Annotated[
        str,
        typer.Option(
            help="Expected returns: tokens of history, times how often.", metavar="TOKENS[xCOUNT],..."
        ),
    ] = "4096",
    new: Annotated[int, typer.Option(help="Tokens to prefill at each return.", min=0)] = 0,
    place: Annotated[
        given.PlaceName, typer.Option(help="Where the state lies by then.")
    ] = given.PlaceName.SSD,
    byte_price: Annotated[
        float, typer.Option(help="Seconds of restoring that one byte of storage is worth.", min=0)
    ] = 0.0,
    hardware: given.Hardware = "",
    profile_file: given.ProfileFile = None,
    no_profile: given.NoProfile = False,
    directory: given.Directory = None,
    gpus: given.GpuCount = 1,
    ssds: given.SsdCount = None,
    staged: given.Staged = False,
    element_bytes: given.ElementBytes = 2,
    no_recompute: given.NoRecompute = False,
    by_layer: given.ByLayer = False,
    allow_loss: given.AllowLoss = "",
    as_json: given.AsJson = False,
) -> None:
    """Choose which state of a new session to save."""
    shape, machine = given.machine(
        model, hardware=hardware, profile_file=profile_file, no_profile=no_profile, directory=directory,
        element_bytes=element_bytes, gpu_count=gpus, ssd_count=ssds, staged=staged,
    )  # fmt: skip
    chosen = choose_layout(
        shape,
        machine,
        [Return(tokens, new, given.place(place), count) for tokens, count in _returns(returns)],
        engine=given.engine(no_recompute=no_recompute, by_layer=by_layer, split=False, allow_loss=allow_loss),
        byte_price_s=byte_price,
    )
    names = ["none" if kind is None else kind.name.lower() for kind in chosen.kinds]
    if as_json:
        typer.echo(json.dumps({"format": 1, "model": shape.name, **_facts(chosen), "layers": names}))
        return
    kv_bytes = TOKEN_ROW_BYTES + sum(layer.kv_row_bytes for layer in shape.layers)
    typer.echo(
        f"save {_spans(names)}: {chosen.bytes_per_token:,.0f} bytes a token, "
        f"{kv_bytes / chosen.bytes_per_token:.2f} times smaller than K/V"
    )
    if chosen.loss_nats:
        typer.echo(f"lossy: predictions diverge by {chosen.loss_nats:.0e} nats a token at most")
    typer.echo(f"all expected returns together: {chosen.restore_s * 1e3:,.3f} ms")


def _facts(chosen: Layout) -> dict[str, float]:
    return {
        "bytes_per_token": chosen.bytes_per_token,
        "restore_s": chosen.restore_s,
        "loss_nats": chosen.loss_nats,
    }


def _spans(names: list[str]) -> str:
    parts, begin = [], 0
    for name, group in groupby(names):
        end = begin + len(list(group))
        parts.append(f"{name}:{begin}-{end - 1}" if end > begin + 1 else f"{name}:{begin}")
        begin = end
    return ",".join(parts)


def _returns(text: str) -> list[tuple[int, float]]:
    try:
        parts = [part.partition("x") for part in text.split(",") if part]
        found = [(int(tokens), float(count or 1)) for tokens, _, count in parts]
    except ValueError:
        found = [(-1, 0.0)]
    if any(tokens < 0 or not 0 <= count < float("inf") for tokens, count in found):
        raise InvalidArgument(field="--returns", problem=f"{text!r} is not a list such as 1024x3,16384")
    return found
