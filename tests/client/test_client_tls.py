"""TLS on both TCP ports, against a real server, with certificates made here."""

import resource
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from far_side import KV, LAYOUT, OWN, SPEC, make_rows
from pki import Pki
from server_process import ServerDidNotStart, ServerProcess, write_secret

import ctxcache
from ctxcache.client.credentials import ClientTls
from ctxcache.errors import InvalidConfiguration, TlsFailed, Unavailable
from ctxcache.service.tls import load_tls
from lab.routes import Route, route_options


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority and certificates of it, and one that nobody knows."""
    made = Pki(tmp_path_factory.mktemp("pki")).with_both_sides()
    made.issue("stranger", "other")
    made.issue("expired", "ca", days=-1)
    return made


@pytest.fixture(scope="module")
def server(pki: Pki) -> Iterator[ServerProcess]:
    """A server that asks for certificates."""
    files = {"--tls-certificate": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    options = [part for option, name in files.items() for part in (option, str(pki.directory / name))]
    with ServerProcess(pki.directory / "data", *options) as process:
        yield process


def tls_of(pki: Pki, ca: str = "ca", name: str | None = "client") -> ClientTls:
    """A client's files."""
    own = (pki.directory / f"{name}.pem", pki.directory / f"{name}.key") if name else (None, None)
    return ClientTls(pki.directory / f"{ca}.pem", *own)


@pytest.mark.parametrize("access", ["bulk", "grpc"])
def test_rows_travel_by_tls(pki: Pki, server: ServerProcess, access: Route) -> None:
    """By either way, many frames of them."""
    rows = make_rows(40_000)
    with ctxcache.connect(server.target, **route_options(access), tls=tls_of(pki)) as client:
        client.models.register(SPEC)
        session = client.sessions.create(OWN, layout=LAYOUT).info
        session = client.sessions.open(session, OWN).append(rows)
        for _ in range(2):
            with client.sessions.open(session, OWN).read() as found:
                for stream in LAYOUT:
                    np.testing.assert_array_equal(found.array(stream), rows[stream])


@pytest.mark.parametrize(
    ("ca", "name", "words"),
    [
        ("other", "client", "the server's certificate is signed by nobody whom this client trusts"),
        ("ca", None, "it takes no client without a certificate that it trusts"),
        ("ca", "stranger", "it takes no client without a certificate that it trusts"),
    ],
)
def test_a_certificate_that_is_not_known_is_refused(
    pki: Pki, server: ServerProcess, ca: str, name: str | None, words: str
) -> None:
    """Either side's; the client is told what it can know."""
    with (
        ctxcache.connect(server.target, timeout_s=5, tls=tls_of(pki, ca, name)) as client,
        pytest.raises(TlsFailed) as caught,
    ):
        client.admin.stats()
    assert words in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_one_side_without_tls_is_told_so(pki: Pki, server: ServerProcess, tmp_path: Path, host: str) -> None:
    """Either side, whatever of the host's addresses gRPC tried last; nothing moves."""
    target = server.target.replace("127.0.0.1", host)
    with (
        ctxcache.connect(target, timeout_s=5) as client,
        pytest.raises(TlsFailed, match="the server speaks it, this client does not"),
    ):
        client.admin.stats()
    with (
        ServerProcess(tmp_path / "plain") as plain,
        ctxcache.connect(plain.target.replace("127.0.0.1", host), timeout_s=5, tls=tls_of(pki)) as client,
        pytest.raises(TlsFailed, match="this client speaks it, the server does not"),
    ):
        client.admin.stats()


def test_another_name_than_the_certificates_is_told(pki: Pki, server: ServerProcess) -> None:
    """With the name; and where nobody listens, nothing is said of TLS."""
    with (
        ctxcache.connect(
            server.target.replace("127.0.0.1", "localhost"), timeout_s=5, tls=tls_of(pki)
        ) as client,
        pytest.raises(TlsFailed, match="the server's certificate is for other names than localhost"),
    ):
        client.admin.stats()
    with (
        ctxcache.connect("localhost:1", timeout_s=5, tls=tls_of(pki)) as client,
        pytest.raises(Unavailable) as caught,
    ):
        client.admin.stats()
    assert type(caught.value) is Unavailable


def test_the_unix_socket_needs_none(pki: Pki, server: ServerProcess) -> None:
    """Its directory says who may use it; rows by its bulk socket too."""
    with ctxcache.connect(server.unix_target, access="remote", transport="socket") as client:
        client.models.register(SPEC)
        session = client.sessions.open(client.sessions.create(OWN, layout=LAYOUT).info, OWN).append(
            make_rows(5)
        )
        with client.sessions.open(session, OWN).read() as rows:
            np.testing.assert_array_equal(rows.array(KV), make_rows(5)[KV])


def test_a_renewed_certificate_is_taken_over(pki: Pki, tmp_path: Path) -> None:
    """On both ports, without a restart; what is open stays open, and a file that is none changes nothing."""
    pki.issue("renewed", "ca")

    def put(name: str) -> None:
        for kind in ("pem", "key"):
            write_secret(tmp_path / "new", (pki.directory / f"{name}.{kind}").read_text())
            (tmp_path / "new").rename(tmp_path / f"tls.{kind}")

    put("server")
    files = ("--tls-certificate", str(tmp_path / "tls.pem"), "--tls-key", str(tmp_path / "tls.key"))
    with ServerProcess(tmp_path / "data", *files) as process:
        ports = (process.target, next(a for a in process.ready["bulk_addresses"] if "unix" not in a))
        assert [served(pki, port) for port in ports] == [certificate(pki, "server")] * 2
        with ctxcache.connect(process.target, timeout_s=5, tls=tls_of(pki, name=None)) as client:
            client.admin.stats()
            put("renewed")
            while [served(pki, port) for port in ports] != [certificate(pki, "renewed")] * 2:
                pass
            client.admin.stats()
        assert "certificate_loaded" in process.stderr
        (tmp_path / "tls.key").write_text("no key")
        while "certificate_refused" not in process.stderr:
            pass
        assert [served(pki, port) for port in ports] == [certificate(pki, "renewed")] * 2
        with ctxcache.connect(process.target, timeout_s=5, tls=tls_of(pki, name=None)) as client:
            client.admin.stats()


def test_a_certificate_that_could_not_be_read_at_first_is_taken_over(pki: Pki, tmp_path: Path) -> None:
    """Its key was everybody's, or descriptors lacked; afterwards the same files are read."""
    pki.issue("next", "ca")
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"

    def put(name: str, mode: int) -> None:
        certificate.write_bytes((pki.directory / f"{name}.pem").read_bytes())
        key.write_bytes((pki.directory / f"{name}.key").read_bytes())
        key.chmod(mode)

    put("server", 0o600)
    tls = load_tls(certificate, key, None)
    assert tls is not None
    contexts = [tls.context]

    def look() -> int:
        tls.refresh()
        contexts.append(tls.context)
        return len({id(context) for context in contexts})

    put("next", 0o644)
    assert [look(), look()] == [1, 1]
    key.chmod(0o600)
    assert [look(), look()] == [2, 2]
    put("server", 0o600)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        during = look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [during, look(), look()] == [2, 3, 3]


def served(pki: Pki, address: str) -> bytes:
    """The certificate that a port shows to whoever connects now."""
    context = ssl.create_default_context(cafile=pki.directory / "ca.pem")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as connected,
        context.wrap_socket(connected, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def certificate(pki: Pki, name: str) -> bytes:
    """One that was issued."""
    return ssl.PEM_cert_to_DER_cert((pki.directory / f"{name}.pem").read_text())


def test_an_expired_certificate_is_refused(pki: Pki, tmp_path: Path) -> None:
    """The client says so."""
    files = (
        "--tls-certificate",
        str(pki.directory / "expired.pem"),
        "--tls-key",
        str(pki.directory / "expired.key"),
    )
    with (
        ServerProcess(tmp_path / "data", *files) as process,
        ctxcache.connect(process.target, timeout_s=5, tls=tls_of(pki, name=None)) as client,
        pytest.raises(TlsFailed, match="the server's certificate has expired"),
    ):
        client.admin.stats()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0:0"), "insecure_listen"),
        (("--bulk-listen", "0.0.0.0:0"), "insecure_listen"),
        (("--tls-certificate", "/none.pem", "--tls-key", "/none.key"), "/none.pem"),
        (("--tls-certificate", "/none.pem"), "tls_key"),
        (("--tls-client-ca", "/none.pem"), "tls_certificate"),
    ],
)
def test_a_server_that_would_be_open_or_has_no_key_does_not_start(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    """In words, with the exit code of a wrong configuration."""
    process = ServerProcess(tmp_path / "data", *options)
    with pytest.raises(ServerDidNotStart) as caught:
        process.start()
    process.close()

    assert caught.value.returncode == 11
    assert words in caught.value.stderr


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    """When the client is made, not at its first call."""
    (tmp_path / "ca.pem").write_text("rubbish")
    for ca in ("ca.pem", "none.pem"):
        with pytest.raises(InvalidConfiguration):
            ctxcache.connect(tls=ClientTls(ca=tmp_path / ca))
