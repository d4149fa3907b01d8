"""vLLM's own offloading to host memory, on a CPU: stock vLLM refuses that, though only copies are missing.

Named by `spec_name` and `spec_module_path`. One group of K/V caches, chunks of one block.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once, in the worker's thread."""

    def __init__(self, caches: CanonicalKVCaches, chunk_count: int) -> None:
        self._blocks = [item.tensor.flatten(1).view(torch.int8) for item in caches.tensors]
        self._chunks = [
            torch.empty((chunk_count, blocks.shape[1]), dtype=torch.int8) for blocks in self._blocks
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into chunks."""
        return self._copy(job_id, self._blocks, src_spec, self._chunks, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into blocks."""
        return self._copy(job_id, self._chunks, src_spec, self._blocks, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """What ended since the last call."""
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
        return CopyingWorker(kv_caches, self.num_chunks)
