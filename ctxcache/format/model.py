"""Models: what must be equal for saved state to be usable, and the fingerprint that says so.

State saved under one fingerprint is never handed out for another. The encoding below is
length-prefixed and tagged, so that no two different models share an encoding.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, Stream, StreamSpec

FINGERPRINT_BYTES = 32
_DOMAIN = b"ctxcache.model.v1"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's identity and the streams it can save.

    `model_id` is the caller's name for it and is no part of the fingerprint; everything else is.
    `rope`, `norm` and `settings` (everything else that changes what the layers compute) are canonical
    strings: the same settings give the same string.
    `is_relocatable` is false where state depends on absolute positions (learned embeddings), so
    that tokens before kept ones cannot be dropped.
    """

    model_id: str
    architecture: str
    revision: str
    weights_digest: str
    tokenizer_digest: str
    dtype: DType
    layer_count: int
    hidden_size: int
    kv_head_count: int
    head_size: int
    rope: str
    norm: str
    is_relocatable: bool
    streams: tuple[StreamSpec, ...]
    settings: str = ""

    def fingerprint(self) -> bytes:
        """SHA-256 over every field but `model_id`, each as tag, length, value. 32 bytes."""
        digest = hashlib.sha256(_DOMAIN)
        for item in fields(self):
            if item.name not in ("model_id", "streams"):
                _update(digest, item.name, str(getattr(self, item.name)).encode())
        for spec in sorted(self.streams):
            _update(digest, "stream", _pack_spec(spec))
        return digest.digest()

    def resolve(self, layout: Iterable[Stream]) -> tuple[StreamSpec, ...]:
        """Specs of `layout` in storage order (token ids first, then by layer and kind).

        Token ids are always part of it. Raises KeyError(stream) for one the model does not have.
        """
        known = {spec.stream: spec for spec in self.streams}
        known[TOKENS] = TOKENS_SPEC
        return tuple(sorted(known[stream] for stream in {TOKENS, *layout}))


def _update(digest: "hashlib._Hash", tag: str, value: bytes) -> None:
    digest.update(struct.pack("<HI", len(tag), len(value)) + tag.encode() + value)


def _pack_spec(spec: StreamSpec) -> bytes:
    return struct.pack("<iiii", spec.stream.layer, spec.stream.kind, spec.row_bytes, spec.dtype)
