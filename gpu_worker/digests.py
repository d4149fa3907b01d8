"""Digests of weights and tokenizers that do not depend on the process that computes them.

Knows tensors, checkpoint files and tokenizers as bytes. Each digest names its scheme, so that two
schemes never agree by accident. Worst case: reading all weights once, about 1 GB/s per core.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ctxcache.errors import InvalidArgument

_READ_BYTES = 1 << 20
_TRANSIENT_TOKENIZER_KEYS = ("truncation", "padding")
"""State that a call with `padding=True` leaves in a tokenizer; it changes no token's meaning."""

_TRANSIENT_SETTINGS = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "id2label", "label2id", "problem_type", "task_specific_params", "_attn_implementation",
)  # fmt: skip
"""Settings of loading, calling and naming; they change no row."""


def digest_parameters(model: PreTrainedModel) -> str:
    """`parameters:` and the SHA-256 over every parameter's name, type, shape and bytes, by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(_bytes_of(parameter))
    return f"parameters:{digest.hexdigest()}"


def digest_checkpoint(directory: Path) -> str:
    """`files:` and the SHA-256 over the names and bytes of the directory's safetensors files.

    True of a model only while it is as loaded. Raises InvalidArgument(field="directory") where
    there are no such files.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise InvalidArgument(field="directory", problem=f"{directory} holds no safetensors file")
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return f"files:{digest.hexdigest()}"


def digest_settings(model: PreTrainedModel) -> str:
    """`config:` and the SHA-256 of the model's configuration without what changes no row."""
    settings = model.config.to_dict()
    kept = {
        name: value
        for name, value in settings.items()
        if name not in _TRANSIENT_SETTINGS and value is not None
    }
    return f"config:{hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()}"


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of what maps text to token ids: the whole fast tokenizer, or a slow one's vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content, scheme = dict(tokenizer.get_vocab()), "vocabulary"
    else:
        content, scheme = json.loads(backend.to_str()), "tokenizer"
        for key in _TRANSIENT_TOKENIZER_KEYS:
            content.pop(key, None)
    return f"{scheme}:{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}"


def _bytes_of(parameter: Tensor) -> memoryview:
    flat = parameter.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
