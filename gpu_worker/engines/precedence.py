"""Precedence for the model: turns come first, and work ahead of them runs in between.

```
   turn     ──────waits for a step──►[ turn ]            [ turn ]
   ahead    [ step ][ step ]─gives way              [ step ]
```

Turns wait for each other in no order, and for one step of work ahead at most: it asks behind each step
whether a turn waits. Engines of one model share its precedence: what captures rows of a pass sees every pass
of the model. Worst case: a step that takes long, by which every turn that comes meanwhile is later.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from ctxcache.errors import InvalidArgument


class Precedence:
    """One model's. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting_count = 0
        self._taken_by: int | None = None
        """The thread that has the model."""

    @property
    def is_wanted(self) -> bool:
        """Whether a turn waits: whoever works ahead gives way."""
        return self._waiting_count > 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the model for a turn. Raises InvalidArgument where the thread has it already."""
        with self._changed:
            self._check_thread()
            self._waiting_count += 1
            try:
                self._changed.wait_for(lambda: self._taken_by is None)
                self._taken_by = threading.get_ident()
            finally:
                self._waiting_count -= 1
        with self._given_back():
            yield

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Have the model while no turn wants it. Raises InvalidArgument where the thread has it already."""
        with self._changed:
            self._check_thread()
            self._changed.wait_for(lambda: self._taken_by is None and not self._waiting_count)
            self._taken_by = threading.get_ident()
        with self._given_back():
            yield

    def _check_thread(self) -> None:
        # It would wait for itself.
        if self._taken_by == threading.get_ident():
            raise InvalidArgument(field="model", problem="is in a turn of this thread, or in a pass ahead")

    @contextmanager
    def _given_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._taken_by = None
                self._changed.notify_all()


_OF_MODELS: WeakKeyDictionary[object, Precedence] = WeakKeyDictionary()
_MAKING = threading.Lock()


def precedence_of(model: object) -> Precedence:
    """The precedence that all engines of a model share."""
    with _MAKING:
        return _OF_MODELS.setdefault(model, Precedence())
