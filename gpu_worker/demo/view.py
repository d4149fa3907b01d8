"""How a person follows the demo: the seam, and lines of text for where nothing can be redrawn.

Knows words, no models. Every call returns at once. Worst case: nobody looks.
"""

from typing import Protocol, TextIO

USER_CHARS = 72


class View(Protocol):
    """What happens, in the order in which it happens."""

    def say(self, text: str) -> None:
        """A sentence that stays."""

    def doing(self, text: str) -> None:
        """What is being done from now on."""

    def begin_turn(self, title: str, user_text: str) -> None:
        """A turn of the conversation begins."""

    def begin_reply(self, who: str) -> None:
        """One of those who answer begins to."""

    def reply(self, text: str) -> None:
        """The reply as far as it goes."""

    def end_reply(self, facts: str, *, is_good: bool) -> None:
        """The reply is whole; `facts` are what came of it."""

    def end_turn(self) -> None:
        """Everybody has answered."""


class LineView:
    """A line per event on a stream that may be a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._who = ""
        self._reply = ""
        self._doing = ""
        self._is_in_turn = False

    def say(self, text: str) -> None:
        """See View."""
        self._write(text)

    def doing(self, text: str) -> None:
        """See View. Neither how far a step is, after its comma, nor a step of a turn makes a line of its own."""
        step = text.partition(", ")[0]
        if step != self._doing and not self._is_in_turn:
            self._doing = step
            self._write(f"... {step}")

    def begin_turn(self, title: str, user_text: str) -> None:
        """See View."""
        self._is_in_turn = True
        self._write(f"\n{title}\n  user            {shortened(user_text)}")

    def begin_reply(self, who: str) -> None:
        """See View."""
        self._who, self._reply = who, ""

    def reply(self, text: str) -> None:
        """See View."""
        self._reply = text

    def end_reply(self, facts: str, *, is_good: bool) -> None:
        """See View."""
        mark = "" if is_good else "DIFFERENT: "
        self._write(f"  {self._who:<15} {one_line(self._reply)}\n  {'':<15} {mark}{facts}")

    def end_turn(self) -> None:
        """See View."""
        self._is_in_turn = False

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


def shortened(text: str, size: int = USER_CHARS) -> str:
    """The begin and the end of a text, which is where the question is."""
    line = one_line(text)
    if len(line) <= 2 * size:
        return line
    return f"{line[:size]} [...] {line[-size:]}"


def one_line(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())
