"""Digests of checkpoints and tokenizers that do not depend on the process that computes them.

Knows files and tokenizers as bytes; `executed.py` has models in memory. Each digest names its scheme, so that two
schemes never agree by accident. Worst case: reading all weights once, about 1 GB/s per core.
"""

import hashlib
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ctxcache.errors import InvalidArgument

_READ_BYTES = 1 << 20
_TRANSIENT_TOKENIZER_KEYS = ("truncation", "padding")
"""State that a call with `padding=True` leaves in a tokenizer; it changes no token's meaning."""


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
