"""A device that does not answer: reads, writes and syncs of one file wait until it is let go."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class HungDevice:
    """Operations of this process on one file, held in the threads that asked for them."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.waiting_count = 0
        """Operations that have come so far, let go or not."""
        self.came = threading.Event()
        self._path, self._names = path, names
        self._answers = threading.Event()

    @contextmanager
    def hung(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["HungDevice"]:
        """Hang from now on; at the end it has answered, if nobody let it before."""
        with monkeypatch.context() as patched:
            for name in self._names:
                patched.setattr(os, name, self._waiting(getattr(os, name)))
            try:
                yield self
            finally:
                self.answer()

    @property
    def is_hung(self) -> bool:
        """Whether it has not been let go."""
        return not self._answers.is_set()

    def answer(self) -> None:
        """Carry out, late, what was asked for."""
        self._answers.set()

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(fd: int, *arguments: object) -> object:
            if str(Path(f"/proc/self/fd/{fd}").readlink()) == self._path:
                self.waiting_count += 1
                self.came.set()
                self._answers.wait()
            return call(fd, *arguments)

        return wait
