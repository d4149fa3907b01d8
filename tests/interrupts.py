"""Interruptions of a call, as by a signal's handler that raises at a moment of it."""

import sys
from collections.abc import Callable
from types import FrameType


class Interrupted(BaseException):
    """What such a handler raises."""


def is_interrupted(run: Callable[[], object], at: int) -> bool:
    """Interrupt `run` at the so many-th moment of it; whether there is one.

    Moments are calls of Python, and ends of calls of C.
    """
    count = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        # Python itself drops what is raised within a finalizer.
        count += event in {"call", "c_return"} and frame.f_code.co_name not in {"__del__", "_remove"}
        if count == at:
            sys.setprofile(None)
            raise Interrupted

    try:
        sys.setprofile(look)
        run()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False
