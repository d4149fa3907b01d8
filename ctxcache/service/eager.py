"""Beginning a coroutine at once, without a task: most of them end before they ever wait.

Knows nothing of what they do. What waits inside, or asks for the current task, must do so after the
first suspension: before it there is none.
"""

from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Suspended(Generic[T]):
    """A coroutine that has begun and waits. Await it in a task to let it go on."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        """Hand on what it waits for, as the task's own."""
        while True:
            try:
                sent = yield self._waits_for
            except BaseException as error:  # noqa: BLE001  # cancellation too is the coroutine's
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                self._waits_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # typed Any by the library


def begin(coroutine: Coroutine[Any, Any, T]) -> T | Suspended[T]:
    """Run a coroutine up to its end, or to where it waits. Raises what it raises. Call it on the event loop."""
    try:
        return Suspended(coroutine, coroutine.send(None))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # typed Any by the library
