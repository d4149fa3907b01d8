"""Every tier there is, under the contract of tiers."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import FakeClock, MemoryTier
from tier_contract import SMALLEST_CAPACITY_BYTES, PlacedTier, TierContract

from ctxcache.storage.injection import COUNT_LIMIT, Fault, FaultKind, Faults, FaultySsdFiles
from ctxcache.storage.tiers.dram import DramArena
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the point is to be on another filesystem


def _ssd(directory: Path, path_count: int, *, allow_direct: bool = True) -> SsdFiles:
    paths = [SsdPath(str(directory / str(index)), SMALLEST_CAPACITY_BYTES) for index in range(path_count)]
    return SsdFiles(paths, allow_direct=allow_direct)


def _slow_ssd(directory: Path) -> SsdFiles:
    faults = Faults(FakeClock())
    for kind in (FaultKind.SSD_READ_DELAY, FaultKind.SSD_WRITE_DELAY):
        faults.inject(Fault(kind=kind, left_count=COUNT_LIMIT, end_ns=1, delay_ns=1))
    return FaultySsdFiles([SsdPath(str(directory), SMALLEST_CAPACITY_BYTES)], faults)


KINDS: dict[str, Callable[[Path], PlacedTier]] = {
    "arena": lambda directory: DramArena(directory / "arena", SMALLEST_CAPACITY_BYTES),
    "ssd, one path": lambda directory: _ssd(directory, 1),
    "ssd, two paths": lambda directory: _ssd(directory, 2),
    "ssd, buffered": lambda directory: _ssd(directory, 2, allow_direct=False),
    "ssd, slow": _slow_ssd,
    "memory": lambda _: MemoryTier((SMALLEST_CAPACITY_BYTES, SMALLEST_CAPACITY_BYTES)),
}


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give a directory on the disk, then one in shared memory, whose filesystem is another."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"{SHARED_MEMORY} cannot be written here: the tmpfs half of the contract is NOT checked")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path:
        yield Path(path)


class TestTierContract(TierContract):
    """The contract, for each kind on each filesystem."""

    @pytest.fixture(params=KINDS)
    def tier(self, request: pytest.FixtureRequest, directory: Path) -> Iterator[PlacedTier]:
        """Give a fresh tier of one kind."""
        tier = KINDS[request.param](directory)
        yield tier
        tier.close()
