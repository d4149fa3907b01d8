"""What llama.cpp says in a reply of the tokens of a prompt that it had, and did not compute.

A whole reply says it in its timings. A streamed one says it at its end, when headers have been sent. So
llama.cpp is asked for events about the progress of the prompt. The first one says it, and comes early.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

EVENT_END = b"\n\n"
MOST_EVENT_BYTES = 1 << 20
"""An event that is longer is no event about the prompt."""


def reused_in(reply: bytes) -> int | None:
    """The count in a whole reply; None where it says none."""
    return _count(_read(reply), "timings", "cache_n")


# A streamed reply, whose client has not asked for progress:
#
#     data: {..., "prompt_progress": {"cache": 573, ...}}      the count; taken out
#     data: {..., "prompt_progress": {"cache": 573, ...}}      taken out
#     data: {..., "content": "Hello"}                          from here on all is passed on as it is
class Progress:
    """The begin of a streamed reply, without events that the client has not asked for."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._is_over = False
        self._begun = b""
        """Bytes of an event that has not ended."""
        self.reused: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the count is known, or will not be."""
        return self._is_over or self.reused is not None

    def passed(self, data: bytes) -> bytes:
        """What is to be passed on of the reply's next bytes; the rest with none, at its end."""
        if self._is_over:
            return data
        begun, passed = self._begun + data, b""
        while not self._is_over and EVENT_END in begun:
            event, _, begun = begun.partition(EVENT_END)
            count = _count(_read(event.partition(b"data:")[2]), "prompt_progress", "cache")
            # A line that begins with a colon is no event, but a sign that the connection is used.
            self._is_over = count is None and not event.startswith(b":")
            if self.reused is None:
                self.reused = count
            if count is None or self._is_wanted:
                passed += event + EVENT_END
        self._is_over |= not data or len(begun) > MOST_EVENT_BYTES
        self._begun = b"" if self._is_over else begun
        return passed + begun if self._is_over else passed


def streamed(read: Callable[[], bytes], progress: Progress) -> Iterator[bytes]:
    """The bytes of a streamed reply; the first ones are there when the count is known."""
    passed = b""
    while data := read():
        passed += progress.passed(data)
        if progress.is_known:
            yield passed
            passed = b""
    yield passed + progress.passed(b"")


def _read(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _count(said: Any, *names: str) -> int | None:
    for name in names:
        said = said.get(name) if isinstance(said, dict) else None
    return said if isinstance(said, int) and said >= 0 else None
