"""The SSD tier where only a device can show it: full disks, refused syncs, files cut short."""

import asyncio
import fcntl
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import FakeClock
from refused_syncs import refused_syncs
from tier_contract import buffer

from ctxcache.errors import CapacityExceeded, DataDirectoryUnusable, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE, Slot
from ctxcache.runtime.clock import Clock
from ctxcache.storage.tiers.base import TierRefusal
from ctxcache.storage.tiers.segments_file import SsdPath, choose_mode
from ctxcache.storage.tiers.ssd import SsdFiles

SIZE_BYTES = 16 << 20
SLOT = Slot(0, 0, 1 << 20)
OpenTier = Callable[..., SsdFiles]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Open tiers on directories of this test; they are closed at its end."""
    tiers: list[SsdFiles] = []

    def open_tier(*sizes_bytes: int, allow_direct: bool = True, clock: Clock | None = None) -> SsdFiles:
        sizes_bytes = sizes_bytes or (SIZE_BYTES,)
        places = [SsdPath(str(tmp_path / str(i)), size) for i, size in enumerate(sizes_bytes)]
        tiers.append(SsdFiles(places, allow_direct=allow_direct, clock=clock))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let the kernel cut writes at this byte of any file, and refuse those past it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_block_is_allocated_at_creation(open_tier: OpenTier, tmp_path: Path) -> None:
    """A write never finds the disk full: its blocks are there from the start, for this user alone."""
    open_tier()
    facts = (tmp_path / "0" / SEGMENTS_FILE).stat()

    assert facts.st_size == SIZE_BYTES
    assert facts.st_blocks * 512 >= SIZE_BYTES
    assert facts.st_mode & 0o777 == 0o600


def test_a_new_file_is_on_disk_with_its_name(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks first, then the directory: a record may name a slot of it in the next moment."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    open_tier()

    assert synced == [tmp_path / "0" / SEGMENTS_FILE, tmp_path / "0"]


async def test_synced_bytes_are_there_after_a_restart(open_tier: OpenTier) -> None:
    """Opening keeps what an earlier opening wrote."""
    tier = open_tier()
    data, into = buffer(SLOT.size_bytes, seed=1), buffer(SLOT.size_bytes)
    await tier.write(SLOT, 0, data)
    await tier.sync([0])
    tier.close()
    await open_tier().read(SLOT, 0, into)

    assert into == data


async def test_a_file_may_grow(open_tier: OpenTier) -> None:
    """A larger size keeps what is there and adds room behind it."""
    tier = open_tier()
    data, into = buffer(SLOT.size_bytes, seed=1), buffer(SLOT.size_bytes)
    await tier.write(SLOT, 0, data)
    tier.close()
    grown = open_tier(2 * SIZE_BYTES)
    await grown.read(SLOT, 0, into)
    await grown.write(Slot(0, 2 * SIZE_BYTES - ALIGN_BYTES, ALIGN_BYTES), 0, buffer(ALIGN_BYTES))

    assert into == data
    assert grown.capacities_bytes == (2 * SIZE_BYTES,)


def test_a_file_does_not_shrink(open_tier: OpenTier, tmp_path: Path) -> None:
    """A smaller size is refused, because slots beyond it may be in use; the file stays as it was."""
    open_tier().close()
    with pytest.raises(InvalidConfiguration, match="cannot shrink"):
        open_tier(SIZE_BYTES // 2)

    assert (tmp_path / "0" / SEGMENTS_FILE).stat().st_size == SIZE_BYTES


@pytest.mark.parametrize("size_bytes", [0, -ALIGN_BYTES, ALIGN_BYTES + 512])
def test_an_odd_size_is_refused(open_tier: OpenTier, size_bytes: int) -> None:
    """Sizes are positive multiples of 4 KiB."""
    with pytest.raises(InvalidConfiguration, match="multiple"):
        open_tier(size_bytes)


def test_a_disk_that_is_too_small_is_refused(open_tier: OpenTier, tmp_path: Path) -> None:
    """No room is found out at the start, with what is needed and what is free, and takes no room."""
    needed_bytes = (shutil.disk_usage(tmp_path).total // ALIGN_BYTES + 1) * ALIGN_BYTES
    with pytest.raises(CapacityExceeded, match=SEGMENTS_FILE) as caught:
        open_tier(needed_bytes)

    assert caught.value.needed_bytes == needed_bytes
    assert int(caught.value.free_bytes) < needed_bytes
    assert (tmp_path / "0" / SEGMENTS_FILE).stat().st_size == 0


def test_a_refused_allocation_leaves_the_file_as_it_was(open_tier: OpenTier, tmp_path: Path) -> None:
    """A file that cannot grow keeps its size, so that the next start may try again."""
    open_tier().close()
    with file_size_limit(SIZE_BYTES), pytest.raises(DataDirectoryUnusable, match="File too large"):
        open_tier(2 * SIZE_BYTES)

    assert (tmp_path / "0" / SEGMENTS_FILE).stat().st_size == SIZE_BYTES
    open_tier().close()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A path that cannot be a directory is named."""
    (tmp_path / "file").touch()
    with pytest.raises(DataDirectoryUnusable, match="file"):
        SsdFiles([SsdPath(str(tmp_path / "file"), SIZE_BYTES)])


def test_a_symbolic_link_is_not_followed(open_tier: OpenTier, tmp_path: Path) -> None:
    """No user can have the tier write to a file of their choice."""
    (tmp_path / "0").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "0" / SEGMENTS_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(DataDirectoryUnusable):
        open_tier()

    assert (tmp_path / "victim").read_text() == "mine"


def test_a_second_server_on_the_same_directory_is_refused(open_tier: OpenTier) -> None:
    """Two tiers never share a file."""
    open_tier()
    with pytest.raises(DataDirectoryUnusable, match="another server"):
        open_tier()


def test_a_path_that_cannot_be_opened_gives_up_the_others(open_tier: OpenTier) -> None:
    """A failed start leaves no lock behind."""
    with pytest.raises(InvalidConfiguration):
        open_tier(SIZE_BYTES, 1)

    open_tier(SIZE_BYTES).close()


def test_the_mode_of_access_says_why(open_tier: OpenTier) -> None:
    """An operator can see whether a path goes around the page cache."""
    tier = open_tier(allow_direct=False)

    assert [str(mode) for mode in tier.io_modes] == ["buffered (direct I/O is switched off)"]
    assert tier.io_modes[0].path == tier.paths[0]


def test_a_filesystem_without_direct_io_is_buffered() -> None:
    """Where the kernel refuses direct I/O the path is used through the page cache."""
    with Path("/proc/self/comm").open("rb") as file:
        mode = choose_mode(file.fileno(), file.name, allow_direct=True)

    assert not mode.is_direct
    assert "refuses direct I/O" in mode.reason


async def test_a_read_past_the_end_of_a_cut_file_is_an_error(open_tier: OpenTier, tmp_path: Path) -> None:
    """A read is whole or fails: a file that someone cut short never gives short data."""
    tier = open_tier()
    slot = Slot(0, 0, 8 << 20)
    os.truncate(tmp_path / "0" / SEGMENTS_FILE, 5 << 20)
    with pytest.raises(TierFailure, match="the file ends there"):
        await tier.read(slot, 0, buffer(slot.size_bytes))

    await tier.read(slot, 0, buffer(4 << 20))


@pytest.mark.parametrize("allow_direct", [True, False])
async def test_a_write_that_is_cut_short_is_an_error(open_tier: OpenTier, *, allow_direct: bool) -> None:
    """A write that the kernel ends early is taken up again, and what then fails is told."""
    tier = open_tier(allow_direct=allow_direct)
    with file_size_limit(ALIGN_BYTES * 3), pytest.raises(TierFailure, match="File too large") as caught:
        await tier.write(SLOT, 0, buffer(SLOT.size_bytes, seed=1))
    into = buffer(ALIGN_BYTES * 3)
    await tier.read(SLOT, 0, into)

    assert f"write of {SLOT.size_bytes - 3 * ALIGN_BYTES} B at byte {3 * ALIGN_BYTES}" in str(caught.value)
    assert into == buffer(SLOT.size_bytes, seed=1)[: 3 * ALIGN_BYTES]


async def test_a_sync_that_runs_already_covers_no_later_write(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that asks while a sync runs gets another one, begun after that.

    Those who ask meanwhile share it.
    """
    tier, begun, may_end = open_tier(), threading.Event(), threading.Event()
    written: list[int] = []
    covered: list[int] = []

    def slow_sync(_: int) -> None:
        covered.append(len(written))
        begun.set()
        may_end.wait()

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    first = asyncio.create_task(tier.sync([0]))
    await asyncio.to_thread(begun.wait)
    await tier.write(SLOT, 0, buffer(SLOT.size_bytes, seed=1))
    written.append(1)
    later = [asyncio.create_task(tier.sync([0])) for _ in range(3)]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, *later)

    assert covered == [0, 1]


async def test_a_refused_sync_fails_everyone_who_waits(open_tier: OpenTier) -> None:
    """The kernel reports a lost write once; nobody who syncs at the same time is told otherwise."""
    tier = open_tier()
    with refused_syncs(tier.paths[0]):
        outcomes = await asyncio.gather(*(tier.sync([0]) for _ in range(5)), return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [TierFailure] * 5


async def test_a_path_that_refused_a_sync_is_fenced(open_tier: OpenTier) -> None:
    """After a failed sync no write and no sync is taken, though the device would; reads go on."""
    tier = open_tier()
    data, into = buffer(SLOT.size_bytes, seed=1), buffer(SLOT.size_bytes)
    await tier.write(SLOT, 0, data)
    with refused_syncs(tier.paths[0]), pytest.raises(TierFailure, match="fdatasync"):
        await tier.sync([0])
    with pytest.raises(TierFailure, match="fenced"):
        await tier.sync([0])
    with pytest.raises(TierFailure, match="fenced"):
        await tier.write(SLOT, 0, buffer(SLOT.size_bytes))
    await tier.read(SLOT, 0, into)

    assert into == data
    assert tier.refusals == {0: TierRefusal("fdatasync: Invalid argument", is_final=True)}


async def test_a_fence_is_for_one_path(open_tier: OpenTier) -> None:
    """The other paths go on."""
    tier = open_tier(SIZE_BYTES, SIZE_BYTES)
    with refused_syncs(tier.paths[0]), pytest.raises(TierFailure):
        await tier.sync([0, 1])
    await tier.write(Slot(1, 0, ALIGN_BYTES), 0, buffer(ALIGN_BYTES))
    await tier.sync([1])

    assert list(tier.refusals) == [0]


async def test_a_device_that_is_gone_is_found_by_a_probe_and_taken_again(tmp_path: Path) -> None:
    """Reads fail, all of them: it is lost; the same file under its path again: it is not."""
    place = tmp_path / "ssd"
    tier = SsdFiles([SsdPath(str(place), 4 * ALIGN_BYTES)])
    try:
        await tier.write(Slot(0, 0, ALIGN_BYTES), 0, page := memoryview(mmap.mmap(-1, ALIGN_BYTES)))
        file = tier.files[0]
        kept, file.fd = file.fd, os.open("/dev/null", os.O_WRONLY)
        place.rename(tmp_path / "away")
        await tier.probe()
        lost = tier.refusals
        (tmp_path / "away").rename(place)
        fcntl.flock(kept, fcntl.LOCK_UN)
        file.health.fence("a write: no")
        await tier.probe()
        await tier.read(Slot(0, 0, ALIGN_BYTES), 0, page)
        found = tier.refusals
        os.close(kept)
    finally:
        tier.close()

    assert lost[0].is_lost
    assert found == {0: TierRefusal("a write: no", is_final=True)}


async def test_a_path_whose_directory_was_moved_takes_no_writes_until_it_is_back(tmp_path: Path) -> None:
    """A restart would not find them; what is there is read meanwhile."""
    place = tmp_path / "ssd"
    tier = SsdFiles([SsdPath(str(place), 4 * ALIGN_BYTES)], clock=(clock := FakeClock()))
    page = memoryview(mmap.mmap(-1, ALIGN_BYTES))
    try:
        place.rename(tmp_path / "away")
        await tier.probe()
        with pytest.raises(TierFailure, match="not at its path any more"):
            await tier.write(Slot(0, 0, ALIGN_BYTES), 0, page)
        await tier.read(Slot(0, 0, ALIGN_BYTES), 0, page)
        (tmp_path / "away").rename(place)
        clock.advance(seconds=10)
        await tier.probe()
        await tier.write(Slot(0, 0, ALIGN_BYTES), 0, page)
    finally:
        tier.close()
