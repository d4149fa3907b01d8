"""Collection: objects of the bucket that no head names go, and sessions that have expired with a lost host.

    an object no head names, older than `grace`     a store died in the middle of sharing, or of removing
    a head that names objects, expired, its host    the session ends in the bucket, and its objects go
    lost for `grace`
    a holder of a prefix, older than `grace`        whoever computes the prefix next says so again

A host may have stopped right before it names an object, for however long. So the head is changed before
anything of its session is removed: that host's change is refused then, and it puts its objects anew. Times
are the bucket's. Worst case: no answer; what is left is collected the next time.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from ctxcache.core.fleet.claims import Claims
from ctxcache.core.fleet.heads import HOLDERS, OBJECTS, ForeignObject, Head, NodeRecord, Secret, node_path
from ctxcache.core.fleet.register import Entry, NoAnswer, Register, put
from ctxcache.fleet.sharing import INDEX_LIMIT_BYTES
from ctxcache.storage.objects import Listed, Objects
from ctxcache.v1 import peer_pb2

log = logging.getLogger(__name__)
GRACE_S = 24 * 3600.0
"""How long an object is left alone that no head names."""
COLLECTOR = "v1/collector"
"""The path of the record of who collected last."""
SHARDS = tuple(f"{number:02x}" for number in range(256))


@dataclass(slots=True)
class Collected:
    """Counts of a collection: objects that the bucket has, and objects that were removed."""

    session_count: int = 0
    """Sessions of which the bucket has something."""
    object_count: int = 0
    size_bytes: int = 0
    garbage_object_count: int = 0
    garbage_bytes: int = 0
    expired_session_count: int = 0
    busy_session_count: int = 0
    """Sessions whose head changed meanwhile: left for the next time."""
    problems: list[str] = field(default_factory=list)
    shard_count: int = 0
    """Parts of the names that were looked through, of 256."""


class Collecting:
    """Looks through all that the bucket has of sessions, a part of the names at a time."""

    def __init__(self, register: Register, objects: Objects, secret: Secret, claims: Claims) -> None:
        self._register, self._objects, self._secret, self._claims = register, objects, secret, claims

    async def collect(
        self, *, grace_s: float = GRACE_S, is_dry_run: bool = False
    ) -> AsyncGenerator[Collected]:
        """Collect, or say what would be; yields how far it is, and all of it at last. Raises NoAnswer."""
        collected = Collected()
        now_s = await self._objects.modified_s(node_path(self._claims.node))
        if now_s is None:
            raise NoAnswer("this host has no record yet")
        for shard in SHARDS:
            folders: dict[str, list[Listed]] = {}
            async for found in self._objects.listed(f"{OBJECTS}{shard}/"):
                folders.setdefault(found.path.rpartition("/")[0], []).append(found)
            for folder, objects in folders.items():
                collected.session_count += 1
                collected.object_count += len(objects)
                collected.size_bytes += sum(found.size_bytes for found in objects)
                # A store may be about to name an object that it put a moment ago.
                old = [found for found in objects if now_s - found.modified_s > grace_s]
                if old:
                    await self._look(folder, old, now_s, grace_s, collected, is_dry_run=is_dry_run)
            holders = self._objects.listed(f"{HOLDERS}{shard}/")
            outdated = [found async for found in holders if now_s - found.modified_s > grace_s]
            await self._remove(outdated, collected, is_dry_run=is_dry_run)
            collected.shard_count += 1
            yield collected

    async def _look(
        self,
        folder: str,
        old: list[Listed],
        now_s: float,
        grace_s: float,
        collected: Collected,
        *,
        is_dry_run: bool,
    ) -> None:
        path = folder.replace(OBJECTS, "v1/s/", 1)
        entry = await self._register.get(path)
        try:
            head = None if entry is None else self._secret.read_head(entry.body)
            named, is_over = await self._named(folder, head, now_s, grace_s)
        except (ForeignObject, DecodeError) as error:
            collected.problems.append(f"{folder}: {error}")
            return
        garbage = [found for found in old if found.path not in named]
        collected.expired_session_count += is_over
        # A session without a head has no owner that could name an object.
        if entry is None or head is None or not garbage or is_dry_run:
            is_free = True
        else:
            is_free = await self._fence(path, entry, head, is_over=is_over)
        if not is_free:
            collected.busy_session_count += 1
            return
        await self._remove(garbage, collected, is_dry_run=is_dry_run)

    async def _remove(self, garbage: list[Listed], collected: Collected, *, is_dry_run: bool) -> None:
        collected.garbage_object_count += len(garbage)
        collected.garbage_bytes += sum(found.size_bytes for found in garbage)
        if garbage and not is_dry_run:
            await self._objects.remove([found.path for found in garbage])
            self._claims.counts.removed_objects += len(garbage)

    async def _named(
        self, folder: str, head: Head | None, now_s: float, grace_s: float
    ) -> tuple[Iterable[str], bool]:
        """Paths that a head names, and whether its session is over.

        Raises ForeignObject, DecodeError, NoAnswer.
        """
        if head is None or head.is_deleted or not head.shared:
            return (), False
        path = f"{folder}/{head.shared}"
        found = await self._objects.get(path, INDEX_LIMIT_BYTES)
        if found is None:
            raise ForeignObject("what its head names is not there")
        body = self._secret.verified(path, bytes(memoryview(found.body)))
        index = peer_pb2.SharedSession.FromString(body)
        left_s = index.remaining.ToNanoseconds() / 1e9 - (now_s - found.modified_s)
        # A host that is there ends its sessions itself, and says in time how long they live on.
        if left_s <= -grace_s or (left_s <= 0 and await self._is_lost(head.node, now_s, grace_s)):
            return (), True
        return {path, *(f"{folder}/{part.name}" for part in index.parts)}, False

    async def _is_lost(self, node: str, now_s: float, grace_s: float) -> bool:
        beat_s = await self._objects.modified_s(node_path(node))
        return beat_s is None or now_s - beat_s > grace_s

    async def _fence(self, path: str, entry: Entry, head: Head, *, is_over: bool) -> bool:
        """Change a head, so that a host which has stopped cannot. False: somebody else has changed it."""
        made = self._claims.ended(head) if is_over else head.touched(secrets.token_hex(8))
        body = self._secret.write(made)
        found = await put(self._register, path, body, entry)
        return found is not None and found.body == body

    async def is_due(self) -> bool:
        """Whether nobody has collected for `GRACE_S`; then it is this host's turn. Raises NoAnswer."""
        entry = await self._register.get(COLLECTOR)
        now_s = await self._objects.modified_s(node_path(self._claims.node))
        last_s = await self._objects.modified_s(COLLECTOR)
        if now_s is None or (last_s is not None and now_s - last_s < GRACE_S):
            return False
        mine = NodeRecord(self._claims.node, self._claims.incarnation, "", 0, secrets.token_hex(8))
        body = self._secret.write(mine)
        found = await put(self._register, COLLECTOR, body, entry)
        return found is not None and found.body == body
