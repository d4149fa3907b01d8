"""The engine's own blocks of K/V, whole: copied as they lie in its memory, for any model of attention.

A block's bytes have no meaning here. Cut into as many rows as the block has tokens, they are rows like
others: kept, verified, found by their prefix, and cut by sessions, in whole blocks. Layers with a window are
saved as all others, so that a session may be cut anywhere, and restored as far as the window reaches.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import vllm
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from ctxcache.client import SessionRows
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.link import Refused
from gpu_worker.engines.vllm.plan import ABSENT, BlockLayout, BlockLoad, BlockSave, Writing, first_kept
from gpu_worker.engines.vllm.settings import layer_caches
from gpu_worker.saving import Saver, Slice


# A block of the engine, 16 tokens of one layer, as rows of the store:
#
#     engine   page [page_bytes]     K and V in whatever order the backend has
#     store    16 rows of page_bytes / 16 each: cut evenly, without regard to what they are
#
# Rows are of use in whole blocks only, for the same backend,
# processor and version: all are in the model's description.
class _Layer(NamedTuple):
    """A layer's cache."""

    pages: Tensor
    """[blocks, bytes of a block]."""
    group: int
    block_tokens: int

    def blocks_of(self, block_ids: Sequence[Sequence[int]], begin: int, end: int) -> Sequence[int]:
        """The layer's blocks of tokens `[begin, end)`. `block_ids`: all of a request's blocks, by group."""
        return block_ids[self.group][begin // self.block_tokens : end // self.block_tokens]


class EngineBlocks:
    """Saves and restores the blocks of an engine, whole."""

    def __init__(
        self, caches: Mapping[str, Tensor], kv_cache_config: KVCacheConfig, modules: Mapping[str, object]
    ) -> None:
        """`modules`: the engine's layers by name."""
        count = kv_cache_config.num_blocks
        self._layers = [
            _Layer(_pages(caches[name], count, one.spec.page_size_bytes), one.group, one.spec.block_size)
            for name, one in layer_caches(kv_cache_config).items()
        ]
        self._saver: Saver | None = None
        self._sessions: set[str] = set()
        self.layout = layout_of(caches, kv_cache_config, modules)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._layers[0].pages.device

    def follow(self, saver: Saver) -> None:
        """See EngineState."""
        self._saver = saver

    def opened(self, name: str, token_count: int) -> None:
        """See EngineState."""
        del token_count
        self._sessions.add(name)

    def own(self, name: str, block_ids: Iterable[int]) -> None:
        """Nothing: the scheduler says which blocks are to be saved."""

    def disown(self, name: str) -> None:
        """Nothing: the scheduler says which blocks are to be saved."""

    def closed(self, name: str) -> None:
        """See EngineState."""
        self._sessions.discard(name)

    def parts(self, item: BlockLoad) -> Mapping[int, Sequence[int]]:
        """See EngineState."""
        parts = defaultdict[int, list[int]](list)
        for number, layer in enumerate(self._layers):
            first = first_kept(layer.blocks_of(item.block_ids, item.begin, item.end))
            if first is not None:
                parts[item.begin + first * layer.block_tokens].append(number)
        return parts

    def load(
        self,
        rows: SessionRows,
        streams: Mapping[int, Stream],
        item: BlockLoad,
        writing: Writing,
    ) -> None:
        """Write whole blocks into the request's blocks."""
        for number, stream in streams.items():
            layer = self._layers[number]
            ids, pages = layer.blocks_of(item.block_ids, rows.begin, item.end), layer.pages
            if ABSENT in ids:
                raise InvalidArgument(field="block_ids", problem=f"layer {number}: {ids} have a gap")
            blocks = rows.array(stream).reshape(len(ids), -1)
            with writing():
                if self.device.type == "cpu":
                    # Torch would start threads for the copy, beside those that compute.
                    pages.numpy()[_chosen(ids)] = blocks
                else:
                    pages.index_copy_(
                        0, torch.tensor(ids, device=self.device), torch.from_numpy(blocks).to(self.device)
                    )

    def renewed(self) -> None:
        """Nothing: blocks hold K and V, and no copies of weights."""

    @torch.inference_mode()
    def save(self, saves: Iterable[BlockSave]) -> None:
        """Copy the blocks that a step filled."""
        for item in saves:
            if self._saver is None or item.session_name not in self._sessions:
                continue
            count = len(item.token_ids)
            with self._saver.passing([Slice(item.session_name, item.begin, count)], item.token_ids):
                for number, (pages, group, _) in enumerate(self._layers if self._saver.is_taking else ()):
                    ids = item.block_ids[group]
                    if self.device.type == "cpu":
                        blocks = torch.from_numpy(pages.numpy()[_chosen(ids)])
                    else:
                        # Copy the blocks: the saver's own copy may end after the engine's next write to them.
                        blocks = pages.index_select(0, torch.tensor(ids, device=self.device))
                    self._saver.put(number, StateKind.ENGINE_BLOCK, blocks.reshape(count, -1))


def _chosen(block_ids: Sequence[int]) -> slice | list[int]:
    """The index of blocks: a slice for blocks that follow one another, which are copied at once."""
    first = block_ids[0]
    is_run = all(block == first + i for i, block in enumerate(block_ids))
    return slice(first, first + len(block_ids)) if is_run else list(block_ids)


def _pages(cache: Tensor, block_count: int, page_bytes: int) -> Tensor:
    """A layer's cache as [blocks, bytes of a block], uint8, over the same memory.

    Layers may be interleaved block by block: the distance between blocks is the cache's stride.
    """
    blocks = grouped_blocks(cache, block_count)
    element_bytes = blocks.element_size()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        # By bytes over the whole storage: a view of another element type could not keep such strides.
        blocks.untyped_storage(),
        blocks.storage_offset() * element_bytes,
        (block_count, page_bytes),
        (blocks.stride(0) * element_bytes, 1),
    )


def grouped_blocks(cache: Tensor, block_count: int) -> Tensor:
    """A layer's cache as [blocks, ...]: kernels may have several blocks for one of the engine."""
    if cache.shape[0] == block_count:
        return cache
    if cache.shape[0] % block_count:
        raise Refused(f"a K/V cache of shape {tuple(cache.shape)} is not of {block_count} blocks")
    return cache.view(block_count, cache.shape[0] // block_count, *cache.shape[1:])


def layout_of(
    caches: Mapping[str, Tensor], kv_cache_config: KVCacheConfig, modules: Mapping[str, object]
) -> BlockLayout:
    """How the blocks of an engine's caches lie in memory. `modules`: its layers by name."""
    layers = layer_caches(kv_cache_config)
    return BlockLayout(
        row_bytes=tuple(layer.spec.page_size_bytes // layer.spec.block_size for layer in layers.values()),
        description="; ".join(
            (
                _platform(),
                *_described({name: caches[name] for name in layers}, kv_cache_config.num_blocks, modules),
            )
        ),
    )


def _platform() -> str:
    """The engine and the machine, as far as the order of bytes within a block depends on them."""
    name = current_platform.device_name
    if current_platform.is_cpu():
        # Kernels order a block by what the processor can do.
        capabilities = torch.cpu.get_capabilities()
        able = [key for key in sorted(capabilities) if key.startswith(("amx", "avx512", "architecture"))]
        name = ",".join(f"{key}={capabilities[key]}" for key in able)
    return f"vllm {vllm.__version__} {name}"


def _described(
    caches: Mapping[str, Tensor], block_count: int, modules: Mapping[str, object]
) -> Iterable[str]:
    """Each layer's backend, and the order of its block's elements in memory."""
    for name, cache in caches.items():
        blocks = grouped_blocks(cache, block_count)
        backend = getattr(modules[name], "attn_backend", None)
        kind = backend.get_name() if backend is not None else type(modules[name]).__name__
        shape, strides = tuple(blocks.shape[1:]), tuple(blocks.stride()[1:])
        yield f"{name} {kind} {cache.dtype} {shape} {strides}"
