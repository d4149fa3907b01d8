"""TLS of a client: whom it trusts and who it is, for gRPC and for the bulk channel alike.

Worst case: a file that cannot be used raises InvalidConfiguration when the client is made.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from ctxcache.errors import InvalidConfiguration
from ctxcache.privacy import check_secret, secret_refusal


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files. `ca`: who signed the server's certificate, None for those that the system trusts.

    `certificate` and `key`: this client's own, for a server that asks for one.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What gRPC takes. Raises InvalidConfiguration."""
        return grpc.ssl_channel_credentials(
            _read(self.ca), _read(self.key, is_secret=True), _read(self.certificate)
        )

    def context(self) -> ssl.SSLContext:
        """What a socket takes. Raises InvalidConfiguration."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.certificate is not None:
                _read(self.key, is_secret=True)
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            problem = f"a certificate cannot be used: {error}"
            raise InvalidConfiguration(source="tls", problem=problem) from error
        return context


def _read(path: str | Path | None, *, is_secret: bool = False) -> bytes | None:
    try:
        if path is not None and is_secret:
            check_secret(Path(path), secret_refusal("tls", Path(path)))
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(source="tls", problem=f"{path}: {error.strerror}") from error
