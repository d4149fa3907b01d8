"""Precedence for the model: turns come first, and work ahead of them runs in between.

```
   turn     ──────waits for a step──►[ turn ]            [ turn ]
   ahead    [ step ][ step ]─gives way              [ step ]
```

Turns wait for each other in no order, and for one step of work ahead at most: it asks behind each step
whether a turn waits. Worst case: a step that takes long, by which every turn that comes meanwhile is later.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Precedence:
    """One model's. Thread-safe; nobody takes it twice in one thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting_count = 0
        self._is_taken = False

    @property
    def is_wanted(self) -> bool:
        """Whether a turn waits: whoever works ahead gives way."""
        return self._waiting_count > 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the model for a turn."""
        with self._changed:
            self._waiting_count += 1
            try:
                self._changed.wait_for(lambda: not self._is_taken)
                self._is_taken = True
            finally:
                self._waiting_count -= 1
        with self._given_back():
            yield

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Have the model while no turn wants it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken and not self._waiting_count)
            self._is_taken = True
        with self._given_back():
            yield

    @contextmanager
    def _given_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
