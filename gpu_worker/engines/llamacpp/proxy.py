"""llama.cpp's API, with sessions: a slot is restored before a session's request, and saved after it.

Bodies are read here (`bodies`), and everything else is passed on as it is. Whatever a request is, it is
answered, and no other one hears of it. Worst case: llama.cpp ends, and each request is answered with 502.
"""

import http.client
import itertools
import json
import logging
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self
from urllib.parse import unquote

import numpy as np

from ctxcache.client import Client, ClientTls, connect
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.conversations import Reply, chat_of, goes_on
from gpu_worker.engines.link import StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings
from gpu_worker.engines.llamacpp.ahead import SlotAhead
from gpu_worker.engines.llamacpp.bodies import (
    SESSION_HEADER,
    Refused,
    check_fields,
    is_several,
    read_body,
    session_of,
)
from gpu_worker.engines.llamacpp.keeper import (
    DRAIN_S,
    LlamaRefused,
    LlamaServer,
    NotWhole,
    SlotKeeper,
    model_files,
    tokens_in,
)
from gpu_worker.engines.llamacpp.replies import Progress, reused_in, streamed
from gpu_worker.engines.llamacpp.slots import MOST_WAITING, NoSlot, Slot, Slots

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 64 << 20
MOST_CONNECTIONS = 256
MOST_SLOTS = 256
IDLE_S = 600
"""A connection that says nothing for longer is closed."""
RUN_BYTES = 1 << 16
RESTORED_HEADER = "X-Ctxcache-Restored-Tokens"
PINNED = {"/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions"}
"""Paths whose requests llama.cpp runs in the slot that they name."""
CHATS = {"/chat/completions", "/v1/chat/completions"}
"""Those of them whose prompts a template renders."""
NEXT = "/v1/ctxcache/next"
"""Takes a chat request that a client will send."""
FORBIDDEN = {
    "/slots": "slots are saved and restored by sessions",
    "/lora-adapters": "LoRA adapters cannot be given",
}
"""Paths, and what is below them, whose POST would change what slots hold or depend on."""
NOT_JSON = "/v1/audio/"
"""Below it bodies are forms with files."""
# Headers of one connection, which the proxy's two connections each make for themselves (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length", "host"}


class LlamaProxy(ThreadingHTTPServer):
    """llama.cpp's API. A context manager; `serve_forever` answers until `shutdown`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: LlamaSettings) -> None:
        """Load the model. Raises InvalidArgument, RuntimeError, OSError."""
        if not 1 <= settings.slot_count <= MOST_SLOTS:
            raise InvalidArgument(field="slots", problem=f"{settings.slot_count} is not 1 to {MOST_SLOTS}")
        # Its rows are blocks, and no block is shared.
        if settings.durability not in ("memory", "disk"):
            raise InvalidArgument(field="durability", problem=f"{settings.durability!r} is not known")
        model_files(settings.model)
        # A thread for each connection: without a bound, idle ones would take all memory.
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((settings.host, settings.port), _Handler)
        self._directory = settings.directory or Path(tempfile.gettempdir())
        self.llama = LlamaServer(settings)
        self.slots = Slots(settings.slot_count)

        def open_client() -> Client:
            tls = ClientTls.of(
                settings.store_ca, settings.store_certificate, settings.store_key, settings.store_server_name
            )
            token = settings.store_token_file
            return connect(settings.store, token_file=token, timeout_s=settings.store_timeout_s, tls=tls)

        self.link = StoreLink(open_client, self.llama.space)
        self.keeper = SlotKeeper(self.link, settings)
        self.ahead = SlotAhead(self.llama, self.slots, self, share=settings.ahead) if settings.ahead else None

    def new_file(self) -> FileIO:
        """A slot's file, without a name. Raises OSError."""
        return tempfile.TemporaryFile(buffering=0, dir=self._directory)

    def restore(self, session: str, slot: Slot) -> bool:
        """Put a session's state into a slot, where the store has it."""
        llama, keeper = self.llama, self.keeper
        try:
            with self.new_file() as file:
                if not keeper.restore(session, file):
                    return False
                llama.restore(slot.number, file)
                slot.kept = tokens_in(file)
        except (LlamaRefused, OSError) as error:
            keeper.reasons.tell(session, "is not restored, llama.cpp does not take its state", error)
            with suppress(LlamaRefused):
                llama.erase(slot.number)
            return False
        return True

    def save(self, session: str, slot: Slot) -> None:
        """Keep a slot's state as its session's, unless the store has more of the same tokens."""
        keeper = self.keeper
        file: FileIO | None = None
        try:
            file = self.new_file()
            token_count = self.llama.save(slot.number, file)
        except (LlamaRefused, NotWhole, OSError) as error:
            if file is not None:
                file.close()
            keeper.reasons.tell(session, "is not saved, llama.cpp does not give its state", error)
            return
        tokens = tokens_in(file)
        is_there = 0 < tokens.size < slot.kept.size and np.array_equal(tokens, slot.kept[: tokens.size])
        if token_count and not is_there:
            slot.kept = tokens
            keeper.save(session, file, token_count)
            return
        file.close()
        if is_there:
            # An earlier turn was asked again: what the store has goes on, and is restored when that comes.
            slot.session = None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it where there are too many."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread began, which would give the room back.
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ThreadingHTTPServer."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended by an error, and nothing else did."""
        del request
        if not isinstance(error := sys.exception(), OSError):
            log.error("a connection of %s", client_address, exc_info=error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server_close()
        self.slots.close()
        if self.ahead is not None:
            self.ahead.close()
        self.slots.drain(DRAIN_S)
        self.keeper.close()

    def __enter__(self) -> Self:
        return self


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ctxcache", ""
    timeout = IDLE_S
    server: LlamaProxy

    def handle_any(self) -> None:
        """Answer one request. A client that goes away ends its own request alone."""
        self._is_begun, self._reply = False, Reply()
        try:
            body = self._body()
            path = unquote(self.path.partition("?")[0])
            is_json = self.command == "POST" and body and not path.startswith(NOT_JSON)
            request = self._request(path, read_body(body) if is_json else None)
            if self.command == "POST" and path == NEXT:
                self._expect(request)
                return
            if isinstance(request, dict) and path in PINNED and not is_several(request):
                self._complete(request, chat_of(request) if path in CHATS else None)
                return
            # It may run in any slot, and overwrite what that had.
            with self.server.slots.unknown() if self.command == "POST" else nullcontext():
                self._forward(json.dumps(request).encode() if is_json else body)
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except NoSlot:
            self._refuse(503, f"{MOST_WAITING} requests wait for a slot already")
        except (http.client.InvalidURL, ValueError) as error:
            # Of a path or a header that cannot be passed on; bodies are looked at before.
            self._refuse(400, f"the request cannot be passed on: {error!r}")
        except (OSError, http.client.HTTPException) as error:
            self._refuse(502, f"llama.cpp does not answer: {error!r}")
        except Exception as error:
            log.exception("a request to llama.cpp")
            self._refuse(500, f"the request could not be answered: {error!r}")

    do_GET = do_POST = do_OPTIONS = do_HEAD = do_DELETE = handle_any  # noqa: N815  names of the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name in the base class
        """Requests are llama.cpp's to log."""

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            self.close_connection = True
            raise Refused(411, "Content-Length: a body needs its length")
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            self.close_connection = True
            raise Refused(413, f"Content-Length: {length!r} is not 0 to {MOST_BODY_BYTES}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise Refused(400, f"the body ends behind {len(body)} of {length} bytes")
        return body

    def _request(self, path: str, request: Any) -> Any:
        """The request, if llama.cpp may be told it. Raises Refused."""
        if self.command == "POST":
            for forbidden, problem in FORBIDDEN.items():
                if path == forbidden or path.startswith(f"{forbidden}/"):
                    raise Refused(403, f"{path}: {problem}")
            if path in {*PINNED, NEXT} and not isinstance(request, dict):
                raise Refused(400, "the body is no object")
            if isinstance(request, dict):
                check_fields(request)
        return request

    def _expect(self, request: dict[str, Any]) -> None:
        """A client says what it will send next."""
        session, chat = session_of(request, self.headers.get_all(SESSION_HEADER, [])), chat_of(request)
        if self.server.ahead is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"{NEXT}: nothing is computed ahead, by --ahead 0")
        if session is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "session_id: a conversation without a name is not kept")
        if chat is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "messages: a list of one message or more")
        try:
            count = self.server.ahead.expect(session, chat)
        except LlamaRefused as error:
            raise Refused(
                HTTPStatus.BAD_REQUEST, f"messages: llama.cpp does not render them: {error}"
            ) from error
        self._answer(HTTPStatus.ACCEPTED, {"token_count": count})

    def _complete(self, request: dict[str, Any], chat: dict[str, Any] | None) -> None:
        """Run a request in a slot; `chat`: its fields, where a template renders its prompt."""
        session = session_of(request, self.headers.get_all(SESSION_HEADER, []))
        ahead = self.server.ahead if session is not None and chat is not None else None
        if ahead is not None and session is not None:
            ahead.turn_begins(session)
        with self.server.slots.taken(session) as slot:
            is_restored = False
            if slot.session != session:
                slot.kept = slot.kept[:0]
                if session is not None and request.get("cache_prompt", True):
                    is_restored = self.server.restore(session, slot)
            slot.session = None
            if self._run(request, slot, session if is_restored else None) == HTTPStatus.OK:
                slot.session = session
                if session is not None and self.server.keeper.is_ready:
                    self.server.save(session, slot)
                said = self._reply.message()
                if ahead is None or session is None or chat is None or said is None:
                    return
                if goes_on(chat):
                    ahead.replied(session, chat, said)

    def _run(self, request: dict[str, Any], slot: Slot, restored: str | None) -> int:
        """Have llama.cpp answer in a slot, which a state of the session `restored` was put into."""
        told = request | {"id_slot": slot.number}
        if restored is None:
            return self._forward(json.dumps(told).encode())
        progress = None
        if request.get("stream") is True:
            progress = Progress(is_wanted=request.get("return_progress") is True)
            told["return_progress"] = True
        return self._forward(json.dumps(told).encode(), restored, progress)

    def _forward(self, body: bytes, restored: str | None = None, progress: Progress | None = None) -> int:
        """Pass the request on, and the reply back as it comes; the reply's status.

        Of a request whose slot was restored the reply says how much of it llama.cpp used; `progress` where it
        is a stream.
        """
        connection = http.client.HTTPConnection(*self.server.llama.address)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body or None, headers)
            self._wait_for(connection.sock)
            response = connection.getresponse()
            # Reading changes what is left of it.
            length = response.length
            is_chunked = length is None and self.request_version != "HTTP/1.0"
            pieces: Iterable[bytes] = iter(partial(response.read1, RUN_BYTES), b"")
            reused = None
            if restored is not None and response.status == HTTPStatus.OK:
                pieces, reused = _counted(response, progress)
            if restored is not None and reused == 0:
                self.server.keeper.reasons.tell(
                    restored, "was restored in vain", "its prompt begins otherwise"
                )
            self.send_response(response.status)
            self._is_begun = True
            self._reply.begin(response.status, response.getheader("Content-Type", ""))
            for name, value in response.getheaders():
                if name.lower() not in HOP_BY_HOP | {"server", "date"}:
                    self.send_header(name, value)
            if reused is not None:
                self.send_header(RESTORED_HEADER, str(reused))
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif length is not None:
                self.send_header("Content-Length", str(length))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            for data in filter(None, pieces):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
                self._reply.add(data)
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")
            self._reply.end()
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
        if self._is_begun:
            # The reply's end is all that can be said.
            self.close_connection = True
            return
        self._answer(status, {"error": {"code": status, "message": problem, "type": "ctxcache"}})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def _counted(
    response: http.client.HTTPResponse, progress: Progress | None
) -> tuple[Iterable[bytes], int | None]:
    """A reply's pieces, and how many tokens of its prompt llama.cpp did not compute."""
    if progress is None:
        reply = response.read()
        return [reply], reused_in(reply)
    pieces = streamed(partial(response.read1, RUN_BYTES), progress)
    # The first piece comes when the count is known.
    first = next(pieces)
    return itertools.chain([first], pieces), progress.reused


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
