"""Chain keys: what a run of 64 tokens is called, together with everything before it.

    key = SHA-256(field(DOMAIN) | field(tenant) | field(model fingerprint) | field(layout tag) | field(salt)
                  | field(parent) | field(token ids))
    field(x) = length of x in bytes, u32 little endian | x

`parent` is the key of the 64 tokens before, 32 zero bytes for the first. Token ids are int32, little endian.
Two keys are equal only if all of this is: tenant, model, layout, salt, and every token from the first on.
docs/prefixes.md has the same with test vectors.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from typing_extensions import Buffer

from ctxcache.format.streams import TOKENS_RANGE, StreamRange

BLOCK_TOKENS = 64
"""Tokens that one key covers."""
BLOCK_BYTES = 4 * BLOCK_TOKENS
"""Of their ids."""
KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)
DOMAIN = b"ctxcache.prefix.v1"
SCOPES_KEPT = 4096
"""Scopes that are not made anew each time: one for each tenant, model and layout in use."""
_LENGTH, _RANGE = struct.Struct("<I"), struct.Struct("<iii")
_PARENT_LENGTH, _TOKENS_LENGTH = _LENGTH.pack(KEY_BYTES), _LENGTH.pack(BLOCK_BYTES)


class Scope(NamedTuple):
    """Within which keys are looked for. What is in one scope is never found in another.

    `mask`: 256 bits that the index combines every key of the scope with.
    """

    head: bytes
    """The fields before `parent`, encoded."""
    mask: int

    def key(self, parent: bytes, token_ids: Buffer) -> bytes:
        """The key of 64 token ids behind `parent`. 32 bytes."""
        return hashlib.sha256(
            b"".join((self.head, _PARENT_LENGTH, parent, _TOKENS_LENGTH, token_ids))
        ).digest()

    def keys(self, token_ids: Buffer, parent: bytes = NO_PARENT) -> Iterator[bytes]:
        """The key of each whole run of 64 token ids; what is left over has none."""
        view = memoryview(token_ids).cast("B")
        for begin in range(0, len(view) - BLOCK_BYTES + 1, BLOCK_BYTES):
            parent = self.key(parent, view[begin : begin + BLOCK_BYTES])
            yield parent


def layout_tag(ranges: Iterable[StreamRange]) -> bytes:
    """What a session's layout is in a key: SHA-256 of its ranges, token ids left out. 32 bytes.

    Each range is kind, layer_begin and layer_end, int32 little endian; by kind, then by layer, as few as can
    be.
    """
    packed = (_RANGE.pack(kind, begin, end) for kind, begin, end in sorted(ranges))
    tokens = _RANGE.pack(*TOKENS_RANGE)
    return hashlib.sha256(b"".join(item for item in packed if item != tokens)).digest()


@lru_cache(SCOPES_KEPT)
def scope_of(
    tenant: str, model_fingerprint: bytes, ranges: Sequence[StreamRange], salt: bytes = b""
) -> Scope:
    """The scope of state of that model and layout. `ranges` are a tuple, as `ranges_of` makes them."""
    return make_scope(tenant, model_fingerprint, layout_tag(ranges), salt)


def make_scope(tenant: str, model_fingerprint: bytes, tag: bytes, salt: bytes = b"") -> Scope:
    """As `scope_of`, of a layout tag."""
    fields = (DOMAIN, tenant.encode(), model_fingerprint, tag, salt)
    head = b"".join(_LENGTH.pack(len(item)) + item for item in fields)
    return Scope(head, int.from_bytes(hashlib.sha256(head).digest(), "little"))
