"""The bare gRPC peer: it keeps what it is sent, and a transfer that is not whole is no transfer."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from lab.bench.bare_grpc import MESSAGE_BYTES, FarSide, ask_read, ask_save, far_side
from lab.bench.contexts import content, warm

SIZE_BYTES = 2 * MESSAGE_BYTES + 4096


@pytest.fixture
def far() -> Iterator[FarSide]:
    """Two contexts of more than two messages, the last one short."""
    with far_side(2, SIZE_BYTES) as far:
        yield far


def test_each_context_comes_back_as_it_was_saved(far: FarSide) -> None:
    """Whatever was saved to another one meanwhile."""
    contexts = [content(owner, SIZE_BYTES) for owner in range(2)]
    for index, data in enumerate(contexts):
        ask_save(far, index, data)

    for index, data in enumerate(contexts):
        into = warm(SIZE_BYTES)
        ask_read(far, index, into)
        np.testing.assert_array_equal(into, data)


def test_a_context_of_another_size_is_no_transfer(far: FarSide) -> None:
    """Neither a shorter nor a longer one, in either direction."""
    for size_bytes in (SIZE_BYTES - 4096, SIZE_BYTES + 4096):
        with pytest.raises(EOFError):
            ask_read(far, 0, warm(size_bytes))
        with pytest.raises(EOFError):
            ask_save(far, 0, warm(size_bytes))


def test_a_peer_that_ends_is_said(far: FarSide) -> None:
    """An error that a row takes for its own, not one of gRPC's."""
    os.kill(far.pid, signal.SIGKILL)

    with pytest.raises(EOFError, match="bare gRPC"):
        ask_save(far, 0, warm(SIZE_BYTES))
