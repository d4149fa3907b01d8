"""TLS of the TCP ports: one certificate for gRPC and the bulk channel, taken over when its files change.

Worst case at the start: a file that cannot be used is named before anything listens. Later such a file is
logged, and the earlier certificate goes on. Open connections keep what they began with.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret, is_shortage, secret_refusal, stamp

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""How often the files are looked at."""
Stamps = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the files. With a client CA, a client needs a certificate of it."""

    certificate: Path
    key: Path
    client_ca: Path | None
    prefix: str = ""
    """The beginning of the settings' names."""

    def stamps(self) -> Stamps:
        """The stamps that change with one of the files."""
        return [stamp(path) for path in (self.certificate, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The parts of the files that both ports need."""

    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext


class Tls:
    """The current certificate. Handshakes take it in threads, so that it changes by whole objects."""

    # Handshakes run in gRPC's threads and in those of the bulk channel. Each takes the object that is there
    # when it begins: the certificate is changed by one assignment.
    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidConfiguration."""
        self._files = files
        self._seen = files.stamps()
        self._now = self._given = _load(files)
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._now.configuration,
            self._changed,  # type: ignore[arg-type]  # its stub knows no None
            # A client CA means that a certificate is required: a client without one is refused in the
            # handshake.
            require_client_authentication=files.client_ca is not None,
        )

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a handshake that begins now."""
        return self._now.context

    async def watch(self) -> None:
        """Look at the files for ever; ends by cancellation."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Take the files over if they have changed. Files that cannot be used change nothing."""
        stamps = self._files.stamps()
        if stamps == self._seen:
            return
        try:
            loaded = _load(self._files)
        except InvalidConfiguration as error:
            # Two files arrive one after the other, and the first alone is no pair. Files that changed during
            # the read are looked at again in the next round, without a log line.
            if self._files.stamps() == stamps:
                # After a shortage the files are read at the next look: the old certificate may end before
                # they change again.
                self._seen = [] if is_shortage(error) else stamps
                log.error("certificate_refused error=%s", error)  # noqa: TRY400  the sentence says all
            return
        # The pair that was read is the pair that is there.
        if self._files.stamps() == stamps:
            self._seen, self._now = stamps, loaded
            log.info("certificate_loaded path=%s", self._files.certificate)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Answer gRPC's question at each handshake; None where gRPC has the current certificate."""
        loaded = self._now
        if loaded is self._given:
            return None
        self._given = loaded
        return loaded.configuration


def load_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None, *, prefix: str = ""
) -> Tls | None:
    """Read the files; None where there is no TLS. Raises InvalidConfiguration."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        missing = f"{prefix}tls_key" if certificate else f"{prefix}tls_certificate"
        raise InvalidConfiguration(source=missing, problem="TLS needs a certificate and its key")
    return Tls(TlsFiles(certificate, key, client_ca, prefix))


def _load(files: TlsFiles) -> _Loaded:
    certificate, key, client_ca = files.certificate, files.key, files.client_ca
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    chain = _read(certificate, f"{files.prefix}tls_certificate")
    secret = _read(key, f"{files.prefix}tls_key", is_secret=True)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        problem = f"{certificate} and {key} are no certificate and its key: {error}"
        raise InvalidConfiguration(source=f"{files.prefix}tls_certificate", problem=problem) from error
    authorities = None if client_ca is None else _read(client_ca, "tls_client_ca")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            problem = f"{client_ca} has no certificates: {error}"
            raise InvalidConfiguration(source="tls_client_ca", problem=problem) from error
    return _Loaded(grpc.ssl_server_certificate_configuration([(secret, chain)], authorities), context)


def peer_properties(connected: socket.socket) -> Mapping[str, Sequence[bytes]]:
    """The verified certificate at the other end, in the words in which gRPC says it; empty without one."""
    certificate = connected.getpeercert() if isinstance(connected, ssl.SSLSocket) else None
    if not certificate:
        return {}
    # Typed as any nesting of tuples by the library.
    names: Any = certificate.get("subjectAltName", ())
    subject: Any = certificate.get("subject", ())
    properties: dict[str, list[bytes]] = {"peer_uri": [], "peer_dns": [], "x509_common_name": []}
    kinds = {"URI": "peer_uri", "DNS": "peer_dns"}
    for kind, name in names:
        if kind in kinds:
            properties[kinds[kind]].append(name.encode())
    common = [value for part in subject for kind, value in part if kind == "commonName"]
    properties["x509_common_name"] += [value.encode() for value in common[:1]]
    return properties


def _read(path: Path, source: str, *, is_secret: bool = False) -> bytes:
    try:
        # A key that others can read is refused by its mode.
        if is_secret:
            check_secret(path, secret_refusal(source, path))
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(source=source, problem=f"{path}: {error.strerror}") from error
