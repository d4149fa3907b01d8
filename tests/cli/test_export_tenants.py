"""`ctxcache export` and `import` where callers say who they are: by tokens, through TLS."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from carried import SPEC, Rows, assert_equal, found, keep
from command_line import Ran, asked, ctxcache
from pki import Pki
from server_process import ServerProcess, write_secret

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.client import Client
from ctxcache.client.credentials import ClientTls
from ctxcache.identity import ArenaGrant, Role, Token, digest_of

GRANTS = {
    "a": ArenaGrant("a", has_shared_memory=True),
    "b": ArenaGrant("b"),
    "ops": ArenaGrant("ops", Role.OPERATOR),
}
"""By a token's text, which is its name and its tenant's too."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority, the server's certificate, and everybody's token."""
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.authority("ca")
    made.issue("server", "ca")
    lines = (Token(name, digest_of(name), grant).line() for name, grant in GRANTS.items())
    write_secret(made.directory / "hashes", "\n".join(lines))
    for name in GRANTS:
        write_secret(made.directory / f"{name}.token", name)
    return made


@pytest.fixture(scope="module")
def server(pki: Pki) -> Iterator[ServerProcess]:
    """One that asks for tokens, and speaks TLS alone."""
    options = {"--tls-certificate": "server.pem", "--tls-key": "server.key", "--token-hashes": "hashes"}
    given = [part for option, name in options.items() for part in (option, str(pki.directory / name))]
    with ServerProcess(pki.directory / "data", *given) as started:
        yield started


@pytest.fixture
def run(pki: Pki, server: ServerProcess) -> Callable[..., Ran]:
    """The command line, as somebody.

    By the real program where rows move, in this process where that is refused.
    """

    def run_as(token: str, *arguments: str, is_real: bool = False) -> Ran:
        who = [
            "--token-file",
            str(pki.directory / f"{token}.token"),
            "--tls-ca",
            str(pki.directory / "ca.pem"),
        ]
        if is_real:
            return ctxcache("--target", server.target, "--output", "json", *who, *arguments)
        return asked(server.target, *who, *arguments)

    return run_as


@pytest.fixture
def client_of(pki: Pki, server: ServerProcess) -> Iterator[Callable[[str], Client]]:
    """Clients by the token of their caller. No tenant has a session at first."""
    opened: list[Client] = []

    def connect_as(token: str) -> Client:
        ca, file = pki.directory / "ca.pem", pki.directory / f"{token}.token"
        opened.append(connect(server.target, access="remote", tls=ClientTls(ca), token_file=file))
        return opened[-1]

    for token in GRANTS:
        client = connect_as(token)
        for session in list(client.sessions.list()):
            client.sessions.open(session.name).delete()
    yield connect_as
    for client in opened:
        client.close()


def test_a_file_goes_from_tenant_to_tenant(
    run: Callable[..., Ran], client_of: Callable[[str], Client], tmp_path: Path
) -> None:
    """Each exports its own and nobody else's; what is imported is the importer's.

    A pin needs the role operator.
    """
    file = str(tmp_path / "x")
    rows: Rows = keep(client_of("ops"), SPEC, "x", 100, is_pinned=True)
    keep(client_of("ops"), SPEC, "z", 0)
    assert run("ops", "export", "--all", "--to", file, is_real=True).exit_code == 0
    assert run("b", "export", "x", "--to", str(tmp_path / "y")).exit_code == ExitCode.NOT_FOUND
    assert not (tmp_path / "y").exists()

    refused = run("b", "import", file, "--pins")
    assert refused.exit_code == ExitCode.PERMISSION_DENIED
    assert [(one["status"], one["reason"]) for one in json.loads(refused.stdout)["sessions"]] == [
        ("failed", "PERMISSION_DENIED"), ("untried", ""),
    ]  # fmt: skip
    assert "1 of 2 sessions failed, 1 were not tried; sessions/x: " in refused.sentence
    assert not list(client_of("b").sessions.list())
    assert run("b", "import", file, is_real=True).exit_code == 0
    assert run("ops", "import", file, "--pins", "--rename", "x=y", "--only", "x").exit_code == 0

    assert_equal(found(client_of("b"), "x"), rows)
    assert not client_of("b").sessions.get("sessions/x").is_pinned
    assert client_of("ops").sessions.get("sessions/y").is_pinned
    assert not list(client_of("a").sessions.list())


def test_a_store_is_exported_by_operators_and_imported_by_each_tenant(
    run: Callable[..., Ran], client_of: Callable[[str], Client], tmp_path: Path
) -> None:
    """All tenants' sessions are in it, those of one name too.

    An import into a store that runs takes those of one tenant.
    """
    file = str(tmp_path / "store")
    rows: dict[str, Rows] = {token: keep(client_of(token), SPEC, "x", 40 + ord(token)) for token in "ab"}
    for token in "ab":
        client_of(token).sessions.open("sessions/x").flush()
    assert run("a", "export", "--store", "--to", file).exit_code == ExitCode.PERMISSION_DENIED
    assert list(tmp_path.iterdir()) == []
    assert run("ops", "export", "--store", "--to", file, is_real=True).exit_code == 0
    for token in "ab":
        client_of(token).sessions.open("sessions/x").delete()

    refused = run("a", "import", file)
    assert refused.exit_code == ExitCode.USAGE
    assert "--from-tenant says whose" in refused.stderr
    for token, tenant in (("a", "b"), ("b", "b")):
        assert run(token, "import", file, "--from-tenant", tenant, is_real=True).exit_code == 0
        assert_equal(found(client_of(token), "x"), rows["b"])
    assert run("b", "import", file, "--from-tenant", "nobody", "--only", "x").exit_code == ExitCode.USAGE


def test_who_does_not_say_who_it_is_gets_no_file(pki: Pki, server: ServerProcess, tmp_path: Path) -> None:
    """UNAUTHENTICATED, and nothing under the name."""
    ca = ["--tls-ca", str(pki.directory / "ca.pem")]
    ran = asked(server.target, *ca, "export", "--all", "--to", str(tmp_path / "x"))

    assert (ran.exit_code, list(tmp_path.iterdir())) == (ExitCode.UNAUTHENTICATED, [])
