"""Tenants told apart by certificates, against a real server.

The sessions and rights of each caller, and of callers without a name.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from far_side import KV, LAYOUT, OWN, SPEC, make_rows
from pki import Pki
from server_process import ServerProcess

import ctxcache
from ctxcache.client import Client, QueuedJob
from ctxcache.client.credentials import ClientTls
from ctxcache.client.types import HintOutcome, SessionInfo, seconds
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    ModelNotFound,
    PermissionDenied,
    SessionAlreadyExists,
    SessionNotFound,
    Unauthenticated,
    Unavailable,
)
from ctxcache.v1 import arena_pb2, session_pb2, session_pb2_grpc
from ctxcache.wire.status import from_rpc_error
from lab.routes import Route, route_options

MIB = 1 << 20
SPIFFE = "spiffe://example.org/ns/{}/sa/engine"
SETTINGS = """
[[identities]]
subject = "spiffe://example.org/ns/*/sa/engine"
tenant = "$1"

[[identities]]
subject = "dns:ops.example"
tenant = "ops"
role = "operator"

[[identities]]
subject = "cn:legacy"
tenant = "a"

[tenant_shares]
a = 0.25
b = 0.5
"""
STRANGERS = {
    "unmapped": ("unmapped", "URI:spiffe://example.org/ns/a/sa/other"),
    "other-domain": ("legacy", f"URI:{SPIFFE.format('a').replace('example.org', 'evil.org')}"),
    "two-ids": ("legacy", f"URI:{SPIFFE.format('a')},URI:{SPIFFE.format('b')}"),
    "id-in-name": (SPIFFE.format("b").replace("/", "\\/"), ""),
    "id-in-dns": ("legacy", "DNS:spiffe"),
    "deeper": ("legacy", f"URI:{SPIFFE.format('a')}/x"),
    "no-tenant": ("legacy", f"URI:{SPIFFE.format('..')}"),
}
"""Common name and further names of certificates that our authority signed and no rule speaks of."""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates of two tenants, an operator, and those who are nobody."""
    made = Pki(tmp_path_factory.mktemp("pki"))
    for authority in ("ca", "foreign"):
        made.authority(authority)
    made.issue("server", "ca")
    for tenant in ("a", "b"):
        made.issue(tenant, "ca", names=f"URI:{SPIFFE.format(tenant)},DNS:ops.example")
    made.issue("ops", "ca", names="DNS:x.example,DNS:OPS.example", common_name="legacy")
    made.issue("legacy", "ca")
    made.issue("expired", "ca", days=-1, names=f"URI:{SPIFFE.format('a')}")
    made.issue("forged", "foreign", names=f"URI:{SPIFFE.format('a')}")
    for name, (common_name, names) in STRANGERS.items():
        made.issue(name, "ca", common_name=common_name, names=names)
    return made


@pytest.fixture(scope="module")
def server(pki: Pki) -> Iterator[ServerProcess]:
    """A small server of several tenants."""
    (pki.directory / "settings.toml").write_text(SETTINGS)
    files = {"--tls-certificate": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    options = [part for option, name in files.items() for part in (option, str(pki.directory / name))]
    options += ["--arena-size-bytes", "4MiB", "--ssd-size-bytes", "4MiB"]
    config = ("--config", str(pki.directory / "settings.toml"))
    with ServerProcess(pki.directory / "data", *config, *options) as process:
        yield process


@pytest.fixture
def connect(pki: Pki, server: ServerProcess) -> Iterator[Callable[..., Client]]:
    """Clients by the name of their certificate, closed at the end."""
    opened: list[Client] = []

    def open_one(name: str, access: Route = "remote", tenant: str = "") -> Client:
        tls = tls_of(pki, name)
        opened.append(
            ctxcache.connect(server.target, timeout_s=10, **route_options(access), tls=tls, tenant=tenant)
        )
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


def tls_of(pki: Pki, name: str) -> ClientTls:
    """A client's files."""
    return ClientTls(pki.directory / "ca.pem", pki.directory / f"{name}.pem", pki.directory / f"{name}.key")


def fill(client: Client, session_id: str, rows: Any) -> SessionInfo:
    """A session with these rows."""
    client.models.register(SPEC)
    return client.sessions.open(client.sessions.create(OWN, id=session_id, layout=LAYOUT).info, OWN).append(
        rows
    )


def ensure(client: Client, session_id: str) -> None:
    """A session of that name is there."""
    with suppress(SessionAlreadyExists):
        fill(client, session_id, make_rows(2))


def rows_of(client: Client, name: str) -> Any:
    """The K/V that a reader is given."""
    with client.sessions.open(name, OWN).read() as found:
        return np.array(found.array(KV))


@pytest.mark.parametrize("access", ["bulk", "grpc"])
def test_what_is_another_tenants_is_not_there(connect: Callable[..., Client], access: Route) -> None:
    """By whatever verb and way it is asked for; the same name is another session in another tenant."""
    owner, other = connect("a", access), connect("b", access)
    session_id = f"secret-{access}"
    mine = fill(owner, session_id, make_rows(70))
    name = mine.name
    other.models.register(SPEC)
    asked: list[Callable[[], Any]] = [
        partial(other.sessions.get, name),
        partial(other.sessions.open(name).update, ttl=seconds(60)),
        partial(other.sessions.open(name).keep_first, 0),
        other.sessions.open(name).fork,
        other.sessions.open(name).flush,
        other.sessions.open(name).delete,
        partial(other.sessions.open(mine, OWN).append, make_rows(1)),
        partial(rows_of, other, name),
        lambda: rows_of_snapshot(other, mine),
    ]
    for ask in asked:
        with pytest.raises(SessionNotFound):
            ask()
    assert name not in {session.name for session in other.sessions.list()}

    theirs = fill(other, session_id, make_rows(3, first=500))

    assert (theirs.tenant, owner.sessions.get(name).tenant) == ("b", "a")
    np.testing.assert_array_equal(rows_of(other, name), make_rows(3, first=500)[KV])
    np.testing.assert_array_equal(rows_of(owner, name), make_rows(70)[KV])
    other.sessions.open(name).delete()
    assert owner.sessions.get(name).token_count == 70


def rows_of_snapshot(client: Client, session: SessionInfo) -> Any:
    """Read by what another has learnt of a session: no call before the read could refuse it."""
    client.routes.layouts.put(session.uid, OWN.specs(LAYOUT))
    with client.sessions.open(session, OWN).read() as found:
        return found.array(KV)


def test_models_are_a_tenants_own(connect: Callable[..., Client]) -> None:
    """So are their names, which another may give to a different model."""
    connect("a").models.register(SPEC)
    with pytest.raises(ModelNotFound):
        connect("ops").models.get("models/tiny")


def test_hints_speak_of_ones_own_sessions_alone(connect: Callable[..., Client]) -> None:
    """To a hint, and in a queue, another's session is missing; nothing of it is ever told."""
    owner, other = connect("a"), connect("b")
    fill(owner, "hinted", make_rows(5))
    fill(other, "theirs", make_rows(5))
    with other.hints.engine_queue("engine") as queue, owner.hints.engine_queue("engine") as own:
        queue.put(
            QueuedJob("1", "sessions/hinted", position=1.0), QueuedJob("2", "sessions/theirs", position=2.0)
        )
        own.put(QueuedJob("1", "sessions/hinted", position=1.0))
        queue.flush()
        own.flush()
        owner.sessions.open("sessions/hinted").delete()
        told = {event.session for event in queue.take()}
        missing = dict(queue.missing)

        assert missing == {"1": "SESSION_NOT_FOUND"}
        assert dict(own.missing) == {}
        assert told == {"sessions/theirs"}
    outcomes = [
        other.hints.prefetch("sessions/hinted").outcome,
        other.hints.demote("sessions/hinted").outcome,
        other.hints.pin("sessions/hinted", ttl=seconds(10)).outcome,
        other.hints.expect("sessions/hinted", None).outcome,
    ]
    assert set(outcomes) == {HintOutcome.MISSING}


def test_one_floods_and_the_other_keeps_its_share(
    connect: Callable[..., Client], server: ServerProcess
) -> None:
    """A tenant that writes many times what SSD holds pushes out its own.

    The other's is there, also after a kill.
    """
    flooding, quiet = connect("a"), connect("b")
    rows, many = make_rows(640), make_rows(1920)
    kept = [fill(quiet, f"kept-{number}", rows) for number in range(8)]
    for session in kept:
        quiet.sessions.open(session.name).flush()
    for number in range(60):
        flooding.sessions.open(fill(flooding, f"flood-{number}", many).name).flush()
    use = {use.tenant: use for use in connect("ops").admin.list_tenants()}

    assert use["a"].session_count < 60
    assert use["b"].kept_bytes <= use["b"].guaranteed_ssd_bytes
    for session in kept:
        np.testing.assert_array_equal(rows_of(quiet, session.name), rows[KV])

    server.kill9()
    server.start()
    for session in kept:
        np.testing.assert_array_equal(rows_of(connect("b"), session.name), rows[KV])
    with pytest.raises(SessionNotFound):
        connect("a").sessions.get(kept[0].name)


def test_operators_verbs_need_an_operator(connect: Callable[..., Client], server: ServerProcess) -> None:
    """So does a hold against eviction.

    An operator's change is written down with its author and outcome.
    """
    user, operator = connect("a"), connect("ops")
    name = fill(user, "pinned", make_rows(5)).name
    asked: list[Callable[[], Any]] = [
        user.admin.stats,
        lambda: list(user.admin.list_tenants()),
        partial(user.admin.demote_session, name),
        lambda: list(user.admin.verify()),
        lambda: list(user.admin.backup()),
        partial(user.sessions.open(name).update, is_pinned=True),
        partial(user.sessions.create, OWN, layout=LAYOUT, is_pinned=True),
    ]
    for ask in asked:
        with pytest.raises(PermissionDenied, match="needs the role operator"):
            ask()

    assert operator.admin.stats().session_count > 0
    with pytest.raises(SessionNotFound):
        operator.admin.demote_session(name)
    assert list(operator.admin.verify())[-1].bad == ()
    said = server.stderr
    assert (
        'audit subject="dns:ops.example" tenant=ops role=operator method=DemoteSession'
        f' request={{"name":"{name}"}} result=SESSION_NOT_FOUND' in said
    )
    assert (
        'audit subject="dns:ops.example" tenant=ops role=operator method=Verify request={} result=OK' in said
    )
    assert "caller_refused peer=" in said


def test_an_operator_acts_for_a_tenant_and_sees_no_rows(
    connect: Callable[..., Client], server: ServerProcess
) -> None:
    """Its sessions are shown and changed, which is written down; a user's are only its own."""
    name = fill(connect("a"), "acted-on", make_rows(5)).name
    tenant = connect("a").sessions.get(name).tenant
    operator, user = connect("ops", tenant=tenant), connect("b", tenant=tenant)

    assert operator.sessions.get(name).token_count == 5
    assert operator.sessions.open(name).update(is_pinned=True).is_pinned
    operator.admin.evict_session(name)
    again = fill(connect("a"), "acted-on", make_rows(5))
    with pytest.raises(CacheError):
        operator.sessions.open(again.name, OWN).read()
    with pytest.raises(PermissionDenied, match="acting for tenant"):
        user.sessions.get(name)
    assert f'tenant={tenant} role=operator method=UpdateSession request={{"name":"{name}"' in server.stderr


@pytest.mark.parametrize("name", STRANGERS)
def test_a_certificate_of_which_no_rule_speaks_is_nobody(connect: Callable[..., Client], name: str) -> None:
    """Whatever its other names are: one sort of name hides the next, and none is taken for another sort."""
    with pytest.raises((PermissionDenied, Unauthenticated)) as caught:
        list(connect(name).sessions.list())
    if name == "unmapped":
        assert "identities" in str(caught.value)
        assert "spiffe://example.org/ns/a/sa/other" in str(caught.value)


@pytest.mark.parametrize("name", ["expired", "forged"])
def test_a_certificate_that_does_not_hold_gets_no_connection(
    connect: Callable[..., Client], name: str
) -> None:
    """Whatever names it has: the handshake ends before anybody asks for them."""
    with pytest.raises(Unavailable):
        list(connect(name).sessions.list())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tenant", "b"),
        ("x-tenant", "b"),
        ("x-ctxcache-tenant", "b"),
        ("role", "operator"),
        ("authorization", "Bearer b"),
        ("authorization", "Basic Yjpi"),
        ("x-user", "root"),
        ("x-forwarded-client-cert", f"URI={SPIFFE.format('b')}"),
        ("x-forwarded-for", "unix:"),
        ("x509_common_name", "legacy"),
        ("peer_spiffe_id", SPIFFE.format("b")),
        ("transport_security_type", "local"),
    ],
)
def test_what_a_caller_says_of_itself_is_not_heard(
    pki: Pki, server: ServerProcess, connect: Callable[..., Client], key: str, value: str
) -> None:
    """Metadata names no tenant: the session that was made is the certificate's."""
    tls = tls_of(pki, "a")
    ensure(connect("b"), "said")
    with grpc.secure_channel(server.target, tls.credentials()) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)
        request = session_pb2.GetSessionRequest(name="sessions/said")
        with pytest.raises(grpc.RpcError) as caught:
            sessions.GetSession(request, metadata=((key, value),), timeout=10)
    assert isinstance(from_rpc_error(caught.value, "it"), SessionNotFound)


@pytest.mark.parametrize(
    "name",
    ["sessions/b/said", "sessions/../b/said", "sessions/b\0said", "tenants/b/sessions/said", "sessions/"],
)
def test_no_name_reaches_into_another_tenant(connect: Callable[..., Client], name: str) -> None:
    """Names have no parts."""
    ensure(connect("b"), "said")
    with pytest.raises(CacheError) as caught:
        connect("a").sessions.get(name)
    assert caught.value.reason in ("INVALID_FIELD", "SESSION_NOT_FOUND")


def test_without_shared_memory_rows_come_by_stream(connect: Callable[..., Client]) -> None:
    """Callers without a grant are not told where the arena is, and may neither lease nor reserve.

    Others' bytes lie there.
    """
    client = connect("a", "auto")
    fill(client, "streamed", make_rows(70))
    np.testing.assert_array_equal(rows_of(client, "sessions/streamed"), make_rows(70)[KV])
    arena = client.wire.arena.GetArena(arena_pb2.GetArenaRequest())
    call = client.wire.arena.Access(iter([arena_pb2.AccessRequest()]))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)

    assert (arena.path, arena.control_socket) == ("", "")
    assert isinstance(from_rpc_error(caught.value, "it"), PermissionDenied)
    with pytest.raises(Unavailable):
        connect("a", "local").sessions.get("sessions/streamed") and connect("a", "local").sessions.open(
            "sessions/streamed", OWN
        ).read()


def test_a_ticket_is_its_owners(pki: Pki, connect: Callable[..., Client]) -> None:
    """With one's own ticket another's session is not there.

    Another's ticket does not go with one's own certificate.
    """
    owner, other = connect("a", "bulk"), connect("b", "bulk")
    fill(owner, "bulky", make_rows(5))
    stolen = owner.routes.bulk.ticket()
    other.routes.bulk.ticket = lambda: stolen  # type: ignore[method-assign]
    with pytest.raises(CacheError) as caught:
        rows_of_snapshot(other, owner.sessions.get("sessions/bulky"))
    assert "was given to spiffe://example.org/ns/a/sa/engine" in str(caught.value)


def test_an_operators_client_on_the_servers_host_is_about_that_tenant(
    pki: Pki, connect: Callable[..., Client], server: ServerProcess
) -> None:
    """The server's sockets know one tenant a connection, the caller's own: it does not use them."""
    name = fill(connect("a"), "matched", make_rows(70)).name
    tenant = connect("a").sessions.get(name).tenant
    with ctxcache.connect(server.target, tls=tls_of(pki, "ops"), tenant=tenant) as operator:
        assert operator.routes.attach() is None
        assert operator.sessions.get(name).tenant == tenant
    with pytest.raises(InvalidArgument, match="go over the network"):
        ctxcache.connect(server.target, tls=tls_of(pki, "ops"), tenant=tenant, access="local")
