"""Aborted saves: thousands of multi-chunk saves that end before their commit; nothing of them may be visible.

Each client has sessions of its own with some durable tokens, and ends saves by cancelling, by a deadline, by
falling silent, with a broken chunk, by giving up a reservation, or by dying. Worst case: an abort that
the server notices late, which the next save of that session meets as WRITE_IN_PROGRESS.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import grpc

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.convert import stream_to_wire
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import CacheError, WriteInProgress
from ctxcache.format.checksums import wire_checksum
from ctxcache.v1.session_pb2 import AppendHeader, AppendSessionRequest, AppendSessionResponse, Chunk
from ctxcache.wire.status import from_rpc_error
from tests.faults.harness import Report
from tests.faults.ledger import Ledger, Shape
from tests.server_process import ServerProcess

Call: TypeAlias = "grpc.Future[AppendSessionResponse]"
SHAPE = Shape(3, 160)
OWN = CallerModel(SHAPE.model)
SESSIONS_PER_CLIENT = 8
KEPT_TOKENS = 70
SAVED_TOKENS = 150
CLIENTS = 2
SETTLE_TIMEOUT_S = 20.0
PARTS = 4


class Aborter(threading.Thread):
    """Begins saves and never commits one."""

    def __init__(
        self, target: str, ledger: Ledger, sessions: Sequence[SessionInfo], count: int, *, seed: int
    ) -> None:
        super().__init__(daemon=True)
        self._target, self._ledger, self._sessions, self._count = target, ledger, sessions, count
        self._random = random.Random(seed)
        rows = ledger.rows(ledger.take_tags(SAVED_TOKENS))
        self._rows = rows
        self._chunks = [
            Chunk(
                stream=stream_to_wire(stream),
                token_begin=KEPT_TOKENS + begin,
                data=data,
                checksum=wire_checksum(data),
            )
            for stream, of_stream in rows.items()
            for begin in range(0, SAVED_TOKENS, SAVED_TOKENS // PARTS + 1)
            if (data := of_stream[begin : begin + SAVED_TOKENS // PARTS + 1].tobytes())
        ]
        self._ways: list[Callable[[Client, SessionInfo], None]] = [
            self._cancel,
            self._outlive_deadline,
            self._end_early,
            self._break_chunk,
            self._give_up,
        ]

    def run(self) -> None:
        """Abort as many saves as asked for."""
        try:
            with ctxcache.connect(self._target, access="local") as client:
                for i in range(self._count):
                    way = self._ways[i % len(self._ways)]
                    self._abort(client, way, self._random.choice(self._sessions))
        except Exception as error:  # noqa: BLE001  a thread's end that nobody would see
            self._ledger.find(f"a client that aborts ended by {type(error).__name__}: {error}")

    def _abort(
        self, client: Client, way: Callable[[Client, SessionInfo], None], session: SessionInfo
    ) -> None:
        try:
            way(client, session)
        except WriteInProgress:
            self._ledger.count("met_another_abort_count")
            return
        self._ledger.count(f"aborted_by{way.__name__}_count")
        self._ledger.count("aborted_save_count")
        if self._random.random() < 0.1:
            check(client, self._ledger, session)

    def _send(
        self,
        client: Client,
        session: SessionInfo,
        chunks: Sequence[Chunk],
        *,
        timeout_s: float,
        is_held: bool,
    ) -> tuple[Call, threading.Event]:
        sent, done = threading.Event(), threading.Event()

        def messages() -> Iterator[AppendSessionRequest]:
            header = AppendHeader(
                name=session.name, model_fingerprint=session.model_fingerprint, write_offset=KEPT_TOKENS
            )
            yield AppendSessionRequest(header=header)
            for chunk in chunks:
                yield AppendSessionRequest(chunk=chunk)
            sent.set()
            if is_held:
                done.wait(5.0)

        call = client.wire.sessions.AppendSession.future(messages(), timeout=timeout_s)
        # Refused at its header, it asks for no more messages.
        call.add_done_callback(lambda _: sent.set())
        sent.wait()
        return call, done

    def _some(self) -> list[Chunk]:
        return self._chunks[: self._random.randint(1, len(self._chunks))]

    def _cancel(self, client: Client, session: SessionInfo) -> None:
        call, done = self._send(client, session, self._some(), timeout_s=30, is_held=True)
        time.sleep(self._random.uniform(0, 0.002))
        if call.done():
            self._expect_failure(call, session)
        call.cancel()
        done.set()

    def _outlive_deadline(self, client: Client, session: SessionInfo) -> None:
        timeout_s = self._random.uniform(0.002, 0.02)
        call, done = self._send(client, session, self._some(), timeout_s=timeout_s, is_held=True)
        self._expect_failure(call, session)
        done.set()

    def _end_early(self, client: Client, session: SessionInfo) -> None:
        call, _ = self._send(client, session, self._some(), timeout_s=30, is_held=False)
        self._expect_failure(call, session)

    def _break_chunk(self, client: Client, session: SessionInfo) -> None:
        *good, last = self._some()
        broken = Chunk()
        broken.CopyFrom(last)
        broken.checksum ^= 1
        call, _ = self._send(client, session, [*good, broken], timeout_s=30, is_held=False)
        self._expect_failure(call, session)

    def _give_up(self, client: Client, session: SessionInfo) -> None:
        with client.sessions.open(session, OWN).writer(SAVED_TOKENS) as writer:
            for stream, rows in self._rows.items():
                writer.write(stream, 0, rows[: self._random.randint(1, SAVED_TOKENS)])

    def _expect_failure(self, call: Call, session: SessionInfo) -> None:
        error = call.exception()
        if not isinstance(error, grpc.RpcError):
            self._ledger.find(f"{session.name}: a save without a commit was acknowledged")
        elif isinstance(reason := from_rpc_error(error, self._target), WriteInProgress):
            raise reason


def check(client: Client, ledger: Ledger, session: SessionInfo) -> None:
    """See that a session is as it was before any abort."""
    now = client.sessions.get(session.name)
    if (now.token_count, now.generation) != (session.token_count, session.generation):
        ledger.find(
            f"{session.name}: {now.token_count} tokens at generation {now.generation} after aborted saves, "
            f"{session.token_count} at {session.generation} before"
        )


def abort_saves(server: ServerProcess, report: Report, count: int, *, seed: int) -> None:
    """Abort `count` saves on a running server, then see that nothing of them is there and nothing is held."""
    ledger = Ledger(SHAPE)
    with ctxcache.connect(server.target, access="remote") as client:
        model = client.models.register(SHAPE.model)
        sessions = [
            client.sessions.open(
                client.sessions.create(model, id=f"kept{i}", layout=SHAPE.streams).info, model
            ).append(
                ledger.rows(ledger.take_tags(KEPT_TOKENS)),
                durability=Durability.DISK,
            )
            for i in range(SESSIONS_PER_CLIENT * CLIENTS)
        ]
        threads = [
            Aborter(server.target, ledger, sessions[i::CLIENTS], count // CLIENTS, seed=seed + i)
            for i in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not ledger.findings:
            _die_writing(server.target, sessions, ledger)
            _look(client, ledger, sessions)
    report.findings += ledger.findings
    for name, number in ledger.counts.items():
        report.count(name, number)


def _die_writing(target: str, sessions: Sequence[SessionInfo], ledger: Ledger) -> None:
    """A client process that is killed while it holds a reservation with rows in it."""
    script = (
        "import sys, time, numpy as np, ctxcache\n"
        "from tests.faults.aborts import OWN\n"
        "client = ctxcache.connect(sys.argv[1], access='local')\n"
        f"writers = [client.sessions.open(name, OWN).writer({SAVED_TOKENS}) for name in sys.argv[2:]]\n"
        "for writer in writers:\n"
        "    for stream, spec in writer._specs.items():\n"
        f"        writer.write(stream, 0, np.ones(({SAVED_TOKENS}, spec.row_bytes), np.uint8))\n"
        "print('written', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, target, *(session.name for session in sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        client.stdout.readline()
        os.kill(client.pid, signal.SIGKILL)
    ledger.count("aborted_by_kill_count", len(sessions))
    ledger.count("aborted_save_count", len(sessions))


def _look(client: Client, ledger: Ledger, sessions: Sequence[SessionInfo]) -> None:
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while (stats := client.admin.stats()).reservation_count and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if stats.reservation_count:
        ledger.find(f"{stats.reservation_count} reservations are left of aborted saves")
    for session in sessions:
        check(client, ledger, session)
        with client.sessions.open(session.name, OWN).read() as rows:
            tags, problem = ledger.read_tags(rows)
        ledger.find(problem)
        if len(tags) != KEPT_TOKENS:
            ledger.find(f"{session.name}: {len(tags)} tokens are read after aborted saves")
        try:
            client.sessions.open(session.name).keep_first(KEPT_TOKENS)
        except CacheError as error:
            ledger.find(f"{session.name} cannot be changed after aborted saves: {error}")
