"""Stores that speak TLS to each other: by addresses that no certificate has, and by the role peer."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxcache.client import Client, connect
from tests.fleet.stores import Stores, User
from tests.fleet.test_stores import published
from tests.pki import Pki
from tests.server_process import ServerDidNotStart

NAME = "stores.example"


class TlsStores(Stores):
    """Two stores with one certificate, as a chart's pods have it. Clients take the sockets."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._pki = Pki(directory)
        authority, certificate, key = self.renew()
        files = (
            "--tls-certificate",
            str(certificate),
            "--tls-key",
            str(key),
            "--tls-client-ca",
            str(authority),
        )
        super().__init__(directory, 2, *files, *options)

    def renew(self) -> tuple[Path, Path, Path]:
        """Another authority, and what it has signed, in the same files."""
        authority = self._pki.authority("authority")
        return authority, *self._pki.issue("stores", "authority", names=f"DNS:{NAME}", address="")

    def _connect(self, number: int) -> Client:
        return connect(self.processes[number].unix_target, timeout_s=20)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[TlsStores]:
    """Two stores that know each other by the name in their certificate, and by it only."""
    options = ("--fleet-server-name", NAME, "--identities", f"dns:{NAME}=fleet:peer")
    with TlsStores(tmp_path, *options) as both:
        yield both


def test_a_conversation_moves_between_addresses_that_no_certificate_has(stores: TlsStores) -> None:
    """Questions and rows go over TLS, verified by the name that all stores share."""
    user = User(stores, "alice")
    user.turn(0, 1000)
    published(stores, user, 1)
    for turn in range(3):
        assert user.turn(turn % 2) == 1000 + 70 * turn
    assert user.computed == 0
    nodes = stores.clients[0].admin.fleet().nodes
    assert [(node.is_answering, node.problem) for node in nodes] == [(True, "")] * 2


def test_renewed_certificates_are_shown_without_a_restart(stores: TlsStores) -> None:
    """A store outlives its certificate: neither questions nor rows rest on the one of its start."""
    user = User(stores, "alice")
    user.turn(0, 300)
    published(stores, user, 1)
    stores.renew()
    for process in stores.processes:
        deadline = time.monotonic() + 10
        while "certificate_loaded" not in process.stderr:
            assert time.monotonic() < deadline, process.stderr
            time.sleep(0.1)
    assert user.found(0) == 300
    assert user.found(1) == 300


def test_a_store_whose_certificate_has_another_name_is_not_asked(tmp_path: Path) -> None:
    """Without that setting the address has to be in the certificate, and the reason is told."""
    with TlsStores(tmp_path) as stores:
        user = User(stores, "alice")
        user.turn(0)
        (other,) = (node for node in stores.clients[1].admin.fleet().nodes if not node.is_self)
        assert not other.is_answering
        assert "is for other names than 127.0.0.1" in other.problem


def test_a_name_of_certificates_without_any_is_refused(tmp_path: Path) -> None:
    """A store that verified nothing would be believed to."""
    stores = Stores(tmp_path, 1, "--fleet-server-name", NAME)
    with pytest.raises(ServerDidNotStart, match="needs tls_certificate beside it"), stores:
        pass
