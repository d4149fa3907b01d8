"""A real server in this process, on a loop of its own, with a clock that is moved by hand.

Background steps are asked for: `rest` does all of it and waits until nothing moves.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ctxcache.cache import Cache
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.server.server import Server
from ctxcache.server.upkeep import Upkeep
from ctxcache.settings.config import Settings
from tests.fakes import NANOSECONDS, FakeClock
from tests.integrity import check_integrity

T = TypeVar("T")
PATIENCE_S = 60.0
BUFFER_SHARE = 1 / 16
"""The part of memory that is kept free, in the store and in the simulator."""


def store_settings(
    directory: Path, policy: str, *, dram_bytes: int, ssd_bytes: int, ssd_directories: tuple[Path, ...] = ()
) -> Settings:
    """A server of that size, as a simulator knows it: no bound on what turns keep.

    `ssd_bytes`: of each SSD directory.
    """
    return Settings(
        data_directory=directory,
        listen="127.0.0.1:0",
        arena_huge_pages="off",
        arena_size_bytes=ALIGN_BYTES + dram_bytes,
        ssd_size_bytes=ssd_bytes,
        ssd_directories=ssd_directories,
        dram_low_watermark=BUFFER_SHARE,
        dram_high_watermark=BUFFER_SHARE,
        placement_policy=policy,  # type: ignore[arg-type]  # checked when it is run
        lease_share=1,
        reservation_share=1,
        client_share=1,
        default_ttl_s=86_400,
    )


class RunningServer:
    """Use it as a context manager; leaving it stops the server and fails unless its books add up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Clients compare the server's times with this machine's.
        self.clock = FakeClock(time.time_ns())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server")

    @property
    def target(self) -> str:
        """Its address."""
        return self._server.addresses[0]

    @property
    def cache(self) -> Cache:
        """The cache that it serves; to be touched within `do` only."""
        return self._server.cache

    def do(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do something on the server's loop."""

        async def done() -> T:
            return await step()

        work: Coroutine[Any, Any, T] = done()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def set_time(self, now_s: float) -> None:
        """Let it be `now_s` seconds after the start. Never back."""
        self.clock.advance(ns=max(round(now_s * NANOSECONDS) - self.clock.monotonic_ns(), 0))
        self.do(self._upkeep.end_what_is_over)

    def written(self) -> None:
        """Nothing is done about it."""

    def rest(self) -> None:
        """Let it do what is due, but read ahead, and wait until it is done."""
        self.do(self._rest)

    def prefetch(self) -> None:
        """Let it read ahead."""
        self.do(self._prefetch)

    def await_no_queue(self) -> None:
        """Wait until it knows that no scheduler is connected."""
        self.do(self._await_no_queue)

    async def _await_no_queue(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.cache.queues.engine_count:
                await self._upkeep.end_what_is_over()
                await asyncio.sleep(0)

    async def _rest(self) -> None:
        await self._upkeep.end_what_is_over()
        await self._upkeep.write_behind()
        await self._upkeep.make_room()
        await self.cache.drain()

    async def _prefetch(self) -> None:
        await self._upkeep.prefetch()
        await self.cache.drain()

    async def _start(self) -> None:
        self._server = await Server.start(self._settings, self.clock)
        # Its own loops would do the same at any moment.
        if self._server._upkeep:
            self._server._upkeep.cancel()
        self._upkeep = Upkeep(self.cache)

    async def _stop(self) -> None:
        await self._server.stop()
        problems = check_integrity(self.cache)
        if problems:
            raise AssertionError("; ".join(problems))

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.do(self._start)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.do(self._stop)
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
