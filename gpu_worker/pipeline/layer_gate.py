"""The layer gate: an engine's forward pass that waits, layer by layer, for what is being restored.

Knows the model's blocks through its adapter. Worst case: a layer that never comes, whose error leaves the
forward pass; the cache is then to be thrown away.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpu_worker.families import Adapter
from gpu_worker.pipeline.restoration import Restoration


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
