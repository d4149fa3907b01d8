"""LMCache: the store as its second tier (`l2`), or as the remote storage of an engine (`remote`).

Here, for both: settings, and LMCache's chunks as blocks of the store. A chunk has whatever size LMCache gives
it; the store's blocks have 16 MiB at most. So a larger chunk is several blocks, and is there only where all
of them are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import lmcache
import numpy as np
import numpy.typing as npt

from ctxcache.client import BlockSpace, Client
from ctxcache.format.model import ModelSpec
from gpu_worker.engines.link import Refused, StoreLink, StoreSettings
from gpu_worker.engines.spaces import model_of
from gpu_worker.engines.tried import warn_if_untried
from gpu_worker.model.spec import digest_checkpoint

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj


MOST_BLOCK_BYTES = 16 << 20
THREADS = 2
"""For each of storing and loading."""
MOST_STORES = 64
"""Tasks of storing that may wait; more are not done, which is a miss later."""
SPACES_KEPT = 64
"""Spaces that are not made anew each time: one for each model and salt."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ChunkSettings(StoreSettings):
    """The settings, where LMCache's configuration has any of ours."""

    model_directory: str | None = None
    """The model's files: where it is given, other weights under the same name find nothing."""

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """The settings that a configuration gives at `where`. Raises Refused."""
        # Not super(): a class with slots is made anew.
        settings = super(ChunkSettings, cls).of(given, where)
        directory = settings.model_directory
        if directory is not None and not Path(directory).is_dir():
            raise Refused(f"{where}.model_directory: {directory} is no directory")
        return settings

    def link(self) -> "StoreLink[Weights]":
        """A link to the store, for what is known of the model's weights."""
        warn_if_untried("LMCache", lmcache.__version__)
        return StoreLink(self.connect, self._weights)

    def _weights(self, client: Client) -> "Weights":
        # Mapped and populated while LMCache starts, and not beside the first chunks.
        client.map_arena(is_written=True)
        directory = self.model_directory
        return Weights("" if directory is None else digest_checkpoint(Path(directory)), self.weights_version)


@dataclass(frozen=True, slots=True)
class Weights:
    """The digest of a model's files, empty where settings do not say where they are; and the version."""

    digest: str
    version: str
    _known: set[str] = field(default_factory=set, compare=False)

    def model(self, name: str) -> ModelSpec:
        """The model of that name."""
        # LMCache's keys have the name alone, and one adapter may have chunks of several models.
        return model_of(name, "lmcache", self.digest, name, version=self.version)

    def register(self, client: Client, name: str) -> None:
        """Let the store know whose chunks are put, once: a version's can be forgotten."""
        if name not in self._known:
            client.models.register(self.model(name))
            self._known.add(name)


@lru_cache(SPACES_KEPT)
def space_of(model_name: str, weights: Weights, *, tag: str, salt: str = "") -> BlockSpace:
    """Where chunks of a model are looked for."""
    return BlockSpace(
        weights.model(model_name).fingerprint(),
        layout_tag=tag,
        salt=hashlib.sha256(_encoded(salt)).digest() if salt else b"",
    )


def _encoded(name: str) -> bytes:
    # Models, salts and tags are named by callers: a lone surrogate is no character, and may be in a name.
    return name.encode(errors="surrogatepass")


# A chunk of 40 MiB, as three blocks:
#
#     chunk   [ 16 MiB ][ 16 MiB ][ 8 MiB ]
#     keys    H(facts, 3, 0, hash)   H(facts, 3, 1, hash)   H(facts, 3, 2, hash)
#
# The count is in every key: a chunk of another size under the same hash finds none of these.
class BlockKeys:
    """Makes the keys of the blocks of chunks that have these facts, and this size."""

    def __init__(self, facts: str, size_bytes: int) -> None:
        count = max(-(-size_bytes // MOST_BLOCK_BYTES), 1)
        # All but the hash, added up once for many chunks.
        self._begun = [hashlib.sha256(_encoded(f"{facts} {count} {number} ")) for number in range(count)]

    def of(self, chunk_hash: bytes) -> list[bytes]:
        """The keys of a chunk's blocks."""
        keys = []
        for begun in self._begun:
            hasher = begun.copy()
            hasher.update(chunk_hash)
            keys.append(hasher.digest())
        return keys


def cut(keys: list[bytes], data: Bytes) -> dict[bytes, Bytes]:
    """A chunk's blocks, sharing its memory."""
    return {key: data[i * MOST_BLOCK_BYTES : (i + 1) * MOST_BLOCK_BYTES] for i, key in enumerate(keys)}


def bytes_of(chunk: "MemoryObj") -> Bytes:
    """A chunk's memory."""
    return np.frombuffer(chunk.byte_array, np.uint8)
