"""Deferred: promotions that somebody asked for and for which there was no room; done when there is, or given up.

Each stands in the merged queue as if a job of the session were about to start. Nothing here waits.
"""

from ctxcache.cache.queues import Queue, Queues
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Keyed
from ctxcache.core.placement.schedule import Job

NOBODY = ""
"""Stands for whoever gives hints without a queue: no engine has that name."""


class _Waiting(Queue):
    """What was deferred of one tenant's sessions."""

    def __init__(self, tenant: str, deferred: "Deferred") -> None:
        super().__init__(tenant, NOBODY)
        self._deferred = deferred

    def promoted(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def demoted(self, uid: bytes) -> None:
        """See Watcher."""

    def evicted(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def ended(self, uid: bytes) -> None:
        """See Watcher."""
        self._deferred.discard(uid)

    def ask(self, uid: bytes) -> None:
        """Nobody is told anything."""


class Deferred:
    """Promotions that wait for room, until a time of their own. Owned by the event loop."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._waiting: dict[str, _Waiting] = {}
        self._asked: dict[bytes, tuple[int, _Waiting]] = {}
        """Until when, and where, by session."""
        self._due = Keyed()

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, session: Session, now_ns: int, until_ns: int, priority: int) -> None:
        """Let the session come when there is room. Raises TooManyRequests where as many wait as may."""
        waiting = self._waiting.get(session.tenant) or _Waiting(session.tenant, self)
        job_id = session.uid.hex()
        self._queues.check_room(waiting, (job_id,), ())
        self._waiting[session.tenant] = waiting
        self._asked[session.uid] = until_ns, waiting
        self._due.put(session.uid, (until_ns,))
        job = Job(job_id, None, start_s=now_ns / 10**9, priority=priority)
        self._queues.put(waiting, session.session_id, job)

    def discard(self, uid: bytes) -> None:
        """The session need not come any more, or is gone."""
        _, waiting = self._asked.pop(uid, (0, None))
        if waiting is not None:
            self._due.discard(uid)
            self._queues.gone(waiting, uid.hex(), is_started=False)
            if not self._queues.job_count(waiting):
                self._queues.forget(waiting)
                del self._waiting[waiting.tenant]

    def expire_due(self, now_ns: int) -> None:
        """Give up those whose time is over."""
        while (uid := self._due.first()) is not None and self._asked[uid][0] <= now_ns:
            self.discard(uid)
