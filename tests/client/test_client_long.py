"""Segments of more than 64 tokens, by every way in and every way out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC, make_rows
from live_server import LiveServer, serving, settings_in

import ctxcache
from ctxcache.client import Client
from ctxcache.client.rows import FiledRows
from ctxcache.client.types import Durability
from ctxcache.errors import InvalidArgument
from ctxcache.v1 import session_pb2
from lab.routes import Route, route_options

NAME = "sessions/a"
WAYS: tuple[Route, ...] = ("local-socket", "local-grpc", "grpc", "bulk")
FIRST, SECOND = 3000, 1100
RANGES = ((0, FIRST + SECOND), (1000, 3500), (2047, 2049), (4099, 4100))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose arena has room for segments of 2,048 tokens."""
    directory: Path = tmp_path_factory.mktemp("long")
    with serving(
        settings_in(directory, arena_size_bytes=64 << 20, ssd_size_bytes=64 << 20, drain_timeout_s=1)
    ) as made:
        yield made


@pytest.fixture
def connect(live: LiveServer) -> Iterator[Callable[[Route], Client]]:
    """Make clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda access: clients.enter_context(
            ctxcache.connect(live.target, timeout_s=10, **route_options(access))
        )


@pytest.mark.parametrize("writer", WAYS)
def test_what_came_in_one_way_goes_out_by_all(
    live: LiveServer, connect: Callable[[Route], Client], writer: Route
) -> None:
    """Verified, from DRAM and from SSD, whole and in parts that begin and end inside a segment."""
    rows = make_rows(FIRST + SECOND)
    client = connect(writer)
    client.models.register(SPEC)
    client.sessions.create(OWN, id="a", layout=LAYOUT)
    session = client.sessions.open(NAME, OWN)
    session.append({stream: each[:FIRST] for stream, each in rows.items()})
    with session.writer(SECOND, is_all_coming=True) as room:
        for stream, each in rows.items():
            room.write(stream, 0, each[FIRST : FIRST + 600])
        room.commit(FIRST + 600, keep_open=True)
        for stream, each in rows.items():
            room.write(stream, 600, each[FIRST + 600 :])
        room.commit(durability=Durability.DISK)
    lengths = live.ask(
        lambda server: [
            one.layout.segment_tokens for one in server.cache.ledger.names.sessions["default", "a"].segments
        ]
    )

    assert max(lengths) >= 2048
    assert len(lengths) < 14
    for is_in_dram in (True, False):
        for reader in WAYS:
            if not is_in_dram:
                client.admin.demote_session(NAME)
            handle = connect(reader).sessions.open(NAME, OWN)
            for begin, end in RANGES:
                with handle.read(begin=begin, end=end) as found:
                    for stream in found.streams:
                        np.testing.assert_array_equal(found.array(stream), rows[stream][begin:end])
    client.admin.demote_session(NAME)
    with (
        connect("local-socket").sessions.open(NAME, OWN).read(begin=100, end=4000, leave_on_ssd=True) as found
    ):
        assert isinstance(found, FiledRows)
        for stream in found.streams:
            np.testing.assert_array_equal(found.array(stream), rows[stream][100:4000])
    assert [bad for step in client.admin.verify() for bad in step.bad] == []
    client.sessions.open(NAME).delete()


@pytest.mark.parametrize("count", [-1, (1 << 20) + 1])
def test_what_is_announced_is_bounded(connect: Callable[[Route], Client], count: int) -> None:
    """The refusal names the field, and the session is as it was."""
    client = connect("grpc")
    client.models.register(SPEC)
    client.sessions.create(OWN, id="b", layout=LAYOUT)
    handle = client.sessions.open("sessions/b", OWN)
    header = session_pb2.AppendHeader(
        name="sessions/b", model_fingerprint=OWN.fingerprint, write_offset=0, coming_token_count=count
    )
    with pytest.raises(InvalidArgument) as refused:
        client.routes.transport.append(header, make_rows(1), Durability.MEMORY)
    assert refused.value.facts["field"] == "header.coming_token_count"
    assert handle.refresh().token_count == 0
    client.sessions.open("sessions/b").delete()
