"""TLS of the server's TCP ports: one certificate for gRPC and for the bulk channel.

Files are read once, at start. Worst case: a file that cannot be used, which is said by its name
before anything listens.
"""

import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ctxcache.errors import InvalidConfiguration


@dataclass(frozen=True, slots=True)
class Tls:
    """What both ports need. With a client CA, a client has to have a certificate of it."""

    credentials: grpc.ServerCredentials
    context: ssl.SSLContext


def load_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
    """Read the files; None where there is no TLS. Raises InvalidConfiguration."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        missing = "tls_key" if certificate else "tls_certificate"
        raise InvalidConfiguration(source=missing, problem="TLS needs a certificate and its key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    chain, secret = _read(certificate, "tls_certificate"), _read(key, "tls_key")
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        problem = f"{certificate} and {key} are no certificate and its key: {error}"
        raise InvalidConfiguration(source="tls_certificate", problem=problem) from error
    authorities = None if client_ca is None else _read(client_ca, "tls_client_ca")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            problem = f"{client_ca} has no certificates: {error}"
            raise InvalidConfiguration(source="tls_client_ca", problem=problem) from error
    credentials = grpc.ssl_server_credentials(
        [(secret, chain)], authorities, require_client_auth=authorities is not None
    )
    return Tls(credentials, context)


def peer_properties(connected: socket.socket) -> Mapping[str, Sequence[bytes]]:
    """The verified certificate at the other end, in the words in which gRPC says it; empty without one."""
    certificate = connected.getpeercert() if isinstance(connected, ssl.SSLSocket) else None
    if not certificate:
        return {}
    # Typed as any nesting of tuples by the library.
    names: Any = certificate.get("subjectAltName", ())
    subject: Any = certificate.get("subject", ())
    found: dict[str, list[bytes]] = {"peer_uri": [], "peer_dns": [], "x509_common_name": []}
    kinds = {"URI": "peer_uri", "DNS": "peer_dns"}
    for kind, name in names:
        if kind in kinds:
            found[kinds[kind]].append(name.encode())
    common = [value for part in subject for kind, value in part if kind == "commonName"]
    found["x509_common_name"] += [value.encode() for value in common[:1]]
    return found


def _read(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(source=source, problem=f"{path}: {error.strerror}") from error
