"""As whom an online command calls: options before the command's name, each with a variable.

Knows paths, and reads no file: the client does. Worst case: one that cannot be used, which the client says by its name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ctxcache.client.tls import ClientTls

SYSTEM = "system"
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="CTXCACHE_TOKEN_FILE", metavar="FILE", help="Token that says who calls."
    ),
]
CaOption = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        envvar="CTXCACHE_TLS_CA",
        metavar="FILE",
        help="TLS, with a server whose certificate these authorities signed; `system` for the machine's.",
    ),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-certificate",
        envvar="CTXCACHE_TLS_CLIENT_CERTIFICATE",
        metavar="FILE",
        help="Certificate to show.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--tls-client-key", envvar="CTXCACHE_TLS_CLIENT_KEY", metavar="FILE", help="Its key."),
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a command shows, and whom it trusts."""

    token_file: Path | None = None
    ca: str | None = None
    certificate: Path | None = None
    key: Path | None = None

    def tls(self) -> "ClientTls | None":
        """What the client takes; None for plaintext."""
        if self.ca is None and self.certificate is None:
            return None
        from ctxcache.client.tls import ClientTls  # noqa: PLC0415  grpc is half the start time of --help

        ca = None if self.ca in (None, SYSTEM) else Path(str(self.ca))
        return ClientTls(ca, self.certificate, self.key)


NO_CREDENTIALS = Credentials()
