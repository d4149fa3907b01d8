"""A watcher of the server's health that takes no answer holds up no call: neither the drain nor the end."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import RawClient, message
from service_rig import Client, refused, until

from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.v1 import operations_pb2 as ops

WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def deaf_watcher(target: str) -> RawClient:
    """A client that watches health and has room for no byte of the answer.

    It is under way when this returns.
    """
    made = await RawClient.open(target, room=0)
    made.begin(1, WATCH)
    made.say(1, message(b""), is_last=True)
    while 1 not in made.begun:
        await made.take()
    return made


async def test_a_watcher_that_takes_nothing_holds_up_no_drain(server: Server, client: Client) -> None:
    """It drains, and takes work again, while that one waits for room that it does not give itself."""
    watcher = await deaf_watcher(server.addresses[0])

    async with asyncio.timeout(10):
        statuses = [status async for status in client.admin.Drain(ops.DrainRequest())]
        await refused(client.create("a"), grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await client.admin.Undrain(ops.UndrainRequest())
        await client.create("a")

    assert statuses[-1].is_done
    watcher.writer.close()


async def test_nor_the_end(settings: Settings) -> None:
    """It gets the time that running calls get, and what was acknowledged is on disk afterwards."""
    settings = settings.model_copy(update={"drain_timeout_s": 0.5})
    server = await Server.start(settings)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 8)
        watcher = await deaf_watcher(server.addresses[0])
        async with asyncio.timeout(10):
            await server.stop()
    watcher.writer.close()
    again = await Server.start(settings)
    try:
        assert again.cache.ledger.names.sessions["default", "a"].durable_token_count == 8
    finally:
        await again.stop()


async def test_a_watcher_hears_of_each_change(server: Server, client: Client) -> None:
    """Changes of a service that there is, and of the server; and it hears that there is no other."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    names = ("", "ctxcache.v1.SessionService")
    watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]

    assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
    await client.admin.Drain(ops.DrainRequest()).read()
    assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 2
    await client.admin.Undrain(ops.UndrainRequest())
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
    unknown = health_pb2.HealthCheckRequest(service="nothing")
    answer = await health.Watch(unknown).read()
    assert answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    for watch in watches:
        watch.cancel()
    await until(lambda: not server.admissions.operators.running_count)
