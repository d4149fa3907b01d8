"""vLLM's own offloading to host memory, on a CPU: stock vLLM refuses that, though only copies are missing.

Named by `spec_name` and `spec_module_path`. One group of K/V caches, chunks of one block.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once, in the worker's thread."""

    def __init__(self, caches: CanonicalKVCaches, room: Callable[[int], torch.Tensor]) -> None:
        """`room` makes place for chunks of so many bytes: [chunks, bytes]."""
        self._blocks = [item.tensor.flatten(1).view(torch.int8) for item in caches.tensors]
        self._chunks = [room(blocks.shape[1]) for blocks in self._blocks]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into chunks."""
        return self._copy(job_id, self._blocks, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into blocks."""
        return self._copy(job_id, self._chunks, src_spec, self._blocks, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """The transfers that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: a transfer ends before its submission does."""

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], source: Any, targets: list[torch.Tensor], target: Any
    ) -> bool:
        began_s = time.perf_counter()
        taken, given = torch.from_numpy(source.block_ids).long(), torch.from_numpy(target.block_ids).long()
        for one, other in zip(sources, targets, strict=True):
            other[given] = one[taken]
        size_bytes = len(taken) * sum(one.shape[1] for one in sources)
        took_s = time.perf_counter() - began_s
        self._finished.append(
            TransferResult(job_id, success=True, transfer_size=size_bytes, transfer_time=took_s)
        )
        return True


class OffloadOnCpu(CPUOffloadingSpec):
    """Host memory beside an engine whose blocks lie in host memory too."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of these caches, asked for once."""
        return CopyingWorker(
            kv_caches, lambda size_bytes: torch.empty((_chunk_count(self), size_bytes), dtype=torch.int8)
        )


class TieringOnCpu(TieringOffloadingSpec):
    """The same with tiers behind it, which share its memory with the scheduler."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of these caches, asked for once."""
        # By their places, and this once more below: versions of vLLM have different names for the same.
        region = SharedOffloadRegion(
            self.config.engine_id,
            _chunk_count(self),
            self.config.parallel.rank,
            self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )
        is_new = hasattr(region, "create_next_worker_view")
        return CopyingWorker(kv_caches, region.create_next_worker_view if is_new else region.create_next_view)


def _chunk_count(spec: Any) -> int:
    count: int = spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks
    return count
