"""A session being restored for one turn: its leased rows, its cache, and the passes that wait for layers.

Knows the pipeline, the store's client, and the model's blocks through its adapter. Owned by the turn. Worst
case: a restore that fails while the model runs on its cache. The pass ends with the reason; the cache is
thrown away.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from ctxcache.client import SessionRows
from ctxcache.errors import CacheError
from gpu_worker.errors import LaneStuck
from gpu_worker.families import Adapter
from gpu_worker.pipeline.device import device_of
from gpu_worker.pipeline.kernels import KernelWeights, compute_for
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.planned import Choice, Chooser
from gpu_worker.pipeline.source import LeasedSource
from gpu_worker.pipeline.target import CacheTarget


class LayerGate:
    """Context manager: within it, passes of the thread that entered wait before each block for its layer.

    Other threads pass: the restore itself may be running layers.
    """

    def __init__(self, adapter: Adapter, restoration: Restoration) -> None:
        self._adapter, self._restoration = adapter, restoration
        self._hooks: list[RemovableHandle] = []
        self._thread_id = 0

    def __enter__(self) -> Self:
        self._thread_id = threading.get_ident()
        for layer, decoder in enumerate(self._adapter.layers):
            self._hooks.append(decoder.block.register_forward_pre_hook(self._waiting_for(layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _waiting_for(self, layer: int) -> Callable[[nn.Module, object], None]:
        def hook(_block: nn.Module, _args: object) -> None:
            if threading.get_ident() == self._thread_id:
                self._restoration.wait(layer)

        return hook


class Restoring:
    """A context manager: within it, passes wait for their layers; leaving it gives the lease back."""

    def __init__(
        self,
        adapter: Adapter,
        rows: SessionRows,
        cache: Cache,
        restoration: Restoration,
        choice: Choice,
        chooser: Chooser,
    ) -> None:
        self.cache, self.restoration, self.choice = cache, restoration, choice
        self._rows, self._chooser = rows, chooser
        self._gate = LayerGate(adapter, restoration)

    @property
    def restored_ns(self) -> int:
        """From its begin until the last layer was usable; 0 where that did not happen."""
        return int(self.restoration.restored_s * 1e9)

    @property
    def is_ahead(self) -> bool:
        """Whether passes begin before all is restored."""
        return self.choice.lead is not None

    def is_failed_by(self, error: CacheError) -> bool:
        """Whether an error out of a pass is why the restore failed."""
        return error is self.restoration.error or isinstance(error, LaneStuck)

    def wait_for_lead(self) -> None:
        """Wait until a pass may begin without waiting for a layer later, as planned; without a plan, for all.

        Raises why the restore failed; then it is over, and the lease given back.
        """
        lead = self.choice.lead
        try:
            if lead is None:
                self.restoration.wait_all()
            for layer in range(lead.layer_count if lead else 0):
                self.restoration.wait(layer)
        except BaseException:
            self._end()
            raise
        if lead is None:
            self._end()

    def __enter__(self) -> Self:
        self._gate.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.__exit__(kind, error, trace)
        self._end()

    def _end(self) -> None:
        try:
            self.restoration.cancel()
            self.restoration.drain()
            self._chooser.observe(self.choice, self.restoration)
        finally:
            self._rows.close()


class SessionRestorer:
    """Begins restores of one model's sessions, on a pipeline that is replaced when it is stuck. Close it."""

    def __init__(
        self,
        adapter: Adapter,
        chooser: Chooser,
        *,
        timeout_s: float,
        settings: PipelineSettings | None = None,
    ) -> None:
        self._adapter, self._chooser = adapter, chooser
        self._timeout_s, self._settings = timeout_s, settings
        self._weights = KernelWeights(adapter)
        self._pipeline: Pipeline | None = None

    def begin(self, rows: SessionRows, choice: Choice, token_ids: Sequence[int]) -> Restoring:
        """Restore the session's first tokens, those of `token_ids`. `rows` are the restore's from here on."""
        adapter, count = self._adapter, len(token_ids)
        target = CacheTarget(adapter, count)
        restoration = self._usable().start(
            choice.schedule(target),
            LeasedSource(rows),
            target,
            compute_for(adapter, self._weights, torch.arange(count)),
            deadline=Deadline.after_s(self._timeout_s),
            token_ids=torch.tensor(token_ids),
        )
        return Restoring(adapter, rows, target.cache, restoration, choice, self._chooser)

    def close(self) -> None:
        """End the lanes. Raises LaneStuck."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            _end(pipeline)

    def _usable(self) -> Pipeline:
        if self._pipeline is None or self._pipeline.is_stuck:
            self.close()
            self._pipeline = Pipeline(device_of(self._adapter.layers[0].device), self._settings)
        return self._pipeline


def _end(pipeline: Pipeline) -> None:
    """Close a pipeline.

    Of a stuck one, which has been told, the lane that is stuck ends by itself, whenever it does.
    """
    if not pipeline.is_stuck:
        pipeline.close()
        return
    with suppress(LaneStuck):
        pipeline.close(timeout_s=0.0)
