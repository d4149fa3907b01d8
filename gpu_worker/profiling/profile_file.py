"""Profile files: one JSON document per hardware and model, with the model's shape. Knows no torch.

Worst case: a file of another version, or one that was damaged, which is refused by name; `--no-profile`
goes on with datasheet figures.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.profile import NO_LIMIT, Curve, Link, Profile
from gpu_worker.planning.shape import LayerKind, LayerShape, ModelShape

FORMAT = 2
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")


@dataclass(frozen=True, slots=True)
class Measured:
    """A model's shape and what one machine takes for it."""

    model: ModelShape
    profile: Profile


def profile_path(directory: Path, *, hardware: str, model: str) -> Path:
    """Return where the profile of a model on a machine is kept."""
    names = (_NOT_IN_NAMES.sub("-", name.lower()).strip("-.") for name in (hardware, model))
    return directory / f"{'--'.join(names)}.json"


def write_profile(path: Path, measured: Measured) -> None:
    """Write the file as a whole: it is as it was or as it is to be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(_document(measured), file, indent=1)
            file.flush()
            # Synced before the rename: after a crash the name would lead to an empty file otherwise.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_profile(path: Path) -> Measured:
    """Read a profile. Raises InvalidArgument(field="profile") for anything else, FileNotFoundError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["format"]
        if version == FORMAT:
            return _measured(document)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, CacheError) as error:
        raise InvalidArgument(field="profile", problem=f"{path} cannot be read: {error!r}") from error
    raise InvalidArgument(field="profile", problem=f"{path} has format {version!r}, not {FORMAT}")


def _measured(document: Mapping[str, Any]) -> Measured:
    layers = [LayerShape(**{**each, "kind": LayerKind(each["kind"])}) for each in document["layers"]]
    pattern = tuple(layers[i] for i in document["pattern"])
    model = ModelShape(document["model"], pattern, bool(document["has_token_inputs"]))
    return Measured(model, _profile(document["profile"], layers))


def _document(measured: Measured) -> dict[str, Any]:
    # Each sort of layer once, and the order as numbers: like layers are one object again when it is read.
    layers = list(dict.fromkeys(measured.model.layers))
    profile = measured.profile
    return {
        "format": FORMAT,
        "model": measured.model.name,
        "layers": [{**asdict(layer), "kind": layer.kind.value} for layer in layers],
        "has_token_inputs": measured.model.has_token_inputs,
        "pattern": [layers.index(layer) for layer in measured.model.layers],
        "profile": {
            "name": profile.name,
            "copy": asdict(profile.copy),
            "ssd": asdict(profile.ssd),
            "remote": asdict(profile.remote),
            "gemm_flops_per_s": profile.gemm_flops_per_s,
            "attention_flops_per_s": profile.attention_flops_per_s,
            "memory_bytes_per_s": None
            if profile.memory_bytes_per_s == NO_LIMIT
            else profile.memory_bytes_per_s,
            "layer_overhead_s": profile.layer_overhead_s,
            "is_direct": profile.is_direct,
            "is_measured": profile.is_measured,
            "curves": [
                {"stage": stage.value, "layer": layers.index(layer), "points": curve.points}
                for (stage, layer), curve in profile.curves.items()
            ],
            "factors": {stage.value: factor for stage, factor in profile.factors.items()},
        },
    }


def _profile(document: Mapping[str, Any], layers: list[LayerShape]) -> Profile:
    curves = {
        (Stage(curve["stage"]), layers[curve["layer"]]): Curve(
            tuple((int(at), float(s)) for at, s in curve["points"])
        )
        for curve in document["curves"]
    }
    return Profile(
        name=document["name"],
        copy=Link(**document["copy"]),
        ssd=Link(**document["ssd"]),
        remote=Link(**document["remote"]),
        gemm_flops_per_s=document["gemm_flops_per_s"],
        attention_flops_per_s=document["attention_flops_per_s"],
        memory_bytes_per_s=document["memory_bytes_per_s"] or NO_LIMIT,
        layer_overhead_s=document["layer_overhead_s"],
        is_direct=document["is_direct"],
        is_measured=document["is_measured"],
        curves=curves,
        factors={Stage(name): factor for name, factor in document["factors"].items()},
    )
