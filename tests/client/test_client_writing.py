"""Appending: all at once, and layer by layer."""

from typing import Any

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, Connect, FarSide, make_rows

from ctxcache.client import Client
from ctxcache.errors import IncompleteAppend, InvalidArgument, ReservationNotFound, WriteInProgress
from ctxcache.format.streams import TOKENS, StateKind, Stream

NAME = "sessions/a"


def _assert_holds(far_side: FarSide, token_count: int) -> None:
    for stream, rows in make_rows(token_count).items():
        np.testing.assert_array_equal(far_side.rows[NAME][stream], rows)


def test_appended_rows_are_kept_as_they_were_given(client: Client, far_side: FarSide) -> None:
    """Two appends in a row continue where the session ended, from the session each returned."""
    session = far_side.add(NAME, 0)

    session = client.sessions.open(session, OWN).append(make_rows(5))
    session = client.sessions.open(session, OWN).append(make_rows(6, first=5))

    assert session.token_count == 11
    _assert_holds(far_side, 11)


def test_rows_larger_than_a_message_arrive_whole(
    connect: Connect, far_side: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cut into messages at row borders."""
    monkeypatch.setattr("ctxcache.client.streamed_rows.CHUNK_BYTES", 40)
    far_side.add(NAME, 0)

    connect(access="remote").sessions.open(NAME, OWN).append(make_rows(23))

    _assert_holds(far_side, 23)


def test_arrays_of_any_type_count_as_their_bytes(client: Client, far_side: FarSide) -> None:
    """Token ids are int32 [T] for an engine, and [T, 4] bytes for the store."""
    far_side.add(NAME, 0)
    rows = make_rows(4)
    typed = {
        TOKENS: rows[TOKENS].view("<i4")[:, 0].copy(),
        HIDDEN: rows[HIDDEN].view(np.float16),
        KV: rows[KV],
    }

    client.sessions.open(NAME, OWN).append(typed)

    _assert_holds(far_side, 4)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        make_rows(0),
        make_rows(4) | {KV: make_rows(4)[HIDDEN]},
        make_rows(4) | {KV: make_rows(8)[KV][::2]},
        make_rows(4) | {KV: np.float32(1)},
        make_rows(4) | {KV: np.empty((4, 2), object)},
        make_rows(4) | {Stream(7, StateKind.KV): make_rows(4)[KV]},
    ],
    ids=["nothing", "no rows", "short rows", "strided", "scalar", "objects", "foreign stream"],
)
def test_rows_of_a_wrong_shape_are_refused(
    client: Client, far_side: FarSide, rows: dict[Stream, Any]
) -> None:
    """Nothing is sent and no room is taken for rows that cannot be right."""
    far_side.add(NAME, 0)

    with pytest.raises(InvalidArgument):
        client.sessions.open(NAME, OWN).append(rows)
    assert "reserve" not in far_side.operations


@pytest.mark.parametrize("rows", [make_rows(4) | {KV: make_rows(3)[KV]}, {TOKENS: make_rows(4)[TOKENS]}])
def test_a_stream_without_its_rows_is_an_incomplete_append(
    client: Client, far_side: FarSide, rows: dict[Stream, Any]
) -> None:
    """A session never has tokens that lack a layer."""
    far_side.add(NAME, 0)

    with pytest.raises(IncompleteAppend):
        client.sessions.open(NAME, OWN).append(rows)


def test_a_writer_takes_rows_layer_by_layer(client: Client, far_side: FarSide) -> None:
    """Rows arrive in any split, as an engine computes them."""
    far_side.add(NAME, 0)
    rows = make_rows(10)

    with client.sessions.open(NAME, OWN).writer(10) as writer:
        for stream in LAYOUT:
            for begin in range(0, 10, 3):
                writer.write(stream, begin, rows[stream][begin : begin + 3])
        writer.commit()

    _assert_holds(far_side, 10)


def test_a_writer_that_is_kept_open_commits_in_steps(client: Client, far_side: FarSide) -> None:
    """A decoding engine commits token by token into room that it took once."""
    far_side.add(NAME, 0)
    rows = make_rows(6)

    with client.sessions.open(NAME, OWN).writer(6) as writer:
        for end in range(1, 7):
            for stream in LAYOUT:
                writer.write(stream, end - 1, rows[stream][end - 1 : end])
            session = writer.commit(end, keep_open=True)
            assert session.token_count == end

    _assert_holds(far_side, 6)


def test_a_writer_whose_room_is_full_holds_nothing(connect: Connect, far_side: FarSide) -> None:
    """The commit that fills the room ends the reservation, however long it was to be kept open."""
    session = far_side.add(NAME, 0)
    rows = make_rows(4)
    client = connect(access="local")

    with client.sessions.open(session, OWN).writer(4) as writer:
        for stream in LAYOUT:
            writer.write(stream, 0, rows[stream])
        session = writer.commit(keep_open=True)
        with client.sessions.open(session, OWN).writer(1) as second:
            assert second.write_offset == 4


def test_a_writer_left_without_a_commit_leaves_the_session_alone(client: Client, far_side: FarSide) -> None:
    """The room is given back, and the next writer gets it."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(4) as writer:
        writer.write(KV, 0, make_rows(4)[KV])
    client.sessions.open(NAME, OWN).append(make_rows(4))

    _assert_holds(far_side, 4)


def test_a_commit_of_rows_nobody_wrote_is_refused(client: Client, far_side: FarSide) -> None:
    """The arena holds somebody's old bytes where nothing was written."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(4) as writer:
        writer.write(TOKENS, 0, make_rows(4)[TOKENS])
        writer.write(KV, 0, make_rows(2)[KV])
        with pytest.raises(IncompleteAppend):
            writer.commit()


def test_a_gap_between_rows_is_refused(client: Client, far_side: FarSide) -> None:
    """Rows of a stream follow one another."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(4) as writer, pytest.raises(InvalidArgument):
        writer.write(KV, 1, make_rows(1)[KV])


def test_rows_past_the_room_are_refused(client: Client, far_side: FarSide) -> None:
    """The bytes behind the room belong to another session."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(4) as writer, pytest.raises(InvalidArgument):
        writer.write(KV, 0, make_rows(5)[KV])


def test_a_committed_row_is_not_written_again(client: Client, far_side: FarSide) -> None:
    """Readers may be looking at it."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(4) as writer:
        for stream in LAYOUT:
            writer.write(stream, 0, make_rows(2)[stream])
        writer.commit(2, keep_open=True)
        with pytest.raises(InvalidArgument):
            writer.write(KV, 1, make_rows(1)[KV])


def test_a_closed_writer_takes_nothing(client: Client, far_side: FarSide) -> None:
    """After the commit the rows belong to the session."""
    far_side.add(NAME, 0)

    with client.sessions.open(NAME, OWN).writer(2) as writer:
        for stream in LAYOUT:
            writer.write(stream, 0, make_rows(2)[stream])
        writer.commit()
        with pytest.raises(InvalidArgument):
            writer.write(KV, 0, make_rows(1)[KV])


def test_a_session_has_one_writer_in_place(connect: Connect, far_side: FarSide) -> None:
    """The error of the operation arrives as its class."""
    far_side.add(NAME, 0)
    client = connect(access="local")

    with client.sessions.open(NAME, OWN).writer(2), pytest.raises(WriteInProgress):
        client.sessions.open(NAME, OWN).writer(2)


def test_a_reservation_past_its_deadline_takes_no_rows(connect: Connect, far_side: FarSide) -> None:
    """Bytes are never written where another session's may be by now."""
    far_side.add(NAME, 0)
    far_side.lease_ttl_s = -1.0

    with (
        connect(access="local").sessions.open(NAME, OWN).writer(2) as writer,
        pytest.raises(ReservationNotFound),
    ):
        writer.write(KV, 0, make_rows(2)[KV])
