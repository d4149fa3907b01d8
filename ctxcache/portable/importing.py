"""Sessions out of a file and into a store, so that each is there whole or not at all.

A session is filled under a name of its own, made durable, and forked to the name that was asked for: only then is that there.
Worst case: the server or the importer dies, and what is left is `importing-…`, which expires two minutes after its last rows.
"""

import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError, SessionAlreadyExists, SessionNotFound
from ctxcache.portable.description import Description
from ctxcache.portable.outcomes import ENDS_ALL, Outcome, Status, Step
from ctxcache.portable.session_reader import SessionInFile
from ctxcache.portable.wishes import OnConflict, Wishes
from ctxcache.v1.session_pb2 import DURABILITY_DISK, DURABILITY_MEMORY, Session

UNFINISHED = "importing-"
UNFINISHED_TTL_S = 120.0
SHORTEST_LIFE_S = 60.0
SYNC_BYTES = 128 << 20
"""After so many bytes they are made durable: what is left for the end takes less than the unfinished session lives."""
_NS_PER_S = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def present(client: Client, session_id: str) -> Session | None:
    """The store's session of that id."""
    try:
        return client.get_session(f"sessions/{session_id}")
    except SessionNotFound:
        return None


class Importer:
    """Imports sessions as they come. `begin_time_ns`: when they were exported. Not thread-safe."""

    def __init__(self, client: Client, wishes: Wishes, begin_time_ns: int, step: Step) -> None:
        self._client, self._wishes, self._step = client, wishes, step
        self._begin_time_ns = begin_time_ns

    def take(self, sessions: Iterator[SessionInFile]) -> Iterator[Outcome]:
        """Import what is wanted; what became of each, an error that ends all among them."""
        try:
            for one in sessions:
                if not self._wishes.wants(one.described.session_id):
                    continue
                outcome = self._one(one)
                if not isinstance(outcome.error, ENDS_ALL):
                    # Whether it is void is said behind its last block.
                    deque(one.blocks(), maxlen=0)
                if not one.is_void:
                    yield outcome
                if isinstance(outcome.error, ENDS_ALL):
                    return
        except ENDS_ALL as error:
            yield Outcome("", "", Status.FAILED, error=error)

    def _one(self, one: SessionInFile) -> Outcome:
        described, target = one.described, self._wishes.target(one.described.session_id)
        source, name = f"sessions/{described.session_id}", f"sessions/{target}"
        try:
            before = present(self._client, target)
            if before is not None and self._wishes.on_conflict is not OnConflict.REPLACE:
                error = SessionAlreadyExists(session=name)
                is_fine = self._wishes.on_conflict is OnConflict.SKIP
                return Outcome(source, name, Status.SKIPPED if is_fine else Status.FAILED, error=error)
            self._bring(one, target, before)
        except CacheError as error:
            return Outcome(source, name, Status.FAILED, error=error)
        size_bytes = described.token_count * described.token_bytes
        return Outcome(source, name, Status.IMPORTED, described.token_count, size_bytes)

    def _bring(self, one: SessionInFile, target: str, before: Session | None) -> None:
        described = one.described
        is_pinned = described.is_pinned and self._wishes.keeps_pins
        model = self._client.register_model(described.model, described.probe)
        unfinished = self._client.create_session(
            model.name, session_id=UNFINISHED + secrets.token_hex(8), layout=described.layout,
            ttl_s=UNFINISHED_TTL_S, is_pinned=is_pinned,
        )  # fmt: skip
        try:
            filled = self._fill(unfinished, model, one, target)
            if not one.is_void:
                self._publish(filled, described, target, before)
                if is_pinned:
                    self._client.update_session(f"sessions/{target}", is_pinned=True)
        finally:
            # What failed before counts, and what cannot be deleted expires.
            with suppress(CacheError):
                self._client.delete_session(unfinished.name)

    def _fill(self, session: Session, model: CallerModel, one: SessionInFile, target: str) -> Session:
        unsynced_bytes = 0
        for rows in one.blocks():
            before = session.token_count
            size_bytes = sum(part.nbytes for part in rows.values())
            unsynced_bytes += size_bytes
            is_synced = unsynced_bytes >= SYNC_BYTES
            try:
                session = self._client.append(
                    session, model, rows, durability=DURABILITY_DISK if is_synced else DURABILITY_MEMORY
                )
            except SessionNotFound as error:
                problem = f"what had come of it was evicted, or nothing came for {UNFINISHED_TTL_S:.0f} s"
                raise SessionNotFound(f"sessions/{target}: {problem}", session=session.name) from error
            if is_synced:
                unsynced_bytes = 0
            self._step(f"sessions/{target}", session.token_count - before, size_bytes)
        return session

    def _publish(self, filled: Session, described: Description, target: str, before: Session | None) -> None:
        if before is not None:
            # Of another generation it has what nobody has seen who wanted it replaced.
            with suppress(SessionNotFound):
                self._client.delete_session(before.name, if_generation_match=before.generation)
        ends: dict[str, Any] = {"ttl_s": described.ttl_ns / _NS_PER_S}
        if self._wishes.ttl_s is not None:
            ends = {"ttl_s": self._wishes.ttl_s}
        elif not described.ttl_ns:
            # The server's clock, as of its last answer.
            now = filled.access_time.ToDatetime(tzinfo=UTC)
            ends = {"expire_time": end_of_life(described.expire_time_ns, self._begin_time_ns, now)}
        self._client.fork_session(filled.name, session_id=target, **ends)


def end_of_life(expire_time_ns: int, begin_time_ns: int, now: datetime) -> datetime:
    """When a session of absolute expiry ends: then, or, when that is past, with as much time as it had left at the export."""
    left_s = max((expire_time_ns - begin_time_ns) / _NS_PER_S, SHORTEST_LIFE_S)
    expire_time = _EPOCH + timedelta(microseconds=expire_time_ns // 1000)
    return (
        expire_time
        if expire_time > now + timedelta(seconds=SHORTEST_LIFE_S)
        else now + timedelta(seconds=left_s)
    )
