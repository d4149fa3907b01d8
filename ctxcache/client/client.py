"""The connection to a server: `connect` opens one, and its namespaces hold the calls.

Knows no engine. Thread-safe. Worst case: a server that vanishes costs each call its deadline, and each
call raises a CacheError.
"""

from pathlib import Path
from typing import Literal, get_args

from ctxcache.client.admin import AdminCalls
from ctxcache.client.blocks import BlockCalls
from ctxcache.client.credentials import ClientTls, OwnTokenFile
from ctxcache.client.futures import Completions
from ctxcache.client.hints import HintCalls
from ctxcache.client.models import ModelCalls
from ctxcache.client.prefixes import PrefixCalls
from ctxcache.client.routes import Access, RowRoutes, Transport
from ctxcache.client.sessions import SessionCalls
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.wire import Closing, Wire
from ctxcache.errors import InvalidArgument
from ctxcache.wire.address import tcp_target

DEFAULT_TARGET = "127.0.0.1:7420"
DEFAULT_TIMEOUT_S = 30.0
Verify = Literal["always", "never"]


class Client(Closing):
    """A connection to one server. Made by `connect`; a context manager that closes itself.

    `sessions` makes and opens sessions, `prefixes` finds what they have by its tokens, `blocks` keeps an
    engine's own bytes by its keys, `hints` tells the store what an engine expects, `models` registers models,
    `admin` is for operators. A session is named `sessions/{id}`, a model `models/{id}`.
    """

    def __init__(self, wire: Wire, routes: RowRoutes) -> None:
        self.completions = Completions(wire.target)
        """Carries out `match_async`, `put_async` and `load_async`, and says when some have ended."""
        self.prefixes = PrefixCalls(wire, routes, self.completions)
        self.sessions = SessionCalls(wire, routes, self.prefixes)
        self.hints = HintCalls(wire)
        self.models = ModelCalls(wire)
        self.blocks = BlockCalls(wire, routes, self.completions)
        self.admin = AdminCalls(wire)
        self.wire = wire
        self.routes = routes
        """Both are for modules of this package, for measurements and tests: their methods change."""

    def ssd_files(self) -> SsdReader | None:
        """The SSD tier's files as this process can read them; None if the server is on another host.

        Raises Unavailable, DeadlineExceeded.
        """
        return self.routes.ssd_files()

    def map_arena(self, *, is_written: bool = False, timeout_s: float = 0) -> bool:
        """Map the server's arena ahead of the calls that use it; whether it is on this host.

        A thread populates the mapping: 0.15 s of a processor for each GiB, and 0.3 s more where it is
        `is_written`, which calls beside it would feel. Waits for that at most `timeout_s`. Raises
        Unavailable, DeadlineExceeded, TooManyRequests, Draining.
        """
        attachment = self.routes.attach()
        if attachment is None:
            return False
        if is_written:
            attachment.arena.writable()
        attachment.arena.wait_populated(timeout_s)
        return True

    # The order of an end. Each step wakes or ends what the next one would wait for:
    #
    #     completions.stop     nothing new begins, what waits is cancelled
    #     wire.close           calls under way fail at once, the running future's among them
    #     routes.close         sockets are shut; leases and reservations end with them
    #     completions.close    the thread has nothing to wait for any more, and is joined
    def close(self) -> None:
        """End every call, lease and reservation of this connection. Futures that wait are cancelled."""
        self.completions.stop()
        self.wire.close()
        self.routes.close()
        self.completions.close()


def connect(
    target: str = DEFAULT_TARGET,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    access: Access = "auto",
    transport: Transport = "auto",
    verify: Verify = "always",
    tls: ClientTls | None = None,
    token_file: str | Path | None = None,
    tenant: str = "",
) -> Client:
    """Connect to the server at `target`, a gRPC target such as `host:port` or `unix:/path`.

    Sends nothing before the first call. `timeout_s` bounds every wait; a call that moves rows gets more time
    by its size. Raises InvalidArgument, InvalidConfiguration.

    - `access`: where rows travel. `local`: only through shared memory; `remote`: only over the network;
      `auto`: through shared memory where this process can map it.
    - `transport`: what carries leases and remote rows. `socket`: the server's plain sockets only; `grpc`:
      streams of gRPC only; `auto`: plain sockets where they can be reached, gRPC otherwise.
    - `verify`: `always` compares rows under a lease with their writer's checksums. `never` leaves that to a
      caller that does so itself. Rows that come over the network are always verified.
    - `tls`: for a server whose TCP port has TLS.
    - `token_file`: holds the token that names the tenant; a changed file is read again.
    - `tenant`: for an operator, the tenant that calls without rows are about; `access` is `remote`.
    """
    check_target(target)
    _check_one_of("access", access, get_args(Access))
    _check_one_of("transport", transport, get_args(Transport))
    _check_one_of("verify", verify, get_args(Verify))
    if tenant and access == "local":
        raise InvalidArgument(field="access", problem="calls about another tenant go over the network")
    token = None if token_file is None else OwnTokenFile(token_file)
    wire = Wire(target, timeout_s, tls, token, tenant)
    # The server's sockets know one tenant for each connection: its own.
    access = "remote" if tenant else access
    return Client(wire, RowRoutes(wire, access, transport, is_verified=verify == "always"))


def check_target(target: str) -> None:
    """Raise InvalidArgument for an address that gRPC would look up as a host's name, again and again."""
    try:
        tcp_target(target)
    except ValueError as error:
        raise InvalidArgument(field="target", problem=str(error)) from error


def _check_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(field=field, problem=f"{value!r} is not one of {known}")
