"""A client of the history harness: a process that works on sessions others work on too, and logs every call.

Each operation is a line of JSON before it is asked for and one when it was answered, with CLOCK_MONOTONIC,
which all processes share, in a file that is written before the next thing happens. Rows say of which session,
position and writer they are, in every word. Knows no checker. Worst case: it is killed, and its last line has
no answer.
"""

import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.rows import SessionRows
from ctxcache.client.types import Durability, SessionInfo, seconds
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, DeadlineExceeded, Draining, SessionNotFound, TierFailure, Unavailable
from ctxcache.format.streams import TOKENS, Stream
from lab.routes import Route, route_options
from tests.faults.ledger import Shape
from tests.faults.rows import _mix

SHAPE = Shape(2, 64)
MODEL = SHAPE.model
OWN = CallerModel(MODEL)
APPENDS = (1, 3, 17, 63, 64, 65, 100)
MOST_TOKENS = 300
TIMEOUT_S = 10.0
RETURN_TIMEOUT_S = 60.0
"""How long a server that is gone is waited for."""
WRITER_BITS = 20
"""A tag is a writer's number and how many tokens it had made before."""
_UNKNOWN = (Unavailable, DeadlineExceeded, TierFailure)
Words = npt.NDArray[np.uint64]


def words_of(lineage: Words, tags: Words, positions: Words, layer: int) -> Words:
    """Rows that say whose they are: [n, words]."""
    width = SHAPE.row_bytes // 8
    found = np.empty((len(tags), width), np.uint64)
    found[:, 0] = tags | positions << np.uint64(32)
    found[:, 1] = lineage | np.uint64(layer) << np.uint64(32)
    at = np.arange(2, width, dtype=np.uint64)[None, :]
    found[:, 2:] = _mix(found[:, :1] ^ _mix(found[:, 1:2] + at))
    return found


def lineage_of(name: str) -> int:
    """The number that a session name has in rows."""
    return zlib.crc32(name.encode())


def rows_to_append(
    name: str, first_tag: int, position: int, count: int
) -> dict[Stream, npt.NDArray[np.uint8]]:
    """Rows of every stream."""
    tags = np.arange(first_tag, first_tag + count, dtype=np.uint64)
    positions = np.arange(position, position + count, dtype=np.uint64)
    lineage = np.full(count, lineage_of(name), np.uint64)
    rows = {TOKENS: tags.astype("<i4").view(np.uint8).reshape(count, 4)}
    for stream in SHAPE.streams:
        rows[stream] = words_of(lineage, tags, positions, stream.layer).view(np.uint8)
    return rows


def look_into(rows: SessionRows) -> dict[str, Any]:
    """The facts that rows carry: runs of `(tag, count, lineage, position)`, or what is wrong with them."""
    tags = rows.array(TOKENS).view("<i4").ravel().astype(np.uint64)
    whole: Words | None = None
    for stream in SHAPE.streams:
        words = rows.array(stream).view(np.uint64)
        found = words_of(
            words[:, 1] & np.uint64(0xFFFFFFFF), tags, words[:, 0] >> np.uint64(32), stream.layer
        )
        wrong = np.flatnonzero((found != words).any(axis=1))
        if len(wrong):
            return {"damage": f"{stream} of token {wrong[0]} of {len(tags)} is nobody's"}
        if whole is not None and (words[:, 0] != whole[:, 0]).any():
            return {"damage": f"{stream} has rows of other tokens than the stream before it"}
        whole = words
    if whole is None or not len(tags):
        return {"runs": []}
    lineages, positions = whole[:, 1] & np.uint64(0xFFFFFFFF), whole[:, 0] >> np.uint64(32)
    steps = np.flatnonzero(
        (np.diff(tags) != 1) | (np.diff(positions) != 1) | (np.diff(lineages.astype(np.int64)) != 0)
    )
    begins = [0, *(int(i) + 1 for i in steps)]
    ends = [*begins[1:], len(tags)]
    return {
        "runs": [
            [int(tags[b]), e - b, int(lineages[b]), int(positions[b])]
            for b, e in zip(begins, ends, strict=True)
        ]
    }


class Log:
    """Lines of what was asked and answered, each on its way to the file before anything else happens."""

    def __init__(self, path: Path, writer: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._writer, self._count = writer, 0

    @contextmanager
    def op(self, kind: str, name: str, **facts: object) -> Iterator[dict[str, Any]]:
        """Log a call and its answer, which the body puts into what it is given.

        Errors are answers and are raised.
        """
        self._count += 1
        answer: dict[str, Any] = {}
        self._write({"kind": kind, "name": name, "writer": self._writer, **facts, "ns": time.monotonic_ns()})
        try:
            yield answer
        except _UNKNOWN as error:
            self._write({"ns": time.monotonic_ns(), "unknown": type(error).__name__})
            raise
        except CacheError as error:
            answer = {"error": type(error).__name__, "says": str(error), **_facts(error)}
            self._write({"ns": time.monotonic_ns(), **answer})
            raise
        self._write({"ns": time.monotonic_ns(), **answer})

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps({"op": self._count, **line}).encode() + b"\n")


def _facts(error: CacheError) -> dict[str, int]:
    return {
        name: int(fact)
        for name, fact in error.facts.items()
        if name in ("token_count", "actual") and str(fact).isdigit()
    }


def view_of(session: SessionInfo) -> dict[str, Any]:
    """The facts of a session in an answer."""
    return {"uid": session.uid, "generation": session.generation, "count": session.token_count}


class Worker:
    """Draws operations, and does them until there were enough."""

    def __init__(self, target: str, access: Route, log: Log, writer: int, seed: int) -> None:
        self._target, self._access, self._log = target, access, log
        self._random = random.Random(seed)
        self._next_tag = (writer << WRITER_BITS) + 1
        self._names: Sequence[str] = ()
        self._acts: dict[Callable[[Client, str], object], int] = {
            self._append: 8,
            self._write_in_parts: 3,
            self._abandon: 1,
            self._keep_first: 3,
            self._keep_recent: 2,
            self._fork: 2,
            self._fork_and_write_both: 3,
            self._delete: 2,
            self._update: 1,
            self._flush: 2,
            self._demote: 2,
            self._read: 7,
            self._get: 2,
            self._look_up: 2,
        }

    def play(self, names: Sequence[str], operation_count: int) -> None:
        """Do that many things to the sessions of these names, over as many connections as it takes."""
        self._names = names
        left, deadline_s = operation_count, time.monotonic() + RETURN_TIMEOUT_S
        while left > 0 and time.monotonic() < deadline_s:
            try:
                with ctxcache.connect(
                    self._target, **route_options(self._access), timeout_s=TIMEOUT_S
                ) as client:
                    client.admin.stats()
                    deadline_s = time.monotonic() + RETURN_TIMEOUT_S
                    while left > 0:
                        left -= 1
                        self._turn(client)
            except (*_UNKNOWN, Draining):
                time.sleep(0.02)

    def _turn(self, client: Client) -> None:
        name = self._random.choice(self._names)
        (act,) = self._random.choices([*self._acts], [*self._acts.values()])
        try:
            act(client, name)
        except SessionNotFound:
            if self._random.random() < 0.7:
                self._create(client, name)
        except (*_UNKNOWN, Draining):
            raise
        except CacheError:
            return

    # -- acts ------------------------------------------------------------------------------------------

    def _create(self, client: Client, name: str) -> None:
        try:
            with self._log.op("create", name) as answer:
                session = client.sessions.create(
                    OWN,
                    id=name.partition("/")[2],
                    layout=SHAPE.streams,
                    expire_time=_moment(time.time_ns() + 3600 * 10**9),
                ).info
                answer.update(view_of(session))
        except (*_UNKNOWN, Draining):
            raise
        except CacheError:
            return

    def _get(self, client: Client, name: str) -> SessionInfo:
        with self._log.op("get", name) as answer:
            session = client.sessions.get(name)
            answer.update(view_of(session))
        return session

    def _look_up(self, client: Client, name: str) -> None:
        with self._log.op("lookup", name) as answer:
            (found,) = client.sessions.lookup([(name, MODEL.fingerprint())])
            if found.reason == "SESSION_NOT_FOUND":
                answer.update({"error": "SessionNotFound", "says": found.reason})
            else:
                answer.update({"generation": found.generation, "count": found.token_count})

    def _append(self, client: Client, name: str) -> None:
        session = self._get(client, name)
        count, first = self._tags(session)
        is_durable, generation = self._is_heads(), session.generation if self._is_heads() else None
        rows = rows_to_append(name, first, session.token_count, count)
        with self._log.op(
            "append",
            name,
            begin=session.token_count,
            first=first,
            count=count,
            is_durable=is_durable,
            matches=generation,
        ) as answer:
            answer.update(
                view_of(
                    client.sessions.open(session, OWN).append(
                        rows,
                        durability=Durability.DISK if is_durable else Durability.MEMORY,
                        if_generation_match=generation,
                    )
                )
            )

    def _write_in_parts(self, client: Client, name: str) -> None:
        session = self._get(client, name)
        count, first = self._tags(session)
        middle = self._random.randint(1, count)
        with client.sessions.open(session, OWN).writer(count) as writer:
            for begin, end in ((0, middle), (middle, count)):
                if begin == end:
                    continue
                at = session.token_count + begin
                for stream, rows in rows_to_append(name, first + begin, at, end - begin).items():
                    writer.write(stream, begin, rows)
                is_durable = self._is_heads()
                with self._log.op(
                    "append",
                    name,
                    begin=at,
                    first=first + begin,
                    count=end - begin,
                    is_durable=is_durable,
                    matches=None,
                ) as answer:
                    answer.update(
                        view_of(
                            writer.commit(
                                session.token_count + end,
                                Durability.DISK if is_durable else Durability.MEMORY,
                                keep_open=end < count,
                            )
                        )
                    )

    def _abandon(self, client: Client, name: str) -> None:
        session = self._get(client, name)
        count, first = self._tags(session)
        with client.sessions.open(session, OWN).writer(count) as writer:
            for stream, rows in rows_to_append(name, first, session.token_count, count).items():
                writer.write(stream, 0, rows)

    def _keep_first(self, client: Client, name: str) -> None:
        session = self._get(client, name)
        count = self._random.randint(session.token_count // 2, session.token_count)
        with self._log.op("keep_first", name, count=count) as answer:
            answer.update(view_of(client.sessions.open(name).keep_first(count)))

    def _keep_recent(self, client: Client, name: str) -> None:
        session = self._get(client, name)
        count, sinks = self._random.randint(session.token_count // 2, session.token_count), 4
        with self._log.op("keep_recent", name, count=count, sinks=sinks) as answer:
            answer.update(view_of(client.sessions.open(name).keep_recent(count, sink_token_count=sinks)))

    def _fork_and_write_both(self, client: Client, name: str) -> None:
        """Have room in both at once, behind what they share."""
        source, new_name = self._get(client, name), self._another(name)
        with suppress(SessionNotFound):
            self._delete(client, new_name)
        fork = self._fork_to(client, source, new_name, source.token_count)
        with (
            client.sessions.open(source, OWN).writer(3) as first,
            client.sessions.open(fork, OWN).writer(3) as second,
        ):
            for writer, session in ((first, source), (second, fork)):
                self._fill(writer, session)

    def _fill(self, writer: SessionWriter, session: SessionInfo) -> None:
        first, self._next_tag = self._next_tag, self._next_tag + writer.token_count + 1
        for stream, rows in rows_to_append(
            session.name, first, session.token_count, writer.token_count
        ).items():
            writer.write(stream, 0, rows)
        with self._log.op(
            "append",
            session.name,
            begin=session.token_count,
            first=first,
            count=writer.token_count,
            is_durable=False,
            matches=None,
        ) as answer:
            answer.update(view_of(writer.commit()))

    def _fork(self, client: Client, name: str) -> None:
        source = self._get(client, name)
        count = source.token_count if self._is_heads() else self._random.randint(0, source.token_count)
        self._fork_to(client, source, self._another(name), count)

    def _fork_to(self, client: Client, source: SessionInfo, new_name: str, count: int) -> SessionInfo:
        with self._log.op("fork", source.name, target=new_name, count=count) as answer:
            fork = client.sessions.open(source.name).fork(
                id=new_name.partition("/")[2],
                token_count=count,
                expire_time=_moment(time.time_ns() + 3600 * 10**9),
            )
            answer.update(view_of(fork.info))
        return fork.info

    def _another(self, name: str) -> str:
        return self._random.choice([other for other in self._names if other != name])

    def _delete(self, client: Client, name: str) -> None:
        with self._log.op("delete", name):
            client.sessions.open(name).delete()

    def _update(self, client: Client, name: str) -> None:
        if self._is_heads():
            left_ns = self._random.randint(1000, 1500) * 10**6
            with self._log.op("update", name, ttl_ns=left_ns) as answer:
                answer.update(view_of(client.sessions.open(name).update(ttl=seconds(left_ns / 10**9))))
        else:
            left_ns = self._random.randint(100, 1500) * 10**6
            # Read one after the other: how long that may take is allowed for.
            due_ns, moment = time.monotonic_ns() + left_ns, _moment(time.time_ns() + left_ns)
            with self._log.op("update", name, due_ns=due_ns) as answer:
                answer.update(view_of(client.sessions.open(name).update(expire_time=moment)))

    def _flush(self, client: Client, name: str) -> None:
        with self._log.op("flush", name) as answer:
            answer.update(view_of(client.sessions.open(name).flush()))

    def _demote(self, client: Client, name: str) -> None:
        with self._log.op("flush", name) as answer:
            answer.update(view_of(client.admin.demote_session(name)))

    def _read(self, client: Client, name: str) -> None:
        with self._log.op("read", name) as answer, client.sessions.open(name, OWN).read() as rows:
            answer.update(view_of(rows.session) | look_into(rows))

    def look_at_all(self, names: Sequence[str]) -> None:
        """Read every session once, whatever is there. Raises Unavailable."""
        with ctxcache.connect(self._target, **route_options(self._access), timeout_s=TIMEOUT_S) as client:
            for name in names:
                try:
                    self._read(client, name)
                except (*_UNKNOWN, Draining):
                    raise
                except CacheError:
                    # An answer like any other: it is in the log, and judged with the history.
                    continue

    def _tags(self, session: SessionInfo) -> tuple[int, int]:
        count = min(self._random.choice(APPENDS), max(1, MOST_TOKENS - session.token_count))
        first, self._next_tag = self._next_tag, self._next_tag + count + 1
        return count, first

    def _is_heads(self) -> bool:
        return self._random.random() < 0.5


def _moment(unix_ns: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=unix_ns // 1000)


def work(orders: Connection, target: str, access: Route, log_path: str, writer: int, seed: int) -> None:
    """Do what is ordered, until nothing is any more: the whole life of a client's process."""
    log = Log(Path(log_path), writer)
    worker = Worker(target, access, log, writer, seed)
    try:
        while (order := orders.recv()) is not None:
            try:
                worker.play(*order)
            except Exception as error:  # noqa: BLE001  whatever it is, it is for the harness to tell
                orders.send(f"client {writer} ended by {type(error).__name__}: {error}")
            else:
                orders.send("")
    except (EOFError, KeyboardInterrupt):
        sys.exit(1)
