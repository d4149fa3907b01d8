"""Reading rows: in place under a lease, and by stream."""

import contextlib
import gc
import time
from pathlib import Path

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, ROW_SIZES, Connect, FarSide

from ctxcache.client import Client
from ctxcache.client.rows import LeasedRows
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    ChecksumMismatch,
    CorruptSegment,
    InvalidArgument,
    LeaseNotFound,
    SessionNotFound,
    Unavailable,
)
from ctxcache.format.streams import TOKENS, StateKind, Stream

NAME = "sessions/a"
SOON_S = 10.0


@pytest.mark.parametrize(("begin", "end"), [(0, None), (0, 1), (3, 9), (5, None), (4, 4)])
def test_a_read_returns_the_rows_of_its_range(
    client: Client, far_side: FarSide, begin: int, end: int | None
) -> None:
    """Every stream has exactly the rows that were asked for, whichever way they travel."""
    far_side.add(NAME, 11)

    with client.sessions.open(NAME, OWN).read(begin=begin, end=end) as rows:
        for stream in LAYOUT:
            np.testing.assert_array_equal(rows.array(stream), far_side.rows[NAME][stream][begin:end])


def test_chunks_come_in_layer_order_without_a_gap(client: Client, far_side: FarSide) -> None:
    """A restore can start with the first layer and never has to sort."""
    far_side.add(NAME, 11)

    with client.sessions.open(NAME, OWN).read() as rows:
        chunks = [(piece.stream, piece.token_begin, piece.rows.copy()) for piece in rows.chunks()]

    assert list(dict.fromkeys(stream for stream, _, _ in chunks)) == list(LAYOUT)
    for stream in LAYOUT:
        parts = [(begin, part) for name, begin, part in chunks if name == stream]
        assert [begin for begin, _ in parts] == list(np.cumsum([0, *(len(part) for _, part in parts[:-1])]))
        np.testing.assert_array_equal(
            np.concatenate([part for _, part in parts]), far_side.rows[NAME][stream]
        )


def test_a_read_of_some_streams_offers_no_others(client: Client, far_side: FarSide) -> None:
    """Other streams are not read, and asking for them later is an error."""
    far_side.add(NAME, 5)

    with client.sessions.open(NAME, OWN).read(streams=[KV]) as rows:
        assert rows.streams == (KV,)
        with pytest.raises(InvalidArgument):
            rows.array(HIDDEN)


def test_rows_cannot_be_written_through_a_view(client: Client, far_side: FarSide) -> None:
    """The arena is everybody's: views of it are read-only, and so are those of messages."""
    far_side.add(NAME, 5)

    with client.sessions.open(NAME, OWN).read() as rows:
        assert not any(piece.flags.writeable for piece in rows.pieces(KV))


def test_rows_can_be_copied_into_a_buffer_of_the_callers(client: Client, far_side: FarSide) -> None:
    """A buffer that is in memory already is filled four times faster than a fresh one."""
    far_side.add(NAME, 6)
    buffer = np.empty((6, ROW_SIZES[KV]), np.uint8)

    with client.sessions.open(NAME, OWN).read() as rows:
        assert rows.array(KV, out=buffer) is buffer

    np.testing.assert_array_equal(buffer, far_side.rows[NAME][KV])


def test_a_buffer_of_another_shape_is_refused(client: Client, far_side: FarSide) -> None:
    """Rows are never cut or broadcast to fit."""
    far_side.add(NAME, 6)

    with client.sessions.open(NAME, OWN).read() as rows, pytest.raises(InvalidArgument):
        rows.array(KV, out=np.empty((5, ROW_SIZES[KV]), np.uint8))


def test_a_session_that_is_not_there_is_an_error(client: Client) -> None:
    """A read never invents an empty session."""
    with pytest.raises(SessionNotFound):
        client.sessions.open("sessions/none", OWN).read()


# -- in place --------------------------------------------------------------------------------------


def test_damaged_bytes_in_the_arena_are_refused(connect: Connect, far_side: FarSide) -> None:
    """One flipped bit is enough, and the stream that has it is not handed out."""
    far_side.add(NAME, 6)
    far_side.flips_arena_bytes = True

    with connect(access="local").sessions.open(NAME, OWN).read() as rows:
        with pytest.raises(CorruptSegment):
            rows.array(HIDDEN)
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])


@pytest.mark.parametrize(("begin", "end"), [(0, 10), (0, 4), (1, 3), (3, 9), (4, 8), (9, 10), (5, 5)])
def test_rows_are_verified_as_they_are_copied(
    connect: Connect, far_side: FarSide, begin: int, end: int
) -> None:
    """Whatever part of a chunk it is; a flipped bit is found where its chunk is copied, and nowhere else."""
    far_side.add(NAME, 10)
    expected = far_side.rows[NAME][HIDDEN][begin:end]
    into = np.zeros_like(expected)
    with connect(access="local").sessions.open(NAME, OWN).read() as rows:
        assert isinstance(rows, LeasedRows)
        rows.copy_verified(HIDDEN, begin, end, into)
        np.testing.assert_array_equal(into, expected)
    far_side.flips_arena_bytes = True

    with connect(access="local").sessions.open(NAME, OWN).read() as rows:
        assert isinstance(rows, LeasedRows)
        with pytest.raises(CorruptSegment) if begin < 4 else contextlib.nullcontext():
            rows.copy_verified(HIDDEN, begin, end, into)
        with pytest.raises(InvalidArgument):
            rows.copy_verified(Stream(7, HIDDEN.kind), 0, 1, into)


def test_a_lease_past_its_deadline_gives_no_rows(connect: Connect, far_side: FarSide) -> None:
    """After the deadline the slots may be another session's."""
    far_side.add(NAME, 6)
    far_side.lease_ttl_s = -1.0

    with connect(access="local").sessions.open(NAME, OWN).read() as rows, pytest.raises(LeaseNotFound):
        rows.array(KV)


def test_rows_that_were_closed_are_not_returned(connect: Connect, far_side: FarSide) -> None:
    """Their slots are another session's by now, and nobody asks the server."""
    far_side.add(NAME, 6)
    rows = connect(access="local").sessions.open(NAME, OWN).read()
    rows.close()
    rows.close()

    for ask in (rows.pieces, rows.array):
        with pytest.raises(LeaseNotFound):
            ask(KV)
    with pytest.raises(LeaseNotFound):
        next(rows.chunks())
    with pytest.raises(LeaseNotFound):
        rows.check()


def test_a_broken_stream_ends_its_leases(connect: Connect, far_side: FarSide) -> None:
    """Rows under a lease whose stream broke are no longer protected."""
    far_side.add(NAME, 6)
    client = connect(access="local")
    rows = client.sessions.open(NAME, OWN).read()

    far_side.stop()

    with pytest.raises(Unavailable):
        client.sessions.open(rows.session, OWN).read()
    with pytest.raises(LeaseNotFound):
        rows.check()


def test_leaving_a_read_releases_its_lease(connect: Connect, far_side: FarSide) -> None:
    """The release comes before whatever the client asks next."""
    far_side.add(NAME, 6)
    client = connect(access="local")

    with client.sessions.open(NAME, OWN).read():
        pass
    client.sessions.open(NAME, OWN).read().close()

    first = far_side.operations.index("acquire_lease")
    assert far_side.operations[first : first + 3] == ["acquire_lease", "release_lease", "acquire_lease"]


def test_rows_that_the_arena_cannot_hold_come_by_stream(connect: Connect, far_side: FarSide) -> None:
    """A full arena costs speed, not the read."""
    far_side.add(NAME, 6)
    far_side.is_arena_full = True

    with connect().sessions.open(NAME, OWN).read() as rows:
        assert not rows.is_local
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])


def test_who_wants_only_the_arena_is_told_that_it_is_full(connect: Connect, far_side: FarSide) -> None:
    """`local` never falls back in silence."""
    far_side.add(NAME, 6)
    far_side.is_arena_full = True

    with pytest.raises(CapacityExceeded):
        connect(access="local").sessions.open(NAME, OWN).read()


# -- by stream -------------------------------------------------------------------------------------


def test_damaged_bytes_on_the_wire_are_refused(connect: Connect, far_side: FarSide) -> None:
    """Each message is verified before its rows are handed out."""
    far_side.add(NAME, 6)
    far_side.flips_wire_bytes = True

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows, pytest.raises(ChecksumMismatch):
        rows.array(TOKENS)


def test_a_gap_in_a_stream_is_refused(connect: Connect, far_side: FarSide) -> None:
    """Rows that do not follow one another are never joined."""
    far_side.add(NAME, 9)
    far_side.skips_a_chunk = True

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows, pytest.raises(CacheError):
        rows.array(TOKENS)


def test_chunks_that_were_swapped_are_refused(connect: Connect, far_side: FarSide) -> None:
    """The rows are as many as they should be, and lie in the wrong places."""
    far_side.add(NAME, 9)
    far_side.swaps_chunks = True

    with (
        connect(access="remote").sessions.open(NAME, OWN).read() as rows,
        pytest.raises(CacheError, match="out of order"),
    ):
        rows.array(TOKENS)


@pytest.mark.parametrize("chunk_count", range(9))
def test_a_broken_read_goes_on_where_it_broke(connect: Connect, far_side: FarSide, chunk_count: int) -> None:
    """Wherever the stream breaks, the rows are whole, and nothing that arrived is asked for again."""
    far_side.add(NAME, 9)
    far_side.chunks_until_break = [chunk_count]

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        arrived = [piece.rows for piece in rows.chunks()]

    expected = np.concatenate([far_side.rows[NAME][stream].ravel() for stream in LAYOUT])
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in arrived]), expected)
    assert all(request.if_generation_match == 1 for request in far_side.reads[1:])


def test_a_read_that_breaks_twice_fails(connect: Connect, far_side: FarSide) -> None:
    """One break is an accident; two are the caller's to judge."""
    far_side.add(NAME, 9)
    far_side.chunks_until_break = [2, 0]

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows, pytest.raises(Unavailable):
        rows.array(KV)


def test_a_read_does_not_go_on_in_another_session_of_that_name(connect: Connect, far_side: FarSide) -> None:
    """A session created again may have the same generation; its rows are not the rest of ours."""
    far_side.add(NAME, 9)
    far_side.chunks_until_break = [1]

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        far_side.add(NAME, 9)
        with pytest.raises(SessionNotFound):
            rows.array(KV)


def test_streams_asked_for_late_are_still_there(connect: Connect, far_side: FarSide) -> None:
    """Arrays can be asked for in any order; what came before is kept."""
    far_side.add(NAME, 7)

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        rows.array(KV)
        np.testing.assert_array_equal(rows.array(TOKENS), far_side.rows[NAME][TOKENS])


def test_rows_handed_out_as_chunks_are_not_kept(connect: Connect, far_side: FarSide) -> None:
    """Asking for them again is an error rather than a second copy of the session in memory."""
    far_side.add(NAME, 7)

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        assert sum(len(piece.rows) for piece in rows.chunks()) == 3 * 7
        with pytest.raises(InvalidArgument):
            rows.array(TOKENS)


def test_arrays_asked_for_before_chunks_are_part_of_the_chunks(connect: Connect, far_side: FarSide) -> None:
    """Looking at the token ids first loses nothing."""
    far_side.add(NAME, 7)

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        rows.array(TOKENS)
        streams = {piece.stream for piece in rows.chunks()}

    assert streams == set(LAYOUT)


def test_a_stream_that_the_session_does_not_store_is_an_error(connect: Connect, far_side: FarSide) -> None:
    """In place the layout comes with the lease."""
    far_side.add(NAME, 7)

    with pytest.raises(InvalidArgument):
        connect(access="local").sessions.open(NAME, OWN).read(streams=[Stream(5, StateKind.KV)])


def test_rows_are_received_into_a_buffer_of_the_callers_once(connect: Connect, far_side: FarSide) -> None:
    """They are the caller's then: it may use the buffer again, so they are never handed out from there."""
    far_side.add(NAME, 9)
    buffer = np.empty((9, ROW_SIZES[HIDDEN]), np.uint8)

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        rows.array(HIDDEN, out=buffer)
        np.testing.assert_array_equal(buffer, far_side.rows[NAME][HIDDEN])
        np.testing.assert_array_equal(rows.array(TOKENS), far_side.rows[NAME][TOKENS])
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])
        for ask in (
            lambda: rows.array(HIDDEN),
            lambda: rows.array(HIDDEN, out=buffer),
            lambda: next(rows.chunks()),
        ):
            with pytest.raises(InvalidArgument):
                ask()


def test_a_buffer_is_filled_whole_wherever_the_stream_breaks(connect: Connect, far_side: FarSide) -> None:
    """Rows that arrive after a break go where they belong."""
    far_side.add(NAME, 9)
    for chunk_count in range(9):
        far_side.chunks_until_break = [chunk_count]
        with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
            for stream in LAYOUT:
                out = np.zeros((9, ROW_SIZES[stream]), np.uint8)
                np.testing.assert_array_equal(rows.array(stream, out=out), far_side.rows[NAME][stream])


def test_a_buffer_that_is_not_in_c_order_is_filled_all_the_same(connect: Connect, far_side: FarSide) -> None:
    """Rows that cannot be received into it are copied."""
    far_side.add(NAME, 9)
    out = np.zeros((9, 2 * ROW_SIZES[KV]), np.uint8)[:, ::2]

    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        np.testing.assert_array_equal(rows.array(KV, out=out), far_side.rows[NAME][KV])


def test_a_read_that_is_given_up_leaves_no_connection(connect: Connect, far_side: FarSide) -> None:
    """Closed half-way, or not closed at all: with its client the connection goes."""
    far_side.add(NAME, 11)
    counts = []
    for _ in range(3):
        clients = [connect(access="remote", transport="grpc") for _ in range(4)]
        for number, client in enumerate(clients):
            rows = client.sessions.open(NAME, OWN).read()
            next(iter(rows.chunks()))
            if number % 2:
                rows.close()
        for client in clients:
            client.close()
        gc.collect()
        counts.append(_open_files())

    # Less than a round's: what gRPC sets up once. It closes connections in a thread of its own.
    deadline_s = time.monotonic() + SOON_S
    while _open_files() - counts[0] >= 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert _open_files() - counts[0] < 4


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_reads_that_fail_are_not_remembered(connect: Connect, far_side: FarSide) -> None:
    """Neither one that never began, nor one that broke and was begun again."""
    session = far_side.add(NAME, 11)
    client = connect(access="remote", transport="grpc")
    far_side.chunks_until_break = [1]
    with client.sessions.open(NAME, OWN).read() as rows:
        list(rows.chunks())
    del far_side.sessions[NAME]
    for _ in range(3):
        with pytest.raises(CacheError):
            client.sessions.open(session, OWN).read()

    assert not client.wire.open_streams
