"""llama.cpp's own server in this process, and its slots' files in the store.

A session has its newest file, in blocks, and a record of which blocks those are. llama.cpp does not look
whether a file is whole (half a file aborts its process), nor of which model it is. So a file is given out
whole and equal to the one that was saved, or not at all. Blocks are looked for in a space that the caller
derives from the model's files. Worst case: a conversation is computed again.
"""

import hashlib
import http.client
import json
import logging
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import xllamacpp
from xxhash import xxh3_128

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import Durability
from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.engines.link import GONE, LinkState, StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings

log = logging.getLogger(__name__)

SLOT_WORDS = 6
"""A slot's file begins with so many words of 32 bits, and its tokens follow."""
SLOT_HEAD = (0x67677371, 4, -1, 1, 4)
"""In xllamacpp 2026.10: a sequence's mark and version, its tokens' mark and version, words beside tokens."""
PART_BYTES = 4 << 20
"""Bytes of a slot's file in one block."""
DRAIN_S = 10.0
"""How long the end of the process waits for what is still to be saved."""


# A conversation in the store:
#
#     block "session alice"   record: size, digest, tokens, keys k0 k1 k2
#     blocks k0 k1 k2         the slot's file in parts of 4 MiB, under random keys
#
#     save    put k0' k1' k2' ─ delete the record ─ put the new record ─ delete k0 k1 k2
#     crash   between any two: the old conversation, none, or the new one; never a mixture
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
        # A record whose keys are not those of its size was not written by this code.
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
                # A turn that comes right behind another one would find the state before that.
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
            # Each file is a whole state on disk: more of them than the directory has room for must not wait.
            if older is None and len(self._pending) >= 2 * self._settings.slot_count:
                log.warning("a conversation is not saved: %d others wait for it", len(self._pending))
                older = (path, token_count)
            else:
                self._pending[session] = (path, token_count)
                self._changed.notify_all()
        if older is not None:
            # The file that is not saved: the older one of the session, or the new one where too many wait.
            older[0].unlink(missing_ok=True)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is to be saved, or the time is over; whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and self._saved is None, timeout_s)

    def close(self) -> None:
        """Save what is left, for a bounded time, and end."""
        # Bounded twice: a store that hangs must not keep the process from ending.
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
            except (OSError, ValueError) as error:
                # An empty file cannot be mapped, which numpy says by a ValueError.
                log.warning("a conversation is not saved: %s", error)
            finally:
                path.unlink(missing_ok=True)

    def _put(self, client: Client, space: BlockSpace, session: str, path: Path, token_count: int) -> None:
        # Mapped and not read: a state of gigabytes is put part by part.
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
            # A store that is gone would let each of these deletes wait for its timeout.
            if not isinstance(error, GONE):
                with suppress(CacheError):
                    client.blocks.delete(space, record.keys)
            raise
        if old is not None:
            client.blocks.delete(space, old.keys)


def tokens_in(path: Path) -> npt.NDArray[np.int32]:
    """The tokens at the begin of a slot's file; none of a file of another kind, or with images."""
    head = np.fromfile(path, "<i4", SLOT_WORDS)
    magic, version, size, mark, tokens_version, count = (*head.tolist(), *([0] * SLOT_WORDS))[:SLOT_WORDS]
    if (magic, version, mark, tokens_version, size - count) != SLOT_HEAD:
        return np.empty(0, np.int32)
    return np.fromfile(path, "<i4", count, offset=head.nbytes)


def _record(client: Client, space: BlockSpace, session: str) -> SlotRecord | None:
    (found,) = client.blocks.load(space, [SlotKeeper.record_key(session)])
    return None if found is None else SlotRecord.of(b"".join(part.tobytes() for part in found))


def _load(client: Client, space: BlockSpace, session: str, path: Path) -> int:
    record = _record(client, space, session)
    if record is None:
        return 0
    with path.open("wb") as file:
        # All of it now, or an error: a page of a mapping that has no place on disk ends the process.
        os.posix_fallocate(file.fileno(), 0, record.size_bytes)
    # The store's client writes the parts right into the file that llama.cpp reads next.
    content = np.memmap(path, np.uint8, "r+", shape=(record.size_bytes,))
    parts = [content[begin : begin + PART_BYTES] for begin in range(0, content.size, PART_BYTES)]
    try:
        loaded = client.blocks.load(space, record.keys, into=parts)
    except InvalidArgument:
        # One of its blocks has another size.
        return 0
    # llama.cpp aborts its process on half a file: anything but the whole is as good as nothing.
    if any(part is None for part in loaded) or _digest(content) != record.digest:
        return 0
    return record.token_count


def _digest(content: npt.NDArray[np.uint8]) -> str:
    return xxh3_128(content.data).hexdigest()


OWNED = ("model", "port", "hostnames", "slot_save_path", "api_keys", "n_parallel", "n_ctx")
"""Parameters of llama.cpp that are set here."""
NEUTRAL = {"port", "slot_save_path", "n_parallel", "n_ctx", "n_threads_http", "n_predict", "model_alias"} | {
    "verbosity", "warmup", "n_gpu_layers", "n_batch", "n_ubatch", "load_mode", "endpoint_metrics",
}  # fmt: skip
"""Parameters that a slot's bytes do not depend on; n_ctx counts as a slot's share of it."""
CALL_TIMEOUT_S = 60.0


class LlamaServer:
    """llama.cpp's own server on a port of this host that only the proxy knows. Raises RuntimeError."""

    def __init__(self, settings: LlamaSettings, directory: Path) -> None:
        self.directory = directory
        # Opened before llama.cpp loads them: `space` digests the
        # same files, even if the names lead elsewhere by then.
        self._files = [path.open("rb") for path in model_files(settings.model)]
        self._stats = [os.fstat(file.fileno()) for file in self._files]
        parameters = common_parameters(settings)
        parameters.model.path = str(settings.model)
        # Port 0: the system chooses, and only this process knows which one.
        parameters.hostnames, parameters.port = ["127.0.0.1"], 0
        parameters.n_parallel, parameters.n_ctx = settings.slot_count, settings.context_tokens
        parameters.slot_save_path = f"{directory}/"
        parameters.endpoint_slots = True
        # The store is what keeps conversations that have no slot.
        parameters.cache_ram_mib, parameters.cache_idle_slots = 0, False
        self._server = xllamacpp.Server(parameters)
        address = urlsplit(self._server.listening_address)
        if address.hostname is None or address.port is None:
            raise RuntimeError(f"llama.cpp does not listen: {self._server.listening_address}")
        self.address = address.hostname, address.port
        # All parameters count but those that are known not to:
        # a new one of llama.cpp counts until it is listed.
        scalars = {name: getattr(parameters, name) for name in dir(parameters) if name not in NEUTRAL}
        self._facts = {
            "llama.cpp": [xllamacpp.__version__, xllamacpp.BUILD_INFO],
            "slot_tokens": self.call("GET", "/props")["default_generation_settings"]["n_ctx"],
            "parameters": {
                name: value for name, value in scalars.items() if isinstance(value, bool | int | float | str)
            },
        }

    def space(self, client: Client) -> BlockSpace:
        """Where slots are looked for: what their bytes depend on is in it. Asks the store once."""
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True, default=str).encode())
        for file, before in zip(self._files, self._stats, strict=True):
            file.seek(0)
            digest.update(hashlib.file_digest(file, "sha256").digest())
            now = os.fstat(file.fileno())
            # A file that changes under llama.cpp: states would be found under the digest of other weights.
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise ValueError(f"{file.name} changed after llama.cpp had loaded it")
        space = BlockSpace(digest.digest(), layout_tag="llama.cpp slot")
        # For its error: a space that may not be used refuses the link now, and not the first save.
        client.blocks.look_up(space, [digest.digest()])
        return space

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One of llama.cpp's own operations. Raises LlamaRefused, OSError."""
        connection = http.client.HTTPConnection(*self.address, timeout=CALL_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise LlamaRefused(repr(error)) from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise LlamaRefused(text.decode(errors="replace"))
        found: dict[str, Any] = json.loads(text)
        return found

    def slot(self, number: int, action: str, file: Path | None = None) -> dict[str, Any]:
        """Save, restore or erase a slot. Raises LlamaRefused, OSError."""
        body = {} if file is None else {"filename": file.name}
        return self.call("POST", f"/slots/{number}?action={action}", body)


class LlamaRefused(Exception):
    """llama.cpp answered with an error; the message is its own."""


def model_files(model: Path) -> list[Path]:
    """The files of a model: one, or all shards. Raises InvalidArgument."""
    shard = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", model.name)
    files = sorted(model.parent.glob(f"{shard[1]}-*-of-{shard[2]}.gguf")) if shard else [model]
    if not files or not all(file.is_file() for file in files):
        raise InvalidArgument(field="model", problem=f"{model} is no file")
    return files


def common_parameters(settings: LlamaSettings) -> Any:
    """Parameters of xllamacpp with those that the user gave. Raises InvalidArgument."""
    parameters = xllamacpp.CommonParams()
    for name, text in settings.parameters.items():
        *outer, field = name.split(".")
        place, value = parameters, None
        with suppress(AttributeError):
            for part in outer:
                place = getattr(place, part)
            value = getattr(place, field)
        if name.partition(".")[0] in OWNED or not isinstance(value, bool | int | float | str):
            raise InvalidArgument(field=f"param {name}", problem="is not a parameter that may be set")
        try:
            given = {"true": True, "false": False}[text] if isinstance(value, bool) else type(value)(text)
            setattr(place, field, given)
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            kind = type(value).__name__
            raise InvalidArgument(field=f"param {name}", problem=f"{text!r} is no {kind}") from error
    return parameters
