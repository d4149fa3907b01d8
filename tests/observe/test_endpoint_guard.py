"""The metrics endpoint with a token and with TLS: whom it answers, and what it says to the rest."""

import asyncio
import base64
import http.client
import os
import ssl
from contextlib import closing
from pathlib import Path

import pytest
from observed import small_settings
from pki import Pki
from service_rig import until

from ctxcache.errors import InvalidConfiguration
from ctxcache.observe.bearer import Bearer
from ctxcache.server.server import Server

TOKEN = "0123456789abcdef"  # noqa: S105  # of a test


def _token_file(directory: Path, text: str = TOKEN) -> Path:
    path = directory / "token"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


async def _ask(
    server: Server, path: str, authorization: str = "", context: ssl.SSLContext | None = None
) -> http.client.HTTPResponse:
    def ask() -> http.client.HTTPResponse:
        connection: http.client.HTTPConnection
        if context is None:
            connection = http.client.HTTPConnection(server.metrics_address, timeout=30)
        else:
            connection = http.client.HTTPSConnection(server.metrics_address, timeout=30, context=context)
        with closing(connection):
            connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
            answer = connection.getresponse()
            answer.read()
            return answer

    return await asyncio.to_thread(ask)


def _basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'prometheus:{password}'.encode()).decode()}"


async def test_metrics_are_for_who_shows_the_token(tmp_path: Path) -> None:
    """As a bearer, or as a browser does; probes show none; nothing else tells that it is there."""
    settings = small_settings(tmp_path / "data").model_copy(
        update={"metrics_token_file": _token_file(tmp_path)}
    )
    server = await Server.start(settings)
    try:
        for authorization in (f"Bearer {TOKEN}", f"bearer {TOKEN}", _basic(TOKEN)):
            assert (await _ask(server, "/metrics", authorization)).status == 200
        wrong = ("", "Bearer", f"Bearer {TOKEN}x", f"Token {TOKEN}", _basic("x"), "Basic ???", "Bearer \xff")
        for authorization in wrong:
            answer = await _ask(server, "/metrics", authorization)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer ")
        for path in ("/healthz", "/readyz"):
            assert (await _ask(server, path)).status == 200
        for path in ("/", "/nothing"):
            assert (await _ask(server, path)).status == 401
    finally:
        await server.stop()


async def test_metrics_by_tls_take_over_a_renewed_certificate(tmp_path: Path) -> None:
    """A scraper that knows the authority is answered, one without TLS is not; a renewal needs no restart."""
    pki = Pki(tmp_path)
    old = ssl.create_default_context(cafile=str(pki.authority("old")))
    new = ssl.create_default_context(cafile=str(pki.authority("new")))
    certificate, key = pki.issue("metrics", "old")
    settings = small_settings(tmp_path / "data").model_copy(
        update={"metrics_tls_certificate": certificate, "metrics_tls_key": key}
    )
    server = await Server.start(settings)
    try:
        assert (await _ask(server, "/metrics", context=old)).status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            await _ask(server, "/metrics")
        with pytest.raises(ssl.SSLCertVerificationError):
            await _ask(server, "/metrics", context=new)
        pki.issue("metrics", "new")
        assert server._metrics_tls is not None
        server._metrics_tls.refresh()

        assert (await _ask(server, "/metrics", context=new)).status == 200
    finally:
        await server.stop()


async def test_who_begins_no_handshake_makes_way(tmp_path: Path) -> None:
    """A connection that is silent before TLS is one of the bounded number, and the oldest of them leaves.

    None of them is an error of the server.
    """
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    pki = Pki(tmp_path)
    context = ssl.create_default_context(cafile=str(pki.authority("authority")))
    certificate, key = pki.issue("metrics", "authority")
    settings = small_settings(tmp_path / "data").model_copy(
        update={"metrics_tls_certificate": certificate, "metrics_tls_key": key}
    )
    server = await Server.start(settings)
    host, _, port = server.metrics_address.rpartition(":")
    try:
        held = [await asyncio.open_connection(host, int(port)) for _ in range(32)]
        await until(lambda: server.metrics.connection_count == 32)
        assert (await _ask(server, "/readyz", context=context)).status == 200
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await held[0][0].readexactly(1)
        await until(lambda: server.metrics.connection_count == 31)
        for _, writer in held:
            writer.close()
    finally:
        await server.stop()
    assert told == []


def _replace(path: Path, mode: int) -> None:
    """Put another token's file in the place of this one."""
    fresh = path.with_name("fresh")
    fresh.write_text("fedcba9876543210")
    fresh.chmod(mode)
    fresh.rename(path)


def test_a_token_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """A file that cannot be used changes nothing."""
    path = _token_file(tmp_path)
    bearer = Bearer(path, source="metrics_token_file")
    _replace(path, 0o600)
    assert bearer.allows("Bearer fedcba9876543210")
    assert not bearer.allows(f"Bearer {TOKEN}")
    path.write_text("short")
    assert bearer.allows("Bearer fedcba9876543210")


def test_a_token_whose_mode_is_mended_is_read(tmp_path: Path) -> None:
    """The refusal says `chmod 600`, and that is enough: the content is the same."""
    path = _token_file(tmp_path)
    bearer = Bearer(path, source="metrics_token_file")
    _replace(path, 0o644)
    assert bearer.allows(f"Bearer {TOKEN}")
    path.chmod(0o600)
    assert bearer.allows("Bearer fedcba9876543210")


@pytest.mark.parametrize("text", ["", "short", "two words of a sentence", "é" * 20])
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Empty it would let everybody in."""
    with pytest.raises(InvalidConfiguration, match="metrics_token_file"):
        Bearer(_token_file(tmp_path, text), source="metrics_token_file")


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """And one that is not there."""
    path = _token_file(tmp_path)
    os.chmod(path, 0o644)  # noqa: PTH101  # what it is about
    with pytest.raises(InvalidConfiguration, match="metrics_token_file"):
        Bearer(path, source="metrics_token_file")
    with pytest.raises(InvalidConfiguration, match="No such file"):
        Bearer(tmp_path / "none", source="metrics_token_file")


async def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    """By the name of the setting that is missing."""
    certificate = Pki(tmp_path).authority("authority")
    settings = small_settings(tmp_path / "data").model_copy(update={"metrics_tls_certificate": certificate})
    with pytest.raises(InvalidConfiguration, match="metrics_tls_key"):
        await Server.start(settings)
