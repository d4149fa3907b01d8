"""A recording of a running store, made during a test, and a replay that moves the other store's clock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ctxcache
from ctxcache.recordings import created, write
from ctxcache.simulate.recorded import Called
from lab.replay.replay import Due
from tests.live.running import RunningServer

PATIENCE_S = 60.0
PARTS_UNTIL_ALL = 2
"""The part that is on its way when it is over may have begun before."""


@contextmanager
def recorded(target: str, path: Path) -> Iterator[None]:
    """Calls to the store within the block are in the file after it."""
    has_begun, is_over = threading.Event(), threading.Event()

    def record() -> None:
        parts_left = PARTS_UNTIL_ALL
        with ctxcache.connect(target, access="remote") as client, created(path) as lines:
            for _ in write(client.admin.record(), lines):
                has_begun.set()
                parts_left -= is_over.is_set()
                if not parts_left:
                    break

    recording = threading.Thread(target=record, name="recording")
    recording.start()
    try:
        if not has_begun.wait(PATIENCE_S):
            raise AssertionError("no recording begins")
        yield
    finally:
        is_over.set()
        recording.join(PATIENCE_S)


class Stepped(Due):
    """Moves the store's clock, and lets it come to rest after every turn, as the live load does."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(0)
        self._server, self._now_s, self._has_written = server, 0.0, False

    def wait(self, call: Called) -> None:
        """See Due."""
        if self._has_written and call.kind != "finish":
            self._server.rest()
            self._has_written = False
        if call.at_s > self._now_s:
            self._server.set_time(call.at_s)
            self._now_s = call.at_s
        self._has_written = self._has_written or call.kind == "append"
