"""One session's restore under a turn: its leased rows, its cache, and the passes that wait for layers.

`SessionRestorer.begin` starts a restore, `Restoring` is the turn's side of it, and `LayerGate` lets a pass
begin while later layers are still restored. Knows no session's fate: what a failed restore means is the
engine's. Worst case: a lane that hangs. The restore fails at its deadline, and the next one has new lanes.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import nn
from transformers import Cache

from ctxcache.client import SessionRows
from ctxcache.errors import CacheError
from gpu_worker.errors import LaneStuck
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Hooked
from gpu_worker.forms.snapshots import Snapshot
from gpu_worker.pipeline.compute import Compute, KernelWeights, compute_for
from gpu_worker.pipeline.lane import Deadline, device_of
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.planned import Choice, Chooser
from gpu_worker.pipeline.sources import ArenaPins
from gpu_worker.pipeline.target import CacheTarget, LayerRoom, Target
from gpu_worker.planning.plan import Method, RestoreSchedule


# The first pass of a turn, while later layers are still restored:
#
#     restore   [ layer 0 ][ layer 1 ][ layer 2 ][ layer 3 ]
#     pass                 │0│        │1│        │2│        │3│       each block waits at its gate
#     with a lead                       │0││1││2│         │3│       begun later, so that waits are short
class LayerGate(Hooked):
    """Context manager: within it, passes of the thread that entered wait before each block for its layer.

    Other threads pass: the restore itself may be running layers.
    """

    def __init__(self, adapter: Adapter, restoration: Restoration) -> None:
        super().__init__()
        self._adapter, self._restoration = adapter, restoration
        self._thread_id = 0

    def __enter__(self) -> Self:
        self._thread_id = threading.get_ident()
        for layer, decoder in enumerate(self._adapter.layers):
            self._hooks.append(decoder.block.register_forward_pre_hook(self._waiting_for(layer)))
        return self

    def _waiting_for(self, layer: int) -> Callable[[nn.Module, object], None]:
        def hook(_block: nn.Module, _args: object) -> None:
            # A restore may run the same blocks for layers that it recomputes: it would wait for itself for
            # ever.
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
        lent: ExitStack,
    ) -> None:
        """`lent`: closed when no copy from the arena is under way any more."""
        self.cache, self.restoration, self.choice = cache, restoration, choice
        self._rows, self._chooser, self._lent = rows, chooser, lent
        self._gate, self._is_over = LayerGate(adapter, restoration), False
        self.snapshot_tokens = choice.snapshot_tokens if choice.snapshot_layers else 0
        """The tokens of the snapshot whose states the restore goes on from; 0 without one."""
        # Where each pass takes one token, the first would wait for all layers.
        self._lead = None if adapter.is_stepwise else choice.lead

    @property
    def restored_ns(self) -> int:
        """The time from the begin until the last layer was usable; 0 where a layer never was."""
        return int(self.restoration.restored_s * 1e9)

    @property
    def is_ahead(self) -> bool:
        """Whether passes begin before every layer is restored."""
        return self._lead is not None

    def is_failed_by(self, error: CacheError) -> bool:
        """Whether an error out of a pass comes from the failed restore."""
        return error is self.restoration.error or isinstance(error, LaneStuck)

    def wait_for_lead(self) -> None:
        """Wait until a pass may begin without later waits, as planned; without a plan, for all layers.

        Raises the restore's error, after it gave the lease back.
        """
        lead = self._lead
        try:
            if lead is None:
                self.restoration.wait_all()
            for layer in range(lead.layer_count if lead else 0):
                self.restoration.wait(layer)
        except BaseException:
            self.end()
            raise
        if lead is None:
            self.end()

    def __enter__(self) -> Self:
        self._gate.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.__exit__(kind, error, trace)
        self.end()

    def end(self) -> None:
        """Cancel the rest of the restore, and give the lease back. Does nothing once it is over."""
        if self._is_over:
            return
        # The flag comes first: later steps may raise, and must not be done twice.
        self._is_over = True
        try:
            self.restoration.cancel()
            self.restoration.drain()
            self._lent.close()
            # The device's times are known only behind `drain`.
            self._chooser.observe(self.choice, self.restoration)
        finally:
            self._rows.close()


@dataclass(frozen=True, slots=True)
class _Apart(Compute):
    """Another Compute, which recomputes layers within a context of the engine's."""

    compute: Compute
    recomputing: Callable[[], AbstractContextManager[None]]

    def restore(self, layer: int, method: Method, data: torch.Tensor, begin: int, room: LayerRoom) -> None:
        """See Compute."""
        self.compute.restore(layer, method, data, begin, room)

    def chain(self, layers: frozenset[int]) -> None:
        """See Compute."""
        self.compute.chain(layers)

    def recompute(self, schedule: RestoreSchedule, token_ids: torch.Tensor, target: Target) -> None:
        """See Compute."""
        with self.recomputing():
            self.compute.recompute(schedule, token_ids, target)


class SessionRestorer:
    """Begins restores of one model's sessions. A stuck pipeline is replaced. Close it."""

    def __init__(
        self,
        adapter: Adapter,
        chooser: Chooser,
        *,
        timeout_s: float,
        settings: PipelineSettings | None = None,
        recomputing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`recomputing` is entered, on a lane, around passes that recompute layers."""
        self._adapter, self._chooser, self._recomputing = adapter, chooser, recomputing
        self._timeout_s, self._settings = timeout_s, settings
        self._weights = KernelWeights(adapter)
        self._pipeline: Pipeline | None = None
        self._pins = ArenaPins(adapter.layers[0].device)

    def begin(
        self,
        rows: SessionRows,
        choice: Choice,
        token_ids: Sequence[int],
        *,
        behind_count: int = 0,
        snapshot: Snapshot | None = None,
    ) -> Restoring:
        """Restore the session's first tokens, those of `token_ids`. The restore owns `rows` from here on.

        `snapshot`: the states from which the choice goes on. With `behind_count` other restores under way,
        the restore may take as long as all of them.
        """
        adapter, count = self._adapter, len(token_ids)
        target = CacheTarget(adapter, count, snapshot=snapshot)
        compute = compute_for(adapter, self._weights, torch.arange(count), standing=target.standing)
        pipeline = self._usable()
        with ExitStack() as lent:
            restoration = pipeline.start(
                choice.schedule(target),
                lent.enter_context(self._pins.source(rows)),
                target,
                _Apart(compute, self._recomputing),
                # Restores share the lanes: the last of a batch waits for those before it.
                deadline=Deadline.after_s(self._timeout_s * (1 + behind_count)),
                token_ids=torch.tensor(token_ids),
            )
            # The arena stays lent until the restore is drained. A start that raises gives it back here.
            kept = lent.pop_all()
        return Restoring(adapter, rows, target.cache, restoration, choice, self._chooser, kept)

    def close(self) -> None:
        """End the lanes. Raises LaneStuck."""
        self._end_pipeline()
        self._pins.close()

    def _end_pipeline(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        if not pipeline.is_stuck:
            pipeline.close()
            return
        # The stuck lane was told to end, and ends when its call returns. Nobody waits for it.
        with suppress(LaneStuck):
            pipeline.close(timeout_s=0.0)

    def _usable(self) -> Pipeline:
        # A lane that hangs keeps its thread and its buffers: the next restore has new ones.
        if self._pipeline is None or self._pipeline.is_stuck:
            self._end_pipeline()
            self._pipeline = Pipeline(device_of(self._adapter.layers[0].device), self._settings)
        return self._pipeline
