"""Every rpc: the callers that may call it, and whether the call is written down."""

import hashlib
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from server_process import write_secret
from service_rig import Client, refused

import ctxcache.v1
from ctxcache.server.server import Server
from ctxcache.service.callers import TENANT_HEADER
from ctxcache.settings.config import Settings
from ctxcache.v1 import operations_pb2 as ops
from ctxcache.v1 import session_pb2
from ctxcache.wire.methods import unchanging

Code = grpc.StatusCode
ADMIN = "/ctxcache.v1.AdminService/"
PEERS = "/ctxcache.v1.PeerService/"
NAMES = {"user": "team", "operator": "ops:operator", "peer": "stores:peer"}
READS = ("Get", "List", "WhyMiss", "Lookup", "Match")
"""Beginnings of the names of rpcs that change nothing."""


@pytest.fixture
def settings(tmp_path: Path, settings: Settings) -> Settings:
    """A server that tells a user and an operator apart by their tokens, which are their roles."""
    hashes = tmp_path / "hashes"
    lines = (f"{name} {hashlib.sha256(name.encode()).hexdigest()} {grant}" for name, grant in NAMES.items())
    write_secret(hashes, "\n".join(lines))
    return settings.model_copy(update={"token_hashes": hashes})


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of nobody yet."""
    async with grpc.aio.insecure_channel(server.addresses[0]) as made:
        yield made


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the audit log."""
    caplog.set_level(logging.INFO, "ctxcache.audit")

    class Lines(list[str]):
        def __iter__(self) -> Iterator[str]:
            return (record.getMessage() for record in caplog.records if record.name == "ctxcache.audit")

    return Lines()


def rpcs() -> list[str]:
    """Every rpc of every service, by its path."""
    found = []
    for module in pkgutil.iter_modules(ctxcache.v1.__path__):
        if module.name.endswith("_pb2"):
            services = importlib.import_module(f"ctxcache.v1.{module.name}").DESCRIPTOR.services_by_name
            found += [f"/{s.full_name}/{method.name}" for s in services.values() for method in s.methods]
    return found


def by(name: str, *, tenant: str = "") -> tuple[tuple[str, str], ...]:
    """A caller's metadata."""
    token = (("authorization", f"Bearer {name}"),)
    return (*token, (TENANT_HEADER, tenant)) if tenant else token


async def answered(channel: grpc.aio.Channel, path: str, metadata: Any = ()) -> grpc.StatusCode:
    """Send an empty request to an rpc; the code that it ends with, or OK once it says something."""
    stream: Any = channel.stream_stream(path)
    call = stream([b""], metadata=metadata, timeout=10)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return Code.OK


async def test_nobody_calls_anything(channel: grpc.aio.Channel) -> None:
    """Without a token, or with one that is not known."""
    for path in rpcs():
        for metadata in ((), by("nobody"), (("authorization", "Basic dXNlcg=="),)):
            assert await answered(channel, path, metadata) is Code.UNAUTHENTICATED, path


async def test_a_peer_asks_what_stores_ask_and_nothing_else(channel: grpc.aio.Channel) -> None:
    """Of any tenant; of an empty request the first thing that is wrong is told."""
    for path in rpcs():
        found = await answered(channel, path, by("peer"))
        assert (found is Code.PERMISSION_DENIED) == (not path.startswith(PEERS)), path


async def test_a_user_administers_nothing_and_acts_for_nobody(channel: grpc.aio.Channel) -> None:
    """Whatever it names in its metadata; and it may call everything else."""
    for path in rpcs():
        found = await answered(channel, path, by("user"))
        is_for_others = path.startswith((ADMIN, PEERS)) or is_of_memory(path)
        assert (found is Code.PERMISSION_DENIED) == is_for_others, path
        elsewhere = await answered(channel, path, by("user", tenant="ops"))
        assert elsewhere is Code.PERMISSION_DENIED or elsewhere is found, path


def test_what_changes_nothing_says_so_in_the_proto() -> None:
    """By its name and by its option: clients repeat it, and the audit log leaves it out."""
    for service in ("Admin", "Arena", "Block", "Bulk", "Hint", "Model", "Prefix", "Session"):
        names = {path.rpartition("/")[2] for path in rpcs() if f".{service}Service/" in path}
        assert names, service
        assert set(unchanging(f"{service}Service")) == {name for name in names if name.startswith(READS)}


async def test_what_an_operator_changes_is_written_down(channel: grpc.aio.Channel, lines: list[str]) -> None:
    """Each rpc of AdminService, and no other one; what only looks is not."""
    for path in rpcs():
        before = len(list(lines))
        found = await answered(channel, path, by("operator"))
        assert (found is Code.PERMISSION_DENIED) == is_of_memory(path)
        method = path.rpartition("/")[2]
        is_change = path.startswith(ADMIN) and not method.startswith(READS)
        written = [line for line in list(lines)[before:] if f"method={method} " in line]
        assert bool(written) == is_change, path
        if method == "Drain":
            await answered(channel, f"{ADMIN}Undrain", by("operator"))


async def test_a_drain_is_written_down_when_it_begins(channel: grpc.aio.Channel, lines: list[str]) -> None:
    """It may go on for hours; whose it is must not wait for its end, which a kill would take away."""
    drain: Any = channel.unary_stream(f"{ADMIN}Drain", ops.DrainRequest.SerializeToString)
    call = drain(ops.DrainRequest(), metadata=by("operator"))
    await call.read()
    assert [line.rpartition(" ")[2] for line in lines if "method=Drain" in line][:1] == ["result=BEGUN"]


async def test_what_cannot_be_written_as_json_is_written_down(
    server: Server, channel: grpc.aio.Channel, lines: list[str]
) -> None:
    """A span of time that is none: the caller is told what is wrong with it, as without an audit."""
    client = Client(channel)
    update = session_pb2.UpdateSessionRequest(name="sessions/a", ttl=Duration(seconds=1 << 50))
    call = client.sessions.UpdateSession(update, metadata=by("operator", tenant="team"))
    await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    (line,) = lines
    assert "sessions/a" in line
    assert line.endswith("result=INVALID_FIELD")


async def test_a_large_request_is_written_down_in_short(channel: grpc.aio.Channel, lines: list[str]) -> None:
    """By what it names and its size: to spell it out would hold up everybody."""
    ranges = [session_pb2.TokenRange(begin=i, end=i + 1) for i in range(20_000)]
    truncate = session_pb2.TruncateSessionRequest(
        name="sessions/a", drop=session_pb2.DropRanges(ranges=ranges)
    )
    call = Client(channel).sessions.TruncateSession(truncate, metadata=by("operator", tenant="team"))
    await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    (line,) = lines
    assert f'request={{"name":"sessions/a","size_bytes":{truncate.ByteSize()}}} ' in line


def is_of_memory(path: str) -> bool:
    """Whether an rpc is for those alone who may map the arena."""
    return path == "/ctxcache.v1.ArenaService/Access"
