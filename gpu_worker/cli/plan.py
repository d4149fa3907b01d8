"""`ctxcache worker plan`: how a session would come back, when each layer is there, and why so.

Needs no torch. Worst case: a model or machine that is not known, which is one sentence.
"""

import json
from typing import Annotated

import typer

from gpu_worker.cli import options as given
from gpu_worker.cli.tables import show_explanation, show_plan
from gpu_worker.planning.explain import document
from gpu_worker.planning.holding import Holding, Span
from gpu_worker.planning.planner import Request, compare
from gpu_worker.planning.planner import plan as decide


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
        model, hardware=hardware, profile_file=profile_file, no_profile=no_profile, directory=directory,
        element_bytes=element_bytes, gpu_count=gpus, ssd_count=ssds, staged=staged,
    )  # fmt: skip
    span = Span(given.place(place), 0, history)
    request = Request(
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
