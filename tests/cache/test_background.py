"""Moves in the background: their errors."""

import asyncio
import logging

import pytest

from ctxcache.cache.state import Background
from ctxcache.errors import TierFailure


async def test_an_error_that_nobody_foresaw_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A move has no waiter. A device's failure is known already, and a cancellation is no failure."""

    async def fail(error: BaseException) -> None:
        raise error

    moves = Background()
    with caplog.at_level(logging.ERROR):
        for error in (TierFailure(path="/ssd", problem="it fails"), asyncio.CancelledError(), KeyError(1)):
            moves.start(fail(error))
        await moves.drain()
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["move_broken"]
