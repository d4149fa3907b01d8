"""Proxies that fail on purpose: one between a store and the bucket, one between a store and its peers.

    BucketProxy   HTTP: delays, loses requests, loses answers, says 503, strips conditions
    PeerProxy     TCP: lets through, flips a bit of what comes back, slows it, breaks off, or says nothing

Each runs in a thread with an event loop of its own. What a proxy does now is `mode`, set from any thread.
"""

import asyncio
import contextlib
import random
import threading
from typing import Self

CONDITIONS = (b"if-match:", b"if-none-match:")
SHORT_BYTES = 4096
MODES = ("pass", "cut", "lose_requests", "lose_answers", "late", "refuse", "strip", "flip", "slow", "break")
SLOW_S, BREAK_BYTES = 0.2, 6 << 20


class Proxy:
    """A listening socket on a free port of 127.0.0.1."""

    def __init__(self, target_port: int = 0) -> None:
        self.target_port = target_port
        self.mode = "pass"
        self.port = 0
        self.back_bytes = 0
        """So many have come back."""
        self._random = random.Random(1)
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def break_connections(self) -> None:
        """End what is open, so that the next request sees the mode that holds now."""
        for writer in list(self._open):
            self._loop.call_soon_threadsafe(writer.transport.abort)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._talk(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(writer)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class PeerProxy(Proxy):
    """Between stores."""

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "cut":
            await asyncio.sleep(30)
            return
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        ways = [self._pump(reader, back_writer), self._pump(back_reader, writer, is_back=True)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        back_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool = False
    ) -> None:
        while data := await reader.read(1 << 16):
            if self.mode == "cut":
                return
            self.back_bytes += len(data) if is_back else 0
            if self.mode == "slow" and is_back:
                await asyncio.sleep(SLOW_S)
            if self.mode == "break" and self.back_bytes > BREAK_BYTES:
                return
            # Short messages are heads of frames: a connection that ends by them shows no wrong rows.
            is_flipped = self.mode == "flip" and is_back and len(data) > SHORT_BYTES
            writer.write(_flipped(data, self._random) if is_flipped else data)
            await writer.drain()


class BucketProxy(Proxy):
    """Between a store and the bucket."""

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_length_of(head))
            answer = await self._answer(head, body)
            if answer is None:
                return
            writer.write(answer)
            await writer.drain()

    async def _answer(self, head: bytes, body: bytes) -> bytes | None:
        """None: the connection ends without one."""
        mode, is_unlucky = self.mode, self._random.random() < 0.5
        if mode == "cut":
            await asyncio.sleep(30)
            return None
        if mode == "refuse":
            return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
        if mode == "lose_requests" and is_unlucky:
            return None
        if mode == "late" and is_unlucky:
            # It is on its way while its sender has given up.
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
        if mode == "strip":
            lines = head.split(b"\r\n")
            head = b"\r\n".join(line for line in lines if not line.lower().startswith(CONDITIONS))
        answer = await self._ask(head, body)
        return None if mode == "lose_answers" and is_unlucky else answer

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            writer.write(head + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            is_bodiless = head.startswith(b"HEAD") or answer.split(b" ")[1] in (b"204", b"304")
            return answer + (b"" if is_bodiless else await _body_of(answer, reader))
        finally:
            writer.close()


def _flipped(data: bytes, draw: random.Random) -> bytes:
    at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def _length_of(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _body_of(head: bytes, reader: asyncio.StreamReader) -> bytes:
    if b"chunked" not in head.lower():
        return await reader.readexactly(_length_of(head))
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        chunk = await reader.readexactly(int(line, 16) + 2)
        body += line + chunk
        if int(line, 16) == 0:
            return body
