"""Frames over a socket pair: how long a peer may take for one."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from xxhash import xxh3_64_intdigest

from ctxcache.wire import framed_socket
from ctxcache.wire.framed_socket import (
    PARTS_LIMIT,
    PIECE_BYTES,
    PIECE_TIMEOUT_S,
    FramedSocket,
    FrameError,
    Part,
    SocketFrameKind,
)


class SlowPeer:
    """A clock by which each receipt of bytes takes `seconds`, and the socket that they come by."""

    def __init__(self, receiving: socket.socket, seconds: float) -> None:
        self._receiving, self._seconds = receiving, seconds
        self.now_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._receiving, name)

    def recv_into(self, *args: int) -> int:
        """As a socket's, later."""
        self.now_s += self._seconds
        return self._receiving.recv_into(*args)  # type: ignore[arg-type]  # passed on as it came


@pytest.fixture
def pair() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    """Two ends."""
    ends = socket.socketpair()
    made = FramedSocket(ends[0]), FramedSocket(ends[1])
    yield made
    for end in made:
        end.close()


def receive_slowly(
    pair: tuple[FramedSocket, FramedSocket],
    monkeypatch: pytest.MonkeyPatch,
    part_sizes: list[int],
    seconds: float,
) -> bool:
    """Send a frame in these parts, and receive it from a peer that takes so long for each."""
    sender, receiver = pair
    data = [bytes(size) for size in part_sizes]
    sender.send(SocketFrameKind.CHUNK, b"", [memoryview(b"".join(data))])
    assert receiver.receive() is not None
    peer = SlowPeer(receiver._socket, seconds)
    monkeypatch.setattr(receiver, "_socket", peer)
    monkeypatch.setattr(framed_socket, "time", SimpleNamespace(monotonic=lambda: peer.now_s))
    parts = [Part(len(part), xxh3_64_intdigest(part)) for part in data]
    return receiver.receive_into([(memoryview(bytearray(sum(part_sizes))), None)], parts)


def test_a_frame_of_many_parts_has_no_more_time_than_its_bytes(
    pair: tuple[FramedSocket, FramedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one frame could keep what it is put into for hours."""
    with pytest.raises(FrameError, match="too slowly"):
        receive_slowly(pair, monkeypatch, [1] * PARTS_LIMIT, PIECE_TIMEOUT_S / 2)


def test_a_slow_peer_has_its_time_for_every_piece(
    pair: tuple[FramedSocket, FramedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that moves fast enough is not cut."""
    assert receive_slowly(pair, monkeypatch, [PIECE_BYTES] * 3, PIECE_TIMEOUT_S * 0.9)
