"""Which sessions a command is about, by their names and by what is true of them; and their deletion.

A selection is applied here, to pages of the server's list. Worst case: a session changes, or comes again
under its name, between list and deletion. It is then looked at anew, and goes if it still is selected.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from threading import Lock

from ctxcache.cli.documents import Plain
from ctxcache.cli.units import counted, human_size, session_name
from ctxcache.client import Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, GenerationMismatch, SessionNotFound

PAGE_SIZE = 1000
DELETED_AT_ONCE = 8
"""Deletions under way at a time: their commits share writes of the log, and others have their turn."""
LOOKS = 5
"""How often a session that changes is looked at before it counts as one that could not be deleted."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that each selected session meets, all of them. Ages count back from `now`."""

    prefix: str = ""
    model: str = ""
    idle: timedelta = timedelta()
    age: timedelta = timedelta()
    larger_bytes: int = 0
    is_pinned: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_all(self) -> bool:
        """Whether every session is meant."""
        return self == Selection(now=self.now)

    @property
    def is_filtered(self) -> bool:
        """Whether more is asked than the server filters by."""
        return self != Selection(model=self.model, labels=self.labels, now=self.now)

    def has(self, session: SessionInfo) -> bool:
        """Whether a session is one of them."""
        return (
            session.name.startswith(session_name(self.prefix))
            and self.model in ("", session.model)
            # Without an age also those that are younger than the selection.
            and (not self.idle or session.access_time <= self.now - self.idle)
            and (not self.age or session.create_time <= self.now - self.age)
            and session.dram_bytes + session.ssd_bytes >= self.larger_bytes
            and self.is_pinned in (None, session.is_pinned)
            and self.labels.items() <= session.labels.items()
        )

    def sessions(self, client: Client, page_size: int = PAGE_SIZE) -> Iterator[SessionInfo]:
        """The sessions that are meant, by name, a page at a time."""
        return filter(self.has, client.sessions.list(self.model, labels=self.labels, page_size=page_size))


@dataclass(slots=True)
class Tally:
    """How many sessions, and what they take. A segment that forks share counts for each of them."""

    names: list[str] = field(default_factory=list)
    token_count: int = 0
    dram_bytes: int = 0
    ssd_bytes: int = 0

    def add(self, session: SessionInfo) -> None:
        """Count one more."""
        self.names.append(session.name)
        self.token_count += session.token_count
        self.dram_bytes += session.dram_bytes
        self.ssd_bytes += session.ssd_bytes

    def text(self) -> str:
        """Count and sizes, for people."""
        sizes = f"{human_size(self.dram_bytes)} in DRAM, {human_size(self.ssd_bytes)} on SSD"
        sessions, tokens = counted(len(self.names), "session"), counted(self.token_count, "token")
        return f"{sessions} ({tokens}, {sizes})"

    def facts(self) -> dict[str, Plain]:
        """The same for scripts."""
        return {
            "session_count": len(self.names),
            "token_count": self.token_count,
            "dram_bytes": self.dram_bytes,
            "ssd_bytes": self.ssd_bytes,
        }


@dataclass(slots=True)
class Deletion:
    """Deletes sessions, a few at a time, and knows afterwards which went and which did not, and why.

    Run again after an interruption, it goes on: a session that is gone meanwhile is no failure.
    """

    client: Client
    selection: Selection
    on_step: Callable[[Tally], None] = lambda _: None
    deleted: Tally = field(default_factory=Tally)
    failures: dict[str, CacheError] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def run(self, sessions: Iterable[SessionInfo], show: Callable[[], None] = lambda: None) -> None:
        """Delete them, and `show` what became of it.

        Failures of single sessions are kept; what concerns all, as Unavailable, is raised.
        """
        try:
            self._run(iter(sessions))
        except BaseException:
            # Shown also when it ends early: these sessions are gone. Of none there is nothing to say.
            if self.deleted.names:
                show()
            raise
        show()

    def _run(self, remaining: Iterator[SessionInfo]) -> None:
        with ThreadPoolExecutor(DELETED_AT_ONCE, "delete") as threads:
            while few := list(islice(remaining, DELETED_AT_ONCE)):
                for session, failure in zip(few, threads.map(self._delete, few), strict=True):
                    if failure is not None:
                        self.failures[session.name] = failure
                self.on_step(self.deleted)
                self._raise_lasting()

    def _raise_lasting(self) -> None:
        """Raise a failure that the next sessions would meet as well."""
        for error in self.failures.values():
            if error.status in ("UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "DEADLINE_EXCEEDED"):
                raise error

    def _delete(self, session: SessionInfo) -> CacheError | None:
        """Why a session is still there; None also for one that is none of these any more."""
        handle, error = self.client.sessions.open(session.name), None
        try:
            for _ in range(LOOKS):
                try:
                    handle.delete(if_generation_match=session.generation)
                except GenerationMismatch as changed:
                    error = changed
                else:
                    # Counted by the thread that has deleted it: Ctrl-C comes between the others.
                    with self._lock:
                        self.deleted.add(session)
                    return None
                session = handle.refresh()
                if not self.selection.has(session):
                    return None
        except SessionNotFound:
            return None
        except CacheError as refused:
            return refused
        return error


def named(
    client: Client, names: Sequence[str], selection: Selection
) -> tuple[list[SessionInfo], dict[str, CacheError]]:
    """The named sessions that are selected, and why others cannot be looked at."""
    sessions: list[SessionInfo] = []
    failures: dict[str, CacheError] = {}
    for name in dict.fromkeys(names):
        try:
            session = client.sessions.get(name)
        except SessionNotFound as error:
            failures[name] = error
        else:
            sessions += [session] if selection.has(session) else []
    return sessions, failures
