"""Bytes that change in the arena.

Every way to the rows serves SSD's, or ends the session before them, and says so.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, SPEC, make_rows
from integrity import check_integrity
from live_server import LiveServer, serving, settings_in
from xxhash import xxh3_64_intdigest

import ctxcache
from ctxcache.archive.contents import ArchiveOutcome, ArchiveStatus
from ctxcache.archive.frames import FILE_ID_BYTES, ROWS, ArchiveFrameReader, FrameWriter, source
from ctxcache.archive.transfer import Exporter
from ctxcache.client import Client
from ctxcache.client.types import Durability, StorageTier
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, InvalidArgument, LeaseNotFound
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.server.server import Server
from ctxcache.v1 import admin_pb2, arena_pb2
from lab.routes import Route, route_options

NAME = "sessions/a"
FAR = datetime(2200, 1, 1, tzinfo=UTC)
WAYS: tuple[Route, ...] = ("local-socket", "local-grpc", "grpc", "bulk")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A server with a bulk channel that writes nothing behind anybody's back."""
    with serving(
        settings_in(tmp_path, arena_size_bytes=4 << 20, ssd_size_bytes=4 << 20, drain_timeout_s=1)
    ) as made:
        made.run(_without_upkeep(made.server))
        yield made


async def _without_upkeep(server: Server) -> None:
    async def nothing(_: object) -> bool:
        return True

    setattr(server.cache.write_behind, "turn", nothing)  # noqa: B010  # it is a method


@pytest.fixture
def connect(live: LiveServer) -> Iterator[Callable[[Route], Client]]:
    """Make clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda access: clients.enter_context(
            ctxcache.connect(live.target, timeout_s=10, **route_options(access))
        )


def segments(live: LiveServer) -> list[Segment]:
    """Those of the session, in order."""
    return live.ask(lambda server: list(server.cache.ledger.names.sessions["default", "a"].segments))


def flip(live: LiveServer, index: int, row: int, stream: Stream = KV) -> None:
    """Change a bit of a row in the arena."""
    segment = segments(live)[index]
    assert segment.memory is not None
    view = live.server.cache.arena.view(segment.memory)
    view[segment.layout.rows(stream, row, row + 1).start] ^= 1


def counters(live: LiveServer) -> tuple[int, int]:
    """Mended, and lost."""
    found = live.ask(lambda server: server.cache.state.counters)
    return found.mended_segment_count, found.corrupt_segment_count


def events(client: Client) -> list[int]:
    """The events of the session that `why-miss` tells."""
    return [one.event for one in client.admin.why_miss(NAME).happenings]


def made(client: Client, token_count: int, durability: Durability) -> None:
    """Session a with so many tokens, in segments of 64."""
    client.models.register(SPEC)
    client.sessions.create(OWN, id="a", layout=LAYOUT)
    session, rows = client.sessions.open(NAME, OWN), make_rows(token_count)
    for begin in range(0, token_count, SEGMENT_TOKENS):
        end = min(begin + SEGMENT_TOKENS, token_count)
        session.append({stream: each[begin:end] for stream, each in rows.items()}, durability=durability)


def read(client: Client, begin: int = 0, end: int | None = None) -> dict[Stream, np.ndarray]:
    """All rows, copied."""
    with client.sessions.open(NAME, OWN).read(begin=begin, end=end) as rows:
        return {stream: rows.array(stream) for stream in rows.streams}


def check(found: dict[Stream, np.ndarray], begin: int, end: int) -> None:
    """Whether these are the rows that were written."""
    for stream, expected in make_rows(end).items():
        np.testing.assert_array_equal(found[stream], expected[begin:end])


def check_books(live: LiveServer) -> None:
    """Nothing is left held, lost or unaccounted for."""
    live.until(lambda server: not server.cache.leases.lease_count)
    live.run(live.server.cache.drain())
    assert live.ask(lambda server: check_integrity(server.cache)) == []


@pytest.mark.parametrize("writer", WAYS)
@pytest.mark.parametrize("reader", WAYS)
def test_what_ssd_has_takes_the_place_of_a_flipped_byte(
    live: LiveServer, connect: Callable[[Route], Client], writer: Route, reader: Route
) -> None:
    """No reader gets a wrong byte, none gets an error, and the operator is told."""
    made(connect(writer), 150, Durability.DISK)
    for stream, index, row in ((KV, 1, 7), (HIDDEN, 0, 63), (TOKENS, 2, 3)):
        flip(live, index, row, stream)
    client = connect(reader)
    check(read(client), 0, 150)
    flip(live, 1, 40)
    check(read(client, 70, 75), 70, 75)

    assert counters(live) == (4, 0)
    assert events(client) == [admin_pb2.MISS_EVENT_MENDED]
    check_books(live)


@pytest.mark.parametrize("writer", WAYS)
@pytest.mark.parametrize("reader", WAYS)
def test_where_memory_alone_has_it_the_session_ends_before_a_flipped_byte(
    live: LiveServer, connect: Callable[[Route], Client], writer: Route, reader: Route
) -> None:
    """The reader is told at once, and the next one gets what is right."""
    made(connect(writer), 150, Durability.MEMORY)
    flip(live, 1, 7)
    client = connect(reader)
    with pytest.raises(CorruptSegment):
        read(client)

    assert client.sessions.get(NAME).token_count == 64
    check(read(client), 0, 64)
    assert counters(live) == (0, 1)
    assert events(client) == [admin_pb2.MISS_EVENT_CORRUPT]
    check_books(live)


@pytest.mark.parametrize("way", WAYS[:2])
def test_views_and_files_beside_the_server_are_verified_too(
    live: LiveServer, connect: Callable[[Route], Client], way: Route
) -> None:
    """Before a view is handed out, and where some of the rows come from the SSD tier's own files."""
    client = connect(way)
    made(client, 150, Durability.DISK)
    flip(live, 1, 7)
    with client.sessions.open(NAME, OWN).read() as rows:
        pieces = rows.pieces(KV)
        np.testing.assert_array_equal(np.concatenate(pieces), make_rows(150)[KV])
    flip(live, 1, 7)
    with client.sessions.open(NAME, OWN).read(leave_on_ssd=True) as rows:
        check({stream: rows.array(stream) for stream in rows.streams}, 0, 150)

    assert counters(live) == (2, 0)


@pytest.mark.parametrize("way", WAYS)
def test_an_export_has_no_flipped_byte(
    live: LiveServer, connect: Callable[[Route], Client], tmp_path: Path, way: Route
) -> None:
    """SSD gets the rows that were stored; of a session of which memory alone has it, nothing is."""
    client = connect(way)
    made(client, 150, Durability.DISK)
    whole = exported(client, tmp_path / "whole")
    flip(live, 1, 7)
    assert exported(client, tmp_path / "flipped") == whole
    client.sessions.open(NAME, OWN).append({stream: rows[150:] for stream, rows in make_rows(170).items()})
    flip(live, 2, 40)

    (outcome,) = outcomes_of(client, tmp_path / "lost")
    assert outcome.status is ArchiveStatus.FAILED or outcome.token_count == 150
    assert counters(live) == (1, 1)


def exported(client: Client, path: Path) -> list[bytes]:
    """The frames of rows of an export that goes well."""
    (outcome,) = outcomes_of(client, path)
    assert (outcome.status, outcome.token_count) == (ArchiveStatus.EXPORTED, 150)
    with source(str(path)) as opened:
        return [bytes(frame.payload) for frame in ArchiveFrameReader(opened).frames() if frame.tag == ROWS]


def outcomes_of(client: Client, path: Path) -> list[ArchiveOutcome]:
    """Export the session."""
    with path.open("wb", buffering=0) as file:
        writer = FrameWriter(file.fileno(), str(path), bytes(FILE_ID_BYTES), 0)
        exporter = Exporter(client, writer, lambda *_: None, skips_gone=False)
        client.sessions.open(NAME).update(expire_time=FAR)
        return list(exporter.export([NAME]))


def test_a_byte_that_changes_before_its_first_flush_is_never_made_durable(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """A flush is refused; the tokens before are durable, and a restart serves no others."""
    client = connect("local-socket")
    made(client, 150, Durability.MEMORY)
    flip(live, 2, 5)
    with pytest.raises(CorruptSegment):
        client.sessions.open(NAME).flush()
    assert client.sessions.get(NAME).durable_token_count == 128
    live.stop()
    live.start()

    with ctxcache.connect(live.target, timeout_s=10) as other:
        check(read(other), 0, 128)


def test_a_byte_that_changes_before_the_server_ends_is_never_made_durable(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """The flush at the end finds it as any other does, and ends in order."""
    made(connect("grpc"), 150, Durability.MEMORY)
    flip(live, 2, 5)
    live.stop()
    live.start()

    with ctxcache.connect(live.target, timeout_s=10) as other:
        check(read(other), 0, 128)


def test_durable_rows_outlive_a_byte_that_changes_behind_them(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """The part of a segment that SSD has is mended or kept, though it grew since it was flushed.

    Only what is behind it goes.
    """
    client = connect("local-socket")
    made(client, 100, Durability.DISK)
    client.sessions.open(NAME, OWN).append({stream: rows[100:] for stream, rows in make_rows(120).items()})
    flip(live, 1, 5)
    check(read(client), 0, 120)
    assert counters(live) == (1, 0)
    flip(live, 1, 40)
    with pytest.raises(CorruptSegment):
        read(client)

    assert client.sessions.get(NAME).token_count == 100
    check(read(client), 0, 100)
    client.sessions.open(NAME, OWN).append({stream: rows[100:] for stream, rows in make_rows(130).items()})
    check(read(client), 0, 130)
    client.sessions.open(NAME).flush()
    check_books(live)


def test_scrubbing_finds_what_nobody_has_read(live: LiveServer, connect: Callable[[Route], Client]) -> None:
    """A pass over everything tells both sorts apart, and says where each was."""
    client = connect("local-socket")
    made(client, 128, Durability.DISK)
    client.sessions.open(NAME, OWN).append({stream: rows[128:] for stream, rows in make_rows(150).items()})
    assert [report.bad for report in client.admin.verify() if report.bad] == []
    flip(live, 0, 9)
    flip(live, 2, 9)
    bad = [found for report in client.admin.verify() for found in report.bad]

    assert sorted((found.position_begin, found.is_mended) for found in bad) == [(0, True), (128, False)]
    assert {found.tier for found in bad} == {StorageTier.DRAM}
    assert counters(live) == (1, 1)
    check(read(client), 0, 128)
    assert [report.bad for report in client.admin.verify() if report.bad] == []
    check_books(live)


def test_tokens_of_a_decode_batch_are_summed_one_by_one(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """Their sums hold for whoever reads and flushes them, and find a byte that changed in any row."""
    client = connect("local-socket")
    made(client, 10, Durability.MEMORY)
    rows = make_rows(70)
    with client.sessions.decode_batch([NAME], OWN) as batch:
        for token in range(10, 70):
            for stream in LAYOUT:
                batch.write(stream, rows[stream][token : token + 1])
            batch.commit()
    check(read(connect("grpc")), 0, 70)
    flip(live, 1, 3)
    with pytest.raises(CorruptSegment):
        client.sessions.open(NAME).flush()

    check(read(client), 0, 64)


def test_a_local_writer_that_says_something_else_serves_nobody_wrong_rows(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """Too few sums are refused and change nothing.

    Wrong ones end the session before the rows, and nothing else.
    """
    client = connect("local-socket")
    made(client, 64, Durability.DISK)
    attachment = client.routes.attach()
    assert attachment is not None
    stream = attachment.stream
    reserve = arena_pb2.Reserve(
        session=NAME, model_fingerprint=OWN.fingerprint, write_offset=64, token_count=6
    )
    number = stream.carry_out(arena_pb2.Operation(reserve=reserve)).reservation.reservation_id

    def commit(checksums: list[int]) -> arena_pb2.Operation:
        return arena_pb2.Operation(
            commit=arena_pb2.CommitReservation(reservation_id=number, token_count=70, checksums=checksums)
        )

    for few in ([], [1], [1] * 4):
        with pytest.raises(InvalidArgument) as refused:
            stream.carry_out(commit(few))
        assert refused.value.facts["field"] == "checksums"
        assert client.sessions.get(NAME).token_count == 64
    stream.carry_out(commit([1] * len(LAYOUT)))
    with pytest.raises(CorruptSegment):
        read(client)

    check(read(client), 0, 64)


def test_a_reader_that_lies_costs_nobody_anything(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """The server looks for itself: what is right stays, and foreign leases do not exist."""
    client = connect("local-socket")
    made(client, 150, Durability.MEMORY)
    attachment = client.routes.attach()
    assert attachment is not None
    lease = arena_pb2.AcquireLease(session=NAME, model_fingerprint=OWN.fingerprint, is_brief=True)
    number = attachment.stream.carry_out(arena_pb2.Operation(acquire_lease=lease)).lease.lease_id
    recheck = arena_pb2.Operation(recheck_lease=arena_pb2.RecheckLease(lease_id=number))
    assert attachment.stream.carry_out(recheck).WhichOneof("result") == "rechecked"
    with pytest.raises(LeaseNotFound):
        attachment.stream.carry_out(
            arena_pb2.Operation(recheck_lease=arena_pb2.RecheckLease(lease_id=number + 1))
        )

    assert counters(live) == (0, 0)
    check(read(client), 0, 150)


def test_a_place_that_keeps_nothing_is_used_no_more(
    live: LiveServer, connect: Callable[[Route], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where mending does not help, the next reader is served from SSD, in another place."""
    client = connect("local-socket")
    made(client, 64, Durability.DISK)

    async def nothing(*_: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(live.server.cache.io, "restore_rows", nothing)
    flip(live, 0, 1)
    with pytest.raises(CorruptSegment):
        read(client)
    live.until(lambda server: server.cache.ledger.memory.spoiled)

    check(read(client), 0, 64)
    assert counters(live) == (0, 0)
    check_books(live)


def test_a_fork_and_a_cut_session_are_verified_by_whole_chunks(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """Sums are of whole chunks, whatever part of them a session still has."""
    client = connect("local-socket")
    made(client, 150, Durability.DISK)
    client.sessions.open(NAME).keep_first(100)
    fork = client.sessions.open(NAME).fork(id="b", token_count=70)
    flip(live, 1, 1)
    for way in WAYS:
        check(read(connect(way)), 0, 100)
        with connect(way).sessions.open(fork.name, OWN).read(begin=66, end=70) as rows:
            np.testing.assert_array_equal(rows.array(KV), make_rows(70)[KV][66:])
        flip(live, 1, 60)
    assert counters(live)[1] == 0


def test_flips_at_random_between_operations_at_random(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """Whatever comes between.

    A reader gets right rows of all tokens that are told to be there, or is told otherwise.
    """
    random = np.random.default_rng(7)
    clients = [connect(way) for way in WAYS]
    made(clients[0], 20, Durability.MEMORY)
    durable = 0
    for _ in range(120):
        client = clients[random.integers(len(clients))]
        token_count = client.sessions.get(NAME).token_count
        assert token_count >= durable
        match random.integers(5):
            case 0:
                more = token_count + int(random.integers(1, 90))
                client.sessions.open(NAME, OWN).append(
                    {s: r[token_count:] for s, r in make_rows(more).items()}
                )
            case 1:
                with contextlib.suppress(CorruptSegment):
                    client.sessions.open(NAME).flush()
                durable = client.sessions.get(NAME).durable_token_count
            case 2 if token_count > 600:
                client.sessions.open(NAME).keep_first(30)
                durable = min(durable, 30)
            case 3 if token_count:
                there = segments(live)
                index = int(random.integers(len(there)))
                if there[index].memory and there[index].row_count:
                    flip(
                        live,
                        index,
                        int(random.integers(there[index].row_count)),
                        LAYOUT[int(random.integers(3))],
                    )
            case _ if token_count:
                begin = int(random.integers(token_count))
                with contextlib.suppress(CorruptSegment):
                    check(read(client, begin, token_count), begin, token_count)
    check_books(live)
    assert sum(counters(live)) > 0


def test_readers_of_all_ways_at_once_see_no_flipped_byte(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """Rows are mended where they lie, while others read them."""
    made(connect("local-socket"), 150, Durability.DISK)
    problems: list[BaseException] = []
    is_over = threading.Event()
    read_counts = dict.fromkeys(WAYS, 0)

    def go_on(way: Route, client: Client) -> None:
        try:
            while not is_over.is_set():
                check(read(client), 0, 150)
                read_counts[way] += 1
        except BaseException as error:  # noqa: BLE001  # told by the test
            problems.append(error)

    threads = [threading.Thread(target=go_on, args=(way, connect(way))) for way in WAYS]
    for thread in threads:
        thread.start()
    for number in range(10):
        flip(live, number % 3, number % 20)
        wanted = {way: count + 2 for way, count in read_counts.items()}
        live.until(lambda _: problems or all(read_counts[way] >= wanted[way] for way in WAYS))  # noqa: B023  # at once
    is_over.set()
    for thread in threads:
        thread.join()

    assert problems == []
    assert counters(live) == (10, 0)


def test_the_sums_of_a_lease_are_those_of_its_rows(
    live: LiveServer, connect: Callable[[Route], Client]
) -> None:
    """They are on the wire for any reader.

    XXH3 of the rows, also of a segment that grows by single tokens.
    """
    client = connect("local-socket")
    made(client, 1, Durability.MEMORY)
    rows = make_rows(80)
    for token in range(1, 80):
        client.sessions.open(NAME, OWN).append(
            {stream: one[token : token + 1] for stream, one in rows.items()}
        )
    attachment = client.routes.attach()
    assert attachment is not None
    lease = arena_pb2.AcquireLease(session=NAME, model_fingerprint=OWN.fingerprint)
    found = attachment.stream.carry_out(arena_pb2.Operation(acquire_lease=lease)).lease

    assert [list(segment.checksums) for segment in found.segments] == [
        [xxh3_64_intdigest(rows[stream][begin:end].tobytes()) for stream in LAYOUT]
        for begin, end in ((0, 64), (64, 80))
    ]
