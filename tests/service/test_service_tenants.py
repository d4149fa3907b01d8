"""Tenants as an operator sees them, and soft pins under a running load."""

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from hint_rig import seconds
from service_rig import Client, all_rows, settings_in

from ctxcache.core.placement.shares import Share
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, hints_pb2, hints_pb2_grpc

MIB = 1 << 20
WRITERS = 4
SESSIONS_PER_WRITER = 40
TOKENS = 640
"""A session of ten segments: 160 of them are eleven times what SSD takes."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A small server: half of it is for whoever calls, and a quarter for one that has not come yet."""
    return settings_in(
        tmp_path,
        arena_size_bytes=4 * MIB,
        ssd_size_bytes=4 * MIB,
        client_share=0.75,
        tenant_shares={"default": Share(0.5, 0.75), "other": Share(0.25)},
        retention_share=1,
        pin_share=1,
    )


async def test_tenants_are_listed_with_what_they_have(server: Server, client: Client) -> None:
    """A tenant with a share is listed before it has anything; a page at a time."""
    await client.create("s")
    await client.append("s", 1, 0, 100, is_durable=True)
    listed = await client.admin.ListTenants(admin_pb2.ListTenantsRequest())

    default, other = listed.tenants
    slot_bytes = server.cache.ledger.names.sessions["default", "s"].layout.size_bytes
    assert (default.tenant, default.session_count) == ("default", 1)
    assert default.dram_bytes == default.ssd_bytes == default.kept_bytes == 2 * slot_bytes
    assert (default.guaranteed_ssd_bytes, default.limit_bytes) == (2 * MIB, 3 * MIB)
    assert 0 < default.guaranteed_dram_bytes < 2 * MIB
    assert (other.tenant, other.session_count, other.kept_bytes) == ("other", 0, 0)
    assert (other.guaranteed_ssd_bytes, other.HasField("limit_bytes")) == (MIB, False)

    first = await client.admin.ListTenants(admin_pb2.ListTenantsRequest(page_size=1))
    assert [use.tenant for use in first.tenants] == ["default"]
    page = admin_pb2.ListTenantsRequest(page_size=1, page_token=first.next_page_token)
    second = await client.admin.ListTenants(page)
    assert ([use.tenant for use in second.tenants], second.next_page_token) == (["other"], "")


async def test_a_bad_page_is_refused(client: Client) -> None:
    """As every other listing does."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.admin.ListTenants(admin_pb2.ListTenantsRequest(page_size=-1))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_whatever_is_pinned_writes_go_through(client: Client) -> None:
    """Everything is pinned and retained as soon as it is there, by several writers at once.

    None is ever refused.
    """
    hints = hints_pb2_grpc.HintServiceStub(client.channel)
    granted_count = read_count = 0

    async def write(writer: int) -> None:
        nonlocal granted_count, read_count
        for number in range(SESSIONS_PER_WRITER):
            tag, name = writer * SESSIONS_PER_WRITER + number, f"s{writer}-{number}"
            await client.create(name)
            await client.append(name, tag, 0, TOKENS, is_durable=True)
            kept = [
                hints_pb2.HintAction(session=f"sessions/{name}", priority=100, ttl=seconds(3000), **kind)
                for kind in ({"retain": hints_pb2.RetainHint()}, {"pin": hints_pb2.PinHint()})
            ]
            answer = await hints.Hint(hints_pb2.HintRequest(actions=kept))
            granted_count += sum(r.outcome == hints_pb2.HINT_OUTCOME_ACCEPTED for r in answer.results)
            with suppress(grpc.aio.AioRpcError):
                assert await client.read_rows(name) == all_rows(tag, TOKENS)
                read_count += 1

    await asyncio.gather(*(write(writer) for writer in range(WRITERS)))
    use = (await client.admin.ListTenants(admin_pb2.ListTenantsRequest())).tenants[0]
    assert granted_count > 0
    assert read_count > 0
    assert use.retained_bytes > 0
    assert use.pinned_bytes > 0
    assert use.kept_bytes <= 3 * MIB
