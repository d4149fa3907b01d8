"""A server's life with its clients, and the promises that hold whatever fails on the way.

Every call has a deadline. Acknowledged tokens are a bound from below, tokens asked for one from above. Worst
case: a call that is not answered, which is a problem like a wrong byte.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import CacheError, CapacityExceeded, SessionNotFound, TierFailure
from ctxcache.format.streams import TOKENS, Stream
from tests.cli.stored import HIDDEN, ROW_BYTES, model_spec
from tests.faults.rows import first_difference, rows_of

DEADLINE_S = 15.0
SHORT_LIFE_S = 0.4
REFUSALS = (TierFailure, CapacityExceeded)
"""The errors by which a client may see a fault of a system call: a path and a reason each."""
STREAMS = {TOKENS: 4, HIDDEN: ROW_BYTES}
OWN = CallerModel(model_spec())
T = TypeVar("T")


@dataclass(slots=True)
class Known:
    """The states that a session may have after a restart: between `least` and `most` tokens, or gone."""

    owner: int
    least: int = 0
    most: int = 0
    may_be_gone: bool = True
    must_be_gone: bool = False


class Lifecycle:
    """One client's view. `problem` is told of every broken promise; `refused_count` of faults seen."""

    def __init__(
        self, problem: Callable[[str], None], *, refusals: tuple[type[CacheError], ...] = ()
    ) -> None:
        """`refusals`: what else a call may meet, without a path."""
        self._problem, self._refusals = problem, refusals
        self.sessions: dict[str, Known] = {}
        self.refused_count = 0
        self.acknowledged_count = 0

    def run(self, target: str) -> None:
        """Create, append, flush, demote, read back, truncate, fork, delete, expire."""
        with _client(target) as client:
            self.create(client, "brief", life_s=SHORT_LIFE_S)
            ended_s = time.monotonic() + 2 * SHORT_LIFE_S
            self.create(client, "a")
            self.append(client, "a", 100, is_durable=True)
            self.append(client, "a", 90, is_durable=False)
            self._make_durable("flush a", lambda name: client.sessions.open(name).flush(), "a")
            self.append(client, "a", 30, is_durable=False)
            self._make_durable("demote a", client.admin.demote_session, "a")
            self.read(client, "a")
            self.create(client, "b")
            self.append(client, "b", 130, is_durable=True)
            self.truncate(client, "b", 64)
            self._fork(client, "b", "c")
            self.delete(client, "b")
            self.read(client, "c")
            time.sleep(max(0.0, ended_s - time.monotonic()))
            self.sessions["brief"].must_be_gone = True
            self.check_all(client)

    def verify(self, target: str) -> None:
        """After a restart: everything acknowledged is there, nothing else is, every row is its own."""
        with _client(target) as client:
            self.check_all(client)

    def check_all(self, client: Client) -> None:
        """Every session is within its bounds and its rows are its own."""
        for name in self.sessions:
            self.read(client, name)

    def append(self, client: Client, name: str, count: int, *, is_durable: bool) -> None:
        """Append tokens; acknowledged durable ones are a bound from below."""
        known = self.sessions[name]
        before = self.try_("get", lambda: client.sessions.get(f"sessions/{name}"), known)
        if before is None:
            return
        begin = before.token_count
        known.most = max(known.most, begin + count)
        rows = {
            stream: rows_of(known.owner, stream, begin, begin + count, row_bytes)
            for stream, row_bytes in STREAMS.items()
        }
        durability = Durability.DISK if is_durable else Durability.MEMORY
        handle = client.sessions.open(before, OWN)
        done = self.try_(f"append {name}", lambda: handle.append(rows, durability=durability), known)
        if done is not None and is_durable:
            known.least = max(known.least, begin + count)

    def read(self, client: Client, name: str) -> None:
        """Read all rows of a session and compare them."""
        known = self.sessions[name]
        session = self.try_("get", lambda: client.sessions.get(f"sessions/{name}"), known)
        if session is None:
            return
        if known.must_be_gone:
            self._problem(f"{name} was deleted or has expired, and is there")
        if not known.least <= session.token_count <= known.most:
            self._problem(f"{name} has {session.token_count} tokens, not {known.least} to {known.most}")
        if session.token_count:
            self.try_(f"read {name}", lambda: self._compare(client, session, known), known)

    def try_(self, what: str, call: Callable[[], T], known: Known | None = None) -> T | None:
        """Make a call; None when it was refused as it may be."""
        try:
            result = call()
        except REFUSALS as error:
            self.refused_count += 1
            if not {"path", "tier"} & set(error.facts):
                self._problem(f"{what}: {error.reason} names no path: {error}")
            return None
        except SessionNotFound as error:
            if known is None or not (known.may_be_gone or known.must_be_gone):
                self._problem(f"{what}: {error}")
            return None
        except CacheError as error:
            self.refused_count += 1
            if not isinstance(error, self._refusals):
                self._problem(f"{what}: {error.reason}: {error}")
            return None
        self.acknowledged_count += 1
        return result

    def create(self, client: Client, name: str, *, life_s: float | None = None) -> None:
        """Create a session, of the one model; with `life_s` it ends then."""
        known = self.sessions[name] = Known(owner=len(self.sessions) + 1)
        model = self.try_("register", lambda: client.models.register(model_spec()))
        if model is None:
            return
        end = None if life_s is None else datetime.now(UTC) + timedelta(seconds=life_s)
        made = self.try_(
            f"create {name}",
            lambda: client.sessions.create(model, id=name, layout=[HIDDEN], expire_time=end).info,
        )
        known.may_be_gone = made is None or end is not None

    # -- steps -------------------------------------------------------------------------------------

    def _make_durable(self, what: str, call: Callable[[str], SessionInfo], name: str) -> None:
        known = self.sessions[name]
        done = self.try_(what, lambda: call(f"sessions/{name}"), known)
        if done is not None:
            known.least = max(known.least, done.token_count)

    def truncate(self, client: Client, name: str, count: int) -> None:
        """Keep the first tokens."""
        known = self.sessions[name]
        session = self.try_("get", lambda: client.sessions.get(f"sessions/{name}"), known)
        if session is None or session.token_count < count:
            return
        known.least = min(known.least, count)
        done = self.try_(
            f"truncate {name}", lambda: client.sessions.open(f"sessions/{name}").keep_first(count), known
        )
        if done is not None:
            known.most = count

    def _fork(self, client: Client, source: str, name: str) -> None:
        parent = self.sessions[source]
        known = self.sessions[name] = Known(owner=parent.owner, most=parent.most)
        call = lambda: client.sessions.open(f"sessions/{source}").fork(id=name)  # noqa: E731
        done = self.try_(f"fork {source}", call, parent)
        if done is not None:
            known.least, known.may_be_gone = done.info.token_count, False

    def delete(self, client: Client, name: str) -> None:
        """Delete a session: it is gone when that is acknowledged."""
        known = self.sessions[name]
        was_there = not known.may_be_gone
        known.may_be_gone, known.least = True, 0
        call = lambda: client.sessions.open(f"sessions/{name}").delete() or True  # type: ignore[func-returns-value]  # noqa: E731
        if self.try_(f"delete {name}", call, known) and was_there:
            known.must_be_gone = True

    def _compare(self, client: Client, session: SessionInfo, known: Known) -> bool:
        with client.sessions.open(session, OWN).read() as rows:
            for stream in STREAMS:
                self._compare_stream(
                    np.concatenate([np.asarray(p) for p in rows.pieces(stream)]), known, stream
                )
        return True

    def _compare_stream(
        self, found: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", known: Known, stream: Stream
    ) -> None:
        wrong = first_difference(found, known.owner, stream, 0)
        if wrong is not None:
            self._problem(f"row {wrong} of owner {known.owner}, {stream}, is not its own")


def _client(target: str) -> Client:
    return ctxcache.connect(target, access="remote", timeout_s=DEADLINE_S)
