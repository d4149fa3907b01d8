"""Callers that nobody knows and that finish no message.

Their use of the server's memory, and that it comes back.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_http2 import RawClient, message
from server_process import ServerProcess

from ctxcache.runtime.memory import KEPT_BYTES
from ctxcache.server.listening import MESSAGE_LIMIT_BYTES, WINDOW_BYTES
from ctxcache.service.arrivals import ARRIVALS_LIMIT

APPEND = "/ctxcache.v1.SessionService/AppendSession"
CONNECTIONS = 200
UNSENT_BYTES = 100
TAKEN_BYTES = CONNECTIONS * WINDOW_BYTES + ARRIVALS_LIMIT * MESSAGE_LIMIT_BYTES
"""The first window of every stream, and the messages that may arrive at a time."""
# As an operator runs it, but for how often it looks whether memory can be given back.
PROGRAM = (
    sys.executable,
    "-c",
    (
        "from ctxcache.runtime import memory; memory.LOOK_INTERVAL_S = 0.5; from ctxcache.cli.main import"
        " main; main()"
    ),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One of its own: what others have made it hold would count."""
    with ServerProcess(tmp_path / "data", program=PROGRAM) as server:
        yield server


def own_bytes(server: ServerProcess) -> int:
    """Memory that is the process's alone: neither the arena nor what files have."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


async def say_all_but_the_end(raw: RawClient) -> None:
    """Send a message as fast as the server takes it, and never its last bytes."""
    raw.begin(1, APPEND)
    raw.say(1, message(b"", size_bytes=MESSAGE_LIMIT_BYTES))
    left_bytes = MESSAGE_LIMIT_BYTES - UNSENT_BYTES
    while left_bytes and 1 not in raw.ended:
        if room := min(raw.room(1), left_bytes):
            raw.say(1, bytes(room))
            left_bytes -= room
        else:
            await raw.take()


async def test_messages_that_nobody_finishes_take_what_settings_say(server: ServerProcess) -> None:
    """200 connections without credentials.

    When they are gone the memory is, too, but for what malloc keeps.
    """
    before_bytes = most_bytes = own_bytes(server)
    crowd = [await RawClient.open(server.target) for _ in range(CONNECTIONS)]
    saying = [asyncio.create_task(say_all_but_the_end(raw)) for raw in crowd]
    while not all(task.done() for task in saying):
        await asyncio.wait(saying, timeout=0.05)
        most_bytes = max(most_bytes, own_bytes(server))
    await asyncio.gather(*saying)
    for raw in crowd:
        raw.writer.close()

    # Less would mean that nothing was sent.
    assert CONNECTIONS * 65535 < most_bytes - before_bytes < TAKEN_BYTES + KEPT_BYTES
    while own_bytes(server) - before_bytes > KEPT_BYTES:  # noqa: ASYNC110  # it ends with the test's time
        await asyncio.sleep(0.1)
