"""A real server on an event loop of its own, in this process: its books are at hand."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import ctxcache
from ctxcache.client import Client
from ctxcache.client.routes import Access, Transport
from ctxcache.core.ledger.work import Work
from ctxcache.errors import CacheError
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings

T = TypeVar("T")
PATIENCE_S = 20.0


def settings_in(directory: Path, **others: Any) -> Settings:
    """Settings of a small server that lies in `directory` and listens on a Unix socket alone."""
    return Settings(
        data_directory=directory / "data",
        listen="",
        unix_socket=str(directory / "socket"),
        arena_huge_pages="off",
        **others,
    )


class LiveServer:
    """Listens on a Unix socket; may be stopped and started again."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.target = f"unix:{settings.unix_socket}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    def start(self) -> None:
        """Start it on what the last one left."""
        self.server = self.run(Server.start(self.settings))

    def stop(self) -> None:
        """Stop it in order."""
        self.run(self.server.stop())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the server's loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE_S)

    def ask(self, question: Callable[[Server], T]) -> T:
        """The answer of the server's books to a question."""

        async def answer() -> T:
            with Work():
                return question(self.server)

        return self.run(answer())

    def until(self, condition: Callable[[Server], Any]) -> None:
        """Wait for the server to get there."""

        async def wait() -> None:
            while not condition(self.server):  # noqa: ASYNC110  # the books call nobody
                await asyncio.sleep(0)

        self.run(wait())

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[LiveServer]:
    """A server that is stopped at the end, unless it cannot be any more, and its loop with it."""
    made = LiveServer(settings)
    try:
        yield made
    finally:
        with contextlib.suppress(CacheError):
            made.stop()
        made.close()


def serving_small(directory: Path, **others: Any) -> contextlib.AbstractContextManager[LiveServer]:
    """As `serving`: one MiB in memory, four on SSD, no bulk channel, but for what `others` say."""
    small = {"bulk_listen": "", "arena_size_bytes": 1 << 20, "ssd_size_bytes": 4 << 20, "drain_timeout_s": 5}
    return serving(settings_in(directory, **small | others))


WAYS = ("local socket", "local grpc", "remote grpc")
"""The ways that a call may take, for `connected`."""


@contextlib.contextmanager
def connected(live: LiveServer, way: str) -> Iterator[Client]:
    """A client by one of WAYS."""
    access, transport = cast("tuple[Access, Transport]", way.split())
    with ctxcache.connect(live.target, timeout_s=10, access=access, transport=transport) as client:
        yield client
