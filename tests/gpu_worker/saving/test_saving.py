"""Saving in two stages.

A batch's rows come to their sessions, bounded, never behind a gap, and nobody waits.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupts import is_interrupted
from server_process import ServerProcess
from torch import Tensor

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.routes import Access
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    GenerationMismatch,
    InvalidArgument,
    SessionNotFound,
    TooManyRequests,
)
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import DeviceFailed, ShapeMismatch
from gpu_worker.saving import Saver, Slice
from gpu_worker.saving.staging import HostCopies, Mark
from tests.model_specs import small_model

_KV = StreamSpec(Stream(0, StateKind.KV), 64, DType.FLOAT32)
_HIDDEN = StreamSpec(Stream(1, StateKind.HIDDEN), 48, DType.FLOAT32)
_STATE = (_KV, _HIDDEN)
_SPECS = (TOKENS_SPEC, *_STATE)
_TOKEN_BYTES = 4 + 64 + 48
_SPEC = small_model(
    *_STATE,
    model_id="save",
    architecture="Test",
    dtype=DType.FLOAT32,
    layer_count=2,
    hidden_size=8,
    head_size=8,
)
_OWN = CallerModel(_SPEC)
_LAYOUT = [spec.stream for spec in _STATE]

Create = Callable[[str], SessionInfo]


@pytest.fixture
def create(client: Client, session_id: str) -> Create:
    """Makes empty sessions of a model with two layers."""
    client.models.register(_SPEC)
    layout = [spec.stream for spec in _STATE]
    return lambda suffix: client.sessions.create(_OWN, id=f"{session_id}-{suffix}", layout=layout).info


@pytest.fixture
def session(create: Create) -> SessionInfo:
    """One of them."""
    return create("one")


@contextmanager
def _stopped(server: ServerProcess) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def _rows(spec: StreamSpec, ids: Sequence[int]) -> Tensor:
    """Rows that say whose they are: the token's id and the stream's layer."""
    rows = torch.zeros(len(ids), spec.row_bytes // 4)
    rows[:, 0] = torch.tensor(ids)
    rows[:, -1] = spec.stream.layer + 1
    return rows


def _pass(saver: Saver, *slices: tuple[SessionInfo, int, int]) -> None:
    """A pass over tokens `[begin, end)` of sessions, whose ids are their numbers plus 1000 a slice."""
    ids = [
        1000 * number + token for number, (_, begin, end) in enumerate(slices) for token in range(begin, end)
    ]
    with saver.passing([Slice(session.name, begin, end - begin) for session, begin, end in slices], ids):
        for spec in _STATE:
            saver.put(*spec.stream, _rows(spec, ids))


def _assert_holds(client: Client, session: SessionInfo, ids: Sequence[int]) -> None:
    with client.sessions.open(session.name, _OWN).read() as rows:
        assert rows.token_ids() == list(ids)
        for spec in _STATE:
            found = rows.array(spec.stream).view(np.float32)
            np.testing.assert_array_equal(found, _rows(spec, ids).numpy())


def _wait_until_saved(saver: Saver, token_count: int) -> None:
    changed = saver._board.changed
    with changed:
        assert changed.wait_for(lambda: saver.saved_token_count >= token_count, timeout=30)


@pytest.mark.parametrize("access", ["local", "remote"])
def test_a_packed_batch_is_sorted_into_its_sessions(
    server: ServerProcess, create: Create, access: Access
) -> None:
    """Prefill chunks and decode steps of several sessions in the same passes.

    Each session has its own, bit for bit.
    """
    long, short, other = create("long"), create("short"), create("other")
    with ctxcache.connect(server.target, access=access) as client, Saver(client, _OWN, _LAYOUT) as saver:
        for session in (long, short):
            saver.open(session)
        _pass(saver, (long, 0, 150), (short, 0, 3))
        # Not among those that are saved: its rows are nobody's.
        _pass(saver, (long, 150, 300), (other, 0, 70), (short, 3, 4))
        for token in range(4, 90):
            _pass(saver, (long, 296 + token, 297 + token), (short, token, token + 1))
        saver.finish(long.name, durability=Durability.DISK)
        failures = [saver.wait(long.name), saver.wait(short.name)]

        assert failures == [None, None]
        _assert_holds(client, long, range(386))
        _assert_holds(client, short, [*range(1000, 1003), 2003, *range(1004, 1090)])
        assert client.sessions.get(long.name).durable_token_count == 386
        assert client.sessions.get(other.name).token_count == 0
        assert (saver.saved_token_count, saver.shed_token_counts) == (476, {})


def test_decoding_commits_a_segment_at_a_time(client: Client, session: SessionInfo) -> None:
    """Without anybody asking, rows are committed where a segment ends; the rest waits for the turn's end."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        for token in range(64):
            _pass(saver, (session, token, token + 1))
        _wait_until_saved(saver, 64)
        for token in range(64, 70):
            _pass(saver, (session, token, token + 1))
        before = client.sessions.get(session.name).token_count
        failure = saver.flush(session.name)
        flushed = client.sessions.get(session.name).token_count
        _pass(saver, (session, 70, 71))
        saver.wait(session.name)

    assert (before, failure, flushed) == (64, None, 70)
    _assert_holds(client, session, range(71))


def test_full_staging_sheds_and_counts(server: ServerProcess, client: Client, create: Create) -> None:
    """Rows that a slow store cannot take are shed at once, and those that follow too.

    The rows before the gap are saved.
    """
    session, other = create("one"), create("other")
    with Saver(client, _OWN, _LAYOUT, staging_bytes=200 * _TOKEN_BYTES) as saver:
        saver.open(session)
        saver.open(other)
        with _stopped(server):
            _pass(saver, (session, 0, 100))
            _pass(saver, (session, 100, 180))
            _pass(saver, (session, 180, 230), (other, 0, 5))
            _pass(saver, (session, 230, 231))
            shed = saver.shed_token_counts
        failures = [saver.wait(session.name), saver.wait(other.name)]

    assert shed == {"TOO_MANY_REQUESTS": 56}
    assert [type(failure) for failure in failures] == [TooManyRequests, TooManyRequests]
    _assert_holds(client, session, range(180))
    assert saver.saved_token_count == 180


def test_after_a_look_at_the_session_saves_go_on(client: Client, session: SessionInfo) -> None:
    """Once `wait` has told of the loss, the session takes rows again from where it ends."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        _pass(saver, (session, 0, 6))
        _pass(saver, (session, 8, 12))
        _pass(saver, (session, 6, 8))
        failure = saver.wait(session.name)
        end = client.sessions.get(session.name)
        saver.open(end)
        _pass(saver, (session, end.token_count, 12))
        again = saver.wait(session.name)

    assert failure is not None
    assert failure.reason == "WRITE_OFFSET_MISMATCH"
    assert again is None
    assert saver.shed_token_counts == {"WRITE_OFFSET_MISMATCH": 6}
    _assert_holds(client, session, range(12))


def test_a_failed_save_stops_only_its_session(client: Client, create: Create) -> None:
    """Rows of a session that was deleted meanwhile are lost and counted; another session's are not."""
    session, other = create("one"), create("other")
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        saver.open(other)
        client.sessions.open(session.name).delete()
        _pass(saver, (session, 0, 3), (other, 0, 7))
        first = saver.flush(session.name)
        _pass(saver, (session, 3, 5), (other, 7, 8))
        failures = [saver.wait(session.name), saver.wait(other.name)]

    assert isinstance(first, SessionNotFound)
    assert [type(failure) for failure in failures] == [SessionNotFound, type(None)]
    assert saver.shed_token_counts == {"SESSION_NOT_FOUND": 5}
    assert client.sessions.get(other.name).token_count == 8


def test_waiting_has_an_end(server: ServerProcess, client: Client, session: SessionInfo) -> None:
    """A store that does not answer costs the waiter its deadline, and the save is not lost by that."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        with _stopped(server):
            _pass(saver, (session, 0, 3))
            with pytest.raises(DeadlineExceeded):
                saver.flush(session.name, timeout_s=0.05)
            with pytest.raises(DeadlineExceeded):
                saver.wait(session.name, timeout_s=0.05)
        failure = saver.wait(session.name)

    assert failure is None
    _assert_holds(client, session, range(3))


def test_closing_saves_what_is_in_staging(client: Client, session: SessionInfo) -> None:
    """Rows of passes before close are saved; rows after it are shed, and `wait` says so."""
    saver = Saver(client, _OWN, _LAYOUT)
    saver.open(session)
    _pass(saver, (session, 0, 9))

    saver.close()

    assert client.sessions.get(session.name).token_count == 9
    _pass(saver, (session, 9, 10))
    assert saver.shed_token_counts == {"INVALID_FIELD": 1}
    assert isinstance(saver.wait(session.name), InvalidArgument)


def test_closing_has_an_end(server: ServerProcess, client: Client, create: Create) -> None:
    """A store that does not answer costs close its deadline; what no thread has taken by then is shed."""
    taken, left = create("taken"), create("left")
    copies = _LateCopies()
    saver = Saver(client, _OWN, _LAYOUT, copies=copies, thread_count=1)
    for session in (taken, left):
        saver.open(session)

    with _stopped(server):
        _pass(saver, (taken, 0, 5))
        saver.finish(taken.name)
        # The one thread has it, and goes on to the store.
        assert copies.asked.wait(timeout=30)
        _pass(saver, (left, 0, 5))
        copies.let()
        saver.close(timeout_s=0.05)
        shed = saver.shed_token_counts

    assert shed == {"DEADLINE_EXCEEDED": 5}


def test_a_session_never_opened_is_not_waited_for(client: Client) -> None:
    """There is nothing to wait for, and nothing went wrong."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        assert saver.wait("sessions/never") is None
        assert saver.flush("sessions/never") is None


def test_a_session_is_open_once(client: Client, session: SessionInfo) -> None:
    """An engine that opens a session again has to look first at what became of it."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        with pytest.raises(InvalidArgument, match="is being saved"):
            saver.open(session)


def test_sessions_that_nobody_waits_for_are_forgotten(
    client: Client, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that never looks at saved sessions again does not fill memory with what became of them."""
    monkeypatch.setattr("gpu_worker.saving.board.CLOSED_LIMIT", 2)
    sessions = [create(str(number)) for number in range(5)]
    with Saver(client, _OWN, _LAYOUT, thread_count=1) as saver:
        for session in sessions:
            saver.open(session)
            _pass(saver, (session, 0, 3))
            saver.finish(session.name)
        saver.wait(sessions[-1].name)

        saver.open(client.sessions.get(sessions[0].name))
        with pytest.raises(InvalidArgument, match="is being saved"):
            saver.open(client.sessions.get(sessions[-2].name))
        _pass(saver, (sessions[0], 3, 5))

    _assert_holds(client, sessions[0], range(5))
    for session in sessions[1:]:
        _assert_holds(client, session, range(3))


def test_slices_are_the_pass(client: Client, session: SessionInfo) -> None:
    """Slices of other lengths than the tokens are refused before anything is taken."""
    with (
        Saver(client, _OWN, _LAYOUT) as saver,
        pytest.raises(InvalidArgument, match="not the 3 tokens"),
        saver.passing([Slice(session.name, 0, 2)], [1, 2, 3]),
    ):
        pytest.fail("the pass must not run")


def test_a_pass_that_raises_is_a_gap(client: Client, session: SessionInfo) -> None:
    """The engine gets its own error; tokens before that pass are saved, those of it and behind it are not."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        _pass(saver, (session, 0, 4))
        with pytest.raises(ZeroDivisionError), saver.passing([Slice(session.name, 4, 1)], [4]):
            _ = 1 // saver.saved_token_count
        _pass(saver, (session, 5, 6))
        failure = saver.wait(session.name)

    assert failure is not None
    assert failure.reason == "INCOMPLETE_APPEND"
    assert saver.shed_token_counts == {"INCOMPLETE_APPEND": 2}
    _assert_holds(client, session, range(4))


@pytest.mark.parametrize("ring_bytes", [None, 16 * (_TOKEN_BYTES - 4)])
def test_an_engine_that_is_interrupted_anywhere_saves_on(
    client: Client, create: Create, ring_bytes: int | None
) -> None:
    """A signal's handler may raise at each call of Python and behind each one of C.

    What the pass had is saved whole or not at all; the next pass has room, and no thread waits for a lock.
    """
    left = range(1, 1500)
    with Saver(client, _OWN, _LAYOUT, staging_bytes=16 * _TOKEN_BYTES, ring_bytes=ring_bytes) as saver:
        for at in left:
            first, second, after = (create(f"{name}-{at}") for name in ("first", "second", "after"))
            for session in (first, second):
                saver.open(session)

            def run(first: SessionInfo = first, second: SessionInfo = second) -> None:
                _pass(saver, (first, 0, 2), (second, 0, 1))
                saver.finish(first.name)

            is_over = not is_interrupted(run, at)
            for session, count in ((first, 2), (second, 1)):
                failure = saver.wait(session.name, timeout_s=10)
                saved_count = client.sessions.get(session.name).token_count
                assert saved_count in (0, count)
                assert saved_count == count or failure is not None or not is_over
                if saved_count:
                    ids = range(2) if session is first else [1000]
                    _assert_holds(client, session, ids)
            saver.open(after)
            _pass(saver, (after, 0, 14))
            assert saver.wait(after.name, timeout_s=10) is None
            _assert_holds(client, after, range(14))
            for session in (first, second, after):
                client.sessions.open(session.name).delete()
            if is_over:
                break
    assert 100 < at < left[-1]


def test_rows_of_another_shape_are_a_gap(client: Client, create: Create) -> None:
    """Rows that cannot be stored cost the save, never the pass, and their room goes to the next one."""
    session, next_session = create("one"), create("next")
    with Saver(client, _OWN, _LAYOUT, staging_bytes=2 * _TOKEN_BYTES) as saver:
        saver.open(session)
        saver.open(next_session)
        with saver.passing([Slice(session.name, 0, 2)], [0, 1]):
            saver.put(*_KV.stream, _rows(_KV, [0, 1])[:, :-1])
        _pass(saver, (next_session, 0, 2))
        failure = saver.wait(session.name)
        assert saver.wait(next_session.name) is None

    assert isinstance(failure, ShapeMismatch)
    assert client.sessions.get(session.name).token_count == 0


def test_what_others_wrote_meanwhile_is_not_continued(client: Client, session: SessionInfo) -> None:
    """A session of the same length with other tokens is another generation.

    Rows of ours do not follow those.
    """
    row = {TOKENS: np.array([7], "<i4"), **{spec.stream: _rows(spec, [7]).numpy() for spec in _STATE}}
    with Saver(client, _OWN, _LAYOUT) as saver:
        first = client.sessions.open(session, _OWN).append(row)
        saver.open(first)
        client.sessions.open(client.sessions.open(first.name).keep_first(0), _OWN).append(row)
        _pass(saver, (session, 1, 3))
        failure = saver.wait(session.name)

    assert isinstance(failure, GenerationMismatch)
    assert saver.shed_token_counts == {"GENERATION_MISMATCH": 2}
    _assert_holds(client, session, [7])


def _with(client: Client, session: SessionInfo, ids: Sequence[int]) -> SessionInfo:
    """The session, once it holds these tokens."""
    rows = {spec.stream: _rows(spec, ids).numpy() for spec in _STATE}
    return client.sessions.open(session, _OWN).append({TOKENS: np.array(ids, "<i4"), **rows})


def _pass_of(saver: Saver, session: SessionInfo, begin: int, ids: Sequence[int]) -> None:
    """A pass over tokens of one session, between two that are nobody's."""
    slices = [Slice("", 0, 1), Slice(session.name, begin, len(ids)), Slice("", 0, 1)]
    with saver.passing(slices, [7, *ids, 7]):
        for spec in _STATE:
            saver.put(*spec.stream, _rows(spec, [7, *ids, 7]))


def test_tokens_that_a_session_has_are_not_saved_again(client: Client, session: SessionInfo) -> None:
    """Computed once more, they leave it as it is; those behind its end are its next ones."""
    has = _with(client, session, range(10))
    with Saver(client, _OWN, _LAYOUT) as saver:
        for ends in ([8], [7, 10]):
            saver.open(has, ahead=range(4, 10))
            for begin, end in pairwise([4, *ends]):
                _pass_of(saver, has, begin, range(begin, end))
            assert saver.wait(has.name) is None
            assert client.sessions.get(has.name).generation == has.generation
        saver.open(has, ahead=range(4, 10))
        _pass_of(saver, has, 4, range(4, 13))
        _pass_of(saver, has, 13, [13])
        assert saver.wait(has.name) is None
        assert saver.saved_token_count == 4
    _assert_holds(client, session, range(14))


@pytest.mark.parametrize(("unit_tokens", "saved_count"), [(1, 3), (4, 4), (8, 8)])
def test_a_session_is_cut_where_a_token_differs(
    client: Client, session: SessionInfo, unit_tokens: int, saved_count: int
) -> None:
    """It stays whole until then, and is cut at the begin of the unit that has that token."""
    has = _with(client, session, range(20))
    ids = [*range(8, 13), 99, 14, 15]
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(has, ahead=range(8, 20), unit_tokens=unit_tokens)
        _pass_of(saver, has, 8, ids)
        assert saver.wait(has.name) is None
        assert saver.saved_token_count == saved_count
        _assert_holds(client, session, [*range(8), *ids])
        # Behind the cut nothing is compared with what was there.
        again = client.sessions.get(session.name)
        saver.open(again, ahead=[15], unit_tokens=1)
        _pass_of(saver, again, 15, [15, 16])
        assert saver.wait(has.name) is None
    _assert_holds(client, session, [*range(8), *ids, 16])


def test_a_unit_of_which_a_session_has_a_part_is_saved_whole(client: Client, session: SessionInfo) -> None:
    """Its end within a unit: the unit's rows come together, and what it has of them is cut off."""
    has = _with(client, session, range(11))
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(has, ahead=range(8, 11), unit_tokens=4)
        _pass_of(saver, has, 8, range(8, 16))
        assert saver.wait(has.name) is None
        assert saver.saved_token_count == 8
    _assert_holds(client, session, range(16))


def test_a_session_that_others_changed_is_not_cut(client: Client, session: SessionInfo) -> None:
    """Before the first row that differs it is what they made of it, and stays so."""
    has = _with(client, session, range(10))
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(has, ahead=range(4, 10))
        _pass_of(saver, has, 4, [4, 5])
        _with(client, client.sessions.get(session.name), [10, 11])
        _pass_of(saver, has, 6, [99])
        failure = saver.wait(has.name)
    assert isinstance(failure, GenerationMismatch)
    assert saver.shed_token_counts == {"GENERATION_MISMATCH": 1}
    _assert_holds(client, session, range(12))


def test_a_reservation_that_ended_is_opened_again(client: Client, session: SessionInfo) -> None:
    """An idle session's room runs out of time; its next rows are written where nobody else came."""
    with Saver(client, _OWN, _LAYOUT) as saver:
        saver.open(session)
        _pass(saver, (session, 0, 5))
        saver.flush(session.name)
        saver._board.sessions[session.name].lane._writer._hold.deadline_ns = 0  # type: ignore[union-attr]
        _pass(saver, (session, 5, 9))
        failure = saver.wait(session.name)

    assert failure is None
    _assert_holds(client, session, range(9))


def test_a_full_arena_sheds_until_there_is_room(server: ServerProcess, create: Create) -> None:
    """Room ahead is a wish.

    Where there is little, rows get what they need, and where there is none they are shed.
    """
    session, big, more = create("one"), create("big"), create("more")
    with ctxcache.connect(server.target, access="local") as client, Saver(client, _OWN, _LAYOUT) as saver:
        segment_tokens, slot_bytes = 64, 4 << 12
        half = (server.ready["arena"]["size_bytes"] // 2 // slot_bytes) * segment_tokens
        saver.open(session)
        with client.sessions.open(big, _OWN).writer(half - 2 * segment_tokens):
            _pass(saver, (session, 0, 64))
            fitting = saver.flush(session.name)
            with client.sessions.open(more, _OWN).writer(segment_tokens):
                _pass(saver, (session, 64, 128))
                failure = saver.wait(session.name)
        saver.open(client.sessions.get(session.name))
        _pass(saver, (session, 64, 70))
        again = saver.wait(session.name)

        assert fitting is None
        assert isinstance(failure, TooManyRequests)
        assert saver.shed_token_counts == {"TOO_MANY_REQUESTS": 64}
        assert again is None
        _assert_holds(client, session, range(70))


def test_a_paused_session_does_not_keep_staging_from_others(client: Client, create: Create) -> None:
    """Few old rows of one session are committed early where another needs the room."""
    paused, busy = create("paused"), create("busy")
    with Saver(client, _OWN, _LAYOUT, staging_bytes=128 * _TOKEN_BYTES, thread_count=1) as saver:
        saver.open(paused)
        saver.open(busy)
        _pass(saver, (paused, 0, 3))
        for begin in range(0, 640, 32):
            _pass(saver, (busy, begin, begin + 32))
            # The one thread has come to whoever was due before.
            saver.flush(busy.name)
        failures = [saver.wait(paused.name), saver.wait(busy.name)]

    assert failures == [None, None]
    _assert_holds(client, paused, range(3))
    _assert_holds(client, busy, range(640))


class _LateCopies:
    """Copies that are carried out when they are let, as a device would: not before it has come to them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._lock = threading.Lock()
        self.begun_count = self.done_count = 0
        self.asked = threading.Event()
        """Somebody wanted rows whose copy has not ended."""

    def copy(self, target: Tensor, rows: Tensor) -> None:
        target.fill_(torch.nan)
        self._waiting.append((target, rows.clone()))
        self.begun_count += 1

    def mark(self) -> Mark:
        return _LateMark(self, self.begun_count)

    def let(self) -> None:
        with self._lock:
            for target, rows in self._waiting:
                target.copy_(rows)
            self._waiting.clear()
            self.done_count = self.begun_count


class _LateMark:
    def __init__(self, copies: _LateCopies, count: int) -> None:
        self._copies, self._count = copies, count

    def is_done(self) -> bool:
        is_done = self._copies.done_count >= self._count
        if not is_done:
            self._copies.asked.set()
        return is_done


def test_rows_are_read_and_their_room_reused_behind_the_copy(client: Client, session: SessionInfo) -> None:
    """Neither does a thread read rows that are not there yet, nor does another pass get their room."""
    copies = _LateCopies()
    with Saver(client, _OWN, _LAYOUT, copies=copies, staging_bytes=128 * _TOKEN_BYTES) as saver:
        saver.open(session)
        _pass(saver, (session, 0, 100))
        assert copies.asked.wait(timeout=30)
        _pass(saver, (session, 100, 130))
        copies.let()
        failure = saver.wait(session.name)

    assert isinstance(failure, TooManyRequests)
    _assert_holds(client, session, range(100))


def test_a_failed_passes_room_waits_for_its_copies(client: Client, create: Create) -> None:
    """The failed pass's rows are not needed any more, and the device still writes them.

    So the next pass gets other room.
    """
    failed, early, late = create("failed"), create("early"), create("late")
    copies = _LateCopies()
    with Saver(client, _OWN, _LAYOUT, copies=copies, staging_bytes=2 * _TOKEN_BYTES) as saver:
        for session in (failed, early, late):
            saver.open(session)
        with saver.passing([Slice(failed.name, 0, 2)], [0, 1]):
            saver.put(*_KV.stream, _rows(_KV, [0, 1]))
        _pass(saver, (early, 0, 2))
        copies.let()
        _pass(saver, (late, 0, 2))
        copies.let()
        failures = [saver.wait(session.name) for session in (failed, early, late)]

    assert [failure and failure.reason for failure in failures] == [
        "INCOMPLETE_APPEND",
        "TOO_MANY_REQUESTS",
        None,
    ]
    _assert_holds(client, late, range(2))


class _FailingCopies(HostCopies):
    """A device that fails, at a copy or at the mark behind it."""

    def __init__(self, *, is_failing_at_once: bool) -> None:
        self._is_failing_at_once = is_failing_at_once

    def copy(self, target: Tensor, rows: Tensor) -> None:
        if self._is_failing_at_once:
            raise RuntimeError("an illegal memory access was encountered")
        super().copy(target, rows)

    def mark(self) -> Mark:
        return _FailingMark()


class _FailingMark:
    def is_done(self) -> bool:
        raise DeviceFailed(problem="an illegal memory access was encountered")


@pytest.mark.parametrize("is_failing_at_once", [True, False])
def test_a_failed_device_is_a_gap(client: Client, session: SessionInfo, *, is_failing_at_once: bool) -> None:
    """The pass goes on, nothing of it becomes visible, and nobody waits for a copy that never ends."""
    copies = _FailingCopies(is_failing_at_once=is_failing_at_once)
    with Saver(client, _OWN, _LAYOUT, copies=copies) as saver:
        saver.open(session)
        _pass(saver, (session, 0, 64))
        failure = saver.wait(session.name)

    assert isinstance(failure, DeviceFailed)
    assert saver.shed_token_counts == {"DEVICE_FAILED": 64}
    assert client.sessions.get(session.name).token_count == 0


def test_a_killed_store_leaves_whole_tokens(tmp_path: Path, session_id: str) -> None:
    """Killed between two saves.

    Shed rows are counted, and the restarted store has a prefix, bit for bit.
    """
    with ServerProcess(tmp_path / "data") as server:
        with ctxcache.connect(server.target, timeout_s=5) as client, Saver(client, _OWN, _LAYOUT) as saver:
            layout = [spec.stream for spec in _STATE]
            client.models.register(_SPEC)
            sessions = [
                client.sessions.create(_OWN, id=f"{session_id}-{i}", layout=layout).info for i in range(3)
            ]
            for session in sessions:
                saver.open(session)
            _pass(saver, *((session, 0, 64) for session in sessions))
            saver.finish(sessions[0].name, durability=Durability.DISK)
            assert saver.wait(sessions[0].name) is None
            _wait_until_saved(saver, 192)
            server.kill9()
            _pass(saver, *((session, 64, 128) for session in sessions[1:]))
            failures = [saver.wait(session.name) for session in sessions[1:]]
            shed: Mapping[str, int] = saver.shed_token_counts
        server.start()
        with ctxcache.connect(server.target) as client:
            _assert_holds(client, sessions[0], range(64))
            counts = [client.sessions.get(session.name).token_count for session in sessions[1:]]

    assert all(isinstance(failure, CacheError) for failure in failures)
    assert sum(shed.values()) == 128
    assert all(count in (0, 64) for count in counts)
