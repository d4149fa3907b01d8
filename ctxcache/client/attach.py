"""Attaching to the server's arena: a mapping and a way of operations that belong to the same server run.

Knows no session. State is guarded by one lock. Worst case: the server is elsewhere, or its arena
may not be opened; then this client never asks again and everything travels by stream.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from ctxcache.client.access import PROBE, AccessStream, GrpcAccess
from ctxcache.client.arena import MappedArena, SlotLayout, map_arena, map_descriptors
from ctxcache.client.control import Control, connect_control
from ctxcache.client.wire import Wire
from ctxcache.errors import DeadlineExceeded, Unavailable
from ctxcache.v1 import arena_pb2

Way = Literal["auto", "socket", "grpc"]
_ATTEMPTS = 2
K = TypeVar("K")
V = TypeVar("V")
MEMO_LIMIT = 4096
"""Entries of a memo: a few KiB each at most."""


class BoundedMemo(Generic[K, V]):
    """Facts by key that never change, of sessions used before. Forgets all of them when it is full.

    Worst case: a forgotten fact is made again.
    """

    def __init__(self) -> None:
        self._known: dict[K, V] = {}

    def put(self, key: K, value: V) -> V:
        """Remember a fact, and return it."""
        if len(self._known) >= MEMO_LIMIT:
            self._known.clear()
        self._known[key] = value
        return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The fact of a key, made when it is not known."""
        found = self._known.get(key)
        return self.put(key, make()) if found is None else found


@dataclass(frozen=True, slots=True)
class ArenaAttachment:
    """The arena, and the way on which to acquire parts of it.

    `layouts`: of sessions used on it, by their uid.
    """

    arena: MappedArena
    stream: AccessStream
    layouts: BoundedMemo[str, SlotLayout] = field(default_factory=BoundedMemo)


class LocalAccess:
    """Attaches on first use, and again after a break. Thread-safe.

    `way` is what carries operations: the control socket, a gRPC stream, or the first of them that can be had.
    """

    def __init__(self, wire: Wire, way: Way) -> None:
        self._wire = wire
        self._way = way
        self._lock = threading.Lock()
        self._attachment: ArenaAttachment | None = None
        self._is_remote = False

    def attach(self) -> ArenaAttachment | None:
        """Return the arena and a way that lives; None when the server is not on this host.

        Raises Unavailable, DeadlineExceeded, TooManyRequests, Draining.
        """
        timeout_s = self._wire.timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineExceeded(target=self._wire.target, timeout_s=f"{timeout_s:g}")
        try:
            if self._is_remote:
                return None
            if self._attachment is None or self._attachment.stream.is_broken:
                self._attachment = self._connect()
                self._is_remote = self._attachment is None
            return self._attachment
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the way and everything held on it."""
        with self._lock:
            if self._attachment is not None:
                self._attachment.stream.close()
                self._attachment = None

    def _connect(self) -> ArenaAttachment | None:
        for _ in range(_ATTEMPTS):
            arena = self._get_arena()
            if self._way != "grpc" and (found := self._by_socket(arena)) is not None:
                return found
            mapped = None if self._way == "socket" else self._known(arena) or map_arena(arena)
            if mapped is None:
                return None
            if (stream := self._open(mapped)) is not None:
                return ArenaAttachment(mapped, stream)
        raise Unavailable(target=self._wire.target, problem="the server changes while we connect")

    def _by_socket(self, arena: arena_pb2.Arena) -> ArenaAttachment | None:
        if not arena.control_socket:
            return None
        token = "" if self._wire.token is None else self._wire.token.read()
        control = connect_control(arena.control_socket, self._wire.target, self._wire.timeout_s, token)
        if control is None:
            return None
        try:
            mapped = self._map(control, arena)
        except BaseException:
            control.stream.close()
            raise
        finally:
            for fd in control.fds:
                os.close(fd)
        if mapped is None:
            control.stream.close()
            return None
        return ArenaAttachment(mapped, control.stream)

    def _map(self, control: Control, arena: arena_pb2.Arena) -> MappedArena | None:
        # On another host's word the path may lead to a server of this one; or ours was replaced just now.
        told = control.arena
        if told.arena_id != arena.arena_id and told.arena_id != self._get_arena().arena_id:
            return None
        return self._known(told) or map_descriptors(told, control.fds)

    def _open(self, arena: MappedArena) -> AccessStream | None:
        stream = GrpcAccess(self._wire)
        try:
            stream.call([PROBE])
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

    def _known(self, arena: arena_pb2.Arena) -> MappedArena | None:
        known = self._attachment
        return known.arena if known is not None and known.arena.arena_id == arena.arena_id else None
