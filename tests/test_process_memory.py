"""Memory that the system refuses is told from what is our fault, and to callers as what passes."""

import errno
import mmap
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ctxcache.runtime import memory
from ctxcache.runtime.memory import STEP_BYTES, Populate, refused_memory
from ctxcache.service.edge import known_error

REFUSED = (
    MemoryError(),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
)
OTHER = (
    RuntimeError("something else"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("can't start new thread"),
)


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_refused_memory_is_no_internal_error(error: Exception) -> None:
    """The caller may come again: it is told so, and what was short."""
    known = known_error(error)

    assert known.reason == "TOO_MANY_REQUESTS"
    assert "memory" in str(known)


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    """A bug of ours stays a bug of ours."""
    assert refused_memory(error) is None


def test_populating_gives_way_after_each_short_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never waited would lose its processor within a step, and hold up the whole process."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    monkeypatch.setattr(memory, "time", clock)
    mapping = np.frombuffer(mmap.mmap(-1, 8 * STEP_BYTES), np.uint8)
    populate = Populate(mapping.ctypes.data, mapping.size, is_for_writing=True, keeps=mapping)
    populate.start()
    populate.wait()

    assert populate.is_complete
    assert len(pauses) == 8
    assert STEP_BYTES <= 256 << 10
