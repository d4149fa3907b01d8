"""Connections to gRPC's TCP ports: how many there are, and not too many of one host. Owned by the event loop.

gRPC itself holds the sum to its limit, says nothing to Python of a connection, and knows no limit by host. So this
process's own descriptors are looked at twice a second. Worst case: a host fills the sum between two looks; its newest
connections beyond its own limit are then ended.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
LOG_INTERVAL_LOOKS = 20
"""Looks between two lines of the log."""


class _Known(NamedTuple):
    inode: int
    host: str
    """Empty for what is no connection to one of the ports."""


class Connections:
    """Those of every port that is added."""

    def __init__(self, limit: int, host_limit: int) -> None:
        self.limit, self._host_limit = limit, host_limit
        self._ports: set[int] = set()
        self._known: dict[int, _Known] = {}
        self._ended: set[tuple[int, int]] = set()
        """Descriptors and inodes that gRPC has not closed yet."""
        self.count = 0
        """Those that are open, as of the last look."""
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
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family in {socket.AF_INET, socket.AF_INET6}:
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
        kind, _, number = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")  # noqa: PTH115  1,000 of them twice a second
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
