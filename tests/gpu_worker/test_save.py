"""Saving in the background: in order, bounded, and never behind a gap."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from server_process import ServerProcess

from ctxcache.client import Client
from ctxcache.errors import DeadlineExceeded, SessionNotFound, TooManyRequests
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1.session_pb2 import DURABILITY_DISK, Session
from gpu_worker.collect import ByteRows, token_ids_of
from gpu_worker.save import Saver

_ROW_BYTES = 64
_KV = Stream(0, StateKind.KV)
_SPEC = ModelSpec(
    model_id="save",
    architecture="Test",
    revision="",
    weights_digest="",
    tokenizer_digest="",
    dtype=DType.FLOAT32,
    layer_count=1,
    hidden_size=8,
    kv_head_count=1,
    head_size=8,
    rope="",
    norm="",
    is_relocatable=True,
    streams=(StreamSpec(_KV, _ROW_BYTES, DType.FLOAT32),),
)


@pytest.fixture
def session(client: Client, session_id: str) -> Session:
    """An empty session of a model with one layer."""
    return client.create_session(client.register_model(_SPEC).name, session_id=session_id, layout=[_KV])


@contextmanager
def _stopped(server: ServerProcess) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def _rows(begin: int, end: int) -> ByteRows:
    ids = np.arange(begin, end, dtype="<i4")
    state = np.repeat(ids.astype(np.uint8)[:, None], _ROW_BYTES, axis=1)
    return {TOKENS: ids.view(np.uint8).reshape(-1, 4), _KV: state}


def _saved_ids(client: Client, session: Session) -> list[int]:
    with client.read(session.name) as rows:
        return token_ids_of({TOKENS: rows.array(TOKENS)})


def test_saves_follow_one_another(client: Client, session: Session) -> None:
    """What was handed over in pieces is one session, durable when the last piece asked for it."""
    with Saver(client) as saver:
        accepted = [
            saver.submit(session, _rows(0, 5)),
            saver.submit(session, _rows(5, 70)),
            saver.submit(session, _rows(70, 75), durability=DURABILITY_DISK),
        ]
        failure = saver.wait(session.name)

    assert accepted == [True, True, True]
    assert failure is None
    assert _saved_ids(client, session) == list(range(75))
    assert client.get_session(session.name).durable_token_count == 75


def test_a_full_queue_sheds_and_counts(server: ServerProcess, client: Client, session: Session) -> None:
    """What a slow store cannot take is shed at once; so is what follows, because of the gap."""
    with Saver(client, queue_bytes=10 * (_ROW_BYTES + 4)) as saver:
        with _stopped(server):
            accepted = [saver.submit(session, _rows(begin, begin + 6)) for begin in (0, 6, 12)]
            shed_count = saver.shed_token_count
        failure = saver.wait(session.name)

    assert accepted == [True, False, False]
    assert shed_count == 12
    assert isinstance(failure, TooManyRequests)


def test_after_a_look_at_the_session_saves_go_on(
    server: ServerProcess, client: Client, session: Session
) -> None:
    """Once `wait` has told of the loss, the session takes rows again from where it ends."""
    with Saver(client, queue_bytes=10 * (_ROW_BYTES + 4)) as saver:
        with _stopped(server):
            saver.submit(session, _rows(0, 6))
            saver.submit(session, _rows(6, 12))
        saver.wait(session.name)
        end = client.get_session(session.name)
        accepted = saver.submit(end, _rows(end.token_count, end.token_count + 4))
        failure = saver.wait(session.name)

    assert accepted
    assert failure is None
    assert _saved_ids(client, session) == list(range(end.token_count + 4))


def test_a_failed_save_stops_only_its_session(client: Client, session: Session, session_id: str) -> None:
    """Later saves of a session that is gone are shed and counted; another session's are not."""
    other = client.create_session(session.model, session_id=f"{session_id}-other", layout=[_KV])
    client.delete_session(session.name)

    with Saver(client) as saver:
        saver.submit(session, _rows(0, 3))
        saver.submit(session, _rows(3, 5))
        saver.submit(other, _rows(0, 7))
        failure = saver.wait(session.name)
        other_failure = saver.wait(other.name)

    assert isinstance(failure, SessionNotFound)
    assert other_failure is None
    assert saver.shed_token_count == 5
    assert client.get_session(other.name).token_count == 7


def test_waiting_has_an_end(server: ServerProcess, client: Client, session: Session) -> None:
    """A store that does not answer costs the waiter its deadline, and the save is not lost by that."""
    with Saver(client) as saver:
        with _stopped(server):
            saver.submit(session, _rows(0, 3))
            with pytest.raises(DeadlineExceeded):
                saver.wait(session.name, timeout_s=0.05)
        failure = saver.wait(session.name)

    assert failure is None
    assert client.get_session(session.name).token_count == 3


def test_closing_saves_what_is_queued(client: Client, session: Session) -> None:
    """Rows handed over before close are saved; rows after it are shed."""
    saver = Saver(client)
    saver.submit(session, _rows(0, 9))

    saver.close()

    assert client.get_session(session.name).token_count == 9
    assert not saver.submit(session, _rows(9, 10))
    assert saver.shed_token_count == 1


def test_a_session_never_saved_is_not_waited_for(client: Client) -> None:
    """There is nothing to wait for, and nothing went wrong."""
    with Saver(client) as saver:
        assert saver.wait("sessions/never") is None
