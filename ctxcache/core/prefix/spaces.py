"""Spaces: within which the keys of an engine's blocks are looked for, and the parts that a block has. Pure.

    space = SHA-256(field(DOMAIN) | field(model fingerprint) | field(layout tag) | field(salt) | field(parts))
    field(x) = length of x in bytes, u32 little endian | x

`parts`: layer begin, layer end and rank of each, int32 little endian, in their order. A block of one tenant
and space is never found in another. docs/blocks.md has the same in words.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ctxcache.core.prefix.keys import KEY_BYTES
from ctxcache.errors import InvalidArgument

DOMAIN = b"ctxcache.block.v1"
PARTS_LIMIT = 256
BLOCK_LIMIT_BYTES = 16 << 20
"""The most bytes of all parts of a block together."""
TAG_LIMIT_BYTES = 1024
LAYERS_LIMIT = 1 << 16
_LENGTH, _PART = struct.Struct("<I"), struct.Struct("<iii")


class Part(NamedTuple):
    """Which of a block's bytes one rank of an engine writes: those of layers `[layer_begin, layer_end)`."""

    layer_begin: int
    layer_end: int
    rank: int


def space_of(fingerprint: bytes, layout_tag: bytes, salt: bytes, parts: Sequence[Part]) -> bytes:
    """The space of blocks of this model, layout, salt and these parts. 32 bytes."""
    packed = b"".join(_PART.pack(*part) for part in parts)
    fields = (DOMAIN, fingerprint, layout_tag, salt, packed)
    return hashlib.sha256(b"".join(_LENGTH.pack(len(item)) + item for item in fields)).digest()


def check_parts(parts: Sequence[Part]) -> None:
    """Raise InvalidArgument unless every rank from 0 on has each layer from 0 on once, in some part."""
    if not 1 <= len(parts) <= PARTS_LIMIT:
        raise _bad(f"{len(parts)} are not 1 to {PARTS_LIMIT}")
    by_rank = defaultdict[int, list[Part]](list)
    for part in parts:
        if not 0 <= part.layer_begin < part.layer_end <= LAYERS_LIMIT:
            raise _bad(f"layers [{part.layer_begin}, {part.layer_end}) are no range of layers")
        by_rank[part.rank].append(part)
    ranks = sorted(by_rank)
    if ranks != list(range(len(ranks))):
        raise _bad(f"ranks {ranks} are not all ranks from 0 on")
    layer_count = max(part.layer_end for part in parts)
    for rank in ranks:
        layer = 0
        for part in sorted(by_rank[rank]):
            if part.layer_begin < layer:
                raise _bad(f"of rank {rank} overlap at layer {part.layer_begin}")
            if part.layer_begin > layer:
                raise _bad(f"of rank {rank} lack layer {layer}")
            layer = part.layer_end
        if layer < layer_count:
            raise _bad(f"of rank {rank} lack layer {layer}")


def check_key(key: bytes, field: str) -> bytes:
    """A block's key. Raises InvalidArgument."""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(field=field, problem=f"{KEY_BYTES} bytes expected, {len(key)} given")
    return key


def check_sizes(sizes: Sequence[int], part_count: int, field: str) -> tuple[int, ...]:
    """The sizes of a block's parts, in bytes. Raises InvalidArgument."""
    if len(sizes) != part_count:
        raise InvalidArgument(field=field, problem=f"{len(sizes)} are not one for each of {part_count} parts")
    if min(sizes) < 1:
        raise InvalidArgument(field=field, problem=f"{min(sizes)} B are no part")
    if (size_bytes := sum(sizes)) > BLOCK_LIMIT_BYTES:
        problem = f"{size_bytes} B together are more than {BLOCK_LIMIT_BYTES} B"
        raise InvalidArgument(field=field, problem=problem)
    return tuple(sizes)


def _bad(problem: str) -> InvalidArgument:
    return InvalidArgument(field="space.parts", problem=problem)
