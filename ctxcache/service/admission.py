"""Admission: how many rpcs of each sort run at a time, and what is told to those that are too many.

Owned by the event loop; waits for nothing. Worst case: everything beyond the bound is refused, by an answer made before.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

import grpc

from ctxcache.core.limits import Bound
from ctxcache.errors import CacheError, Draining, TooManyRequests
from ctxcache.service.rpc import Context, Handler
from ctxcache.service.turns import Turns
from ctxcache.wire.status import code_of, message_of, trailing_metadata

KEPT_OPEN = ("/ctxcache.v1.ArenaService/Access",)
SCHEDULES = ("/ctxcache.v1.HintService/Schedule",)
OPERATORS = "/ctxcache.v1.AdminService/"
STREAMS = ("/ctxcache.v1.SessionService/AppendSession", "/ctxcache.v1.SessionService/ReadSession")


class Admission:
    """How many rpcs of one sort run, and whether new ones are taken. Owned by the event loop.

    Nothing queues here: what runs shares the machine already, and a queue would only add to the wait
    of all. A refusal says when to come again.
    """

    def __init__(
        self, what: str, limit: int, *, turns: Turns | None = None, is_divided: bool = False
    ) -> None:
        """`turns`: in which its rpcs move their messages. `is_divided`: no tenant takes all of it."""
        self.turns = turns
        self.limit = limit
        self._bound = Bound(limit, is_divided)
        self._running = 0
        self._own: Counter[str] = Counter()
        self._lingering = 0
        self._draining = asyncio.Event()
        self.when_full = Refusal(TooManyRequests(what=what, limit=limit))
        self.when_draining = Refusal(Draining())

    @property
    def running_count(self) -> int:
        """Those that run."""
        return self._running

    @property
    def is_draining(self) -> bool:
        """Whether no more are taken."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no more."""
        self._draining.set()

    def resume(self) -> None:
        """Take more again."""
        self._draining.clear()

    async def drained(self) -> None:
        """Wait until no more are taken."""
        await self._draining.wait()

    def refusal(self) -> "Refusal | None":
        """Why a new rpc would be refused now; None when it would not be."""
        if self._draining.is_set():
            return self.when_draining
        is_full = self._running >= self.limit or self._lingering >= self.limit
        return self.when_full if is_full else None

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Count one rpc of that tenant while it runs. Raises Draining, TooManyRequests."""
        refusal = self.refusal()
        if refusal is None and self._bound.is_divided and self._is_too_much_of(tenant):
            refusal = self.when_full
        if refusal:
            raise refusal.again()
        self._running += 1
        self._own[tenant] += 1
        try:
            yield
        finally:
            self._running -= 1
            self._own[tenant] -= 1
            if not self._own[tenant]:
                del self._own[tenant]

    def _is_too_much_of(self, tenant: str) -> bool:
        return self._bound.is_reached(self._running, self._own[tenant])

    @contextmanager
    def linger(self) -> Iterator[None]:
        """Count an rpc that is over, while its client does not take notice: it keeps a message in memory."""
        self._lingering += 1
        try:
            yield
        finally:
            self._lingering -= 1


class Refusal:
    """An error that is told often, made once: telling it must cost much less than the work refused."""

    def __init__(self, error: CacheError) -> None:
        self._error = error
        self.count = 0
        """How often it was told."""
        self._said = code_of(error), message_of(error), trailing_metadata(error)
        # As a stream, whatever the rpc is: the request is not even received.
        self.handler: Handler = grpc.stream_stream_rpc_method_handler(self._tell)

    def again(self) -> CacheError:
        """The error as a new exception."""
        self.count += 1
        return type(self._error)(**self._error.facts)

    async def _tell(self, _: object, context: Context) -> None:
        self.count += 1
        await context.abort(*self._said)


@dataclass(frozen=True, slots=True)
class Admissions:
    """The sorts of rpcs: small calls, streams that move rows, those that local clients and engines keep open, operators'."""

    calls: Admission
    streams: Admission
    local_clients: Admission
    engines: Admission
    operators: Admission

    def of(self, method: str) -> Admission:
        """Where an rpc is counted."""
        if method in STREAMS:
            return self.streams
        if method in SCHEDULES:
            return self.engines
        if method.startswith(OPERATORS):
            return self.operators
        return self.local_clients if method in KEPT_OPEN else self.calls

    def by_sort(self) -> Mapping[str, Admission]:
        """Each sort's, by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def of_clients(self) -> tuple[Admission, ...]:
        """All but operators'."""
        return self.calls, self.streams, self.local_clients, self.engines

    def drain(self) -> None:
        """Take no more of any sort."""
        for admission in self.by_sort().values():
            admission.drain()
