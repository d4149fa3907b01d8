"""Caches under test, closed at the end with their books checked."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cache_rig import DiskRig, MemoryRig

from ctxcache.core.ledger.work import Work


@pytest.fixture(autouse=True)
def at_work(work: Work) -> None:
    """The test is at work on all that it looks up, until it lets go, see `Rig.let_go`."""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[MemoryRig]:
    """A cache over stores in memory."""
    made = MemoryRig(tmp_path)
    await made.open()
    yield made
    await made.cache.drain()
    made.arena.close()


@pytest.fixture
async def disk_rig(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """A cache over files and a database."""
    made = DiskRig(tmp_path)
    await made.open()
    yield made
    await made.close()
