"""Attaching to the server's arena: a mapping and an access stream that belong to the same server run.

Knows no session. State is guarded by one lock. Worst case: the server is elsewhere, or its arena
may not be opened; then this client never asks again and everything travels by stream.
"""

import threading
from dataclasses import dataclass

from ctxcache.client.access import AccessStream
from ctxcache.client.arena import MappedArena, map_arena
from ctxcache.client.wire import Wire
from ctxcache.errors import Unavailable
from ctxcache.v1 import arena_pb2
from ctxcache.v1.arena_pb2 import Operation, ReleaseLease

_ATTEMPTS = 2
# Ends a lease that never exists: an operation that changes nothing, and whose answer proves the stream.
_PROBE = Operation(release_lease=ReleaseLease(lease_id=0))


@dataclass(frozen=True, slots=True)
class Attachment:
    """The arena, and the stream on which to acquire parts of it."""

    arena: MappedArena
    stream: AccessStream


class LocalAccess:
    """Attaches on first use, and again after a break. Thread-safe."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._is_remote = False

    def attach(self) -> Attachment | None:
        """Return the arena and a stream that lives; None when the server is not on this host.

        Raises Unavailable, DeadlineExceeded.
        """
        with self._lock:
            if self._is_remote:
                return None
            if self._attachment is None or self._attachment.stream.is_broken:
                self._attachment = self._connect()
                self._is_remote = self._attachment is None
            return self._attachment

    def close(self) -> None:
        """End the stream and everything held on it."""
        with self._lock:
            if self._attachment is not None:
                self._attachment.stream.close()
                self._attachment = None

    def _connect(self) -> Attachment | None:
        for _ in range(_ATTEMPTS):
            arena = self._map(self._get_arena())
            if arena is None:
                return None
            if (stream := self._open(arena)) is not None:
                return Attachment(arena, stream)
        raise Unavailable(target=self._wire.target, problem="the server changes while we connect")

    def _open(self, arena: MappedArena) -> AccessStream | None:
        stream = AccessStream(self._wire)
        try:
            stream.call([_PROBE])
            # The server may be replaced between two calls. The same id before and after the stream's
            # first answer says that the stream speaks of the arena that is mapped.
            is_same = self._get_arena().arena_id == arena.arena_id
        except BaseException:
            stream.close()
            raise
        if is_same:
            return stream
        stream.close()
        return None

    def _get_arena(self) -> arena_pb2.Arena:
        return self._wire.call(self._wire.arena.GetArena, arena_pb2.GetArenaRequest())

    def _map(self, arena: arena_pb2.Arena) -> MappedArena | None:
        known = self._attachment
        if known is not None and known.arena.arena_id == arena.arena_id:
            return known.arena
        return map_arena(arena)
