"""`ctxcache worker profile`: measures a model on this machine and keeps what it finds.

Imports torch and transformers when it runs. Worst case: some minutes for long lengths on a CPU.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.errors import InvalidArgument
from gpu_worker.cli import options as given
from gpu_worker.profiling.profile_file import profile_path, write_profile


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
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise InvalidArgument(field="--lengths", problem=f"{text!r} is not a list such as 1,64,256,1024")
    return found
