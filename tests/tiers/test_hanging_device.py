"""A device that returns nothing: its callers are answered, its buffers are kept, others go on."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from hung_device import HungDevice
from tier_contract import buffer

from ctxcache.errors import TierFailure
from ctxcache.format.layout import Slot
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles

SIZE_BYTES = 16 << 20
HANG_AFTER_S = 30
SLOT, OTHER = Slot(0, 0, 1 << 20), Slot(1, 0, 1 << 20)
OVERDUE = "an operation has not come back for 30 s"


@pytest.fixture
def clock() -> FakeClock:
    """Moved by the test."""
    return FakeClock()


@pytest.fixture
def tier(tmp_path: Path, clock: FakeClock) -> Iterator[SsdFiles]:
    """Two devices."""
    places = [SsdPath(str(tmp_path / str(i)), SIZE_BYTES) for i in range(2)]
    tier = SsdFiles(places, threads_per_path=2, hang_after_s=HANG_AFTER_S, clock=clock)
    yield tier
    tier.close()


def _of(tier: SsdFiles, operation: str, into: memoryview) -> Coroutine[Any, Any, None]:
    calls: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "preadv": lambda: tier.read(SLOT, 0, into),
        "pwritev": lambda: tier.write(SLOT, 0, into),
        "fdatasync": lambda: tier.sync([0]),
    }
    return calls[operation]()


@pytest.mark.parametrize("operation", ["preadv", "pwritev", "fdatasync"])
async def test_an_operation_that_is_too_old_loses_its_device(
    tier: SsdFiles, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Its caller gets an error, the other device goes on, and it is back when it has returned everything."""
    data, into = buffer(SLOT.size_bytes, seed=1), buffer(SLOT.size_bytes)
    device = HungDevice(tier.paths[0], (operation,))
    with device.hung(monkeypatch):
        caller = asyncio.create_task(_of(tier, operation, data))
        await asyncio.to_thread(device.came.wait)
        clock.advance(seconds=HANG_AFTER_S - 1)
        tier.give_up_overdue()
        assert not tier.refusals
        clock.advance(seconds=1)
        tier.give_up_overdue()
        with pytest.raises(TierFailure, match=OVERDUE) as caught:
            await caller
        assert tier.refusals[0].is_lost
        await tier.write(OTHER, 0, data)
        await tier.sync([1])
        await tier.read(OTHER, 0, into)
        assert into == data
        came_count = device.waiting_count
        for again in ("preadv", "pwritev", "fdatasync"):
            with pytest.raises(TierFailure, match=OVERDUE):
                await _of(tier, again, into)
        await tier.probe()
        assert (device.waiting_count, tier.refusals[0].is_lost) == (came_count, True)
        returned = caught.value.returned
        assert (returned is None) == (operation == "fdatasync")
        assert returned is None or not returned.done()
        device.answer()
        if returned is not None:
            await returned
        while tier.refusals:
            await tier.probe()
    await tier.write(SLOT, 0, data)
    await tier.sync([0])
    await tier.read(SLOT, 0, into)

    assert into == data


async def test_those_in_line_behind_it_are_answered_too(
    tier: SsdFiles, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More callers than threads.

    None waits for a thread that does not come back, and their buffers are free.
    """
    device = HungDevice(tier.paths[0], ("preadv",))
    with device.hung(monkeypatch):
        callers = [asyncio.create_task(tier.read(SLOT, 0, buffer(SLOT.size_bytes))) for _ in range(6)]
        await asyncio.to_thread(device.came.wait)
        clock.advance(seconds=HANG_AFTER_S)
        tier.give_up_overdue()
        failures = await asyncio.gather(*callers, return_exceptions=True)
        await asyncio.sleep(0)
        kept = [f for f in failures if isinstance(f, TierFailure) and f.returned and not f.returned.done()]

        assert [type(failure) for failure in failures] == [TierFailure] * 6
        assert len(kept) <= 2
        assert device.waiting_count <= 2


async def test_a_device_that_nobody_uses_is_found_by_its_probe(
    tier: SsdFiles, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the devices does not wait for it, and finds what the other one says."""
    device = HungDevice(tier.paths[0], ("preadv",))
    with device.hung(monkeypatch):
        await tier.probe()
        clock.advance(seconds=HANG_AFTER_S)
        await tier.probe()
        tier.give_up_overdue()
        await tier.probe()

        assert [tier.refusals[i].is_lost for i in tier.refusals] == [True]
        assert device.waiting_count == 1


async def test_closing_does_not_wait_for_it(
    tier: SsdFiles, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays open: the late operation must not find another file under the number."""
    device = HungDevice(tier.paths[0], ("pwritev",))
    with device.hung(monkeypatch):
        caller = asyncio.create_task(tier.write(SLOT, 0, buffer(SLOT.size_bytes)))
        await asyncio.to_thread(device.came.wait)
        clock.advance(seconds=HANG_AFTER_S)
        tier.give_up_overdue()
        with pytest.raises(TierFailure) as caught:
            await caller
        tier.close()
        fds = [file.fd for file in tier.files]
        device.answer()
        assert caught.value.returned
        await caught.value.returned

    assert fds[0] >= 0
    assert fds[1] == -1
