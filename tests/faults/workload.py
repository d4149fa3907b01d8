"""Clients that do everything to their own sessions until the server is gone, and note what they were told.

Each is a thread with a connection of its own, local or remote, and changes only sessions of its own,
one change at a time; what is under way when the server dies stays in the ledger as under way.
Worst case: an answer that no promise explains, which is a finding.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo, seconds
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    LeaseNotFound,
    ReservationNotFound,
    SessionInUse,
    SessionNotFound,
    TierFailure,
    TooManyRequests,
    Unavailable,
    WriteInProgress,
)
from lab.routes import Route, route_options
from tests.faults.blocks import CONTESTED
from tests.faults.expected import Change, Expected
from tests.faults.foresight import Foresight
from tests.faults.ledger import Ledger

SESSIONS_PER_CLIENT = 5
MOST_TOKENS = 400
APPENDS = (1, 3, 17, 63, 64, 65, 100, 150)
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Answers that are no fault: sessions that are not pinned may be evicted, devices may fail."""

    may_evict: bool = False
    may_fail: bool = False
    copies: int = 1
    """On how many SSD directories everything is to be."""


class Worker(threading.Thread):
    """One client. `sessions` are those it owns."""

    def __init__(
        self,
        target: str,
        access: Route,
        ledger: Ledger,
        sessions: list[Expected],
        terms: Terms,
        *,
        seed: int,
    ) -> None:
        super().__init__(daemon=True)
        self.sessions = sessions
        self._target, self._access, self._ledger = target, access, ledger
        self._random = random.Random(seed)
        self._terms = terms
        self._engine = f"crash-{seed}"
        self._own = CallerModel(ledger.shape.model)
        self._foresight: Foresight
        self._deleted: list[Expected] = []
        self._stopping = threading.Event()
        self._acts: dict[Callable[[Client, Expected], None], int] = {
            self._append: 6,
            self._append_durably: 6,
            self._write_in_parts: 3,
            self._abandon: 2,
            self._keep_first: 2,
            self._keep_recent: 2,
            self._drop: 1,
            self._fork: 2,
            self._replace: 2,
            self._remove: 1,
            self._flush: 2,
            self._demote: 2,
            self._read: 3,
            self._expire: 1,
            self._foretell: 4,
            self._put_block: 4,
            self._load_block: 2,
            self._delete_block: 1,
            self._contest_block: 3,
        }

    def stop(self) -> None:
        """Do nothing more once the answer that is waited for is there."""
        self._stopping.set()

    def run(self) -> None:
        """Work until stopped, or until the server is gone."""
        try:
            with ctxcache.connect(self._target, **route_options(self._access), timeout_s=TIMEOUT_S) as client:
                self._foresight = Foresight(client, self._engine, self._random)
                while not self._stopping.is_set():
                    self._turn(client)
        except (Unavailable, Draining):
            return
        except TierFailure as error:
            if not self._terms.may_fail:
                self._ledger.find(f"a client was told of {error}")
        except Exception as error:  # noqa: BLE001  a thread's end that nobody would see
            if not (self._stopping.is_set() and type(error) is CacheError):
                self._ledger.find(f"a client ended by {type(error).__name__}: {error}")
            # Otherwise the server's end has cancelled what it had not begun.

    def _turn(self, client: Client) -> None:
        self._ledger.began_operation()
        self._ledger.count("operation_count")
        self.sessions[:] = [s for s in self.sessions if not s.is_done]
        if len(self.sessions) < SESSIONS_PER_CLIENT:
            self._create(client)
            return
        session = self._random.choice(self.sessions)
        (act,) = self._random.choices([*self._acts], [*self._acts.values()])
        try:
            act(client, session)
        except (Unavailable, DeadlineExceeded, Draining, TierFailure):
            raise
        except (TooManyRequests, WriteInProgress):
            session.refuse()
        except SessionNotFound:
            self._vanished(session)
        except (CapacityExceeded, ReservationNotFound) as error:
            self._resolve(client, session, error)
        except LeaseNotFound as error:
            # The server has died meanwhile, which the next call is told; otherwise nothing ends a lease
            # so soon.
            client.sessions.get(session.name)
            self._ledger.find(f"{act.__name__} of {session.name}: {error}")
            session.is_done = True
        except CacheError as error:
            if self._stopping.is_set() and type(error) is CacheError:
                raise
            self._ledger.find(f"{act.__name__} of {session.name}: {type(error).__name__}: {error}")
            session.is_done = True

    # -- what an answer means --------------------------------------------------------------------

    def _acknowledged(self, session: Expected, view: SessionInfo) -> None:
        session.settle()
        self._look(session, view)

    def _look(self, session: Expected, view: SessionInfo) -> None:
        if view.token_count != len(session.live):
            self._ledger.find(f"{session.name}: {view.token_count} tokens, {len(session.live)} expected")
            session.is_done = True
            return
        self._ledger.find(session.note(view.uid, view.generation))

    def _vanished(self, session: Expected) -> None:
        is_explained = session.is_gone_allowed(time.time_ns()) or (
            self._terms.may_evict and not session.is_pinned
        )
        if not is_explained:
            self._ledger.find(f"{session.name} is gone, and nothing says why")
        # Its record may still be on its way out.
        session.may_be_absent = session.is_done = True

    def _resolve(self, client: Client, session: Expected, error: CacheError) -> None:
        """After an error that leaves open whether rows were committed in memory: look."""
        if isinstance(error, CapacityExceeded) and not self._terms.may_evict and error.facts["tier"] == "SSD":
            self._ledger.find(f"{session.name}: {error}")
        try:
            view = client.sessions.get(session.name)
        except SessionNotFound:
            self._vanished(session)
            return
        if session.change is not None and view.token_count == len(session.change.live):
            session.settle()
        session.refuse()
        self._look(session, view)

    # -- acts --------------------------------------------------------------------------------------

    def _create(self, client: Client) -> None:
        reused = self._deleted.pop() if self._deleted and self._random.random() < 0.5 else None
        name = reused.name if reused else f"sessions/{self._ledger.new_name()}"
        session = Expected(name, is_pinned=self._random.random() < 0.1)
        session.seen = reused.seen if reused else session.seen
        self._ledger.sessions[name] = session
        self.sessions.append(session)
        view = client.sessions.create(
            self._own,
            id=name.partition("/")[2],
            layout=self._ledger.shape.streams,
            ttl=seconds(3600),
            is_pinned=session.is_pinned,
        ).info
        session.may_be_absent = False
        self._look(session, view)

    def _tags(self, session: Expected) -> tuple[int, ...]:
        room = max(1, MOST_TOKENS - len(session.live))
        return self._ledger.take_tags(min(room, self._random.choice(APPENDS)))

    def _append(self, client: Client, session: Expected) -> None:
        tags = self._tags(session)
        session.begin(Change((*session.live, *tags), cut=tags[-1] + 1))
        view = client.sessions.open(session.name, self._own).append(
            self._ledger.rows(tags), durability=Durability.MEMORY
        )
        self._acknowledged(session, view)

    def _append_durably(self, client: Client, session: Expected) -> None:
        tags = self._tags(session)
        session.begin(Change((*session.live, *tags), cut=tags[-1] + 1))
        view = client.sessions.open(session.name, self._own).append(
            self._ledger.rows(tags), durability=Durability.DISK
        )
        self._acknowledged(session, view)
        session.flushed()
        self._ledger.told_durable.set()
        self._ledger.count("durable_token_count", len(tags))

    def _write_in_parts(self, client: Client, session: Expected) -> None:
        tags = self._tags(session)
        first = self._random.randint(1, len(tags))
        with client.sessions.open(session.name, self._own).writer(len(tags)) as writer:
            for begin, end in ((0, first), (first, len(tags))):
                if begin == end:
                    continue
                for stream, rows in self._ledger.rows(tags[begin:end]).items():
                    writer.write(stream, begin, rows)
                is_durable = self._random.random() < 0.5
                session.begin(Change((*session.live, *tags[begin:end]), cut=tags[end - 1] + 1))
                view = writer.commit(
                    writer.write_offset + end,
                    Durability.DISK if is_durable else Durability.MEMORY,
                    keep_open=end < len(tags),
                )
                self._acknowledged(session, view)
                if is_durable:
                    session.flushed()

    def _abandon(self, client: Client, session: Expected) -> None:
        tags = self._tags(session)
        with client.sessions.open(session.name, self._own).writer(len(tags)) as writer:
            for stream, rows in list(self._ledger.rows(tags).items())[: self._random.randint(1, 3)]:
                writer.write(stream, 0, rows)
        self._look(session, client.sessions.get(session.name))

    def _keep_first(self, client: Client, session: Expected) -> None:
        kept = self._random.randint(len(session.live) // 2, len(session.live))
        session.begin(Change(session.live[:kept]))
        self._acknowledged(session, client.sessions.open(session.name).keep_first(kept))

    def _keep_recent(self, client: Client, session: Expected) -> None:
        count, recent = len(session.live), self._random.randint(len(session.live) // 2, len(session.live))
        sinks = min(4, count)
        cut = max(sinks, count - recent)
        session.begin(Change((*session.live[:sinks], *session.live[cut:])))
        self._acknowledged(session, client.sessions.open(session.name).keep_recent(recent))

    def _drop(self, client: Client, session: Expected) -> None:
        a, b, c, d = sorted(self._random.randint(0, len(session.live)) for _ in range(4))
        session.begin(Change((*session.live[:a], *session.live[b:c], *session.live[d:])))
        self._acknowledged(session, client.sessions.open(session.name).drop_ranges([(a, b), (c, d)]))

    def _fork(self, client: Client, session: Expected) -> None:
        kept = self._random.randint(0, len(session.live))
        name = self._ledger.new_name()
        fork = Expected(f"sessions/{name}", live=session.live[:kept])
        fork.cuts = [fork.live[-1] + 1 if fork.live else 0]
        fork.flushed()
        self._ledger.sessions[fork.name] = fork
        view = client.sessions.open(session.name).fork(id=name, token_count=kept, ttl=seconds(3600))
        fork.may_be_absent = False
        self._look(fork, view.info)
        session.flushed()
        # One goes for the one that came.
        self.sessions[self.sessions.index(session)] = fork
        self._remove(client, session)

    def _replace(self, client: Client, session: Expected) -> None:
        """A fork of the session takes its place, whole or edited: a kill leaves the one or the other."""
        is_edit = self._random.random() < 0.5
        kept = self._random.randint(0, len(session.live)) if is_edit else len(session.live)
        staged = Expected(f"sessions/{self._ledger.new_name()}", live=session.live[:kept])
        staged.cuts = [staged.live[-1] + 1 if staged.live else 0]
        staged.flushed()
        self._ledger.sessions[staged.name] = staged
        fork = client.sessions.open(session.name).fork(
            id=staged.name.removeprefix("sessions/"), token_count=kept, ttl=seconds(3600)
        )
        staged.may_be_absent = False
        self._look(staged, fork.info)
        session.flushed()
        at = client.sessions.get(session.name).generation
        session.begin(Change(staged.live))
        try:
            view = client.sessions.open(staged.name).fork(
                id=session.name.removeprefix("sessions/"), replaces_generation=at, is_rewrite=is_edit,
                former_count=self._random.randint(0, 2) if is_edit else 0,
            )  # fmt: skip
            self._acknowledged(session, view.info)
        except SessionInUse:
            # A job waits for it, or another client still reads.
            session.refuse()
        except SessionNotFound as error:
            if error.session != staged.name:
                raise
            session.refuse()
            self._vanished(staged)
            return
        self._remove(client, staged)

    def _remove(self, client: Client, session: Expected) -> None:
        session.begin(Change(is_removal=True))
        client.sessions.open(session.name).delete()
        session.change, session.is_done = None, True
        del self._ledger.sessions[session.name]
        self._deleted.append(session)

    def _flush(self, client: Client, session: Expected) -> None:
        self._look(session, client.sessions.open(session.name).flush())
        session.flushed()

    def _demote(self, client: Client, session: Expected) -> None:
        self._look(session, client.admin.demote_session(session.name))
        session.flushed()

    def _read(self, client: Client, session: Expected) -> None:
        with client.sessions.open(session.name, self._own).read() as rows:
            tags, problem = self._ledger.read_tags(rows)
        self._ledger.find(problem)
        if problem is None and tags != session.live:
            self._ledger.find(f"{session.name}: other tokens were read than were left there")

    def _put_block(self, client: Client, _: Expected) -> None:
        durability = Durability.DISK if self._random.random() < 0.5 else Durability.MEMORY
        with self._one_block() as number:
            if number is not None:
                self._ledger.blocks.put(client, number, durability)

    def _load_block(self, client: Client, _: Expected) -> None:
        with self._one_block() as number:
            if number is not None:
                problem = self._ledger.blocks.judge(client, number, may_be_lost=self._terms.may_evict)
                self._ledger.find(problem)

    def _delete_block(self, client: Client, _: Expected) -> None:
        with self._one_block() as number:
            if number is not None:
                self._ledger.blocks.delete(client, number)

    def _contest_block(self, client: Client, _: Expected) -> None:
        """Put a contested block anew, and once more so that it is durable: others may do so meanwhile."""
        blocks, number = self._ledger.blocks, self._random.randrange(CONTESTED)
        try:
            blocks.delete(client, number)
            blocks.put(client, number, Durability.MEMORY)
            blocks.put(client, number, Durability.DISK)
            self._ledger.count("contested_block_count")
        except (CapacityExceeded, TooManyRequests, WriteInProgress):
            self._ledger.count("refused_block_count")

    @contextmanager
    def _one_block(self) -> Iterator[int | None]:
        """A block for this client alone, or a contested one. There may be no room for it."""
        number = self._ledger.blocks.take(self._random)
        try:
            yield number
        except (CapacityExceeded, TooManyRequests, WriteInProgress):
            self._ledger.count("refused_block_count")
        finally:
            if number is not None:
                self._ledger.blocks.give_back(number)

    def _foretell(self, _: Client, session: Expected) -> None:
        if self._foresight.tell(session.name):
            session.flushed()
        self._ledger.count("foretold_count")

    def _expire(self, client: Client, session: Expected) -> None:
        expire_time_ns = time.time_ns() // 1000 * 1000 + self._random.randint(10, 1000) * 10**6
        session.begin(Change(session.live, expire_time_ns=expire_time_ns))
        when = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=expire_time_ns // 1000)
        self._acknowledged(session, client.sessions.open(session.name).update(expire_time=when))
