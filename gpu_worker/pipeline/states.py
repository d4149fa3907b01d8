"""Layer states: which layers of a target may be used, told to those who wait for them.

A layer is invalid, then filling, then usable; a failure makes all of them invalid for good. Thread-safe.
Worst case: a waiter whose deadline passes, and the restore has failed for all.
"""

import enum
import threading
from collections.abc import Callable

from ctxcache.errors import CacheError
from gpu_worker.errors import RestoreTooLate
from gpu_worker.pipeline.deadline import Deadline


class LayerState(enum.Enum):
    """What one layer of a target holds."""

    INVALID = "invalid"
    FILLING = "filling"
    USABLE = "usable"


class LayerStates:
    """The states of one restore's layers."""

    def __init__(
        self, layer_count: int, *, on_usable: Callable[[int], None], on_failure: Callable[[], None]
    ) -> None:
        """Both are called before anybody is told, one at a time, `on_failure` once; they must not wait."""
        self._states = [LayerState.INVALID] * layer_count
        self._error: CacheError | None = None
        self._on_usable, self._on_failure = on_usable, on_failure
        self._changed = threading.Condition()

    @property
    def error(self) -> CacheError | None:
        """Why no layer is usable any more."""
        return self._error

    @property
    def is_whole(self) -> bool:
        """Whether every layer is usable."""
        with self._changed:
            return self._is_whole()

    def of(self, layer: int) -> LayerState:
        """One layer's state."""
        with self._changed:
            return self._states[layer]

    def fill(self, layer: int) -> None:
        """Work on a layer begins."""
        with self._changed:
            if self._error is None:
                self._states[layer] = LayerState.FILLING

    def announce(self, layer: int) -> None:
        """A layer is usable, unless the restore has failed meanwhile."""
        with self._changed:
            if self._error is None:
                self._on_usable(layer)
                self._states[layer] = LayerState.USABLE
                self._changed.notify_all()

    def fail(self, error: CacheError) -> bool:
        """No layer is usable any more, for `error`; False if all were, or it had failed before."""
        with self._changed:
            if self._error is not None or self._is_whole():
                return False
            self._error = error
            self._states = [LayerState.INVALID] * len(self._states)
            self._on_failure()
            self._changed.notify_all()
        return True

    def wait(self, layer: int, deadline: Deadline) -> None:
        """Wait until a layer is usable. Raises why it never will be; RestoreTooLate fails the restore for all."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._states[layer] is LayerState.USABLE, deadline.left_s
            )
            if self._error is None and self._states[layer] is LayerState.USABLE:
                return
        self.fail(RestoreTooLate(what=f"layer {layer}"))
        raise self._error or RestoreTooLate(what=f"layer {layer}")

    def _is_whole(self) -> bool:
        return all(state is LayerState.USABLE for state in self._states)
