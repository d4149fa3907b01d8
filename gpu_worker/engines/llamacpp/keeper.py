"""Slots' files in the store: a session's newest one, in blocks, and a record of which blocks those are.

llama.cpp does not look whether a file is whole (half a file aborts its process), nor of which model it is.
So a file is given out whole and equal to the one that was saved, or not at all. Blocks are looked for in a
space that the caller derives from the model's files. Worst case: a conversation is computed again.
"""

import hashlib
import json
import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import Durability
from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.engines.link import GONE, LinkState, StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings

log = logging.getLogger(__name__)

PART_BYTES = 4 << 20
"""Of a slot's file, in one block."""
DRAIN_S = 10.0
"""How long the end of the process waits for what is still to be saved."""


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The block under a session's own key: which blocks are the slot's file, in order, and what they give."""

    size_bytes: int
    digest: str
    token_count: int
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, data: bytes) -> "SlotRecord | None":
        """The record that a block holds; None where it holds none."""
        try:
            facts = json.loads(data)
            keys = tuple(map(bytes.fromhex, facts["keys"]))
            record = cls(int(facts["size_bytes"]), str(facts["digest"]), int(facts["token_count"]), keys)
        except (ValueError, KeyError, TypeError):
            return None
        return record if len(keys) == -(-record.size_bytes // PART_BYTES) > 0 else None

    def to_bytes(self) -> bytes:
        """The block."""
        facts = {"size_bytes": self.size_bytes, "digest": self.digest, "token_count": self.token_count}
        return json.dumps(facts | {"keys": [key.hex() for key in self.keys]}).encode()


class SlotKeeper:
    """Slots' files in the store, by session. Restores while a request waits; saves in a thread of its own."""

    def __init__(self, link: StoreLink[BlockSpace], settings: LlamaSettings) -> None:
        self._link, self._settings = link, settings
        self._pending: dict[str, tuple[Path, int]] = {}
        """Owned by `_changed`: the newest file of each session, and its tokens."""
        self._saved: str | None = None
        """Owned by `_changed`: the session that the thread saves."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="ctxcache-slots", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether saving has a chance."""
        return self._link.state is LinkState.READY

    @staticmethod
    def record_key(session: str) -> bytes:
        """The key of a session's record."""
        return hashlib.sha256(b"session " + session.encode()).digest()

    def restore(self, session: str, path: Path) -> int:
        """Write a session's file, whole and verified; its tokens, or 0 where the store has none.

        Waits a moment for what is still to be saved of this session.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: session not in self._pending and session != self._saved,
                self._settings.store_timeout_s,
            )
        used = self._link.use()
        if used is None:
            return 0
        try:
            return _load(*used, session, path)
        except CacheError as error:
            self._link.failed(error)
        except OSError as error:
            log.warning("a conversation is not restored: %s", error)
        return 0

    def save(self, session: str, path: Path, token_count: int) -> None:
        """Save a file and remove it, later. The newest file of a session is the one that is saved."""
        with self._changed:
            older = self._pending.get(session)
            if older is None and len(self._pending) >= 2 * self._settings.slot_count:
                log.warning("a conversation is not saved: %d others wait for it", len(self._pending))
                older = (path, token_count)
            else:
                self._pending[session] = (path, token_count)
                self._changed.notify_all()
        if older is not None:
            older[0].unlink(missing_ok=True)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is to be saved, or the time is over; whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and self._saved is None, timeout_s)

    def close(self) -> None:
        """Save what is left, for a bounded time, and end."""
        self.drain(DRAIN_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(DRAIN_S)
        self._link.close()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._saved = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or self._pending)
                if self._is_closed:
                    return
                session, (path, token_count) = next(iter(self._pending.items()))
                del self._pending[session]
                self._saved = session
            try:
                used = self._link.use()
                if used is not None:
                    self._put(*used, session, path, token_count)
            except CacheError as error:
                self._link.failed(error)
            except OSError as error:
                log.warning("a conversation is not saved: %s", error)
            finally:
                path.unlink(missing_ok=True)

    def _put(self, client: Client, space: BlockSpace, session: str, path: Path, token_count: int) -> None:
        content = np.memmap(path, np.uint8, "r")
        parts = [content[begin : begin + PART_BYTES] for begin in range(0, content.size, PART_BYTES)]
        # Keys of their own each time: a block never changes, and an older file's blocks are never mixed in.
        record = SlotRecord(content.size, _digest(content), token_count, tuple(os.urandom(32) for _ in parts))
        durability = Durability[self._settings.durability.upper()]
        old, key = _record(client, space, session), SlotKeeper.record_key(session)
        try:
            for part_key, part in zip(record.keys, parts, strict=True):
                client.blocks.put(space, {part_key: part}, ttl_s=self._settings.ttl_s, durability=durability)
            # Record last: a crash before it leaves blocks that nothing names, which are evicted in time.
            client.blocks.delete(space, [key])
            client.blocks.put(
                space, {key: record.to_bytes()}, ttl_s=self._settings.ttl_s, durability=durability
            )
        except CacheError as error:
            if not isinstance(error, GONE):
                with suppress(CacheError):
                    client.blocks.delete(space, record.keys)
            raise
        if old is not None:
            client.blocks.delete(space, old.keys)


def _record(client: Client, space: BlockSpace, session: str) -> SlotRecord | None:
    (found,) = client.blocks.load(space, [SlotKeeper.record_key(session)])
    return None if found is None else SlotRecord.of(b"".join(part.tobytes() for part in found))


def _load(client: Client, space: BlockSpace, session: str, path: Path) -> int:
    record = _record(client, space, session)
    if record is None:
        return 0
    content = np.memmap(path, np.uint8, "w+", shape=(record.size_bytes,))
    parts = [content[begin : begin + PART_BYTES] for begin in range(0, content.size, PART_BYTES)]
    try:
        loaded = client.blocks.load(space, record.keys, into=parts)
    except InvalidArgument:
        # One of its blocks has another size.
        return 0
    if any(part is None for part in loaded) or _digest(content) != record.digest:
        return 0
    return record.token_count


def _digest(content: npt.NDArray[np.uint8]) -> str:
    return xxh3_128(content.data).hexdigest()
