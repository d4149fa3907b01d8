"""Options that `ctxcache worker` commands share, and what they name."""

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import StateKind
from gpu_worker.planning.datasheets import MODEL_NAMES, PROFILE_NAMES, known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities
from gpu_worker.planning.layout import allowed_loss
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import LayerKind, ModelShape
from gpu_worker.profiling.profile_file import Measured, profile_path, read_profile

DEFAULT_HARDWARE = "cpu"


class PlaceName(StrEnum):
    """Where rows lie, as an option's values."""

    DRAM = "dram"
    SSD = "ssd"
    REMOTE = "remote"


ModelName = Annotated[str, typer.Argument(help=f"A measured model, or one of {', '.join(MODEL_NAMES)}.")]
Hardware = Annotated[
    str,
    typer.Option(help=f"Plan by a datasheet: {', '.join(PROFILE_NAMES)}.", show_default="what was measured"),
]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Plan by this file of `worker profile`.", dir_okay=False)
]
NoProfile = Annotated[
    bool,
    typer.Option("--no-profile", help=f"Plan by a datasheet ({DEFAULT_HARDWARE}) though there is a profile."),
]
GpuCount = Annotated[int, typer.Option("--gpus", help="GPUs of a datasheet that share the work.", min=1)]
SsdCount = Annotated[
    int | None, typer.Option("--ssds", help="SSDs of a datasheet, 6.9 GB/s each.", min=1, show_default="4")
]
Staged = Annotated[bool, typer.Option("--staged", help="SSDs read into host memory, not into the GPU's.")]
ElementBytes = Annotated[int, typer.Option(help="Bytes of one element of a named model.", min=1, max=8)]
NoRecompute = Annotated[
    bool, typer.Option("--no-recompute", help="The engine does not run its first layers alone.")
]
ByLayer = Annotated[bool, typer.Option("--by-layer", help="The engine starts when its first layer is there.")]
Split = Annotated[bool, typer.Option("--split", help="The engine takes a layer's tokens by two methods.")]
AllowLoss = Annotated[
    str,
    typer.Option(
        help="Rows in few bits: most KL divergence in nats a token, or kinds: "
        f"{', '.join(k.name.lower() for k in LOSSY_KINDS)}.",
        metavar="NATS|KIND,...",
        show_default="none",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="Where profiles are kept.", show_default="~/.cache/ctxcache/profiles"),
]


def profile_directory(given: Path | None) -> Path:
    """Return where profiles are kept unless said otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given or Path(cache) / "ctxcache" / "profiles"


def machine(
    model: str,
    *,
    hardware: str,
    profile_file: Path | None,
    no_profile: bool,
    directory: Path | None,
    element_bytes: int,
    gpu_count: int = 1,
    ssd_count: int | None = None,
    staged: bool = False,
) -> tuple[ModelShape, Profile]:
    """Return model and machine: as measured where that is known and wanted, else by name and datasheet.

    Raises InvalidArgument for names that are neither measured nor known.
    """
    measured = (
        _measured(model, profile_file, directory) if not (hardware or no_profile) or profile_file else None
    )
    if measured is not None:
        return measured.model, measured.profile
    if not hardware and not no_profile:
        sys.stderr.write(f"no profile of {model} on this machine; by datasheet: {DEFAULT_HARDWARE}\n")
    profile = _named_profile(hardware or DEFAULT_HARDWARE, gpu_count, ssd_count)
    return _named_model(model, element_bytes), replace(profile, is_direct=profile.is_direct and not staged)


def engine(*, no_recompute: bool, by_layer: bool, split: bool, allow_loss: str) -> EngineAbilities:
    """Return the engine's abilities, and what loss is allowed."""
    return EngineAbilities(
        can_recompute=not no_recompute,
        starts_by_layer=by_layer,
        can_split=split,
        lossy_kinds=allowed_loss(allow_loss),
    )


def kinds(names: str, model: ModelShape) -> tuple[StateKind, ...]:
    """Read `hidden,kv`; of a model with latents, K/V means those."""
    has_latents = any(layer.kind is LayerKind.LATENT for layer in model.layers)
    rows = StateKind.LATENT if has_latents else StateKind.KV
    known = {"hidden": StateKind.HIDDEN, "kv": rows, "latent": rows}
    known |= {kind.name.lower(): kind for kind in LOSSY_KINDS}
    unknown = [name for name in names.split(",") if name and name not in known]
    if unknown:
        raise InvalidArgument(field="--hold", problem=f"{unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names.split(",") if name))


def place(name: PlaceName) -> StatePlace:
    """Return the place of that name."""
    return StatePlace(name.value)


def returns(text: str) -> list[tuple[int, float]]:
    """Read `1024x3,16384`: tokens, and how often. Raises InvalidArgument(field="--returns")."""
    try:
        parts = [part.partition("x") for part in text.split(",") if part]
        returns = [(int(tokens), float(count or 1)) for tokens, _, count in parts]
    except ValueError:
        returns = [(-1, 0.0)]
    if any(tokens < 0 or not 0 <= count < float("inf") for tokens, count in returns):
        raise InvalidArgument(field="--returns", problem=f"{text!r} is not a list such as 1024x3,16384")
    return returns


def datasheet(name: str) -> Profile:
    """A machine by its datasheet. Raises InvalidArgument(field="--hardware")."""
    return _named_profile(name, 1, None)


def _measured(model: str, profile_file: Path | None, directory: Path | None) -> Measured | None:
    if profile_file is not None:
        if not profile_file.is_file():
            raise InvalidArgument(field="--profile", problem=f"{profile_file} is no file")
        return read_profile(profile_file)
    pattern = profile_path(Path(), hardware="hardware", model=model).name.replace("hardware", "*", 1)
    paths = sorted(profile_directory(directory).glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    return read_profile(paths[-1]) if paths else None


def _named_model(name: str, element_bytes: int) -> ModelShape:
    if name not in MODEL_NAMES:
        problem = f"{name!r} was not measured and is not one of {', '.join(MODEL_NAMES)}"
        raise InvalidArgument(field="model", problem=problem)
    return known_model(name, element_bytes=element_bytes)


def _named_profile(name: str, gpu_count: int, ssd_count: int | None) -> Profile:
    if name not in PROFILE_NAMES:
        problem = f"{name!r} is not one of {', '.join(PROFILE_NAMES)}"
        raise InvalidArgument(field="--hardware", problem=problem)
    return known_profile(name, gpu_count=gpu_count, ssd_count=ssd_count)
