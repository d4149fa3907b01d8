"""Memory that the system refuses is told from what is our fault, and to callers as what passes."""

import errno

import pytest

from ctxcache.runtime.memory import refused_memory
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
