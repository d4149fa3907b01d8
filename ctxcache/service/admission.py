"""Admission: how many connections and rpcs there are, what those beyond the bound are told, how rpcs end.

An rpc is counted in one sort. Each sort has a bound of its own, so that none uses up another's room:

    calls            small calls of clients          local_clients    those that map the arena
    streams          rows over gRPC                  engines          queues of engines
    operators        AdminService                    (health and reflection: in `edge.py`)

Nothing queues here: what runs shares the machine already, and a queue would only add to the wait of all. A
refusal says when to come again. Owned by the event loop; waits for nothing. Worst case: everything beyond the
bound is refused, by an answer that was made before.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import grpc

from ctxcache.core.limits import Bound
from ctxcache.core.observations import QUICK_S, Histogram
from ctxcache.errors import CacheError, Draining, TooManyRequests
from ctxcache.service.callers import OPERATORS_ONLY, Context
from ctxcache.service.fairness import Turns
from ctxcache.service.health import Health
from ctxcache.wire.status import code_of, message_of, trailing_metadata

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
KEPT_OPEN = ("/ctxcache.v1.ArenaService/Access",)
FOLLOWED = (
    "/ctxcache.v1.HintService/Schedule",
    "/ctxcache.v1.BlockService/SubscribeBlocks",
)
"""Streams that last as long as an engine."""
STREAMS = (
    "/ctxcache.v1.SessionService/AppendSession",
    "/ctxcache.v1.SessionService/ReadSession",
    "/ctxcache.v1.BlockService/PutBlocks",
    "/ctxcache.v1.BlockService/ReadBlocks",
)
OK, CANCELLED = "OK", "CANCELLED"
"""Ends of an rpc that are no error of ours: an answer, and a caller that went away."""
LOOK_INTERVAL_S = 0.5
"""Between two looks at the connections."""
LOG_INTERVAL_LOOKS = 20
"""Looks between two lines of the log."""
log = logging.getLogger(__name__)


# -- rpcs of one sort ---------------------------------------------------------------------------------


# One sort of rpc, and what may be refused:
#
#     refusal()    draining, or full: asked before a request is read, and costs next to nothing
#     begin()      the same, and the tenant's part: when it is known whose it is
#     linger()     over, but its client has not taken the answer: still in memory
class Admission:
    """How many rpcs of one sort run, and whether new ones are taken. Owned by the event loop."""

    def __init__(
        self, what: str, limit: int, *, turns: Turns | None = None, is_divided: bool = False
    ) -> None:
        """`turns`: in which its rpcs move their messages. `is_divided`: no tenant takes all of it."""
        self.turns = turns
        self.limit = limit
        self.running_count = 0
        self.is_draining = False
        """Whether no more are taken."""
        self._bound = Bound(limit, is_divided)
        self._own: dict[str, int] = {}
        """By tenant, those that run; no Counter, which is Python's own at each call."""
        self._lingering = 0
        self._drained = asyncio.Event()
        self.when_full = Refusal(TooManyRequests(what=what, limit=limit))
        self.when_draining = Refusal(Draining())

    def drain(self) -> None:
        """Take no more."""
        self.is_draining = True
        self._drained.set()

    def resume(self) -> None:
        """Take more again."""
        self.is_draining = False
        self._drained.clear()

    async def drained(self) -> None:
        """Wait until no more are taken."""
        await self._drained.wait()

    def refusal(self) -> "Refusal | None":
        """Why a new rpc would be refused now; None when it would not be."""
        if self.is_draining:
            return self.when_draining
        # Lingering ones count apart: a crowd that takes nothing must not close the door for those that do.
        is_full = self.running_count >= self.limit or self._lingering >= self.limit
        return self.when_full if is_full else None

    def begin(self, tenant: str) -> None:
        """Count one rpc of that tenant, until `end`.

        Raises Draining, TooManyRequests; then nothing is counted.
        """
        refusal = self.refusal()
        if refusal is None and self._bound.is_divided:
            is_too_much = self._bound.is_reached(self.running_count, self._own.get(tenant, 0))
            refusal = self.when_full if is_too_much else None
        if refusal:
            raise refusal.again()
        self.running_count += 1
        self._own[tenant] = self._own.get(tenant, 0) + 1

    def end(self, tenant: str) -> None:
        """Count one rpc of that tenant no longer."""
        self.running_count -= 1
        self._own[tenant] -= 1
        # No entry stays for each tenant that ever was.
        if not self._own[tenant]:
            del self._own[tenant]

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Count one rpc of that tenant within the block. Raises as `begin`."""
        self.begin(tenant)
        try:
            yield
        finally:
            self.end(tenant)

    @contextmanager
    def linger(self) -> Iterator[None]:
        """Count an rpc that is over while its client takes no notice: it keeps a message in memory."""
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
        # A new exception each time: one that is raised twice gathers tracebacks.
        return type(self._error)(**self._error.facts)

    async def _tell(self, _: object, context: Context) -> None:
        self.count += 1
        await context.abort(*self._said)


# -- all sorts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admissions:
    """One admission for each sort of rpcs."""

    calls: Admission
    streams: Admission
    local_clients: Admission
    engines: Admission
    operators: Admission

    def of(self, method: str) -> Admission:
        """Where an rpc is counted."""
        if method in STREAMS:
            return self.streams
        if method in FOLLOWED:
            return self.engines
        if method.startswith(OPERATORS_ONLY):
            return self.operators
        return self.local_clients if method in KEPT_OPEN else self.calls

    def by_sort(self) -> Mapping[str, Admission]:
        """Each sort's, by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def of_clients(self) -> tuple[Admission, ...]:
        """All but operators'."""
        return self.calls, self.streams, self.local_clients, self.engines


# Health and admission change together: a client that hears "serving" is let in.
class Doors:
    """Whether the server takes work, as health says it and as rpcs meet it. Closed at first.

        closed ──open──► open ──close──► closed ──open──► …
           └──────────────┴──close_for_good──► over, which nothing opens

    Owned by the event loop.
    """

    def __init__(self, admissions: Admissions, health: Health) -> None:
        self.admissions = admissions
        self._health = health
        self.is_over = False
        """Whether the server ends."""

    def open(self) -> None:
        """Take work. Does nothing once the server ends."""
        if not self.is_over:
            for admission in self.admissions.of_clients:
                admission.resume()
            self._health.tell(is_serving=True)

    def close(self) -> None:
        """Take no more work of clients; operators are answered."""
        # Health first: balancers stop sending before calls are refused.
        self._health.tell(is_serving=False)
        for admission in self.admissions.of_clients:
            admission.drain()

    def close_for_good(self) -> None:
        """Take no more work of anybody."""
        self.is_over = True
        self._health.tell(is_serving=False)
        for admission in self.admissions.by_sort().values():
            admission.drain()


# -- how rpcs end -------------------------------------------------------------------------------------


class Timer:
    """How long one method's rpcs took and how they ended. Owned by the event loop.

    Memory: a histogram for each way of ending, a closed set. Nothing is formatted here: it is on every call's
    path.
    """

    def __init__(self) -> None:
        self.by_end: dict[str, Histogram] = {}
        """Seconds, by OK, CANCELLED or an error's reason."""

    def ended(self, took_s: float, end: str) -> None:
        """One is over."""
        # Made when first needed: most methods end in one or two ways.
        histogram = self.by_end.get(end)
        if histogram is None:
            histogram = self.by_end[end] = Histogram(QUICK_S)
        histogram.observe(took_s)


class RpcTimes:
    """The timers of all methods. Owned by the event loop."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def of(self, method: str) -> Timer:
        """A method's, `/package.Service/Method`."""
        return self._timers.setdefault(method.rpartition(".")[2], Timer())

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        """Methods as `Service/Method`, each with its own."""
        return iter(self._timers.items())


# -- connections --------------------------------------------------------------------------------------


class _Known(NamedTuple):
    inode: int
    host: str
    """Empty for what is no connection to one of the ports."""


class Connections:
    """Connections to gRPC's TCP ports, and not too many of one host. Owned by the event loop.

    gRPC itself holds the sum to its limit, says nothing to Python of a connection, and knows no limit by
    host. So this process's own descriptors are looked at twice a second. Worst case: a host fills the sum
    between two looks; its newest connections beyond its own limit are then ended.
    """

    def __init__(self, limit: int, host_limit: int) -> None:
        self.limit, self._host_limit = limit, host_limit
        self._ports: set[int] = set()
        self._known: dict[int, _Known] = {}
        self._ended: set[tuple[int, int]] = set()
        """Descriptors and inodes that gRPC has not closed yet."""
        self.count = 0
        """The open connections, as of the last look."""
        self.ended_count = 0
        """How many were ended, because there were too many of a host."""

    def add(self, address: str) -> None:
        """Look after a `host:port`, too; sockets in the filesystem have no hosts."""
        if not address.startswith("unix:"):
            self._ports.add(int(address.rpartition(":")[2]))

    async def watch(self) -> None:
        """Look for ever; ends by cancellation."""
        untold, looks = 0, 0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            untold += self.look()
            looks += 1
            if untold and looks >= LOG_INTERVAL_LOOKS:
                log.warning("connections_ended count=%d limit_per_host=%d", untold, self._host_limit)
                untold, looks = 0, 0

    def look(self) -> int:
        """End what is too much; returns how many that were. Costs a microsecond or two per descriptor."""
        known: dict[int, _Known] = {}
        for descriptor in _descriptors():
            inode = _socket_inode(descriptor)
            if inode is not None:
                # By descriptor and inode: a number is given again when a connection ends.
                before = self._known.get(descriptor)
                is_same = before is not None and before.inode == inode
                known[descriptor] = before if before and is_same else self._meet(descriptor, inode)
        # Those that were there before come first: they keep their places.
        order = sorted(known, key=lambda descriptor: known[descriptor] != self._known.get(descriptor))
        self._known = known
        self._ended &= {(descriptor, item.inode) for descriptor, item in known.items()}
        counts: Counter[str] = Counter()
        ended = 0
        for descriptor in order:
            # A connection that was ended and not closed yet by gRPC must not count again.
            item = known[descriptor]
            if not item.host or (descriptor, item.inode) in self._ended:
                continue
            counts[item.host] += 1
            if counts[item.host] > self._host_limit and _end(descriptor, item.inode):
                self._ended.add((descriptor, item.inode))
                counts[item.host] -= 1
                ended += 1
        self.count = counts.total()
        self.ended_count += ended
        return ended

    def _meet(self, descriptor: int, inode: int) -> _Known:
        # `dup`: the descriptor may be closed by gRPC's threads at any time, and its number be another's.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family in {socket.AF_INET, socket.AF_INET6}:
                # An IPv4 peer of an IPv6 socket.
                host = connected.getpeername()[0].removeprefix("::ffff:")
                if connected.getsockname()[1] in self._ports:
                    return _Known(inode, host)
        return _Known(inode, "")


def _descriptors() -> list[int]:
    with os.scandir("/proc/self/fd") as entries:
        return [int(entry.name) for entry in entries]


def _socket_inode(descriptor: int) -> int | None:
    """The inode of a descriptor's socket; None where it is no socket. Asks no device, as `fstat` would."""
    with suppress(OSError):
        # Not pathlib: there are a thousand of them twice a second.
        kind, _, number = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")  # noqa: PTH115
        if kind == "socket":
            return int(number.strip("[]"))
    return None


def _end(descriptor: int, inode: int) -> bool:
    """End a connection; gRPC finds that out and closes it. False where it is another one by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
        # A copy, which stays what it is.
        if _socket_inode(connected.fileno()) == inode:
            connected.shutdown(socket.SHUT_RDWR)
            return True
    return False
