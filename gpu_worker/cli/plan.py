"""`ctxcache worker plan`, `layout`, `profile`: how a session comes back, and what to save of a new one.

`plan` and `layout` need no torch; `profile` imports it when it runs, and measures a model on this machine.
Worst case: a model or machine that is not known, which is one sentence; some minutes for long lengths on a
CPU.
"""

import json
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKEN_ROW_BYTES
from gpu_worker.cli import options as given
from gpu_worker.planning.explain import ExplainedRun, bottleneck, document, rows
from gpu_worker.planning.holding import HeldSpan, Holding
from gpu_worker.planning.layout import Return, SessionLayout, choose_layout
from gpu_worker.planning.planner import Plan, PlanRequest, compare
from gpu_worker.planning.planner import plan as decide
from gpu_worker.profiling.profile_file import profile_path, write_profile


def plan(
    *,
    model: given.ModelName,
    history: Annotated[int, typer.Option(help="Tokens to restore.", min=0)] = 4096,
    new: Annotated[int, typer.Option(help="Tokens to prefill after them.", min=0)] = 0,
    hold: Annotated[
        str, typer.Option(help="What the store has of each layer.", metavar="KIND,...")
    ] = "hidden,kv",
    place: Annotated[given.PlaceName, typer.Option(help="Where that lies.")] = given.PlaceName.SSD,
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
    split: given.Split = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every layer, its times, and why.")] = False,
    as_json: given.AsJson = False,
) -> None:
    """Plan how a session's layers come back, so that the last one is there first."""
    shape, machine = given.machine(
        model,
        hardware=hardware,
        profile_file=profile_file,
        no_profile=no_profile,
        directory=directory,
        element_bytes=element_bytes,
        gpu_count=gpus,
        ssd_count=ssds,
        staged=staged,
    )
    span = HeldSpan(given.place(place), 0, history)
    request = PlanRequest(
        model=shape,
        holding=Holding.alike(len(shape.layers), given.kinds(hold, shape), [span]),
        history=history,
        profile=machine,
        new_tokens=new,
        engine=given.engine(no_recompute=no_recompute, by_layer=by_layer, split=split, allow_loss=allow_loss),
    )
    chosen = decide(request)
    if as_json:
        typer.echo(json.dumps(document(chosen, compare(request))))
    elif explain:
        show_explanation(chosen, compare(request))
    else:
        show_plan(chosen)


_TITLES = ("layers", "method", ">MB", ">read ms", ">copy ms", ">compute ms", ">there at ms", "why")


def show_plan(plan: Plan) -> None:
    """Print what comes back how, and when it is there."""
    console = _console()
    spans = (f"{row.method}:{_span(row)}" for row in rows(plan))
    console.print(", ".join(spans), soft_wrap=True)
    console.print(_summary(plan), soft_wrap=True)


def show_explanation(plan: Plan, others_s: Mapping[str, float]) -> None:
    """Print every run of layers with its times and reason, the streams' work, and what others would take."""
    console, request = _console(), plan.request
    basis = "measured" if request.profile.is_measured else "datasheet"
    console.print(
        f"{request.model.name} on {request.profile.name} ({basis}): {request.history:,} tokens of history, "
        f"{request.new_tokens:,} new",
        soft_wrap=True,
    )
    table = _table(_TITLES)
    for row in rows(plan):
        times = (row.read_s, row.copy_s, row.compute_s, row.restored_s)
        table.add_row(_span(row), row.method, f"{row.size_bytes / 1e6:,.1f}", *map(_ms, times), row.reason)
    console.print(table)
    console.print(_summary(plan), soft_wrap=True)
    _show_streams(console, plan)
    _show_others(console, plan, others_s)


def _show_streams(console: Console, plan: Plan) -> None:
    table = _table(("stream", ">busy ms", ">idle ms"))
    for stream, busy_s in plan.timeline.busy_s.items():
        table.add_row(stream, _ms(busy_s), _ms(max(0.0, plan.end_s - busy_s)))
    console.print(table)


def _show_others(console: Console, plan: Plan, others_s: Mapping[str, float]) -> None:
    table = _table(("instead", ">ms", ">times"))
    for name, end_s in sorted(others_s.items(), key=lambda item: item[1]):
        table.add_row(name, _ms(end_s), f"{end_s / plan.end_s:.2f}" if plan.end_s else "-")
    console.print(table)


def _summary(plan: Plan) -> str:
    gap = plan.end_s / plan.bound_s - 1 if plan.bound_s else 0.0
    best = "no plan ends earlier" if plan.is_exact else f"within {gap:.1%} of what is possible"
    prefilled = f", prefilled after {_ms(plan.end_s)} ms" if plan.request.new_tokens else ""
    return f"restored after {_ms(plan.restored_s)} ms{prefilled}; {bottleneck(plan)} is busiest; {best}"


def _table(titles: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    return table


def _console() -> Console:
    # No terminal limits the width of a file, and a cut cell says nothing.
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)


def _span(row: ExplainedRun) -> str:
    return f"{row.begin}" if row.end == row.begin + 1 else f"{row.begin}-{row.end - 1}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


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
        model,
        hardware=hardware,
        profile_file=profile_file,
        no_profile=no_profile,
        directory=directory,
        element_bytes=element_bytes,
        gpu_count=gpus,
        ssd_count=ssds,
        staged=staged,
    )
    chosen = choose_layout(
        shape,
        machine,
        [Return(tokens, new, given.place(place), count) for tokens, count in given.returns(returns)],
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


def _facts(chosen: SessionLayout) -> dict[str, float]:
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


def profile(
    *,
    model: Annotated[
        Path, typer.Argument(help="A local transformers model directory.", exists=True, file_okay=False)
    ],
    name: Annotated[str, typer.Option(help="The model's name.", show_default="its directory's")] = "",
    lengths: Annotated[
        str, typer.Option(help="Tokens to measure at.", metavar="TOKENS,...")
    ] = "1,64,256,1024",
    ssd_directory: Annotated[
        Path | None, typer.Option(help="Measure reading here.", exists=True, file_okay=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type to load the model in.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda:0.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Measurements of each time; their median counts.", min=1)] = 3,
    directory: given.Directory = None,
) -> None:
    """Measure what a model takes for each stage on this machine, and keep it for `worker plan`."""
    counts = _lengths(lengths)
    from gpu_worker.profiling.measure import measure_directory  # noqa: PLC0415  --help needs no torch

    measured = measure_directory(
        model,
        name=name or model.resolve().name,
        dtype=dtype,
        device=device,
        lengths=counts,
        repeats=repeats,
        ssd_directory=ssd_directory,
        on_step=_say,
    )
    path = profile_path(
        given.profile_directory(directory), hardware=measured.profile.name, model=measured.model.name
    )
    write_profile(path, measured)
    typer.echo(str(path))


def _say(step: str) -> None:
    sys.stderr.write(f"measuring {step}\n")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        lengths = (0,)
    if lengths[0] < 1:
        raise InvalidArgument(field="--lengths", problem=f"{text!r} is not a list such as 1,64,256,1024")
    return lengths
