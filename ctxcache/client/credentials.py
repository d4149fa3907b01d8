"""A client's side of identity: TLS certificates, and a token that goes with every call.

A token's file is looked at before each call and read again when it changed, so that a new token needs no
restart. Worst case: the file is gone or empty, and the call raises InvalidConfiguration.
"""

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret, secret_refusal, stamp
from ctxcache.wire.address import Address

# By number, as `verify_code` has it; the names of these codes are not in Python's `ssl`.
_VERDICTS = {
    9: "is not valid yet",
    10: "has expired",
    18: "is signed by itself alone",
    19: "is signed by nobody whom this client trusts",
    20: "is signed by nobody whom this client trusts",
    21: "is signed by nobody whom this client trusts",
    62: "is for other names than {host}",
    64: "is for other names than {host}",
}
"""OpenSSL's codes of what is wrong with a certificate."""
# OpenSSL's errors at the answer of a server that speaks plain HTTP/2, by the bytes that it sends.
_NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_EOF_WHILE_READING",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
)
_UNWANTED = "the server ends it behind the handshake: it takes no client without a certificate that it trusts"
_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it has no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "its certificate is signed by nobody whom the server trusts",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "its certificate has expired",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it is to speak TLS 1.3",
}


SYSTEM = "system"
"""The machine's own authorities, where a setting names a file of them."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. `ca`: who signed the server's certificate, None for those that the system trusts.

    `certificate` and `key`: this client's own, for a server that asks for one. `server_name`: the name that
    the server's certificate has, where it is not the host of the target, as behind a tunnel.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    @classmethod
    def of(
        cls,
        ca: str | Path | None,
        certificate: str | Path | None,
        key: str | Path | None,
        server_name: str | None,
    ) -> Self | None:
        """The TLS that settings ask for; None, which is plaintext, where none of them is given.

        `ca` may be SYSTEM.
        """
        if not any((ca, certificate, key, server_name)):
            return None
        return cls(None if str(ca) == SYSTEM else ca, certificate, key, server_name)

    def stamps(self) -> list[tuple[int, ...]]:
        """Numbers that change with one of the files."""
        files = (self.ca, self.certificate, self.key)
        return [stamp(Path(file)) for file in files if file is not None]

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials in gRPC's type. Raises InvalidConfiguration."""
        return grpc.ssl_channel_credentials(
            _read(self.ca), _read(self.key, is_secret=True), _read(self.certificate)
        )

    def context(self) -> ssl.SSLContext:
        """The context of a TLS socket. Raises InvalidConfiguration."""
        if (self.certificate is None) != (self.key is None):
            # One alone would be left unused: a server that asks for a certificate would refuse a client whose
            # settings name one.
            raise InvalidConfiguration(source="tls", problem="a client's certificate and its key go together")
        try:
            _read(self.ca)
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.certificate is not None:
                _read(self.key, is_secret=True)
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            problem = f"a certificate cannot be used: {error}"
            raise InvalidConfiguration(source="tls", problem=problem) from error
        return context


_PLAIN = ClientTls()


# Asked only after a call found no server: gRPC's own error says UNAVAILABLE for a refused certificate, for a
# server without TLS, and for no server at all. A handshake by hand tells them apart.
def tls_problem(address: Address, tls: ClientTls | None, timeout_s: float) -> str:
    """Why TLS does not come about with the server at an address; empty where something else is the matter.

    Costs a connection. `tls` None: a client without. Raises InvalidConfiguration.
    """
    context = _PLAIN.context() if tls is None else tls.context()
    # Without TLS on this side, any answer will do: what matters is whether the server speaks it.
    if tls is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # As gRPC names its protocol: a server may refuse a client that names none.
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, timeout_s) as connected:
            host = (tls and tls.server_name) or address.host
            return _handshake_problem(connected, context, host, is_wanted=tls is not None)
    except OSError:
        return ""


def _handshake_problem(
    connected: socket.socket, context: ssl.SSLContext, host: str, *, is_wanted: bool
) -> str:
    problem = ""
    try:
        with context.wrap_socket(connected, server_hostname=host) as spoken:
            # A server that takes this client begins to speak; one that does not ends it, mostly without a
            # word.
            if is_wanted and not spoken.recv(1):
                problem = _UNWANTED
    except (ConnectionResetError, BrokenPipeError):
        # By the moment at which the server closes, reading or writing fails.
        if not is_wanted:
            return ""
        problem = _UNWANTED
    except ssl.SSLCertVerificationError as error:
        verdict = _VERDICTS.get(error.verify_code, error.verify_message)
        problem = f"the server's certificate {verdict.format(host=host)}"
    except ssl.SSLError as error:
        if error.reason in _NO_TLS:
            return "this client speaks it, the server does not" if is_wanted else ""
        problem = (
            f"the server refuses this client: {_ALERTS.get(error.reason or '', error.reason or str(error))}"
        )
    return problem if is_wanted else "the server speaks it, this client does not"


def _read(path: str | Path | None, *, is_secret: bool = False) -> bytes | None:
    try:
        if path is not None and is_secret:
            # A key that others can read is refused before it is used.
            check_secret(Path(path), secret_refusal("tls", Path(path)))
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(source="tls", problem=f"{path}: {error.strerror}") from error


class OwnTokenFile:
    """The token in a file. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        """Raises InvalidConfiguration."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._metadata: tuple[tuple[str, str], ...] = ()
        self.read()

    def read(self) -> str:
        """The token as it is now. Raises InvalidConfiguration."""
        return self.metadata()[0][1].removeprefix("Bearer ")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call. Raises InvalidConfiguration."""
        try:
            status = self._path.stat()
            # Three facts together: a file replaced within the clock's tick has another inode, one rewritten
            # another size.
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            with self._lock:
                if stamp != self._stamp:
                    self._metadata = (("authorization", f"Bearer {_token(self._path)}"),)
                    self._stamp = stamp
                return self._metadata
        except OSError as error:
            raise InvalidConfiguration(
                source=str(self._path), problem=error.strerror or str(error)
            ) from error


class AuthorizedChannel(grpc.Channel):
    """A channel that adds the token to the metadata of every call made on it."""

    def __init__(self, channel: grpc.Channel, token: OwnTokenFile) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.unary_unary(method, *shape, **options))

    def unary_stream(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.unary_stream(method, *shape, **options))

    def stream_unary(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.stream_unary(method, *shape, **options))

    def stream_stream(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.stream_stream(method, *shape, **options))

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:  # noqa: FBT001, FBT002  grpc's own
        """See grpc.Channel."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _authorized(self, callable_: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            request: Any, timeout: float | None = None, metadata: Iterable[tuple[str, str]] | None = None
        ) -> Any:
            return callable_(request, timeout=timeout, metadata=(*(metadata or ()), *self._token.metadata()))

        return call


def _token(path: Path) -> str:
    check_secret(path, lambda problem: InvalidConfiguration(source=str(path), problem=problem))
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not token or not token.isprintable() or " " in token:
        raise InvalidConfiguration(source=str(path), problem="is not one token")
    return token
