"""The metrics endpoint: a small HTTP server that only answers GET and HEAD, one request per connection.

With TLS where it is given, and with a token for all but OPEN_PATHS. Bounded: CONNECTIONS_LIMIT connections,
REQUEST_LIMIT_BYTES of a request, TIMEOUT_S for all of one, its answer's way included; what goes beyond is
closed, whoever has asked nothing yet before whoever comes: probes must get through. Knows no metric: pages
are given to it. Worst case: a peer that neither sends nor reads is cut off by the timeout.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ctxcache.errors import AddressUnusable
from ctxcache.observe.bearer import CHALLENGE, Bearer

log = logging.getLogger(__name__)

CONNECTIONS_LIMIT = 32
REQUEST_LIMIT_BYTES = 8 << 10
TIMEOUT_S = 10.0
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The rights of a browser over a page: nothing but with files from here."""
TEXT = "text/plain; charset=utf-8"
OPEN_PATHS = frozenset(("/healthz", "/readyz"))
"""The paths of probes, which show no token; one word each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a page."""

    body: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


Page = Callable[[Mapping[str, str]], Awaitable[Answer]]
"""Given the request's headers, names in lower case."""


# The life of a connection, all within TIMEOUT_S:
#
#     accepted ──► TLS ──► request's head read ──► page ──► answer drained ──► closed
#     └ silent: the oldest gives way ─────┘ └ busy: whoever comes is closed
class Endpoint:
    """Serves pages by path. Owned by the event loop."""

    def __init__(
        self,
        pages: Mapping[str, Page],
        *,
        bearer: Bearer | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` is asked for a context at each handshake."""
        self._pages, self._bearer, self._tls = pages, bearer, tls
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Connections that have asked nothing yet, the oldest first."""
        self.address = ""
        """`host:port`, once it listens."""

    @property
    def connection_count(self) -> int:
        """Connections there are."""
        return len(self._connections)

    @property
    def silent_count(self) -> int:
        """Those of them that have asked nothing yet."""
        return len(self._silent)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises AddressUnusable."""
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=REQUEST_LIMIT_BYTES, backlog=CONNECTIONS_LIMIT
            )
        except OSError as error:
            raise AddressUnusable(address=f"{host}:{port}", problem=error.strerror or str(error)) from error
        bound = self._server.sockets[0].getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    async def stop(self) -> None:
        """Stop listening, and cut off every connection."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # the library makes one for each connection
        if len(self._connections) >= CONNECTIONS_LIMIT:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                # With every place taken by a request that runs, the one that comes is cut off.
                writer.transport.abort()
                return
            self._silent.pop(oldest).transport.abort()
        self._connections.add(task)
        self._silent[task] = writer
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._tls is not None:
                    # Here and not as it is accepted, so that handshakes are counted and timed too.
                    await _start_tls(writer, self._tls())
                head = await reader.readuntil(b"\r\n\r\n")
                self._silent.pop(task, None)
                await self._serve(head, writer)
                # Bytes that the peer has not taken yet stay in the server until then.
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The peer is gone: there is nobody to answer.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            self._silent.pop(task, None)
            writer.close()

    async def _serve(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        method, path, headers = _parsed(head)
        answer = await self._answer(method, path, headers)
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            f"Content-Security-Policy: {POLICY}",
            "Referrer-Policy: no-referrer",
            "Connection: close",
            *((f"WWW-Authenticate: {CHALLENGE}",) if answer.status is HTTPStatus.UNAUTHORIZED else ()),
        )
        writer.write("\r\n".join((*lines, "", "")).encode())
        if method != "HEAD":
            writer.write(answer.body)
        await writer.drain()
        # The peer reads to the end of the answer, whatever it makes of its length.
        if writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if method not in ("GET", "HEAD"):
            return _failure(HTTPStatus.METHOD_NOT_ALLOWED if method else HTTPStatus.BAD_REQUEST)
        if (
            path not in OPEN_PATHS
            and self._bearer
            and not self._bearer.allows(headers.get("authorization", ""))
        ):
            return _failure(HTTPStatus.UNAUTHORIZED)
        page = self._pages.get(path)
        if page is None:
            return _failure(HTTPStatus.NOT_FOUND)
        try:
            return await page(headers)
        except Exception:  # an edge of its own: what breaks here must not go unseen
            log.exception("metrics_page_broken path=%s", path)
            return _failure(HTTPStatus.INTERNAL_SERVER_ERROR)


async def _start_tls(writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
    """Shake hands. Raises OSError."""
    plain = writer.transport
    try:
        await writer.start_tls(context)
    finally:
        # Ended meanwhile, by whoever made room. The library leaves the writer without a transport then: every
        # use of it would fail, its collection too.
        if writer.transport is None:
            vars(writer)["_transport"] = plain
            raise ConnectionResetError


def _failure(status: HTTPStatus) -> Answer:
    return Answer(f"{status.phrase}\n".encode(), status=status)


def _parsed(head: bytes) -> tuple[str, str, Mapping[str, str]]:
    """Method, path without its query, and headers; an empty method where it is no request."""
    # Read as bytes: a header that is no text must not break the parsing.
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "", "", {}
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return words[0], words[1].partition("?")[0], headers
