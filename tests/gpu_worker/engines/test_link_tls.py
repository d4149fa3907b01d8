"""A plugin's link to a store on another host: TLS by its settings, against a real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pki import Pki
from server_process import ServerProcess
from tiny_models import build

import ctxcache
from ctxcache.client import CallerModel, Client, ClientTls
from ctxcache.errors import InvalidConfiguration
from gpu_worker.engines.link import LinkState, StoreLink, StoreSettings
from gpu_worker.model.spec import model_spec

TIMEOUT_S = 30
RESTS_S = 3.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Two authorities; a server's certificate for 127.0.0.1, one for another name, and a client's."""
    return Pki(tmp_path_factory.mktemp("pki")).with_both_sides()


def served(pki: Pki, directory: Path, *options: str, name: str = "server") -> ServerProcess:
    """A server with TLS."""
    files = ("--tls-certificate", f"{pki.directory}/{name}.pem", "--tls-key", f"{pki.directory}/{name}.key")
    return ServerProcess(directory, *files, *options)


@pytest.fixture(scope="module")
def store(pki: Pki) -> Iterator[ServerProcess]:
    """A server that asks for certificates."""
    with served(pki, pki.directory / "data", "--tls-client-ca", f"{pki.directory}/ca.pem") as process:
        yield process


def given(pki: Pki, target: str, **changed: str) -> dict[str, str]:
    """The settings of a plugin, as its engine's configuration has them."""
    own = {"tls_client_certificate": "client.pem", "tls_client_key": "client.key"}
    files = {"tls_ca": "ca.pem", **own}
    return {"target": target} | {k: f"{pki.directory}/{v}" for k, v in files.items()} | changed


def linked(settings: dict[str, str]) -> StoreLink[CallerModel]:
    """A link by these settings."""
    spec = model_spec(build("llama"), model_id="linked")

    def register(client: Client) -> CallerModel:
        return client.models.register(spec)

    return StoreLink(StoreSettings.of(settings, "extra").connect, register)


def state_of(settings: dict[str, str], wait_s: float) -> LinkState:
    """What a link by these settings becomes."""
    link = linked(settings)
    try:
        return link.wait(wait_s)
    finally:
        link.close()


def test_a_store_with_tls_is_reached_by_the_settings(pki: Pki, store: ServerProcess) -> None:
    """By mutual TLS over TCP, with the names that the command line's options have."""
    assert state_of(given(pki, store.target), TIMEOUT_S) is LinkState.READY
    options = {name: value for name, value in given(pki, store.target).items() if name.startswith("tls_")}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "ctxcache.cli.main", "--target", store.target, *words, "health"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_a_wrong_authority_is_one_sentence_and_no_end(
    pki: Pki, store: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine computes; the log says once which side trusts whom not."""
    settings = given(pki, store.target, tls_ca=f"{pki.directory}/other.pem")
    # Two tries and more.
    assert state_of(settings, RESTS_S) in (LinkState.RESTING, LinkState.CONNECTING)
    (said,) = (record.getMessage() for record in caplog.records if record.name.endswith("link"))
    assert said == (
        "the context store cannot be used yet, prompts are computed: "
        f"{store.target}: TLS: the server's certificate is signed by nobody whom this client trusts"
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tls_ca": "/none.pem"}, "tls: /none.pem: No such file or directory"),
        ({"tls_client_key": ""}, "tls: a client's certificate and its key go together"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(
    pki: Pki, store: ServerProcess, caplog: pytest.LogCaptureFixture, changed: dict[str, str], words: str
) -> None:
    """Said by the link, which tries again: a volume may bring them later."""
    settings = {name: value for name, value in given(pki, store.target, **changed).items() if value}
    assert state_of(settings, RESTS_S) in (LinkState.RESTING, LinkState.CONNECTING)
    (said,) = (record.getMessage() for record in caplog.records if record.name.endswith("link"))
    assert said.endswith(words)


def test_a_link_without_tls_is_told_that_the_server_speaks_it(
    store: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """So that an operator sees which setting lacks."""
    assert state_of({"target": store.target}, RESTS_S) in (LinkState.RESTING, LinkState.CONNECTING)
    (said,) = (record.getMessage() for record in caplog.records if record.name.endswith("link"))
    assert said.endswith("TLS: the server speaks it, this client does not")


def test_renewed_files_are_read_by_the_next_try(pki: Pki, store: ServerProcess, tmp_path: Path) -> None:
    """An engine runs for longer than a certificate lives."""
    authority = tmp_path / "ca.pem"
    authority.write_bytes((pki.directory / "other.pem").read_bytes())
    link = linked(given(pki, store.target, tls_ca=str(authority)))
    try:
        assert link.wait(RESTS_S) in (LinkState.RESTING, LinkState.CONNECTING)
        authority.write_bytes((pki.directory / "ca.pem").read_bytes())
        assert link.wait(TIMEOUT_S) is LinkState.READY
    finally:
        link.close()


def test_a_store_behind_a_tunnel_has_the_name_of_its_certificate(pki: Pki, tmp_path: Path) -> None:
    """On both TCP ports and in the sentence of a refusal; the command line and plugins name it alike."""
    pki.issue("named", "ca", names="DNS:store.example")
    authority = f"{pki.directory}/ca.pem"
    with served(pki, tmp_path / "data", name="named") as process:
        target = process.target.replace("127.0.0.1", "localhost")
        settings = {"target": target, "tls_ca": authority}
        assert state_of(settings, RESTS_S) is not LinkState.READY
        assert state_of({**settings, "tls_server_name": "store.example"}, TIMEOUT_S) is LinkState.READY
        tls = ClientTls(authority, server_name="store.example")
        with ctxcache.connect(target, tls=tls, access="remote", transport="socket") as client:
            model = client.models.register(model_spec(build("llama"), model_id="linked"))
            assert client.sessions.create(model, id="far").info.token_count == 0
            assert client.blocks.look_up(ctxcache.client.BlockSpace(b"0" * 32), [b"1" * 32])
        environment = {**os.environ, "CTXCACHE_TLS_SERVER_NAME": "other.example"}
        command = [sys.executable, "-m", "ctxcache.cli.main", "--target", target, "--tls-ca", authority]
        ended = subprocess.run(
            [*command, "session", "list"], check=False, capture_output=True, text=True, env=environment
        )
        assert "certificate is for other names than other.example" in ended.stderr


def test_a_server_passes_over_the_variables_of_clients(tmp_path: Path) -> None:
    """Both may run in one environment."""
    with ServerProcess(tmp_path / "data", environment={"CTXCACHE_TLS_SERVER_NAME": "store.example"}):
        pass


def test_a_clients_certificate_and_key_go_together(pki: Pki, store: ServerProcess) -> None:
    """One alone would be passed over, and a server that asks for a certificate would refuse the client."""
    own = pki.directory / "client.pem"
    for tls in (ClientTls(certificate=own), ClientTls(key=own)):
        with pytest.raises(InvalidConfiguration, match="go together"):
            ctxcache.connect(store.target, tls=tls)
