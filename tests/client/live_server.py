"""A real server on an event loop of its own, in this process: its books are at hand."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ctxcache.server.server import Server
from ctxcache.settings.config import Settings

T = TypeVar("T")
PATIENCE_S = 20.0


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
        """What the server's books say."""

        async def answer() -> T:
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
