"""A store that speaks TLS alone and asks for certificates, and the settings of a plugin that reaches it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.pki import Pki
from tests.server_process import ServerProcess


@dataclass(frozen=True)
class TlsStore:
    """The store. `settings`: of a plugin that it takes; `wrong`: of one that trusts somebody else."""

    server: ServerProcess
    settings: dict[str, str]
    wrong: dict[str, str]


@contextmanager
def tls_store(directory: Path) -> Iterator[TlsStore]:
    """Start one."""
    pki = Pki(directory)
    ca, other = pki.authority("ca"), pki.authority("other")
    certificate, key = pki.issue("server", "ca")
    own_certificate, own_key = pki.issue("client", "ca")
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(ca))
    own = {"tls_client_certificate": str(own_certificate), "tls_client_key": str(own_key)}
    with ServerProcess(directory / "data", *files, "--arena-size-bytes", str(128 << 20)) as server:
        settings = {"target": server.target, "tls_ca": str(ca), **own}
        yield TlsStore(server, settings, settings | {"tls_ca": str(other)})
