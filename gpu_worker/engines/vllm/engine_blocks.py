"""The engine's own blocks of K/V, whole: copied as they lie in its memory, for any model that it serves.

A block's bytes have no meaning here. Cut into as many rows as the block has tokens, they are rows like
others: kept, verified, found by their prefix, and cut by sessions, in whole blocks.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import vllm
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, group_kernel_blocks

from ctxcache.client import SessionRows
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.vllm.plan import BlockLayout, BlockLoad, BlockSave, Writing
from gpu_worker.engines.vllm.settings import layer_specs
from gpu_worker.saving import Saver, Slice


# A block of the engine, 16 tokens of one layer, as rows of the store:
#
#     engine   page [page_bytes]     K and V in whatever order the backend has
#     store    16 rows of page_bytes / 16 each: cut evenly, without regard to what they are
#
# Rows are of use in whole blocks only, for the same backend,
# processor and version: all are in the model's description.
class EngineBlocks:
    """The blocks of an engine with one group of caches."""

    def __init__(
        self, caches: Mapping[str, Tensor], kv_cache_config: KVCacheConfig, modules: Mapping[str, object]
    ) -> None:
        """`modules`: the engine's layers by name."""
        specs = layer_specs(kv_cache_config)
        self._pages = [
            _pages(caches[name], kv_cache_config.num_blocks, spec.page_size_bytes)
            for name, spec in specs.items()
        ]
        """[blocks, bytes of a block], by layer."""
        self._block_tokens: int = next(iter(specs.values())).block_size
        self._saver: Saver | None = None
        self._sessions: set[str] = set()
        self.layout = BlockLayout(
            block_tokens=self._block_tokens,
            page_bytes=tuple(pages.shape[1] for pages in self._pages),
            description="; ".join(
                (describe_platform(), *describe_layers(caches, kv_cache_config.num_blocks, modules))
            ),
        )

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._pages[0].device

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

    def load(self, rows: SessionRows, streams: Sequence[Stream], item: BlockLoad, writing: Writing) -> None:
        """Put whole blocks where the request has its own."""
        begin, end = item.begin // self._block_tokens, item.end // self._block_tokens
        ids = item.block_ids[begin:end]
        for pages, stream in zip(self._pages, streams, strict=True):
            blocks = rows.array(stream).reshape(len(ids), -1)
            with writing():
                if self.device.type == "cpu":
                    # Torch would start threads for it, beside those that compute.
                    pages.numpy()[_chosen(ids)] = blocks
                else:
                    pages.index_copy_(
                        0, torch.tensor(ids, device=self.device), torch.from_numpy(blocks).to(self.device)
                    )

    @torch.inference_mode()
    def save(self, saves: Iterable[BlockSave]) -> None:
        """Copy the blocks that a step filled."""
        for item in saves:
            if self._saver is None or item.session_name not in self._sessions:
                continue
            count = len(item.token_ids)
            with self._saver.passing([Slice(item.session_name, item.begin, count)], item.token_ids):
                for layer, pages in enumerate(self._pages if self._saver.is_taking else ()):
                    if self.device.type == "cpu":
                        blocks = torch.from_numpy(pages.numpy()[_chosen(item.block_ids)])
                    else:
                        # Copied: a copy of the saver's may end behind the engine's next write to them.
                        blocks = pages.index_select(0, torch.tensor(item.block_ids, device=self.device))
                    self._saver.put(layer, StateKind.ENGINE_BLOCK, blocks.reshape(count, -1))


def _chosen(block_ids: Sequence[int]) -> slice | list[int]:
    """The index of blocks: a slice where they lie one behind the other, which are copied once."""
    first = block_ids[0]
    is_run = all(block == first + i for i, block in enumerate(block_ids))
    return slice(first, first + len(block_ids)) if is_run else list(block_ids)


def _pages(cache: Tensor, block_count: int, page_bytes: int) -> Tensor:
    """A layer's cache as [blocks, bytes of a block], uint8, over the same memory.

    Layers may lie between one another, block by block: blocks are as far apart as the cache says.
    """
    blocks = group_kernel_blocks(cache, block_count)
    element_bytes = blocks.element_size()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        # By bytes over the whole storage: a view of another element type could not keep such strides.
        blocks.untyped_storage(),
        blocks.storage_offset() * element_bytes,
        (block_count, page_bytes),
        (blocks.stride(0) * element_bytes, 1),
    )


def describe_platform() -> str:
    """The engine and the machine, as far as the order of bytes within a block depends on them."""
    name = current_platform.device_name
    if current_platform.is_cpu():
        # Kernels order a block by what the processor can do.
        capabilities = torch.cpu.get_capabilities()
        able = [key for key in sorted(capabilities) if key.startswith(("amx", "avx512", "architecture"))]
        name = ",".join(f"{key}={capabilities[key]}" for key in able)
    return f"vllm {vllm.__version__} {name}"


def describe_layers(
    caches: Mapping[str, Tensor], block_count: int, modules: Mapping[str, object]
) -> Iterable[str]:
    """Each layer's backend, and the order of its block's elements in memory."""
    for name, cache in caches.items():
        blocks = group_kernel_blocks(cache, block_count)
        backend = getattr(modules[name], "attn_backend", None)
        kind = backend.get_name() if backend is not None else type(modules[name]).__name__
        shape, strides = tuple(blocks.shape[1:]), tuple(blocks.stride()[1:])
        yield f"{kind} {cache.dtype} {shape} {strides}"
