"""Reading beside the server: rows out of the files of a real server's SSD tier, under its lease."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, SPEC, Connect, FarSide, make_rows
from live_server import LiveServer, serving_small

import ctxcache
from ctxcache.client import Client, SessionRows
from ctxcache.client.access import Hold
from ctxcache.client.rows import FiledRows, LeasedRows
from ctxcache.client.types import Durability
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.work import at_work
from ctxcache.errors import (
    CorruptSegment,
    InvalidArgument,
    LeaseNotFound,
    TierFailure,
    Unavailable,
)
from ctxcache.format.layout import HEADER_FIXED_BYTES, Slot
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.server.server import Server
from ctxcache.v1 import arena_pb2
from lab.routes import Route, route_options

NAME = "sessions/a"
TOKEN_COUNT = 200
PATHS = 2


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A small server with two SSD paths."""
    paths = tuple(tmp_path / f"ssd{i}" for i in range(PATHS))
    with serving_small(tmp_path, ssd_size_bytes=1 << 20, ssd_directories=paths, drain_timeout_s=1) as made:
        yield made


@pytest.fixture
def client(live: LiveServer) -> Iterator[Client]:
    """A client, and session a on SSD only."""
    with ctxcache.connect(live.target, timeout_s=10) as made:
        made.models.register(SPEC)
        add(made, "a", TOKEN_COUNT)
        leave(live)
        yield made


def add(client: Client, session_id: str, token_count: int, *, first: int = 0) -> None:
    """A durable session."""
    client.sessions.create(OWN, id=session_id, layout=LAYOUT)
    client.sessions.open(f"sessions/{session_id}", OWN).append(
        make_rows(token_count, first=first), durability=Durability.DISK
    )


def leave(live: LiveServer) -> None:
    """Have every session on SSD only."""

    async def leave_all(server: Server) -> None:
        for session in list(server.cache.ledger.sessions()):
            await server.cache.flushing.demote(session)

    live.run(at_work(leave_all(live.server)))


def segments_of(live: LiveServer) -> list[Segment]:
    """The segments that the server has, in the order in which they were made."""
    return live.ask(lambda server: sorted(server.cache.ledger.segments(), key=lambda each: each.segment_id))


def slots_of(live: LiveServer) -> list[Slot]:
    """Where the session's segments lie, in order."""
    found = [segment.durable for segment in segments_of(live)]
    assert None not in found
    return [slot for slot in found if slot]


def flip(live: LiveServer, slot: Slot, offset_bytes: int) -> None:
    """Damage a byte of a slot, on the device."""
    path = live.settings.ssd_directories[slot.path_index] / "segments.dat"
    with path.open("r+b", buffering=0) as file:
        file.seek(slot.offset_bytes + offset_bytes)
        byte = file.read(1)[0]
        file.seek(slot.offset_bytes + offset_bytes)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def read_all(rows: SessionRows) -> dict[Stream, np.ndarray]:
    """All of it."""
    return {stream: rows.array(stream) for stream in rows.streams}


def assert_same(found: dict[Stream, np.ndarray], tokens: Sequence[int]) -> None:
    """Fail unless these are the rows of those tokens."""
    expected = make_rows(max(tokens) + 1)
    assert set(found) == set(LAYOUT)
    for stream, rows in found.items():
        assert np.array_equal(rows, expected[stream][list(tokens)]), stream


@pytest.mark.parametrize("access", ["local-socket", "local-grpc"])
def test_rows_of_files_are_those_of_the_arena(live: LiveServer, client: Client, access: Route) -> None:
    """All of it, by lease and past the arena; it stays on SSD, of which a session has one path."""
    with (
        ctxcache.connect(live.target, **route_options(access)) as other,
        other.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows,
    ):
        assert isinstance(rows, FiledRows)
        assert rows.ssd_token_count == TOKEN_COUNT
        assert_same(read_all(rows), range(TOKEN_COUNT))
        assert_same({piece.stream: piece.rows for piece in rows.chunks()}, range(TOKEN_COUNT))
    assert client.sessions.get(NAME).dram_bytes == 0
    assert len({slot.path_index for slot in slots_of(live)}) == 1

    with client.sessions.open(NAME, OWN).read() as rows:
        assert isinstance(rows, LeasedRows)
        assert_same(read_all(rows), range(TOKEN_COUNT))
    assert client.sessions.get(NAME).dram_bytes > 0


@pytest.mark.parametrize("access", ["auto", "local-socket", "local-grpc", "remote", "grpc"])
def test_token_ids_are_had_without_the_rows_beside_them(
    live: LiveServer, client: Client, access: Route
) -> None:
    """A look-up has a second: a session on SSD comes to DRAM for who reads its rows, and takes longer."""
    expected = make_rows(TOKEN_COUNT)[TOKENS].view("<i4").ravel().tolist()
    with ctxcache.connect(live.target, **route_options(access)) as other:
        session, ids = other.sessions.open(NAME, OWN).token_ids()
    assert (session.token_count, ids) == (TOKEN_COUNT, expected)
    assert client.sessions.get(NAME).dram_bytes == 0


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (63, 65), (100, 200), (64, 128), (5, 5)])
def test_a_part_is_read_as_a_part(client: Client, begin: int, end: int) -> None:
    """Whatever it cuts."""
    with client.sessions.open(NAME, OWN).read(begin=begin, end=end, streams=[KV], leave_on_ssd=True) as rows:
        found = rows.array(KV)

        assert np.array_equal(found, make_rows(TOKEN_COUNT)[KV][begin:end])
        with pytest.raises(InvalidArgument):
            rows.array(HIDDEN)


def test_what_was_appended_since_comes_from_the_arena(live: LiveServer, client: Client) -> None:
    """A session of both, cut in its middle, and its fork."""
    client.sessions.open(NAME, OWN).append(make_rows(70, first=TOKEN_COUNT))
    client.sessions.open(NAME).keep_recent(180, sink_token_count=4)
    client.sessions.open(NAME).fork(id="b", token_count=150)
    kept = [*range(4), *range(90, 270)]

    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, FiledRows)
        assert 0 < rows.ssd_token_count < len(kept)
        assert_same(read_all(rows), kept)
    leave(live)
    with client.sessions.open("sessions/b", OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, FiledRows)
        assert rows.ssd_token_count == 150
        assert_same(read_all(rows), kept[:150])


def test_what_is_in_the_arena_is_leased_there(client: Client) -> None:
    """Nothing is on SSD only: an ordinary lease."""
    add(client, "warm", 10)

    with client.sessions.open("sessions/warm", OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, LeasedRows)
        assert_same(read_all(rows), range(10))


_HEADER_PLACES = {
    "magic": 0,
    "segment": 16,
    "generation": 24,
    "begin": 32,
    "uid": 48,
    "tenant": 102,
    "header checksum": 248,
    "layer": HEADER_FIXED_BYTES,
    "chunk checksum": HEADER_FIXED_BYTES + 24 + 16,
}


@pytest.mark.parametrize("access", ["auto", "remote"])
def test_damaged_token_ids_are_a_miss_once(live: LiveServer, client: Client, access: Route) -> None:
    """The store hears of what the reader found: the session ends before it, and can be read again."""
    number = 2
    flip(live, slots_of(live)[number], segments_of(live)[number].layout.rows(TOKENS, 0, 8).start)

    with ctxcache.connect(live.target, **route_options(access)) as other:
        with suppress(CorruptSegment):
            other.sessions.open(NAME, OWN).token_ids()
        session, ids = other.sessions.open(NAME, OWN).token_ids()
    assert session.token_count == len(ids) == client.sessions.get(NAME).token_count == 64 * number


@pytest.mark.parametrize("place", [*_HEADER_PLACES, "first row", "last row"])
def test_a_damaged_byte_is_a_miss(live: LiveServer, client: Client, place: str) -> None:
    """Wherever it is, with the reason that the server gives: nothing is returned."""
    number = 3 if place == "last row" else 1
    layout = segments_of(live)[number].layout
    chunk = layout.rows(HIDDEN, 0, 8)
    offset = {**_HEADER_PLACES, "first row": chunk.start, "last row": chunk.stop - 1}[place]
    flip(live, slots_of(live)[number], offset)

    with (
        client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows,
        pytest.raises(CorruptSegment) as direct,
    ):
        rows.array(HIDDEN)
    with pytest.raises(CorruptSegment) as loaded:
        client.sessions.open(NAME, OWN).read()

    assert int(direct.value.facts["segment_id"]) == int(loaded.value.facts["segment_id"])
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert rows.token_count == 64 * number


def test_what_is_leased_keeps_its_place_when_its_session_goes(live: LiveServer, client: Client) -> None:
    """Deleted under the reader: all can be read, and the slots are free only when it has gone."""
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        client.sessions.open(NAME).delete()
        used = live.ask(lambda server: server.cache.ledger.below.used_bytes_by_path)
        add(client, "b", TOKEN_COUNT, first=1000)

        assert sum(used) > 0
        assert_same(read_all(rows), range(TOKEN_COUNT))
    client.sessions.get("sessions/b")
    live.until(lambda server: server.cache.leases.lease_count == 0)
    client.sessions.open("sessions/b").delete()
    assert sum(live.ask(lambda server: server.cache.ledger.below.used_bytes_by_path)) == 0


def _reused(live: LiveServer, client: Client) -> None:
    """End every lease behind its reader's back, and give the slots to another session."""
    before = set(slots_of(live))

    def release_all(server: Server) -> None:
        for lease in list(server.cache.leases.leases()):
            server.cache.leases.release(lease.lease_id)

    live.ask(release_all)
    client.sessions.open(NAME).delete()
    # A session's segments lie on one path: one of so many as there are paths comes to lie there.
    for number in range(PATHS):
        add(client, f"b{number}", TOKEN_COUNT, first=1000)
    leave(live)
    assert set(slots_of(live)) >= before


def _never_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(hold: Hold) -> None:
        del hold

    for name in ("check", "check_known"):
        monkeypatch.setattr(Hold, name, nothing)


def test_a_stale_lease_never_shows_others_rows(
    live: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are another session's.

    The header says so, even where nobody notices that the lease has ended.
    """
    _never_checked(monkeypatch)
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        _reused(live, client)

        for stream in LAYOUT:
            with pytest.raises(CorruptSegment, match="header is not the one recorded"):
                rows.array(stream)


def test_rows_that_change_behind_their_header_are_seen(
    live: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots become another's between header and rows."""
    _never_checked(monkeypatch)
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        rows.array(TOKENS)
        _reused(live, client)

        for stream in LAYOUT:
            with pytest.raises(CorruptSegment, match="does not match its checksum"):
                rows.array(stream)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lease_that_ended_is_told_from_damage(
    live: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The session is not damaged: only the lease has ended, by its deadline as it is known here."""
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, FiledRows)
        if when == "meanwhile":
            rows.array(TOKENS)
        _reused(live, client)
        rows.hold.deadline_ns = 0

        with pytest.raises(LeaseNotFound):
            rows.array(KV)


def test_a_server_that_ended_ends_the_read(live: LiveServer, client: Client) -> None:
    """The rows that were read are not returned: who knows whose it is by now."""
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        live.stop()
        with pytest.raises(LeaseNotFound):
            rows.array(KV)
    live.start()


def _short(*_: object) -> int:
    return 0


def _broken(*_: object) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("preadv", [_short, _broken])
def test_a_device_that_fails_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch, preadv: Callable[..., int]
) -> None:
    """An error, or nothing more to read: a reason, and rows of the store by the usual way."""
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(TierFailure):
            rows.array(KV)
    monkeypatch.undo()
    with client.sessions.open(NAME, OWN).read() as rows:
        assert_same(read_all(rows), range(TOKEN_COUNT))


def test_reads_that_come_in_parts_are_put_together(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may do less than it was asked to."""
    whole = os.preadv

    def part(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:4096]], offset)

    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        monkeypatch.setattr(os, "preadv", part)
        assert_same(read_all(rows), range(TOKEN_COUNT))


def test_files_that_cannot_be_opened_leave_the_usual_way(live: LiveServer, client: Client) -> None:
    """Another mount, another user: the server is not even asked to leave anything there."""
    path = live.settings.ssd_directories[1] / "segments.dat"
    path.rename(path.with_name("elsewhere"))

    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, LeasedRows)
        assert_same(read_all(rows), range(TOKEN_COUNT))
    files = client.ssd_files()
    assert files is not None
    assert not files.is_open
    assert files.problem == f"{path}: No such file or directory"


@pytest.mark.parametrize("content", ["symlink", "directory", "short"])
def test_what_is_no_such_file_is_not_read(live: LiveServer, client: Client, content: str) -> None:
    """A link, a directory, a file that is too short."""
    path = live.settings.ssd_directories[0] / "segments.dat"
    kept = path.rename(path.with_name("kept"))
    if content == "symlink":
        path.symlink_to(kept)
    elif content == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"short")

    files = client.ssd_files()

    assert files is not None
    assert not files.is_open


def test_a_brief_answer_cannot_say_where_in_a_file(client: Client) -> None:
    """Refused, not half an answer."""
    request = arena_pb2.AcquireLease(
        session=NAME, model_fingerprint=SPEC.fingerprint(), is_brief=True, leave_on_ssd=True
    )
    attachment = client.routes.attach()
    assert attachment is not None
    with pytest.raises(InvalidArgument):
        attachment.stream.carry_out(arena_pb2.Operation(acquire_lease=request))


def test_more_than_the_arena_holds_is_leased_on_ssd(live: LiveServer, client: Client) -> None:
    """It takes no room there."""
    for i in range(20):
        client.sessions.open(NAME, OWN).append(
            make_rows(64, first=TOKEN_COUNT + 64 * i), durability=Durability.DISK
        )
        leave(live)
    count = TOKEN_COUNT + 64 * 20

    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert_same(read_all(rows), range(count))
        assert client.sessions.get(NAME).dram_bytes == 0


@pytest.mark.parametrize("names_files", [True, False])
def test_a_server_that_knows_nothing_of_it_is_read_as_ever(
    far_side: FarSide, connect: Connect, tmp_path: Path, *, names_files: bool
) -> None:
    """An old server; and one that names its files and brings everything into the arena all the same."""
    far_side.add(NAME, 10)
    if names_files:
        (tmp_path / "file").write_bytes(bytes(4096))
        far_side.facts.ssd_files.add(path=str(tmp_path / "file"), size_bytes=4096)
        if far_side.control is not None:
            far_side.control.welcomes.CopyFrom(far_side.facts)
    client = connect()

    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        assert isinstance(rows, LeasedRows)
        assert_same(read_all(rows), range(10))
    files = client.ssd_files()
    assert files is not None
    assert files.is_open == names_files


def test_elsewhere_there_are_no_files(live: LiveServer, client: Client) -> None:
    """By stream, as ever."""
    with ctxcache.connect(live.target, access="remote") as remote:
        assert remote.ssd_files() is None
        with remote.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
            assert_same(read_all(rows), range(TOKEN_COUNT))
    with (
        pytest.raises(Unavailable),
        ctxcache.connect(f"unix:{live.settings.unix_socket}.not", timeout_s=0.5) as nobody,
    ):
        nobody.ssd_files()


READS_FOR_EVER = """
import sys, threading
from ctxcache.client.ssd_files import SsdReader
assert not SsdReader([(sys.argv[1], 4096)]).spread_within([threading.Event().wait], 0.01)
"""


def test_the_end_of_a_process_waits_for_no_device(tmp_path: Path) -> None:
    """A read that is never answered has a thread, which an engine that ends leaves behind."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    subprocess.run([sys.executable, "-c", READS_FOR_EVER, str(path)], check=True, timeout=60)
