"""Whose an engine's own blocks are: a model that the store knows, so that a version's can be forgotten.

model_id   Llama-3.sglang-1a2b3c4d.w5e884898
name    engine tag      version of the weights, where they have one
"""

import hashlib
import re

from ctxcache.format.model import ModelSpec, with_version
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

NAME_CHARACTERS = 80
_FOREIGN = re.compile(r"[^a-zA-Z0-9._-]+")


def model_of(name: str, engine: str, weights: str, facts: str, *, version: str = "") -> ModelSpec:
    """The model whose blocks an engine keeps; its fingerprint is that of their spaces.

    `name` is the model's to a person and no part of the fingerprint: moved files are the same model.
    `weights` is the digest of the files, `facts` all else that the bytes of blocks depend on, but for what
    the space says itself.
    """
    # A path, or a name of a hub: its end is what people call it.
    plain = _FOREIGN.sub("-", name.rstrip("/").rpartition("/")[2]).lstrip("._-")[:NAME_CHARACTERS]
    tag = hashlib.sha256(f"{weights}\0{facts}".encode(errors="surrogatepass")).hexdigest()
    spec = ModelSpec(
        model_id=f"{plain or 'model'}.{engine}-{tag[:8]}",
        architecture=engine,
        revision="",
        weights_digest=weights,
        tokenizer_digest="",
        dtype=DType.FLOAT16,
        layer_count=1,
        hidden_size=1,
        kv_head_count=0,
        head_size=0,
        rope="",
        norm="",
        is_relocatable=False,
        # No session is ever made of it: what the store has are blocks.
        streams=(StreamSpec(Stream(0, StateKind.ENGINE_BLOCK), 1, DType.PACKED),),
        settings=f"{engine} {tag}",
    )
    return with_version(spec, version)
