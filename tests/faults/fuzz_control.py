"""Fuzz of the control socket: frames and messages that no honest client sends, behind an honest greeting."""

import random
import socket
import struct
from collections.abc import Callable

from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.v1.arena_pb2 import AccessRequest, AccessResponse, ControlHello
from ctxcache.wire.frames import PROTOCOL_VERSION, Frame, FrameKind, FrameReader, encode_frame
from tests.faults.messages import MessageMaker, mutate

TIMEOUT_S = 30.0
FRAMES_PER_CONNECTION = 25
ANSWER_LIMIT_BYTES = 64 << 20
Find = Callable[[str], None]


def fuzz_control(
    path: str,
    draw: random.Random,
    maker: MessageMaker,
    count: int,
    judge: Callable[[AccessResponse], None],
    find: Find,
) -> int:
    """Open so many connections, and say strange things on each; returns how many frames were sent."""
    return sum(_converse(path, draw, maker, judge, find) for _ in range(count))


def _converse(
    path: str, draw: random.Random, maker: MessageMaker, judge: Callable[[AccessResponse], None], find: Find
) -> int:
    frames = [_frame(draw, maker) for _ in range(draw.randrange(FRAMES_PER_CONNECTION))]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        if draw.random() < 0.9:
            hello = ControlHello(protocol_version=PROTOCOL_VERSION).SerializeToString()
            frames.insert(0, encode_frame(FrameKind.HELLO, hello))
        if draw.random() < 0.7:
            frames.append(encode_frame(FrameKind.END, b""))
        try:
            for frame in frames:
                connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has had enough of us, and says why: read below
        try:
            _listen(connection, judge, find)
        except TimeoutError:
            find("the control socket neither answers nor ends")
        except OSError:
            pass
    return len(frames)


def _frame(draw: random.Random, maker: MessageMaker) -> bytes:
    kind = draw.random()
    if kind < 0.75:
        return encode_frame(FrameKind.ACCESS, maker.encoded(AccessRequest.DESCRIPTOR))
    if kind < 0.85:
        return mutate(draw, encode_frame(FrameKind.ACCESS, maker.encoded(AccessRequest.DESCRIPTOR)))
    if kind < 0.95:
        length = draw.choice((0, 1, 5, 4 << 20, (4 << 20) + 1, 2**31, 2**32 - 1))
        return struct.pack("<IB", length, draw.randrange(256)) + draw.randbytes(draw.randrange(40))
    return draw.randbytes(draw.randrange(100))


def _listen(connection: socket.socket, judge: Callable[[AccessResponse], None], find: Find) -> None:
    reader = FrameReader(ANSWER_LIMIT_BYTES)
    while data := connection.recv(1 << 16):
        reader.feed(data)
        while (frame := reader.next()) is not None:
            _judge(frame, judge, find)


def _judge(frame: Frame, judge: Callable[[AccessResponse], None], find: Find) -> None:
    try:
        if frame.kind == FrameKind.ACCESS:
            judge(AccessResponse.FromString(frame.message))
        elif frame.kind == FrameKind.END and frame.message:
            status = status_pb2.Status.FromString(frame.message)
            # UNKNOWN, INTERNAL, UNAVAILABLE, DATA_LOSS
            if status.code in (2, 13, 14, 15) or not status.details:
                find(f"the control socket ends with {status}")
        elif frame.kind not in (FrameKind.HELLO, FrameKind.END):
            find(f"the control socket sends a frame of kind {frame.kind}")
    except DecodeError:
        find("the control socket sends a message that does not parse")
