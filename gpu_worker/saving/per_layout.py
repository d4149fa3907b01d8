"""A saver for each layout of sessions: the rows that a saver captures are those of one layout."""

from collections import OrderedDict
from collections.abc import Callable

import torch

from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError
from ctxcache.format.streams import Stream
from gpu_worker.saving.saver import Saver

LAYOUT_LIMIT = 2
"""The most savers at a time: each has a staging buffer of its own."""


class Savers:
    """One saver for each layout, made when it is first needed. Close it."""

    def __init__(
        self, client: Client, model: CallerModel, device: torch.device, check: Callable[[], None]
    ) -> None:
        """`check` raises where the rows computed until now are not the model's."""
        self._client, self._model, self._device, self._check = client, model, device, check
        self._by_layout: OrderedDict[frozenset[Stream], Saver] = OrderedDict()

    def of(self, layout: frozenset[Stream]) -> Saver:
        """The saver of sessions with this layout.

        Raises InvalidArgument for a stream that the model does not have.
        """
        saver = self._by_layout.get(layout)
        if saver is None:
            while len(self._by_layout) >= LAYOUT_LIMIT:
                # The saver used longest ago leaves. Closing it saves its staged rows.
                self._by_layout.popitem(last=False)[1].close()
            saver = Saver(
                self._client,
                self._model,
                layout,
                device=self._device,
                # The check runs when rows are about to be saved, not behind each pass.
                witness=lambda: self._check,
            )
            self._by_layout[layout] = saver
        # A saver never leaves the table for its new place: another thread may be waiting for its sessions.
        self._by_layout.move_to_end(layout)
        return saver

    def wait(self, session_name: str) -> CacheError | None:
        """Wait until a session is saved; the error that stopped saves, if any. Raises DeadlineExceeded."""
        failures = [saver.wait(session_name) for saver in list(self._by_layout.values())]
        return next((failure for failure in failures if failure is not None), None)

    def close(self) -> None:
        """Save the staged rows, and end the threads."""
        for saver in self._by_layout.values():
            saver.close()
        self._by_layout.clear()
