"""Savers by layout: every session is saved as it was created, whatever this engine would create.

Owned by an engine that runs one turn at a time. Worst case: sessions of more layouts than are kept, whose turns
then wait until those of another layout are saved.
"""

from collections import OrderedDict

import torch

from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError
from ctxcache.format.streams import Stream
from gpu_worker.saving import Saver

LAYOUT_LIMIT = 2
"""Savers at a time: each has a staging buffer of its own."""


class Savers:
    """One saver for each layout, made when it is first needed. Close it."""

    def __init__(self, client: Client, model: CallerModel, device: torch.device) -> None:
        self._client, self._model, self._device = client, model, device
        self._by_layout: OrderedDict[frozenset[Stream], Saver] = OrderedDict()

    def of(self, layout: frozenset[Stream]) -> Saver:
        """The saver of sessions with this layout. Raises InvalidArgument for a stream that the model does not have."""
        found = self._by_layout.pop(layout, None)
        if found is None:
            while len(self._by_layout) >= LAYOUT_LIMIT:
                self._by_layout.popitem(last=False)[1].close()
            found = Saver(self._client, self._model, layout, device=self._device)
        self._by_layout[layout] = found
        return found

    def wait(self, session_name: str) -> CacheError | None:
        """Wait until a session is saved; what stopped its saves, if anything did. Raises DeadlineExceeded."""
        failures = [saver.wait(session_name) for saver in self._by_layout.values()]
        return next((failure for failure in failures if failure is not None), None)

    def close(self) -> None:
        """Save what is still in staging, and end the threads."""
        for saver in self._by_layout.values():
            saver.close()
        self._by_layout.clear()
