"""Work: whoever is at work on sessions, so that none of these falls asleep meanwhile.

    request, pass ──► with Work() ──► looks a session up ──► waits for a device ──► end: the session may sleep
                                         └► counted as at work on it

Work that waits would not know another object in the session's place. So every look-up that hands a session
out counts it as the work's, until the work ends. A look-up outside of any work raises: it is a fault of the
program to keep a session that nobody counts. What is only looked at, within one turn of the event loop, needs
no work: `Ledger.glance`, and the views of all that is known.

Leases and writers outlast the work that began them. They keep their sessions by `Session.use`, and holds keep
segments.
"""

from collections.abc import Awaitable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")


class Worked(Protocol):
    """A session, as far as work is concerned."""

    worker_count: int
    """Works that have looked it up and go on."""


class NobodyAtWorkError(RuntimeError):
    """A session was looked up outside of any work: a fault of the program, never of a caller."""


class Work:
    """One request, or one pass in the background: entered where it begins, and left at its end.

    Tasks that may outlast it `join` before they begin and `leave` at their end; it ends with the last.
    """

    __slots__ = ("_count", "_sessions", "_token")

    def __init__(self) -> None:
        self._count = 0
        self._sessions: set[Worked] = set()

    def __enter__(self) -> Self:
        self._count += 1
        self._token: Token[Work | None] = _WORK.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _WORK.reset(self._token)
        self.leave()

    def join(self) -> Self:
        """One more is at this work, which must not have ended."""
        if not self._count:
            raise NobodyAtWorkError("the work has ended")
        self._count += 1
        return self

    def leave(self) -> None:
        """One of those at work is done; the last one's sessions may fall asleep."""
        self._count -= 1
        if not self._count:
            self._let_go()

    def on(self, session: Worked) -> None:
        """The work is on this session, too, until it ends. Raises NobodyAtWorkError once it has."""
        # A task that goes on behind the end of its request has the request's work, which counts no more.
        if not self._count:
            raise NobodyAtWorkError("the work has ended")
        if session not in self._sessions:
            self._sessions.add(session)
            session.worker_count += 1

    def _let_go(self) -> None:
        for session in self._sessions:
            session.worker_count -= 1
        self._sessions.clear()


_WORK: ContextVar[Work | None] = ContextVar("work", default=None)


async def at_work(what: Awaitable[T]) -> T:
    """Await it as a work of its own."""
    with Work():
        return await what


def current_work() -> Work:
    """The work that this code is part of. Raises NobodyAtWorkError where there is none."""
    work = _WORK.get()
    if work is None:
        raise NobodyAtWorkError("no work has begun")
    return work
