"""llama.cpp's own server in this process, and its slots' files in the store.

A session has its newest file, in blocks, and a record of which blocks those are. llama.cpp does not look
whether a file is whole (half a file aborts its process), nor of which model it is. So a file is given out
whole and equal to the one that was saved, or not at all. It has no name, and is read and written and not
mapped: nobody can cut it before llama.cpp reads it, and a file that is cut is an error and no signal. Blocks
are looked for in a space that the caller derives from the model's files. Worst case: a conversation is
computed again.
"""

import hashlib
import http.client
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
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
from gpu_worker.engines.names import session_id
from gpu_worker.engines.reasons import Reasons
from gpu_worker.engines.spaces import model_of
from gpu_worker.engines.tried import warn_if_untried

log = logging.getLogger(__name__)

SLOT_WORDS = 6
"""A slot's file begins with so many words of 32 bits, and its tokens follow."""
SLOT_HEAD = (0x67677371, 4, -1, 1, 4)
"""In xllamacpp 2026.10: a sequence's mark and version, its tokens' mark and version, words beside tokens."""
PART_BYTES = 4 << 20
"""Bytes of a slot's file in one block."""
PARTS_AT_A_TIME = 4
"""Parts of a file that are in memory at a time."""
KEY_BYTES = 32
DRAIN_S = 10.0
"""How long the end of the process waits for unsaved files."""


# A conversation in the store:
#
#     block "session alice"   record: size, digest, tokens, keys k0 k1 k2
#     blocks k0 k1 k2         the slot's file in parts of 4 MiB, under random keys
#
#     save    put k0' k1' k2' ─ delete the record ─ put the new record ─ delete k0 k1 k2
#     crash   between any two: the old conversation, none, or the new one; never a mixture
@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The block under a session's own key: the slot's file's blocks, in order, its size and its digest."""

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
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        # A record whose keys are not those of its size was not written by this code.
        is_ours = len(keys) == -(-record.size_bytes // PART_BYTES) > 0
        return record if is_ours and {len(key) for key in keys} == {KEY_BYTES} else None

    def to_bytes(self) -> bytes:
        """The bytes of the block."""
        facts = {"size_bytes": self.size_bytes, "digest": self.digest, "token_count": self.token_count}
        return json.dumps(facts | {"keys": [key.hex() for key in self.keys]}).encode()


@dataclass(frozen=True, slots=True)
class _Saving:
    """A slot's file that waits to be saved, and its size when it was handed over."""

    file: FileIO
    size_bytes: int
    token_count: int


class SlotKeeper:
    """Slots' files in the store, by session. Restores while a request waits; saves in a thread of its own."""

    def __init__(self, link: StoreLink[BlockSpace], settings: LlamaSettings) -> None:
        self._link, self._settings = link, settings
        self.reasons = Reasons(log)
        self._pending: dict[str, _Saving] = {}
        """Owned by `_changed`: the newest file of each session."""
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
        """The key of a session's record, by the name that its caller gives it."""
        return hashlib.sha256(b"session " + session_id(session).encode()).digest()

    def restore(self, session: str, file: FileIO) -> int:
        """Write a session's file, whole and verified; its token count, or 0 where the store has none.

        Waits a moment for the session's unsaved file.
        """
        with self._changed:
            self._changed.wait_for(
                # A turn that follows another at once would find the earlier state.
                lambda: session not in self._pending and session != self._saved,
                self._settings.store_timeout_s,
            )
        used = self._link.use()
        if used is None:
            return 0
        with self._told(session, "is not restored"):
            return _load(*used, session, file)
        return 0

    def save(self, session: str, file: FileIO, token_count: int) -> None:
        """Save a file and close it, later. The newest file of a session is the one that is saved."""
        saving = _Saving(file, os.fstat(file.fileno()).st_size, token_count)
        with self._changed:
            older = self._pending.get(session)
            # Each file is a whole state on disk: only as many may wait as the directory has room for.
            is_full = older is None and len(self._pending) >= 2 * self._settings.slot_count
            if is_full:
                older = saving
            else:
                self._pending[session] = saving
                self._changed.notify_all()
        if is_full:
            self.reasons.tell(session, "is not saved, too many others wait", len(self._pending))
        if older is not None:
            # One file is not saved: the session's older one, or the new one where too many wait.
            older.file.close()

    @contextmanager
    def _told(self, session: str, what: str) -> Iterator[None]:
        """Log any failure within the block, with its reason."""
        try:
            yield
        except CacheError as error:
            self._link.failed(error)
            self.reasons.tell(session, f"{what}, {error.reason}", error)
        except NotWhole as error:
            self.reasons.tell(session, f"{what}, not whole", error)
        except OSError as error:
            self.reasons.tell(session, f"{what}, no file", error)
        except Exception as error:
            # Anybody may have written the store's bytes: they must end neither a request nor the thread.
            log.exception("a conversation %s", what)
            self.reasons.tell(session, f"{what}, an error of ctxcache", repr(error))

    def drain(self, timeout_s: float) -> bool:
        """Wait until every file is saved, or the time is over. Returns whether every file is saved."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and self._saved is None, timeout_s)

    def close(self) -> None:
        """Save the remaining files, for a bounded time, and end."""
        # The wait is bounded twice: a store that hangs must not keep the process from ending.
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
                session, saving = next(iter(self._pending.items()))
                del self._pending[session]
                self._saved = session
            used = self._link.use()
            with saving.file, self._told(session, "is not saved"):
                if used is not None:
                    self._put(*used, session, saving)

    def _put(self, client: Client, space: BlockSpace, session: str, saving: _Saving) -> None:
        size_bytes, digest = saving.size_bytes, xxh3_128()
        # Each save has keys of its own: a block never changes, and an older file's blocks are never mixed in.
        keys = tuple(os.urandom(KEY_BYTES) for _ in range(0, size_bytes, PART_BYTES))
        durability = Durability[self._settings.durability.upper()]
        put = partial(client.blocks.put, space, ttl_s=self._settings.ttl_s, durability=durability)
        old, key = _old_record(client, space, session), SlotKeeper.record_key(session)
        try:
            for part_key, begin in zip(keys, range(0, size_bytes, PART_BYTES), strict=True):
                part = _read(saving.file, begin, min(PART_BYTES, size_bytes - begin))
                digest.update(part)
                put({part_key: part})
            # The record comes last: a crash before it leaves blocks without a record, which are evicted in
            # time.
            client.blocks.delete(space, [key])
            put({key: SlotRecord(size_bytes, digest.hexdigest(), saving.token_count, keys).to_bytes()})
        except (CacheError, NotWhole) as error:
            # With a store that is gone each of these deletes would wait for its timeout.
            if not isinstance(error, GONE):
                with suppress(CacheError):
                    client.blocks.delete(space, keys)
            raise
        if old is not None:
            client.blocks.delete(space, old.keys)


class NotWhole(Exception):
    """A slot's file is not whole or not the saved one; the message says why."""


def tokens_in(file: FileIO) -> npt.NDArray[np.int32]:
    """The tokens at the begin of a slot's file; none of a file of another kind, or with images."""
    head = np.frombuffer(os.pread(file.fileno(), 4 * SLOT_WORDS, 0), np.uint8)
    words = head[: head.size // 4 * 4].view("<i4").tolist()
    magic, version, size, mark, tokens_version, count = (*words, *([0] * SLOT_WORDS))[:SLOT_WORDS]
    if (magic, version, mark, tokens_version, size - count) != SLOT_HEAD or count < 0:
        return np.empty(0, np.int32)
    tokens = os.pread(file.fileno(), 4 * count, 4 * SLOT_WORDS)
    return np.frombuffer(tokens, "<i4") if len(tokens) == 4 * count else np.empty(0, np.int32)


def _record(client: Client, space: BlockSpace, session: str) -> SlotRecord | None:
    """Raises NotWhole for a block that is no record."""
    (parts,) = client.blocks.load(space, [SlotKeeper.record_key(session)])
    if parts is None:
        return None
    record = SlotRecord.of(b"".join(part.tobytes() for part in parts))
    if record is None:
        raise NotWhole("its record says nothing that can be read")
    return record


def _old_record(client: Client, space: BlockSpace, session: str) -> SlotRecord | None:
    """The record that a new one replaces; None where it cannot be read."""
    try:
        return _record(client, space, session)
    except GONE:
        raise
    except (CacheError, NotWhole):
        return None


def _load(client: Client, space: BlockSpace, session: str, file: FileIO) -> int:
    record = _record(client, space, session)
    if record is None:
        return 0
    digest = xxh3_128()
    room = [np.empty(PART_BYTES, np.uint8) for _ in range(min(PARTS_AT_A_TIME, len(record.keys)))]
    file.truncate(0)
    for begin in range(0, len(record.keys), PARTS_AT_A_TIME):
        keys = record.keys[begin : begin + PARTS_AT_A_TIME]
        left_bytes = record.size_bytes - begin * PART_BYTES
        parts = [room[i][: left_bytes - i * PART_BYTES] for i in range(len(keys))]
        try:
            loaded = client.blocks.load(space, keys, into=parts)
        except InvalidArgument as error:
            raise NotWhole(f"a part has another size: {error}") from error
        if any(part is None for part in loaded):
            raise NotWhole("a part is not there, or is damaged")
        for i, part in enumerate(parts, begin):
            digest.update(part.data)
            _write(file, i * PART_BYTES, part)
    # llama.cpp aborts its process on half a file: only the whole file is given out.
    if digest.hexdigest() != record.digest:
        raise NotWhole("its parts are not those that were saved together")
    return record.token_count


def _read(file: FileIO, begin: int, size_bytes: int) -> bytes:
    data = os.pread(file.fileno(), size_bytes, begin)
    if len(data) != size_bytes:
        raise NotWhole(f"the slot's file ends before {begin + size_bytes} bytes")
    return data


def _write(file: FileIO, begin: int, part: npt.NDArray[np.uint8]) -> None:
    data = part.data
    while data:
        written = os.pwrite(file.fileno(), data, begin)
        data, begin = data[written:], begin + written


OWNED = ("model", "port", "hostnames", "slot_save_path", "api_keys", "api_prefix", "n_parallel", "n_ctx")
"""Parameters of llama.cpp that are set here."""
REFUSED = {
    "mmproj": "images cannot be given: a slot's file does not say which ones its rows are of",
    "ctx_shift": "rows of tokens that went would be kept",
    "n_cache_reuse": "rows of another context would be reused, and kept as this one's",
    "lora_adapters": "LoRA adapters cannot be given",
}
"""Parameters with which rows would depend on more than tokens and model."""
NEUTRAL = {"port", "slot_save_path", "n_parallel", "n_ctx", "n_threads_http", "n_predict", "model_alias"} | {
    "verbosity", "warmup", "n_gpu_layers", "n_batch", "n_ubatch", "load_mode", "endpoint_metrics",
}  # fmt: skip
"""Parameters that a slot's bytes do not depend on; n_ctx counts as a slot's share of it."""
CALL_TIMEOUT_S = 60.0


class LlamaServer:
    """llama.cpp's own server on a port of this host that only the proxy knows. Raises RuntimeError."""

    def __init__(self, settings: LlamaSettings) -> None:
        warn_if_untried("xllamacpp", xllamacpp.__version__)
        # Opened before llama.cpp loads them: `space` digests the
        # same files, even if the names lead elsewhere by then.
        self._files = [path.open("rb") for path in model_files(settings.model)]
        self._stats = [os.fstat(file.fileno()) for file in self._files]
        self._name = settings.model.stem
        parameters = common_parameters(settings)
        parameters.model.path = str(settings.model)
        # Port 0: the system chooses, and only this process knows which one.
        parameters.port = 0
        # xllamacpp listens on several addresses since 2026.10.
        if hasattr(parameters, "hostnames"):
            parameters.hostnames = ["127.0.0.1"]
        else:
            parameters.hostname = "127.0.0.1"
        parameters.n_parallel, parameters.n_ctx = settings.slot_count, settings.context_tokens
        # Descriptors of this process name the files, so that nobody else can open them.
        parameters.slot_save_path = "/proc/self/fd/"
        parameters.endpoint_slots = True
        # The store keeps conversations that have no slot.
        parameters.cache_ram_mib, parameters.cache_idle_slots = 0, False
        self._server = xllamacpp.Server(parameters)
        address = urlsplit(self._server.listening_address)
        if address.hostname is None or address.port is None:
            raise RuntimeError(f"llama.cpp does not listen: {self._server.listening_address}")
        self.address = address.hostname, address.port
        # All parameters count but those that are known not to: a new parameter of llama.cpp counts until it
        # is listed.
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
        digest = hashlib.sha256()
        for file in self._files:
            file.seek(0)
            digest.update(hashlib.file_digest(file, "sha256").digest())
        self._check_files()
        facts = json.dumps(self._facts, sort_keys=True, default=str)
        spec = model_of(self._name, "llamacpp", f"files:{digest.hexdigest()}", facts)
        model = client.models.register(spec)
        space = BlockSpace(model.spec.fingerprint(), layout_tag="llama.cpp slot")
        # The look-up is for its error: a space that may not be used refuses the link now, not the first save.
        client.blocks.look_up(space, [space.model_fingerprint])
        return space

    def _check_files(self) -> None:
        """Raise LlamaRefused where a file was written to: llama.cpp maps it, and computes by what it has now.

        States would be found under the digest of other weights.
        """
        for file, before in zip(self._files, self._stats, strict=True):
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise LlamaRefused(f"{file.name} changed after llama.cpp had loaded it")

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
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise LlamaRefused(f"no JSON: {text[:200]!r}") from error
        if not isinstance(answer, dict):
            raise LlamaRefused(f"no object: {text[:200]!r}")
        return answer

    def save(self, slot: int, file: FileIO) -> int:
        """Write a slot's state into a file; its token count. Raises LlamaRefused, NotWhole, OSError."""
        said = self._slot(slot, "save", file)
        # The check follows the save: the slot's state was computed before it.
        self._check_files()
        if os.fstat(file.fileno()).st_size != said["n_written"]:
            raise NotWhole(f"of {said['n_written']} bytes not all are in the slot's file")
        return int(said["n_saved"])

    def restore(self, slot: int, file: FileIO) -> None:
        """Put a state into a slot. Raises LlamaRefused, OSError."""
        self._check_files()
        self._slot(slot, "restore", file)

    def erase(self, slot: int) -> None:
        """Leave a slot without a state. Raises LlamaRefused, OSError."""
        self.call("POST", f"/slots/{slot}?action=erase", {})

    def _slot(self, number: int, action: str, file: FileIO) -> dict[str, Any]:
        return self.call("POST", f"/slots/{number}?action={action}", {"filename": str(file.fileno())})


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
        if problem := REFUSED.get((*outer, field)[0]):
            raise InvalidArgument(field=f"param {name}", problem=problem)
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
