"""The same function with as many KV heads as query heads: a GQA model's multi-head twin.

On such a model saved hidden states are half the size of KV, which is where HCache pays.
Worst case: the twin's K and V are literal copies, so no compression or deduplication ratio
measured on it means anything. Weights are held in memory once.
"""

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ctxcache.errors import InvalidArgument
from gpu_worker.demo.build_once import build_once
from gpu_worker.demo.cache_dir import default_cache_dir
from gpu_worker.demo.progress import Progress, silent

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_KV_PROJECTION = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")


def mha_twin(model_dir: Path, cache_dir: Path | None = None, *, progress: Progress = silent) -> Path:
    """Return a directory with the twin of the model in `model_dir`, made on the first call.

    Logits are those of the original. Needs one `model.safetensors`, as Llama, Mistral and Qwen
    have it. Raises InvalidArgument for a model without KV heads, OSError.
    """
    target = (cache_dir or default_cache_dir()) / f"{model_dir.name}-mha-{_identity(model_dir)}"
    return build_once(target, partial(_build, model_dir), progress=progress)


def repeat_kv_heads(weight: Tensor, *, kv_head_count: int, head_count: int) -> Tensor:
    """Repeat each KV head's rows for every query head that reads it.

    Shape: [kv_head_count * C, ...] to [head_count * C, ...], same dtype. Source: transformers'
    `repeat_kv`, which does the same to K and V at run time.
    """
    heads = weight.reshape(kv_head_count, -1, *weight.shape[1:])
    repeated = heads.repeat_interleave(head_count // kv_head_count, dim=0)
    return repeated.reshape(-1, *weight.shape[1:])


def _build(model_dir: Path, directory: Path) -> None:
    config = _read_config(model_dir)
    kv_head_count, head_count = config["num_key_value_heads"], config["num_attention_heads"]
    weights = load_file(model_dir / _WEIGHTS)
    for name in filter(_KV_PROJECTION.search, list(weights)):
        weights[name] = repeat_kv_heads(weights[name], kv_head_count=kv_head_count, head_count=head_count)
    save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
    twin = json.dumps(config | {"num_key_value_heads": head_count}, indent=2)
    (directory / _CONFIG).write_text(twin + "\n")
    for file in model_dir.iterdir():
        if file.is_file() and file.name not in {_CONFIG, _WEIGHTS}:
            shutil.copy(file, directory)


def _read_config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / _CONFIG).read_text())
    if "num_key_value_heads" not in config:
        raise InvalidArgument(field=str(model_dir), problem="its configuration names no KV heads")
    return config


def _identity(model_dir: Path) -> str:
    """Tell apart two models of one directory name, and a model from what it was before."""
    weights = (model_dir / _WEIGHTS).stat()
    text = f"{(model_dir / _CONFIG).read_text()} {weights.st_size} {weights.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
