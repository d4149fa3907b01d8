"""SGLang's pages in the store: a storage backend of its hierarchical cache (HiCache), loaded by name.

    GPU ◄──SGLang──► host pools ◄──CtxcacheHiCache──► store

A page is a block, in as many parts as it has pieces in host memory: the store's client gathers and scatters
them. SGLang names a page by a hash of its tokens, all tokens before, and its request's salt and adapter. It
does not say which model that is, so spaces of the store do: weights, pool, layout, and rank. SGLang calls
from threads of its own and waits. Where the store does not answer, nothing is found and nothing is stored.
"""

import ctypes
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_serving
from sglang.version import __version__

from ctxcache.client import BlockPart, BlockSpace, Client
from ctxcache.client.types import LookupState
from gpu_worker.engines.link import LinkState, Refused, StoreLink, StoreSettings
from gpu_worker.engines.spaces import model_of
from gpu_worker.engines.tried import warn_if_untried
from gpu_worker.model.spec import digest_checkpoint

log = logging.getLogger(__name__)

# Pieces of a page in SGLang's host memory depend on its layout, and are the parts of a block:
#
#     page_first     [ page 0: all layers ][ page 1: all layers ]     few pieces
#     layer_first    layer 0 [ page 0 ][ page 1 ]   layer 1 ...       a piece for each layer, K and V apart
#
# The client gathers and scatters parts: SGLang's memory is read and written in place.
MOST_PAGE_BYTES = 16 << 20
"""The largest block of the store."""
MOST_PIECES = 256
"""The most parts of a block. A page in more pieces is copied to one first."""
FACTORY = ("backend_name", "module_path", "class_name", "interface_v1")
"""Fields of the configuration that SGLang's own factory reads."""
WHERE = "hicache_storage_backend_extra_config"
# Pools whose pages differ in any of these have other bytes under the same hash.
FACTS = (
    "dtype",
    "layout",
    "page_size",
    "size_per_token",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "kv_cache_dim",
    "dcp_size",
    "storage_format_tag",
)
"""Attributes of a pool, where it has them, on which the bytes of its pages depend."""
Bytes = npt.NDArray[np.uint8]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HiCacheSettings(StoreSettings):
    """The fields of `--hicache-storage-backend-extra-config`, beside those of SGLang's factory."""

    model_directory: str | None = None
    """The model's files, where `--model-path` is not their directory: other weights find nothing."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One of SGLang's host pools, and the place of its pages in the store."""

    host: Any
    page_tokens: int
    page_bytes: int
    facts: str
    piece_count: int
    """Pieces of a page in host memory; 0 where a page is copied as a whole."""

    @classmethod
    def of(cls, host: Any) -> "Pool":
        """Raises Refused for pages that are too large."""
        page_tokens = int(getattr(host, "page_size", 1) or 1)
        facts = {name: str(getattr(host, name)) for name in FACTS if getattr(host, name, None) is not None}
        page_bytes = host.get_dummy_flat_data_page().nbytes
        if page_bytes > MOST_PAGE_BYTES:
            problem = f"a page has {page_bytes} bytes, at most {MOST_PAGE_BYTES} are stored"
            raise Refused(f"{problem}: lower --page-size")
        return cls(
            host,
            page_tokens,
            page_bytes,
            json.dumps([type(host).__name__, facts, page_bytes]),
            _piece_count(host, page_tokens, page_bytes),
        )

    def pieces(self, indices: torch.Tensor) -> list[list[Bytes]]:
        """The pieces of each page, where they lie. `indices`: of the pages' tokens in the pool."""
        pointers, sizes = self.host.get_page_buffer_meta(indices)
        views = list(map(_view, pointers, sizes))
        # SGLang lists pieces page by page.
        return [views[i : i + self.piece_count] for i in range(0, len(views), self.piece_count)]

    def copy_of(self, index: int) -> list[Bytes]:
        """The bytes of the page that begins at this token."""
        page = self.host.get_data_page(index, flat=True)
        return [page.contiguous().view(torch.uint8).numpy()]

    def put_back(self, index: int, page: Sequence[Bytes]) -> None:
        """The reverse of `copy_of`."""
        dummy = self.host.get_dummy_flat_data_page()
        dummy.view(torch.uint8).numpy()[:] = page[0]
        self.host.set_from_flat_data_page(index, dummy)


class CtxcacheHiCache(HiCacheStorage):  # type: ignore[misc]  # untyped package
    """The backend. Thread-safe as far as SGLang's pools are. A call waits for `timeout_s` at most."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises Refused."""
        del kwargs
        warn_if_untried("SGLang", __version__)
        # SGLang passes its factory's own fields on with the others.
        given = {k: v for k, v in (storage_config.extra_config or {}).items() if k not in FACTORY}
        self._settings = HiCacheSettings.of(given, WHERE)
        self._config = storage_config
        name = storage_config.model_name or ""
        directory = self._settings.model_directory or (name if name and Path(name).is_dir() else None)
        if directory is not None and not Path(directory).is_dir():
            raise Refused(f"{WHERE}.model_directory: {directory} is no directory")
        if directory is None:
            log.warning("the context store tells models apart by %r alone: say model_directory", name)
        self._version, self._told_weights = self._settings.weights_version, _told_version()
        """Of the weights, and SGLang's own word for them when they got it."""
        self._is_named = True
        """Whether that is what is loaded, as far as SGLang was told."""
        self._link: StoreLink[bytes] = StoreLink(
            self._settings.connect, partial(self._fingerprint, name, directory)
        )
        self._pools: dict[str, Pool] = {}
        """By name."""
        self._told: set[str] = set()
        """Names of pools of which the user has heard that they do not fit."""

    # -- pools ----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """See HiCacheStorage. Raises Refused."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[str(PoolName.KV)] = Pool.of(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """See HiCacheStorage. Raises Refused."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools[str(host_pool_name)] = Pool.of(host_pool)

    # -- pages of the pool of K/V, where they lie -----------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages are there."""
        del extra_info
        return _leading(self._there(str(PoolName.KV), keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages, verified; whether each is there."""
        del extra_info
        return self._load(str(PoolName.KV), keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages; whether each is there."""
        del extra_info
        return self._store(str(PoolName.KV), keys, host_indices)

    # -- pages of several pools -----------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many of the first pages can be used, with the states of all pools that they need."""
        del extra_info
        # A page behind a gap is of no use: its tokens would attend to missing ones.
        kv_count = _leading(self._there(str(PoolName.KV), keys))
        counts = {str(PoolName.KV): kv_count} if kv_count else {}
        restorable = set(range(1, kv_count + 1))
        for transfer in pool_transfers or []:
            there = self._there(str(transfer.name), keys[:kv_count])
            usable = _usable(transfer, there)
            if usable:
                counts[transfer.name] = max(usable)
            # A prefix counts where every pool can give its state at just that end.
            restorable &= usable
        return PoolTransferResult(max(restorable, default=0), counts, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of each pool, verified; whether each is there."""
        del extra_info
        return {one.name: self._load(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of each pool; whether each is there."""
        del extra_info
        return {one.name: self._store(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    # -- pages as tensors, which SGLang copies --------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self._there(str(PoolName.KV), [key]) == [True]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load a page into a tensor; None where it is not there."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors; None for each that is not there."""
        del target_sizes
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(tensor is None for tensor in targets):
            return [None] * len(keys)
        # Tensors that are not contiguous have no such view, which is an error.
        loaded = self._loaded(
            str(PoolName.KV),
            keys,
            lambda: [[tensor.view(-1).view(torch.uint8).numpy()] for tensor in targets],
            1,
        )
        return [target if is_there else None for target, is_there in zip(targets, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; whether all are there."""
        del target_locations, target_sizes
        return all(
            self._stored(
                str(PoolName.KV),
                keys,
                lambda: [[one.contiguous().view(torch.uint8).reshape(-1).numpy()] for one in values or []],
                1,
            )
        )

    # -- the rest -------------------------------------------------------------------------------------

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Wait until the store can be used, or never will be, or the time is over; whether it can be."""
        return self._link.wait(timeout_s) is LinkState.READY

    def clear(self) -> None:
        """Delete all pages of this engine's model, layout and rank. Later pages are of other weights.

        SGLang calls this after a change of weights, and gives no reason. Later pages have another name.
        """
        for name, pool in self._pools.items():
            # Pages that SGLang copies itself (`set`) lie in a space of one part, beside those in pieces.
            for part_count in {pool.piece_count or 1, 1}:
                self._link.call(
                    partial(_clear, name=name, space_of=partial(self._space, parts=part_count)), None
                )
        told = _told_version()
        self._version = told if told != self._told_weights else f"epoch-{uuid.uuid4().hex}"
        self._told_weights, self._is_named = told, True
        self._link.renew()

    def close(self) -> None:
        """End the client."""
        self._link.close()

    # -- calls of the store ---------------------------------------------------------------------------

    def _fingerprint(self, name: str, directory: str | None, client: Client) -> bytes:
        """The fingerprint of the model's weights, or of its name where the weights are not known."""
        version, weights = self._version, "" if directory is None else digest_checkpoint(Path(directory))
        # A model with known files is the same whatever its name.
        facts = name if directory is None else ""
        spec = model_of(Path(directory or name).name, "sglang", weights, facts, version=version)
        return client.models.register(spec).spec.fingerprint()

    def _call(self, work: Callable[[Client, bytes], Result], otherwise: Result) -> Result:
        """As `StoreLink.call`, with the fingerprint of the weights, while they are those of the name."""
        told = _told_version()
        if told != self._told_weights and self._is_named:
            self._is_named = False
            problem = f"the weights are version {told!r} by now: nothing is found or stored"
            log.error("%s until SGLang clears its storage (/clear_hicache_storage_backend)", problem)
            self._link.renew(is_wanted=False)
        return self._link.call(work, otherwise)

    def _there(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or not keys:
            return [False] * len(keys)

        def look(client: Client, weights: bytes) -> list[bool]:
            space = self._space(weights, name, parts=pool.piece_count or 1)
            found = client.blocks.look_up(space, list(map(_key, keys)))
            # A block of another size is a page of another configuration: loading it would be refused.
            return [one.state is LookupState.HIT and one.size_bytes == pool.page_bytes for one in found]

        return self._call(look, [False] * len(keys))

    def _load(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pool(name, keys, indices)
        if pool is None or indices is None:
            return [False] * len(keys)
        if pool.piece_count:
            return self._loaded(name, keys, lambda: pool.pieces(indices), pool.piece_count)
        pages = [[np.empty(pool.page_bytes, np.uint8)] for _ in keys]
        loaded = self._loaded(name, keys, lambda: pages, 1)

        def put_back() -> list[bool]:
            for i, (page, is_there) in enumerate(zip(pages, loaded, strict=True)):
                if is_there:
                    pool.put_back(int(indices[i * pool.page_tokens]), page)
            return loaded

        return self._link.tried(put_back, [False] * len(keys))

    def _store(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pool(name, keys, indices)
        if pool is None or indices is None:
            return [False] * len(keys)
        if pool.piece_count:
            return self._stored(name, keys, lambda: pool.pieces(indices), pool.piece_count)
        # Indices are those of tokens. A page's tokens follow one another.
        return self._stored(
            name, keys, lambda: [pool.copy_of(i) for i in indices[:: pool.page_tokens].tolist()], 1
        )

    def _loaded(
        self, name: str, keys: Sequence[str], pages: Callable[[], Sequence[list[Bytes]]], part_count: int
    ) -> list[bool]:
        def load(client: Client, weights: bytes) -> list[bool]:
            space = self._space(weights, name, parts=part_count)
            found = client.blocks.load(space, list(map(_key, keys)), list(pages()))
            return [one is not None for one in found]

        return self._call(load, [False] * len(keys))

    def _stored(
        self, name: str, keys: Sequence[str], pages: Callable[[], Sequence[list[Bytes]]], part_count: int
    ) -> list[bool]:
        def store(client: Client, weights: bytes) -> list[bool]:
            space, settings = self._space(weights, name, parts=part_count), self._settings
            blocks = dict(zip(map(_key, keys), pages(), strict=True))
            client.blocks.put(space, blocks, ttl_s=settings.ttl_s, durability=settings.level)
            return [True] * len(keys)

        return self._call(store, [False] * len(keys))

    def _pool(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> Pool | None:
        """The pool, if it has as many places as there are pages."""
        pool = self._pools.get(name)
        if pool is None or indices is None or indices.numel() != len(keys) * pool.page_tokens:
            # Names of pools that are unknown are the caller's text: they are told of once, together.
            if (known := name if pool is not None else "") not in self._told:
                self._told.add(known)
                log.error("pages of %s are not stored or loaded: no pool, or no place for each token", name)
            return None
        return pool

    def _space(self, weights: bytes, name: str, *, parts: int) -> BlockSpace:
        """The space of a pool's pages, in so many parts each."""
        config, pool = self._config, self._pools[name]
        # All ranks of tensor parallelism share the state of latent attention, but not Mamba's.
        is_shared = config.is_mla_model and name != str(PoolName.MAMBA)
        # SGLang 0.5.23 divides that state where decoding is context-parallel; before, no rank has a part.
        tensor_rank = getattr(config, "dcp_rank", 0) if is_shared else config.tp_rank
        ranks = (
            tensor_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
        )
        # The tag has the rank: each rank of tensor parallelism has other heads under one hash.
        tag = hashlib.sha256(f"{name} {pool.facts} {ranks}".encode()).hexdigest()
        return BlockSpace(
            weights,
            layout_tag=f"sglang page {tag}",
            parts=tuple(BlockPart(i, i + 1, 0) for i in range(parts)),
        )


def _clear(
    client: Client, weights: bytes, *, name: str, space_of: Callable[[bytes, str], BlockSpace]
) -> None:
    space = space_of(weights, name)
    keys: set[bytes] = set()
    # A subscription lists a space's keys: all present ones, then `is_current`.
    with client.blocks.subscribe(space) as subscription:
        for news in subscription:
            keys.update(one.key for one in news.changes if one.state is LookupState.HIT)
            if news.is_current:
                break
    client.blocks.delete(space, list(keys))


def _told_version() -> str:
    """SGLang's own name for the version of the weights; empty where it has none."""
    try:
        return str(get_serving().weight_version or "")
    # Outside of its scheduler SGLang has no configuration, and raises an error of its own.
    except (ValueError, AttributeError):
        return ""


def _key(page_hash: str) -> bytes:
    # The hash may have a caller's words, among them a lone surrogate, which is no character.
    return hashlib.sha256(page_hash.encode(errors="surrogatepass")).digest()


def _leading(there: Sequence[bool]) -> int:
    return there.index(False) if False in there else len(there)


def _usable(transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    """Numbers of first pages for which this pool's state is there."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(there) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        count = max(1, len(transfer.keys or []))
        # Windows: a prefix that ends at page 5 needs pages 4 and 5 only (count = 2).
        #
        #     there    x x . x x        ends 1, 2 and 5 are usable
        return {end for end in range(1, len(there) + 1) if all(there[max(0, end - count) : end])}
    # A policy that is not known here gives no state.
    return set()


def _piece_count(host: Any, page_tokens: int, page_bytes: int) -> int:
    """How many pieces of host memory a page has; 0 where the pool does not say, or has too many."""
    try:
        # The pool itself tells, for a page at its beginning: layouts differ by version of SGLang.
        _, sizes = host.get_page_buffer_meta(torch.arange(page_tokens))
    except (AttributeError, NotImplementedError, ValueError):
        return 0
    return len(sizes) if sum(sizes) == page_bytes and len(sizes) <= MOST_PIECES else 0


def _view(pointer: int, size_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(pointer))
