"""Collection: what no session and no store needs any more goes from the bucket.

    an object no head names, older than `grace`     a store died in the middle of sharing, or of removing
    a head that names objects, expired, its host    the session ends in the bucket, and its objects go
    lost for `grace`
    a holder of a prefix, older than `grace`        whoever computes the prefix next says so again
    a head that was not changed for `DEAD_S`, and   its session was deleted, or its owner says that it has
    names no objects                                ended, or its owner is away
    the record of a store that was silent that      a mark says that it was away: see `Claims.was_away`
    long

A host may have stopped right before it names an object, for however long. So the head is changed before
anything of its session is removed: that host's change is refused then, and it puts its objects anew. Times
are the bucket's. Worst case: no answer; what is left is collected the next time.

No bucket removes under a condition. A dead head is marked first, which nobody changes; only when it is gone
may a new one be created. Marked paths are listed beforehand, so that the next collection goes on with them.
The one assumption: a bucket carries no removal out a day after it was sent.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from ctxcache.core.fleet.claims import Claims
from ctxcache.core.fleet.heads import (
    HEADS,
    HOLDERS,
    NODES,
    OBJECTS,
    ForeignObject,
    Head,
    NodeRecord,
    Secret,
    away_path,
    node_path,
)
from ctxcache.core.fleet.register import Entry, NoAnswer, Register, put
from ctxcache.fleet.sharing import INDEX_LIMIT_BYTES
from ctxcache.storage.objects import Listed, Objects
from ctxcache.v1 import peer_pb2

log = logging.getLogger(__name__)
GRACE_S = 24 * 3600.0
"""How long an object is left alone that no head names."""
COLLECTOR = "v1/collector"
"""The path of the record of who collected last."""
DEAD_S = 30 * 86400.0
"""How long a head is left alone that was not changed, and a store waited for that is silent."""
DYING = "v1/dying/"
"""The beginning of the paths of lists of heads that are being removed."""
PATHS_AT_ONCE = 1000
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
    dead_head_count: int = 0
    away_store_count: int = 0
    problems: list[str] = field(default_factory=list)
    shard_count: int = 0
    """Parts of the names that were looked through, of 256."""


Asked = defaultdict[str, dict[str, Entry]]
"""Heads that may be dead, by the node that is asked."""


class Collecting:
    """Looks through all that the bucket has of sessions, a part of the names at a time."""

    def __init__(
        self,
        register: Register,
        objects: Objects,
        secret: Secret,
        claims: Claims,
        is_settled: Callable[[], bool],
        ended: Callable[[str, str, Sequence[str]], Awaitable[Sequence[str]]],
    ) -> None:
        """`is_settled`: see Claims. A host that was stopped meanwhile is not.

        `ended`: which of these heads a node says to name none of its sessions, at this address. It raises
        NoAnswer.
        """
        self._register, self._objects, self._secret, self._claims = register, objects, secret, claims
        self._is_settled, self._ended = is_settled, ended

    async def collect(
        self, *, grace_s: float = GRACE_S, is_dry_run: bool = False
    ) -> AsyncGenerator[Collected]:
        """Collect, or say what would be; yields how far it is, and all of it at last. Raises NoAnswer."""
        collected = Collected()
        now_s = await self._objects.modified_s(node_path(self._claims.node))
        if now_s is None:
            raise NoAnswer("this host has no record yet")
        self._check_settled()
        addresses = await self._addresses(now_s, collected, is_dry_run=is_dry_run)
        if not is_dry_run:
            await self._finish_all(now_s, collected)
        asked = Asked(dict)
        for shard in SHARDS:
            await self._collect_objects(shard, now_s, grace_s, collected, is_dry_run=is_dry_run)
            async for found in self._objects.listed(f"{HEADS}{shard}/"):
                if now_s - found.modified_s > DEAD_S + GRACE_S:
                    await self._ask_later(found.path, now_s, asked, collected)
            is_last = shard == SHARDS[-1]
            for node in [node for node, some in asked.items() if is_last or len(some) >= PATHS_AT_ONCE]:
                await self._ask(asked.pop(node), addresses.get(node), collected, is_dry_run=is_dry_run)
            collected.shard_count += 1
            yield collected

    async def _collect_objects(
        self, shard: str, now_s: float, grace_s: float, collected: Collected, *, is_dry_run: bool
    ) -> None:
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

    # -- heads and records ---------------------------------------------------------------------------

    async def _addresses(
        self, now_s: float, collected: Collected, *, is_dry_run: bool
    ) -> dict[str, tuple[str, str]]:
        """Stores that were heard of in the last `DEAD_S`, and where; the records of others go."""
        addresses = {}
        async for listed in self._objects.listed(NODES):
            node, entry = listed.path.removeprefix(NODES), await self._register.get(listed.path)
            try:
                record = None if entry is None else self._secret.read_node(entry.body)
            except ForeignObject as error:
                collected.problems.append(f"{listed.path}: {error}")
                continue
            if record is not None and now_s - listed.modified_s <= DEAD_S:
                addresses[node] = node, record.address
            elif record is not None:
                collected.away_store_count += 1
                if not is_dry_run:
                    # In this order: without the mark it would go on with what has ended since.
                    mark = self._secret.write(NodeRecord(node, "", "", 0, secrets.token_hex(8)))
                    await put(self._register, away_path(node), mark, None)
                    await self._register.remove(listed.path)
        return addresses

    # A copy here may have been taken and deleted elsewhere, and the head that is removed alone says so.
    def _check_settled(self) -> None:
        if not self._is_settled():
            raise NoAnswer("this host looks first at what was taken from it: try again in a minute")

    async def _ask_later(self, path: str, now_s: float, asked: Asked, collected: Collected) -> None:
        """Note a head that may be dead, by the node that is to be asked; empty where nobody is."""
        entry = await self._register.get(path)
        try:
            head = None if entry is None else self._secret.read_head(entry.body)
        except ForeignObject as error:
            collected.problems.append(f"{path}: {error}")
            return
        # The head may have changed between the listing and the read: its age is asked for after the read.
        modified_s = await self._objects.modified_s(path)
        # A day more than stores are waited for: one that was silent for nearly as long has looked at its own.
        is_old = modified_s is not None and now_s - modified_s > DEAD_S + GRACE_S
        if entry is not None and head is not None and is_old and not (head.shared or head.is_dead):
            asked["" if head.is_deleted else head.node][path] = entry

    async def _ask(
        self,
        entries: dict[str, Entry],
        owner: tuple[str, str] | None,
        collected: Collected,
        *,
        is_dry_run: bool,
    ) -> None:
        """Remove those of these heads whose sessions have ended. `owner`: None where nobody has any."""
        paths = list(entries)
        for begin in range(0, len(paths), PATHS_AT_ONCE):
            dead: Sequence[str] = paths[begin : begin + PATHS_AT_ONCE]
            try:
                dead = dead if owner is None else await self._ended(*owner, dead)
            except NoAnswer:
                # It is there, and does not answer now.
                continue
            collected.dead_head_count += len(dead)
            if dead and not is_dry_run:
                await self._remove_heads({path: entries[path] for path in dead})

    async def _remove_heads(self, entries: dict[str, Entry]) -> None:
        """Remove heads that are as they were when they were looked at."""
        self._check_settled()
        path = f"{DYING}{secrets.token_hex(16)}"
        await self._objects.put(path, self._secret.signed(path, "\n".join(entries).encode()))
        for head_path, entry in entries.items():
            mark = self._secret.write(self._secret.read_head(entry.body).dead(secrets.token_hex(8)))
            found = await put(self._register, head_path, mark, entry)
            # One that another store has marked is that one's to remove.
            if found is not None and found.body == mark:
                await self._register.remove(head_path)
        await self._objects.remove([path])

    async def _finish_all(self, now_s: float, collected: Collected) -> None:
        async for listed in self._objects.listed(DYING):
            # The store that made a young list may be at work on it.
            if now_s - listed.modified_s > GRACE_S:
                await self._finish(listed.path, collected)

    async def _finish(self, path: str, collected: Collected) -> None:
        """Remove what a store has marked that stopped before it removed it."""
        listed = await self._objects.get(path, INDEX_LIMIT_BYTES)
        try:
            body = b"" if listed is None else self._secret.verified(path, bytes(memoryview(listed.body)))
        except ForeignObject as error:
            collected.problems.append(f"{path}: {error}")
            return
        for head_path in body.decode().split():
            entry = await self._register.get(head_path)
            try:
                is_dead = entry is not None and self._secret.read_head(entry.body).is_dead
            except ForeignObject as error:
                collected.problems.append(f"{head_path}: {error}")
                continue
            if is_dead:
                await self._register.remove(head_path)
        await self._objects.remove([path])

    # -- objects -------------------------------------------------------------------------------------

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
        path = folder.replace(OBJECTS, HEADS, 1)
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
