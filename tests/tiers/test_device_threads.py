"""Threads over one queue: an operation is queued, under way or over, also while a thread takes it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from fakes import FakeClock
from hung_device import HungDevice
from metadata_contract import make_session

from ctxcache.errors import TierFailure
from ctxcache.storage.device_threads import Threads
from ctxcache.storage.metadata import rocksdb
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles

HANG_AFTER_S = 0.05
PATIENCE_S = 25.0


class HeldClock(FakeClock):
    """A thread of that name, which has heard of an operation, is held where it looks at the time."""

    def __init__(self, thread_name: str) -> None:
        super().__init__()
        self.came, self.go = threading.Event(), threading.Event()
        self._thread_name = thread_name

    def monotonic_ns(self) -> int:
        """See Clock."""
        if threading.current_thread().name == self._thread_name:
            self.came.set()
            self.go.wait()
        return super().monotonic_ns()


@pytest.fixture
def clock() -> Iterator[HeldClock]:
    """Lets its thread go at the end."""
    clock = HeldClock("device-0")
    yield clock
    clock.go.set()


def failure() -> TierFailure:
    """The answer to callers that are given up."""
    return TierFailure(path="device", problem="it hangs")


async def test_a_thread_that_is_about_to_begin_hides_no_operation(clock: HeldClock) -> None:
    """Its caller is answered by `give_up`, and the device hears nothing of it."""
    threads, done = Threads(1, "device", clock), []
    call: Future[None] = threads.submit(lambda: done.append("call"))
    clock.came.wait()
    moved = asyncio.create_task(threads.transfer(lambda *_: done.append("piece"), [(0, 1), (1, 2)]))
    await asyncio.sleep(0)
    assert threads.is_busy
    threads.give_up(failure)
    assert not threads.is_busy
    clock.go.set()

    assert isinstance(call.exception(PATIENCE_S), TierFailure)
    with pytest.raises(TierFailure):
        await moved
    # They go on: the calls that are left of those given up are no operations.
    threads.submit(lambda: done.append("after")).result(PATIENCE_S)
    threads.close()
    assert done == ["after"]


async def test_a_commit_is_watched_though_its_thread_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch comes in that moment, and comes again: the commit gets its answer when the log hangs then."""
    clock, is_hung, answers = HeldClock("metadata-log-0"), threading.Event(), threading.Event()

    def hang() -> None:
        is_hung.set()
        answers.wait()

    monkeypatch.setattr(rocksdb, "SystemClock", lambda: clock)
    store = RocksDbMetadata(tmp_path / "metadata", hang_after_s=HANG_AFTER_S)
    store._write_log = hang  # type: ignore[method-assign]
    try:
        commit = asyncio.create_task(store.commit(Changes(sessions=[make_session(0)]), is_durable=False))
        await asyncio.to_thread(clock.came.wait)
        assert store._watch is not None
        store._watch.cancel()
        store._look(asyncio.get_running_loop())
        clock.go.set()
        assert await asyncio.to_thread(is_hung.wait, PATIENCE_S)
        clock.advance(seconds=HANG_AFTER_S)

        with pytest.raises(TierFailure, match="has not answered for"):
            await asyncio.wait_for(commit, PATIENCE_S)
    finally:
        answers.set()
        store.close()


async def test_a_device_that_begins_to_hang_at_the_end_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stays open, as that of one that was given up."""
    tier = SsdFiles([SsdPath(str(tmp_path / "0"), 16 << 20)], hang_after_s=HANG_AFTER_S, clock=FakeClock())
    device = HungDevice(tier.paths[0], ("preadv",))
    with device.hung(monkeypatch):
        probe = tier.files[0].start_probe()
        device.came.wait()
        closing = threading.Thread(target=tier.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, PATIENCE_S)
        is_closed, fd = not closing.is_alive(), tier.files[0].fd
        device.answer()
        assert probe is not None
        await asyncio.wrap_future(probe)

    assert is_closed
    assert fd >= 0
