"""A worker's behaviour when engines, stores, or the worker itself fail.

Misses with reasons, and nothing written behind.
"""

import asyncio
import errno
import json
import os
import signal
import socket
from asyncio.selector_events import BaseSelectorEventLoop
from pathlib import Path

import grpc
import pytest
from attached import BLOCKS, RESTORE_LIMIT, Later, saved_case, stopped, under_way, until
from paged_engine import BLOCK_TOKENS, PROMPT_TOKENS, running_engine, write_weights
from server_process import ServerProcess
from typer.testing import CliRunner
from worker_process import WorkerProcess, mortal_engine

from ctxcache.errors import DeadlineExceeded, Draining, EngineTakenOver, TooManyRequests, Unavailable
from ctxcache.wire.status import PUSHBACK_KEY, from_rpc_error
from gpu_worker.cli.app import app
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.errors import AttachmentNotFound, BlockInUse, RestoreAlreadyExists
from gpu_worker.sidecar.handles import host
from gpu_worker.v1 import worker_pb2


def test_an_engine_that_is_killed_leaves_nothing(
    worker: WorkerProcess,
    client: WorkerClient,
    store: ServerProcess,
    weights: Path,
    session_id: str,
    tmp_path: Path,
) -> None:
    """Killed in the middle of a restore, its attachment goes, and one of its name is served after it."""
    with saved_case(client, weights, session_id) as case, running_engine("llama") as other:
        hello = other.hello(write_weights("llama", weights), engine="mortal")
        (tmp_path / "hello").write_bytes(hello.SerializeToString())
        with mortal_engine(worker.path, tmp_path / "hello", case.session, PROMPT_TOKENS) as mortal:
            assert mortal.stdin is not None
            assert mortal.stdout is not None
            assert mortal.stdout.readline() == "attached\n"
            with stopped(store):
                mortal.stdin.write("go on\n")
                mortal.stdin.flush()
                until(lambda: under_way(client) == 1)
                mortal.kill()
                mortal.wait()
                until(lambda: [each.engine for each in client.stats().attachments] == ["engine"])

        with client.attach(hello) as attached:
            until(lambda: attached.restore(case.session, BLOCKS, token_end=PROMPT_TOKENS).is_restored)
        until(lambda: case.restore().is_restored)
        assert case.is_as_saved()


def test_a_restore_that_is_late_is_a_miss(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """The result comes by the deadline, whatever the store does, and nothing was or will be written."""
    with saved_case(client, weights, session_id) as case:
        with stopped(store):
            result = case.restore(timeout_s=0.2)

            assert (result.is_restored, result.reason) == (False, "RESTORE_TOO_LATE")
            assert not result.invalid_block_ids
        until(lambda: case.restore().is_restored)
        assert case.is_as_saved()


def test_cancelling_ends_a_restore(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """Its stream ends with a miss, its blocks are free, and cancelling it again does nothing."""
    with saved_case(client, weights, session_id) as case:
        with stopped(store):
            restoring = Later(lambda: case.restore("this"))
            until(lambda: under_way(client) == 1)
            with pytest.raises(RestoreAlreadyExists):
                case.restore("this")
            with pytest.raises(BlockInUse):
                case.restore("that")

            assert case.attached.cancel("this")

            result = restoring.result()
            assert (result.is_restored, result.reason) == (False, "RESTORE_CANCELLED")
            assert not result.invalid_block_ids
            assert not case.attached.cancel("this")
            assert under_way(client) == 0
        assert case.is_untouched()


def test_more_restores_than_there_may_be_are_refused(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """One too many is told when to come again; those under way are none the worse for it."""
    with saved_case(client, weights, session_id) as case:
        count = RESTORE_LIMIT + 1

        def one(index: int) -> worker_pb2.RestoreResult:
            return case.attached.restore(case.session, [index], token_end=BLOCK_TOKENS)

        # The last tests' threads may wait for the store yet.
        until(lambda: case.restore().is_restored)
        with stopped(store):
            restoring = [Later(lambda index=index: one(index)) for index in range(RESTORE_LIMIT)]  # type: ignore[misc]
            until(lambda: under_way(client) == RESTORE_LIMIT)
            request = worker_pb2.RestoreRequest(
                attachment_id=case.attached.attachment_id,
                restore_id="over",
                session=case.session,
                token_end=BLOCK_TOKENS,
                block_ids=[count],
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(client.stub.Restore(request, timeout=10))
        error = refused.value
        assert isinstance(from_rpc_error(error, ""), TooManyRequests)
        assert isinstance(error, grpc.Call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert PUSHBACK_KEY in {key for key, _ in error.trailing_metadata() or ()}
        assert all(each.result().is_restored for each in restoring)


def test_a_second_attach_of_a_name_takes_it_over(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """The first one's restores end, its stream says why, and its id is nobody's."""
    with saved_case(client, weights, session_id) as case, running_engine("llama") as other:
        with stopped(store):
            restoring = Later(lambda: case.restore("this"))
            until(lambda: under_way(client) == 1)
        with client.attach(other.hello(write_weights("llama", weights))) as second:
            assert case.attached.ended.wait(10)
            with pytest.raises(EngineTakenOver):
                case.attached.check()
            with pytest.raises(AttachmentNotFound):
                case.attached.plan(16)
            assert second.plan(16).methods
        restoring.result()


def test_a_store_that_is_killed_is_a_miss_until_it_is_back(
    client: WorkerClient, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """The reason is said, nothing was written, and after a restart what was durable comes back."""
    with saved_case(client, weights, session_id) as case:
        store.kill9()

        result = case.restore()

        assert (result.is_restored, result.reason) == (False, "UNAVAILABLE")
        assert not result.invalid_block_ids
        assert case.is_untouched()
        store.start()
        until(lambda: case.restore().is_restored)
        assert case.is_as_saved()


def test_a_worker_that_is_killed_is_an_error_at_once(
    worker: WorkerProcess, store: ServerProcess, weights: Path, session_id: str
) -> None:
    """The engine hears of it at the restore and at its attachment.

    A new worker at the same path serves it.
    """
    with WorkerClient(worker.path) as client, saved_case(client, weights, session_id) as case:
        with stopped(store):
            restoring = Later(case.restore)
            until(lambda: under_way(client) == 1)

            worker.close()

            with pytest.raises(Unavailable):
                restoring.result()
            assert case.attached.ended.wait(10)
            with pytest.raises(Unavailable):
                case.attached.check()
        assert case.engine.save_area.path.exists()
        worker.start()
        hello = case.engine.hello(write_weights("llama", weights))
        with WorkerClient(worker.path) as again, again.attach(hello) as attached:
            assert attached.restore(case.session, BLOCKS, token_end=PROMPT_TOKENS).is_restored
        assert case.is_as_saved()


def test_stats_are_a_readiness_probe(worker: WorkerProcess, client: WorkerClient) -> None:
    """A worker that answers is ready and says so; where nobody listens it is one error."""
    assert client.stats().device == "cpu"

    answered = CliRunner().invoke(app, ["stats", "--json", "--listen", str(worker.path)])
    refused = CliRunner().invoke(app, ["stats", "--listen", str(worker.path.with_name("nobody"))])

    assert json.loads(answered.stdout)["device"] == "cpu"
    assert isinstance(refused.exception, Unavailable | DeadlineExceeded)


def test_a_worker_that_is_asked_to_end_tells_its_engines(
    worker: WorkerProcess, client: WorkerClient, weights: Path, session_id: str
) -> None:
    """It says that it drains, removes its sockets, and leaves engines' memory to them."""
    with saved_case(client, weights, session_id) as case:
        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0
        assert case.attached.ended.wait(10)
        with pytest.raises(Draining):
            case.attached.check()
        assert not worker.path.exists()
        assert not worker.path.with_name("worker.sock.fds").exists()
        assert case.engine.save_area.path.exists()


async def test_a_shortage_of_descriptors_ends_no_accepting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that could not be accepted for a moment is accepted behind it."""
    accept, failure_count = BaseSelectorEventLoop.sock_accept, 0

    async def short(loop: BaseSelectorEventLoop, listener: socket.socket) -> object:
        nonlocal failure_count
        failure_count += 1
        if failure_count == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accept(loop, listener)

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_accept", short)
    monkeypatch.setattr(host, "ACCEPT_PAUSE_S", 0.0)
    descriptors = host.DescriptorSocket(str(tmp_path / "it.sock"))
    descriptors.open()
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        engine.connect(str(tmp_path / "it.sock"))
        engine.setblocking(False)  # noqa: FBT003  as the library has it
        socket.send_fds(engine, [os.urandom(16)], [reader])
        taken = await asyncio.get_running_loop().sock_recv(engine, 1)
    await descriptors.close()
    os.close(reader)
    os.close(writer)

    assert taken == host.TAKEN
