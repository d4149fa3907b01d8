"""llama.cpp's API, with sessions: a slot is restored before a session's request, and saved after it.

Everything else is passed on as it is. Worst case: llama.cpp ends, and each request is answered with 502.
"""

import fcntl
import http.client
import itertools
import json
import logging
import select
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from ctxcache.client import Client, connect
from ctxcache.client.types import Durability
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.link import StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings
from gpu_worker.engines.llamacpp.keeper import (
    DRAIN_S,
    LlamaRefused,
    LlamaServer,
    SlotKeeper,
    model_files,
    tokens_in,
)

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 64 << 20
MOST_CONNECTIONS = 256
MOST_WAITING = 64
"""Requests that wait for a slot; more are refused."""
MOST_SLOTS = 256
MOST_NAME_CHARACTERS = 256
IDLE_S = 600
"""A connection that says nothing for longer is closed."""
RUN_BYTES = 1 << 16
SESSION_HEADER = "X-Session-ID"
RESTORED_HEADER = "X-Ctxcache-Restored-Tokens"
PINNED = {"/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions"}
"""Paths whose requests llama.cpp runs in the slot that they name."""
# Headers of one connection, which the proxy's two connections each make for themselves (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length", "host"}


@dataclass(slots=True)
class Slot:
    """One of llama.cpp's slots. `session`: the one whose tokens it has, as far as the proxy knows."""

    number: int
    session: str | None = None
    kept: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The tokens that were last restored or saved of this session."""
    is_taken: bool = False
    last_use: int = 0


class NoSlot(Exception):
    """Too many requests wait for a slot."""


# A request with a session, from its slot's view:
#
#     taken ─► has it the session? ── no ──► restore from the store ─┐
#                      │ yes                                         │
#                      └─────────────────────────────────────────────┴─► run
#     a reply of 200    the slot has the session's tokens, and is saved unless the store has more
#     anything else     nothing is known of the slot
class Slots:
    """Which request has which slot. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._changed = threading.Condition()
        self._waiting_count = self._use_count = 0

    @contextmanager
    def taken(self, session: str | None) -> Iterator[Slot]:
        """A slot for one request: the session's own if it has one, else the one unused for longest."""
        with self._changed:
            if self._waiting_count >= MOST_WAITING:
                raise NoSlot
            self._waiting_count += 1
            try:
                self._changed.wait_for(lambda: not all(slot.is_taken for slot in self._slots))
            finally:
                self._waiting_count -= 1
            free = [slot for slot in self._slots if not slot.is_taken]
            # The session's own slot if it is free, else the one whose conversation is likeliest to be over.
            slot = min(free, key=lambda one: (one.session != session or session is None, one.last_use))
            self._use_count += 1
            slot.is_taken, slot.last_use = True, self._use_count
        try:
            yield slot
        finally:
            with self._changed:
                slot.is_taken = False
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request has a slot, or the time is over; whether none has."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(slot.is_taken for slot in self._slots), timeout_s)

    def forget(self) -> None:
        """A request ran in a slot of llama.cpp's choice: none is known to have what it had."""
        with self._changed:
            for slot in self._slots:
                slot.session = None


class LlamaProxy(ThreadingHTTPServer):
    """llama.cpp's API. A context manager; `serve_forever` answers until `shutdown`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: LlamaSettings) -> None:
        """Load the model. Raises InvalidArgument, RuntimeError, OSError."""
        if not 1 <= settings.slot_count <= MOST_SLOTS:
            raise InvalidArgument(field="slots", problem=f"{settings.slot_count} is not 1 to {MOST_SLOTS}")
        if settings.durability.upper() not in Durability.__members__:
            raise InvalidArgument(field="durability", problem=f"{settings.durability!r} is not known")
        model_files(settings.model)
        # A thread for each connection: without a bound, idle ones would take all memory.
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((settings.host, settings.port), _Handler)
        self._directory, self._lock = _own_directory(settings.directory or Path(tempfile.gettempdir()))
        self.llama = LlamaServer(settings, self._directory)
        self.slots = Slots(settings.slot_count)
        self._file_numbers = itertools.count()

        def open_client() -> Client:
            token = settings.store_token_file
            return connect(settings.store, token_file=token, timeout_s=settings.store_timeout_s)

        self.link = StoreLink(open_client, self.llama.space)
        self.keeper = SlotKeeper(self.link, settings)

    def new_file(self) -> Path:
        """A name for a slot's file."""
        return self._directory / f"slot-{next(self._file_numbers)}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it where there are too many."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingHTTPServer."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server_close()
        self.slots.drain(DRAIN_S)
        self.keeper.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self


def _own_directory(parent: Path) -> tuple[Path, Any]:
    """A directory for slots' files, locked as long as this process lives; those of dead ones are removed."""
    for left in parent.glob("ctxcache-slots-*"):
        with suppress(OSError), (left / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-slots-", dir=parent))
    lock = (directory / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


class _Refused(Exception):
    """A request that is answered here, with a status and a sentence."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ctxcache", ""
    timeout = IDLE_S
    server: LlamaProxy

    def handle_any(self) -> None:
        """Answer one request. A client that goes away ends its own request alone."""
        self._is_begun = False
        try:
            body = self._body()
            request = self._request(body)
            if request is None:
                # It may run in any slot, and overwrite what that had.
                if self.command == "POST":
                    self.server.slots.forget()
                self._forward(body, 0)
            else:
                self._complete(request)
        except _Refused as refused:
            self._refuse(refused.status, str(refused))
        except NoSlot:
            self._refuse(503, f"{MOST_WAITING} requests wait for a slot already")
        except (OSError, http.client.HTTPException) as error:
            if not self._is_begun:
                self._refuse(502, f"llama.cpp does not answer: {error!r}")
            self.close_connection = True

    do_GET = do_POST = do_OPTIONS = do_HEAD = do_DELETE = handle_any  # noqa: N815  names of the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name in the base class
        """Requests are llama.cpp's to log."""

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            self.close_connection = True
            raise _Refused(411, "Content-Length: a body needs its length")
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            self.close_connection = True
            raise _Refused(413, f"Content-Length: {length!r} is not 0 to {MOST_BODY_BYTES}")
        return self.rfile.read(int(length))

    def _request(self, body: bytes) -> dict[str, Any] | None:
        """The request that runs in a slot of the proxy's choice; None for anything else."""
        path = urlsplit(self.path).path
        if self.command == "POST" and path.startswith("/slots"):
            raise _Refused(403, f"{path}: slots are saved and restored by sessions")
        if self.command != "POST" or path not in PINNED:
            return None
        try:
            request = json.loads(body)
        except ValueError:
            return None
        if not isinstance(request, dict):
            return None
        # llama.cpp would run it in a slot that may be another session's.
        if request.get("id_slot", -1) != -1:
            raise _Refused(400, "id_slot: slots are chosen by sessions")
        is_several = isinstance(prompt := request.get("prompt"), list) and not all(
            isinstance(token, int) for token in prompt
        )
        return None if is_several or request.get("n", 1) != 1 else request

    def _session(self, request: dict[str, Any]) -> str | None:
        given, header = request.pop("session_id", None), self.headers.get(SESSION_HEADER)
        if given is not None and header is not None and given != header:
            raise _Refused(400, f"session_id: {given!r}, but {SESSION_HEADER}: {header!r}")
        session = header if given is None else given
        if session is None:
            return None
        if not isinstance(session, str) or not 0 < len(session) <= MOST_NAME_CHARACTERS:
            raise _Refused(400, f"session_id: a string of 1 to {MOST_NAME_CHARACTERS} characters")
        if not session.isprintable():
            raise _Refused(400, "session_id: characters that cannot be printed")
        return session

    def _complete(self, request: dict[str, Any]) -> None:
        session = self._session(request)
        with self.server.slots.taken(session) as slot:
            restored_count = 0
            if slot.session != session:
                slot.kept = slot.kept[:0]
                if session is not None and request.get("cache_prompt", True):
                    restored_count = self._restore(session, slot)
            slot.session = None
            data = json.dumps(request | {"id_slot": slot.number}).encode()
            if self._forward(data, restored_count) == http.client.OK:
                slot.session = session
                if session is not None and self.server.keeper.is_ready:
                    self._save(session, slot)

    def _restore(self, session: str, slot: Slot) -> int:
        path = self.server.new_file()
        try:
            if not self.server.keeper.restore(session, path):
                return 0
            restored_count = int(self.server.llama.slot(slot.number, "restore", path)["n_restored"])
            slot.kept = tokens_in(path)
        except LlamaRefused as error:
            log.warning("llama.cpp does not take a slot's state, the prompt is computed: %s", error)
            self.server.llama.slot(slot.number, "erase")
            return 0
        else:
            return restored_count
        finally:
            path.unlink(missing_ok=True)

    def _save(self, session: str, slot: Slot) -> None:
        path = self.server.new_file()
        try:
            token_count = int(self.server.llama.slot(slot.number, "save", path)["n_saved"])
            tokens = tokens_in(path)
        except (LlamaRefused, OSError) as error:
            path.unlink(missing_ok=True)
            log.warning("a conversation is not saved: %s", error)
            return
        is_there = 0 < tokens.size < slot.kept.size and np.array_equal(tokens, slot.kept[: tokens.size])
        if token_count and not is_there:
            slot.kept = tokens
            self.server.keeper.save(session, path, token_count)
            return
        path.unlink(missing_ok=True)
        if is_there:
            # An earlier turn was asked again: what the store has goes on, and is restored when that comes.
            slot.session = None

    def _forward(self, body: bytes, restored_count: int) -> int:
        """Pass the request on, and the reply back as it comes; the reply's status."""
        connection = http.client.HTTPConnection(*self.server.llama.address)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body or None, headers)
            self._wait_for(connection.sock)
            response = connection.getresponse()
            self.send_response(response.status)
            self._is_begun = True
            for name, value in response.getheaders():
                if name.lower() not in HOP_BY_HOP | {"server", "date"}:
                    self.send_header(name, value)
            if restored_count:
                self.send_header(RESTORED_HEADER, str(restored_count))
            is_chunked = response.length is None and self.request_version != "HTTP/1.0"
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif response.length is not None:
                self.send_header("Content-Length", str(response.length))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            while data := response.read1(RUN_BYTES):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")
            return response.status
        finally:
            connection.close()

    def _wait_for(self, upstream: socket.socket) -> None:
        """Wait for llama.cpp, which may compute for long. Raises ConnectionError where the client goes."""
        watched = [upstream, self.connection]
        while upstream not in (readable := select.select(watched, [], [])[0]):
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self._is_begun = True
                raise ConnectionAbortedError("the client went")
            # It has sent its next request already.
            watched = [upstream]

    def _refuse(self, status: int, problem: str) -> None:
        error = {"code": status, "message": problem, "type": "ctxcache"}
        data = json.dumps({"error": error}).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def serve(settings: LlamaSettings, announce: Callable[[LlamaProxy], None]) -> None:
    """Serve until SIGTERM or SIGINT, then save what is left. In the main thread."""
    with LlamaProxy(settings) as proxy:

        def stop(_number: int, _frame: FrameType | None) -> None:
            # It waits for the loop of `serve_forever`, which this thread runs.
            threading.Thread(target=proxy.shutdown, daemon=True).start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        announce(proxy)
        proxy.serve_forever()
