"""Tenants told apart by tokens, against a real server: both sockets of a host, exchange and revocation."""

import asyncio
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from far_side import KV, LAYOUT, OWN, SPEC, make_rows
from server_process import ServerDidNotStart, ServerProcess, write_secret

import ctxcache
from ctxcache.cli.failures import ExitCode
from ctxcache.client import Client, QueuedJob
from ctxcache.client.access import ArenaAttachment
from ctxcache.client.control import connect_control
from ctxcache.client.credentials import ClientTls
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CacheError,
    InvalidConfiguration,
    LeaseNotFound,
    PermissionDenied,
    ReservationNotFound,
    SessionAlreadyExists,
    SessionNotFound,
    Unauthenticated,
)
from ctxcache.format.streams import TOKENS
from ctxcache.identity import ArenaGrant, Role, Token, digest_of
from ctxcache.service.callers import TokenFile
from ctxcache.v1 import arena_pb2, session_pb2, session_pb2_grpc
from ctxcache.wire.status import from_rpc_error
from lab.routes import Route, route_options

GRANTS = {
    "a": ArenaGrant("a", has_shared_memory=True, writes_in_place=True),
    "b": ArenaGrant("b", has_shared_memory=True, writes_in_place=True),
    "far": ArenaGrant("b"),
    "ops": ArenaGrant("ops", Role.OPERATOR),
}
"""By a token's text, which is its name too."""


def write_hashes(path: Path, grants: dict[str, ArenaGrant]) -> None:
    """Let these be all tokens, in one step."""
    lines = (Token(name, digest_of(name), grant).line() for name, grant in grants.items())
    made = path.with_suffix(".new")
    write_secret(made, "\n".join(lines))
    made.replace(path)


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's file."""
    path = tmp_path_factory.mktemp("tokens") / "hashes"
    write_hashes(path, GRANTS)
    return path


@pytest.fixture(scope="module")
def server(hashes: Path) -> Iterator[ServerProcess]:
    """A server that asks for tokens."""
    with ServerProcess(hashes.parent / "data", "--token-hashes", str(hashes)) as process:
        yield process


@pytest.fixture
def connect(server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Clients by their token, closed at the end."""
    opened: list[Client] = []

    def open_one(token: str, access: Route = "auto", target: str = "") -> Client:
        file = tmp_path / f"token-{len(opened)}"
        write_secret(file, f"{token}\n")
        opened.append(
            ctxcache.connect(target or server.target, timeout_s=10, **route_options(access), token_file=file)
        )
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


def fill(client: Client, session_id: str, token_count: int = 70) -> SessionInfo:
    """A session of so many tokens."""
    client.models.register(SPEC)
    session = client.sessions.create(OWN, id=session_id, layout=LAYOUT)
    return session.append(make_rows(token_count))


def attached(client: Client) -> ArenaAttachment:
    """The client's way to the arena."""
    found = client.routes.attach()
    assert found is not None
    return found


@pytest.mark.parametrize("access", ["local-socket", "local-grpc"])
def test_on_the_ways_of_a_host_another_tenants_is_not_there(
    connect: Callable[..., Client], access: Route
) -> None:
    """By session, by the number of a lease and by that of a reservation: as of what never was."""
    owner, other = connect("a", access), connect("b", access)
    session = fill(owner, f"s-{access}")
    mine, theirs = attached(owner).stream, attached(other).stream
    lease = arena_pb2.AcquireLease(session=session.name, model_fingerprint=session.model_fingerprint)
    reserve = arena_pb2.Reserve(
        session=session.name, model_fingerprint=session.model_fingerprint, write_offset=70, token_count=1
    )
    lease_id = mine.carry_out(arena_pb2.Operation(acquire_lease=lease)).lease.lease_id
    reservation_id = mine.carry_out(arena_pb2.Operation(reserve=reserve)).reservation.reservation_id
    asked: list[tuple[arena_pb2.Operation, type[CacheError]]] = [
        (arena_pb2.Operation(acquire_lease=lease), SessionNotFound),
        (arena_pb2.Operation(reserve=reserve), SessionNotFound),
        (arena_pb2.Operation(release_lease=arena_pb2.ReleaseLease(lease_id=lease_id)), LeaseNotFound),
        (
            arena_pb2.Operation(
                commit=arena_pb2.CommitReservation(reservation_id=reservation_id, token_count=71)
            ),
            ReservationNotFound,
        ),
        (
            arena_pb2.Operation(
                release_reservation=arena_pb2.ReleaseReservation(reservation_id=reservation_id)
            ),
            ReservationNotFound,
        ),
    ]
    for operation, error in asked:
        with pytest.raises(error):
            theirs.carry_out(operation)

    mine.carry_out(arena_pb2.Operation(release_lease=arena_pb2.ReleaseLease(lease_id=lease_id)))
    assert owner.sessions.get(session.name).token_count == 70


def test_a_local_clients_rows_are_its_tenants(connect: Callable[..., Client]) -> None:
    """Written and read in place under the identity that has the tenant.

    Every checksum holds, also from SSD.
    """
    client = connect("a", "local-socket")
    session = fill(client, "in-place", 200)
    assert session.tenant == "a"
    client.sessions.open(session.name).flush()
    with connect("a", "local-socket").sessions.open(session.name, OWN).read() as found:
        np.testing.assert_array_equal(found.array(KV), make_rows(200)[KV])
    with connect("a", "remote").sessions.open(session.name, OWN).read() as streamed:
        np.testing.assert_array_equal(streamed.array(KV), make_rows(200)[KV])
    assert list(connect("ops", "remote").admin.verify())[-1].bad == ()


def test_a_token_without_shared_memory_gets_none(
    connect: Callable[..., Client], server: ServerProcess
) -> None:
    """On the control socket neither, where the arena's descriptor would come with the welcome.

    Rows come by stream.
    """
    client = connect("far")
    session = fill(client, "streamed")
    with client.sessions.open(session.name, OWN).read() as found:
        np.testing.assert_array_equal(found.array(KV), make_rows(70)[KV])
    assert client.routes.attach() is None
    assert client.ssd_files() is None
    told = client.wire.call(client.wire.arena.GetArena, arena_pb2.GetArenaRequest())
    assert not told.path
    assert not told.ssd_files
    with pytest.raises(PermissionDenied):
        connect_control(server.ready["control_socket"], "it", 10, "far")
    with pytest.raises(Unauthenticated):
        connect_control(server.ready["control_socket"], "it", 10, "unknown")


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer unknown"),),
        (("authorization", "Bearer "),),
        (("authorization", "a"),),
        (("authorization", "Basic a"),),
        (("authorization", "Bearer a"), ("authorization", "Bearer b")),
        (("authorization", f"Bearer {digest_of('a').hex()}"),),
        (("tenant", "a"),),
        (("token", "a"),),
        (("x-forwarded-for", "unix:"),),
    ],
)
def test_without_a_token_that_holds_nobody_is_let_in(server: ServerProcess, metadata: Any) -> None:
    """Not on loopback either; with two, with a hash, or by any other word."""
    with grpc.insecure_channel(server.target) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            sessions.ListSessions(session_pb2.ListSessionsRequest(), metadata=metadata, timeout=10)
    assert isinstance(from_rpc_error(caught.value, "it"), Unauthenticated)


def test_the_servers_own_user_is_known_on_its_unix_socket(
    connect: Callable[..., Client], server: ServerProcess
) -> None:
    """As operator of the default tenant, whom the socket's mode alone lets in.

    With a token, as whom that says.
    """
    path = Path(server.unix_target.removeprefix("unix:"))
    with ctxcache.connect(server.unix_target, access="local", transport="socket") as own:
        assert fill(own, "own").tenant == "default"
        assert own.admin.stats().session_count > 0
        assert attached(own).arena.arena_id
        assert attached(own).arena.ssd_files().is_open
    by_token = connect("b", "auto", server.unix_target)

    assert fill(by_token, "by-token").tenant == "b"
    with pytest.raises(SessionNotFound):
        by_token.sessions.get("sessions/own")
    with pytest.raises(Unauthenticated):
        connect("unknown", "auto", server.unix_target).sessions.get("sessions/own")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture
def changed(hashes: Path, server: ServerProcess) -> Iterator[Callable[[dict[str, ArenaGrant]], None]]:
    """Changes all tokens, and has the server look at once; they are as they were at the end."""

    def change(grants: dict[str, ArenaGrant]) -> None:
        write_hashes(hashes, grants)
        server.signal(signal.SIGHUP)

    yield change
    change(GRANTS)


def until(holds: Callable[[], bool]) -> None:
    """Wait for the server to get there, asking it again and again."""
    while not holds():
        pass


def is_known(client: Client) -> bool:
    """Whether the client's token is."""
    with suppress(Unauthenticated):
        list(client.sessions.list(page_size=1))
        return True
    return False


def test_tokens_are_exchanged_while_the_server_runs(
    connect: Callable[..., Client], changed: Callable[[dict[str, ArenaGrant]], None], tmp_path: Path
) -> None:
    """The new one is let in beside the old, clients read their file again, and the old one ends."""
    client = connect("a")
    with suppress(SessionAlreadyExists):
        fill(client, "exchanged")
    changed(GRANTS | {"a2": GRANTS["a"]})
    until(lambda: is_known(connect("a2")))
    assert is_known(client)
    (tmp_path / "token-0").write_text("a2")
    changed({name: grant for name, grant in GRANTS.items() if name != "a"} | {"a2": GRANTS["a"]})
    until(lambda: not is_known(connect("a")))

    assert client.sessions.get("sessions/exchanged").tenant == "a"


def test_a_revoked_token_ends_what_is_open_with_it(
    connect: Callable[..., Client], changed: Callable[[dict[str, ArenaGrant]], None]
) -> None:
    """The control socket, the bulk channel, a stream: at the next word on each, and never as another."""
    local, bulk, streamed = connect("b", "local-socket"), connect("b", "bulk"), connect("b", "local-grpc")
    session = fill(bulk, "revoked")
    ways = [attached(local).stream, attached(streamed).stream]
    queue = local.hints.engine_queue("engine")
    queue.flush()
    changed({name: grant for name, grant in GRANTS.items() if grant.tenant != "b"})
    until(lambda: not is_known(connect("b")))
    lease = arena_pb2.AcquireLease(session=session.name, model_fingerprint=session.model_fingerprint)
    for way in ways:
        with pytest.raises(Unauthenticated, match="revoked"):
            way.carry_out(arena_pb2.Operation(acquire_lease=lease))
    with pytest.raises(Unauthenticated), bulk.sessions.open(session, OWN).read() as rows:
        rows.array(KV)
    queue.put(QueuedJob("1", session.name, position=1.0))
    changed(GRANTS)
    # It has tried again and again: tokens are exchanged under clients that go on.
    queue.flush()
    assert dict(queue.missing) == {}
    queue.close()


def test_a_file_that_cannot_be_used_changes_nothing(
    connect: Callable[..., Client], server: ServerProcess, hashes: Path
) -> None:
    """It is said in the log, by the line's number; the tokens are those that were."""
    # In one step: a file that is written in place is empty for a moment, which means no tokens.
    rubbish = hashes.with_name("rubbish")
    rubbish.write_text("rubbish\n")
    rubbish.chmod(0o600)
    rubbish.replace(hashes)
    server.signal(signal.SIGHUP)
    until(lambda: "tokens_refused error=" in server.stderr)
    assert is_known(connect("a"))
    write_hashes(hashes, GRANTS)
    count = server.stderr.count("tokens_loaded")
    # The server reads the file unasked: the file has changed.
    until(lambda: server.stderr.count("tokens_loaded") > count)
    assert is_known(connect("a"))


def test_a_file_whose_mode_is_mended_is_read(
    connect: Callable[..., Client], server: ServerProcess, hashes: Path
) -> None:
    """The refusal says `chmod 600`, and that is enough: unasked, and though its content is the same."""
    count = server.stderr.count("tokens_refused")
    open_to_all = hashes.with_name("open")
    write_hashes(open_to_all, GRANTS | {"a3": GRANTS["a"]})
    open_to_all.chmod(0o644)
    open_to_all.replace(hashes)
    until(lambda: server.stderr.count("tokens_refused") > count)
    assert not is_known(connect("a3"))
    hashes.chmod(0o600)
    until(lambda: is_known(connect("a3")))
    write_hashes(hashes, GRANTS)
    until(lambda: not is_known(connect("a3")))


def test_tokens_that_a_shortage_kept_from_being_read_are_read_later(hashes: Path) -> None:
    """A token that was revoked meanwhile would go on until the file changes once more."""

    async def look() -> None:
        write_hashes(hashes, GRANTS)
        tokens = TokenFile(hashes)
        caller = tokens.caller("a")
        write_hashes(hashes, {name: grant for name, grant in GRANTS.items() if name != "a"})
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The first thread of a pool needs descriptors of its own.
        await asyncio.to_thread(int)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            await tokens.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not caller.is_revoked
        await tokens.refresh()
        assert caller.is_revoked

    try:
        asyncio.run(look())
    finally:
        write_hashes(hashes, GRANTS)


def test_a_server_does_not_start_with_tokens_that_it_cannot_read(tmp_path: Path) -> None:
    """Rather than without them, open to all."""
    write_secret(tmp_path / "hashes", "rubbish")
    process = ServerProcess(tmp_path / "data", "--token-hashes", str(tmp_path / "hashes"))
    with pytest.raises(ServerDidNotStart) as caught:
        process.start()
    process.close()
    assert caught.value.returncode == ExitCode.CONFIGURATION
    assert "hashes, line 1" in caught.value.stderr


def test_a_client_without_its_token_file_says_so(tmp_path: Path) -> None:
    """When it is made, and by the file's name."""
    for text in (None, "", "two words"):
        if text is not None:
            write_secret(tmp_path / "token", text)
        with pytest.raises(InvalidConfiguration, match=str(tmp_path / "token")):
            ctxcache.connect(token_file=tmp_path / "token")


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    """The token's path as those of certificates, which are looked at when the client is made."""
    write_secret(tmp_path / "token", "secret")
    ctxcache.connect(token_file=str(tmp_path / "token")).close()
    with pytest.raises(InvalidConfiguration, match="/nonexistent: No such file"):
        ctxcache.connect(tls=ClientTls(ca="/nonexistent"))


@pytest.mark.parametrize("access", ["local-socket", "local-grpc"])
def test_a_match_s_token_is_its_tenants_alone(connect: Callable[..., Client], access: Route) -> None:
    """Another tenant neither reads by it nor ends it, and is told what a token that never was is told."""
    owner, other = connect("a", access), connect("b", access)
    fill(owner, f"m-{access}")
    other.models.register(SPEC)
    ids = make_rows(70)[TOKENS].view("<i4").reshape(-1)
    held = owner.prefixes.match(OWN, ids, layout=LAYOUT, lease_ttl=timedelta(seconds=60))
    assert (held.token_count, len(held.lease_token)) == (64, 16)
    for call in (lambda token: other.prefixes.leased(token, OWN), other.prefixes.release):
        with pytest.raises(LeaseNotFound):
            call(held.lease_token)
    with owner.prefixes.leased(held.lease_token, OWN) as rows:
        assert rows.array(TOKENS).view("<i4").reshape(-1).tolist() == ids[:64].tolist()
    owner.prefixes.release(held.lease_token)
