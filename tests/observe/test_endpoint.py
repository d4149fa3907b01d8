"""The metrics endpoint: what it answers, and whom it cuts off."""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from observed import fetch, observed, small_settings
from service_rig import until

from ctxcache.errors import AddressUnusable
from ctxcache.observe import endpoint as endpoint_module
from ctxcache.observe.endpoint import Answer, Endpoint, Page
from ctxcache.server.listening import metrics_place
from ctxcache.server.server import Server


async def test_pages_answer(tmp_path: Path) -> None:
    """Health, readiness and metrics; anything else is not there, and nothing may be changed."""
    async with observed(tmp_path) as (server, _, _):
        assert await fetch(server, "/healthz") == (200, "ok\n")
        assert await fetch(server, "/readyz?x=1") == (200, "ready\n")
        assert (await fetch(server, "/metrics"))[0] == 200
        assert await fetch(server, "/metrics", method="HEAD") == (200, "")
        assert (await fetch(server, "/nothing"))[0] == 404
        assert (await fetch(server, "/metrics", method="POST"))[0] == 405
        assert (await fetch(server, "", head=b"nonsense\r\n\r\n"))[0] == 400


async def test_it_says_that_the_server_drains(tmp_path: Path) -> None:
    """Alive, and not ready."""
    async with observed(tmp_path) as (server, _, _):
        server._doors.close_for_good()

        assert await fetch(server, "/readyz") == (503, "draining\n")
        assert await fetch(server, "/healthz") == (200, "ok\n")
        assert "ctxcache_ready 0.0" in (await fetch(server, "/metrics"))[1]


async def test_openmetrics_where_it_is_asked_for(tmp_path: Path) -> None:
    """Prometheus asks for it by its Accept header."""
    head = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
    async with observed(tmp_path) as (server, _, _):
        assert (await fetch(server, "", head=head))[1].endswith("# EOF\n")


async def test_a_request_that_is_too_long_or_too_late_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends without an answer, and the next one is served."""
    monkeypatch.setattr(endpoint_module, "TIMEOUT_S", 0.05)
    endpoint = await _started()
    try:
        for sent in (b"GET / HTTP/1.1\r\n", b"x" * 20000):
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(endpoint))
            writer.write(sent)
            assert await _rest(reader) == b""
            writer.close()
        assert b"200 OK" in await _get(endpoint)
    finally:
        await endpoint.stop()


async def test_who_asks_nothing_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many connections as there may be, and none of them asks: the next one is answered."""
    monkeypatch.setattr(endpoint_module, "CONNECTIONS_LIMIT", 2)
    endpoint = await _started()
    try:
        held = [await asyncio.open_connection("127.0.0.1", _port(endpoint)) for _ in range(2)]
        await until(lambda: endpoint.connection_count == 2)
        assert b"200 OK" in await _get(endpoint)
        assert await _rest(held[0][0]) == b""
        held[1][1].write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200 OK" in await held[1][0].read()
    finally:
        await endpoint.stop()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is closed at once where all others wait for an answer.

    Then there is room again.
    """
    monkeypatch.setattr(endpoint_module, "CONNECTIONS_LIMIT", 1)
    goes_on = asyncio.Event()

    async def slow(_: Mapping[str, str]) -> Answer:
        await goes_on.wait()
        return Answer(b"here")

    endpoint = await _started({"/": slow})
    try:
        asked = asyncio.ensure_future(_get(endpoint))
        await until(lambda: endpoint.connection_count and not endpoint.silent_count)
        reader, refused = await asyncio.open_connection("127.0.0.1", _port(endpoint))
        assert await _rest(reader) == b""
        refused.close()
        goes_on.set()
        assert b"200 OK" in await asked
        await until(lambda: not endpoint.connection_count)
        assert b"200 OK" in await _get(endpoint)
    finally:
        await endpoint.stop()


async def test_who_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection counts until its answer has gone, however little of it is left for the server to send."""
    monkeypatch.setattr(endpoint_module, "TIMEOUT_S", 0.5)

    async def large(_: Mapping[str, str]) -> Answer:
        return Answer(bytes(60 << 10))

    endpoint = await _started({"/": large})
    # Little of what it sends is the kernel's to keep.
    assert endpoint._server is not None
    endpoint._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    loop = asyncio.get_running_loop()
    try:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(0)
            await loop.sock_connect(peer, ("127.0.0.1", _port(endpoint)))
            await loop.sock_sendall(peer, b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: endpoint.connection_count)
            await until(lambda: not endpoint.connection_count)
            taken = 0
            while some := await loop.sock_recv(peer, 1 << 20):
                taken += len(some)
        assert taken < 60 << 10
    finally:
        await endpoint.stop()


async def test_a_page_that_breaks_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the endpoint lives on."""
    endpoint = await _started()
    try:
        assert b" 500 " in await _get(endpoint, "/broken")
        assert "metrics_page_broken path=/broken" in caplog.text
        assert b"200 OK" in await _get(endpoint)
    finally:
        await endpoint.stop()


async def test_where_it_listens(tmp_path: Path) -> None:
    """Nowhere where nothing is named.

    A port that was asked for and is taken is an error, and so is no address.
    """
    async with observed(tmp_path / "none", metrics_listen="") as (server, _, _):
        assert server.metrics_address == ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = small_settings(tmp_path / "taken", metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(AddressUnusable):
            await Server.start(settings)


async def test_an_automatic_port_that_is_taken_is_no_reason_not_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no metrics then, and the log says so."""

    async def taken(_: Endpoint, host: str, port: int) -> None:
        raise AddressUnusable(address=f"{host}:{port}", problem="taken")

    monkeypatch.setattr(Endpoint, "start", taken)
    async with observed(tmp_path) as (server, client, _):
        await client.create("one")
        assert server.metrics_address == ""
    assert "metrics_off" in caplog.text


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [("127.0.0.1:7420", 7421), ("[::1]:80", 81), ("127.0.0.1:0", 0), ("127.0.0.1:65535", 0), ("", 0)],
)
def test_the_automatic_port_is_the_next_one(tmp_path: Path, listen: str, wanted: int) -> None:
    """On loopback, whatever the other address is; a free one where there is no next."""
    settings = small_settings(tmp_path, listen=listen)

    assert metrics_place(settings, (listen,) if listen else ()) == ("127.0.0.1", wanted)


async def _started(pages: Mapping[str, Page] | None = None) -> Endpoint:
    async def page(_: Mapping[str, str]) -> Answer:
        return Answer(b"here")

    async def broken(_: Mapping[str, str]) -> Answer:
        raise ZeroDivisionError

    endpoint = Endpoint(pages or {"/": page, "/broken": broken})
    await endpoint.start("127.0.0.1", 0)
    return endpoint


def _port(endpoint: Endpoint) -> int:
    return int(endpoint.address.rpartition(":")[2])


async def _get(endpoint: Endpoint, path: str = "/") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(endpoint))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
