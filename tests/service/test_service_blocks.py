"""BlockService and the operations of local clients, by bare stubs: what is refused, and what that leaves."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from service_rig import Access, Client, refused, until

from ctxcache.errors import DeadlineExceeded
from ctxcache.format.checksums import wire_checksum
from ctxcache.server.server import Server
from ctxcache.service.admission import Admission
from ctxcache.service.blocks import BlockService
from ctxcache.service.fairness import Turns
from ctxcache.settings.config import Settings
from ctxcache.v1 import block_pb2, block_pb2_grpc, operations_pb2, session_pb2

Code = grpc.StatusCode
HIT, MISS = session_pb2.LOOKUP_STATE_HIT, session_pb2.LOOKUP_STATE_MISS
PENDING = session_pb2.LOOKUP_STATE_PENDING
Connect = Callable[[], Awaitable[Access]]
SPACE = block_pb2.BlockSpace(
    model_fingerprint=bytes(32), layout_tag="x", parts=[block_pb2.BlockPart(layer_end=1)]
)
SIZE_BYTES = 5000


def key_of(number: int) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(b"%d" % number).digest()


def data_of(number: int) -> bytes:
    """The bytes of a block."""
    return bytes([number]) * SIZE_BYTES


def reserve_of(*numbers: int, **changes: Any) -> block_pb2.ReserveBlocks:
    """Room for these blocks, with changes."""
    facts: dict[str, Any] = {
        "space": SPACE,
        "blocks": [block_pb2.NewBlock(key=key_of(i), part_bytes=[SIZE_BYTES]) for i in numbers],
    }
    return block_pb2.ReserveBlocks(**(facts | changes))


def header_of(*numbers: int, **changes: Any) -> block_pb2.PutBlocksRequest:
    """The first message of a put."""
    return block_pb2.PutBlocksRequest(
        header=block_pb2.PutBlocksHeader(blocks=reserve_of(*numbers, **changes))
    )


def bytes_of(block: int, data: bytes, **changes: Any) -> block_pb2.PutBlocksRequest:
    """Bytes of a put, with changes."""
    facts: dict[str, Any] = {"block": block, "data": data, "checksum": wire_checksum(data)}
    return block_pb2.PutBlocksRequest(bytes=block_pb2.BlockBytes(**(facts | changes)))


@pytest.fixture
def stub(client: Client) -> Any:
    """BlockService."""
    return block_pb2_grpc.BlockServiceStub(client.channel)


async def states(stub: Any, *numbers: int) -> list[Any]:
    """The states that a look-up answers."""
    request = block_pb2.LookupBlocksRequest(space=SPACE, keys=map(key_of, numbers))
    return list((await stub.LookupBlocks(request)).states)


async def read(stub: Any, *numbers: int) -> dict[int, bytes]:
    """The bytes of blocks, by their place in the request."""
    found: dict[int, bytes] = {}
    lease = block_pb2.LeaseBlocksRequest(space=SPACE, keys=map(key_of, numbers))
    async for message in stub.ReadBlocks(block_pb2.ReadBlocksRequest(blocks=lease)):
        if message.HasField("bytes"):
            assert wire_checksum(message.bytes.data) == message.bytes.checksum
            found[message.bytes.block] = found.get(message.bytes.block, b"") + message.bytes.data
    return found


async def test_blocks_are_put_and_read_by_stream(stub: Any, server: Server) -> None:
    """In any order of the blocks; bytes of what is there are ignored; a read leaves no lease."""
    first = [header_of(1, 2), bytes_of(1, data_of(2)), bytes_of(0, data_of(1)[:7])]
    response = await stub.PutBlocks(iter([*first, bytes_of(0, data_of(1)[7:], begin_bytes=7)]))
    assert (list(response.states), response.put_count) == ([HIT, HIT], 2)
    again = [header_of(2, 3), bytes_of(0, b"other"), bytes_of(1, data_of(3))]
    response = await stub.PutBlocks(iter(again))
    assert (list(response.states), response.put_count) == ([HIT, HIT], 1)
    assert await read(stub, 3, 9, 1, 2) == {0: data_of(3), 2: data_of(1), 3: data_of(2)}
    assert not server.cache.leases.lease_count


BAD_PUTS: dict[str, tuple[Iterable[block_pb2.PutBlocksRequest], str, str]] = {
    "nothing": ([], "INVALID_FIELD", "header"),
    "no header": ([bytes_of(0, data_of(1))], "INVALID_FIELD", "header"),
    "two headers": ([header_of(1), header_of(1)], "INVALID_FIELD", "message"),
    "nobody's block": ([header_of(1), bytes_of(1, data_of(1))], "INVALID_FIELD", "bytes.block"),
    "nobody's part": ([header_of(1), bytes_of(0, data_of(1), part=1)], "INVALID_FIELD", "bytes.part"),
    "no data": ([header_of(1), bytes_of(0, b"")], "INVALID_FIELD", "bytes.data"),
    "a gap": ([header_of(1), bytes_of(0, b"abc", begin_bytes=1)], "INVALID_FIELD", "bytes.begin_bytes"),
    "too much": ([header_of(1), bytes_of(0, data_of(1) + b"x")], "INVALID_FIELD", "data"),
    "other bytes": ([header_of(1), bytes_of(0, data_of(1), checksum=1)], "CHECKSUM_MISMATCH", "bytes.data"),
    "an early end": ([header_of(1, 2), bytes_of(0, data_of(1))], "INVALID_FIELD", "bytes"),
    "a short part": ([header_of(1), bytes_of(0, data_of(1)[:-1])], "INVALID_FIELD", "bytes"),
    "one of two short": (
        [header_of(1, 2), bytes_of(0, data_of(1)[:-1]), bytes_of(1, data_of(2))],
        "INVALID_FIELD",
        "bytes",
    ),
    "twice": ([header_of(1, 1)], "INVALID_FIELD", "blocks[1].key"),
    "no blocks": ([header_of()], "INVALID_FIELD", "blocks"),
    "no such part": ([header_of(1, parts=[1])], "INVALID_FIELD", "parts"),
}


@pytest.mark.parametrize(("messages", "reason", "field"), BAD_PUTS.values(), ids=BAD_PUTS)
async def test_a_bad_put_puts_nothing(
    stub: Any, server: Server, messages: Iterable[block_pb2.PutBlocksRequest], reason: str, field: str
) -> None:
    """And gives its room back."""
    facts = await refused(stub.PutBlocks(iter(messages)), Code.INVALID_ARGUMENT, reason)
    assert facts["field"] == field
    assert await states(stub, 1, 2) == [MISS, MISS]
    assert not server.cache.appends.reservation_count
    assert not server.cache.ledger.blocks()


async def test_keys_and_tokens_have_their_length(stub: Any) -> None:
    """Each refusal names the field."""
    bad_keys: dict[str, Any] = {"space": SPACE, "keys": [key_of(1), b"short"]}
    for call, field in (
        (stub.LookupBlocks(block_pb2.LookupBlocksRequest(**bad_keys)), "keys[1]"),
        (stub.LookupBlocks(block_pb2.LookupBlocksRequest(space=SPACE)), "keys"),
        (stub.LeaseBlocks(block_pb2.LeaseBlocksRequest(**bad_keys)), "keys[1]"),
        (stub.DeleteBlocks(block_pb2.DeleteBlocksRequest(**bad_keys)), "keys[1]"),
        (stub.LeaseBlocks(block_pb2.LeaseBlocksRequest(token=b"x")), "token"),
        (stub.LeaseBlocks(block_pb2.LeaseBlocksRequest(token=bytes(16), space=SPACE)), "token"),
        (stub.ReleaseBlocks(block_pb2.ReleaseBlocksRequest()), "token"),
        (
            stub.LookupBlocks(block_pb2.LookupBlocksRequest(keys=[key_of(1)])),
            "space.model_fingerprint",
        ),
    ):
        assert (await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD"))["field"] == field
    unknown = block_pb2.ReleaseBlocksRequest(token=bytes(16))
    await refused(stub.ReleaseBlocks(unknown), Code.NOT_FOUND, "LEASE_NOT_FOUND")


async def test_a_message_has_a_bound_of_parts(stub: Any, access: Access) -> None:
    """So that no answer is too large, and no request takes the loop for long."""
    parts = [block_pb2.BlockPart(layer_begin=i, layer_end=i + 1) for i in range(256)]
    space = block_pb2.BlockSpace(model_fingerprint=bytes(32), parts=parts)
    keys = [key_of(i) for i in range(17)]
    lease = block_pb2.LeaseBlocksRequest(space=space, keys=keys)
    facts = await refused(stub.LeaseBlocks(lease), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert facts["problem"] == "have 4352 parts, more than 4096"
    blocks = [block_pb2.NewBlock(key=key, part_bytes=[1] * 256) for key in keys]
    result = await access.one(reserve_blocks=block_pb2.ReserveBlocks(space=space, blocks=blocks))
    assert result.error.metadata["problem"] == "have 4352 parts, more than 4096"


async def test_a_lease_over_grpc_lasts_until_it_is_released(stub: Any, server: Server) -> None:
    """Its token serves reads, of the same tenant."""
    await stub.PutBlocks(iter([header_of(1), bytes_of(0, data_of(1))]))
    lease = await stub.LeaseBlocks(block_pb2.LeaseBlocksRequest(space=SPACE, keys=[key_of(1), key_of(2)]))
    assert [len(block.offset_bytes) for block in lease.blocks] == [1, 0]
    assert len(lease.token) == 16
    by_token = block_pb2.LeaseBlocksRequest(token=lease.token)
    messages = [m async for m in stub.ReadBlocks(block_pb2.ReadBlocksRequest(blocks=by_token))]
    assert b"".join(message.bytes.data for message in messages[1:]) == data_of(1)
    assert server.cache.leases.lease_count == 1
    await stub.ReleaseBlocks(block_pb2.ReleaseBlocksRequest(token=lease.token))
    assert not server.cache.leases.lease_count
    call = stub.ReadBlocks(block_pb2.ReadBlocksRequest(blocks=by_token))
    await refused(call, Code.NOT_FOUND, "LEASE_NOT_FOUND")


@pytest.mark.parametrize("ttl_s", [0, 5])
async def test_a_read_that_outlasts_its_lease_is_told_how_long_that_was(
    stub: Any, server: Server, clock: FakeClock, ttl_s: int
) -> None:
    """The block that comes next has left memory meanwhile; a minute is what a lease lasts by itself."""
    await stub.PutBlocks(iter([header_of(1, 2), bytes_of(0, data_of(1)), bytes_of(1, data_of(2))]))
    asked = block_pb2.LeaseBlocksRequest(space=SPACE, keys=[key_of(1), key_of(2)])
    if ttl_s:
        asked.ttl.seconds = ttl_s
    service = BlockService(server.cache, Turns(), Admission("calls", 1))
    messages = service._messages(asked, "default")
    assert [(await anext(messages)).WhichOneof("message") for _ in range(2)] == ["header", "bytes"]
    clock.advance(ns=(ttl_s or 60) * 10**9)
    server.cache.leases.end_overdue()
    await stub.DeleteBlocks(block_pb2.DeleteBlocksRequest(space=SPACE, keys=[key_of(2)]))
    with pytest.raises(DeadlineExceeded, match=f"within {ttl_s or 60} s"):
        await anext(messages)


async def test_what_a_connection_has_of_blocks_ends_with_it(
    connect: Connect, stub: Any, server: Server
) -> None:
    """Leases but for those that outlive it, and reservations; another connection commits nothing of them."""
    await stub.PutBlocks(iter([header_of(1), bytes_of(0, data_of(1))]))
    one, other = await connect(), await connect()
    lease = block_pb2.LeaseBlocksRequest(space=SPACE, keys=[key_of(1)])
    brief = (await one.one(lease_blocks=lease)).leased_blocks
    lease.outlives_connection = True
    kept = (await one.one(lease_blocks=lease)).leased_blocks
    [room] = (await one.one(reserve_blocks=reserve_of(2))).reserved_blocks.rooms
    assert (room.state, len(room.offset_bytes)) == (MISS, 1)
    commit = block_pb2.CommitBlocks(reservation_ids=[room.reservation_id], parts=[0], checksums=[0])
    assert (await other.one(commit_blocks=commit)).error.reason == "RESERVATION_NOT_FOUND"
    assert await states(stub, 1, 2) == [HIT, PENDING]
    one.die()
    await until(lambda: server.cache.leases.lease_count == 1)
    assert not server.cache.appends.reservation_count
    assert await states(stub, 2) == [MISS]
    gone = await other.one(lease_blocks=block_pb2.LeaseBlocksRequest(token=brief.token))
    assert gone.error.reason == "LEASE_NOT_FOUND"
    again = await other.one(lease_blocks=block_pb2.LeaseBlocksRequest(token=kept.token))
    assert again.leased_blocks.blocks == kept.blocks
    released = await other.one(release_blocks=block_pb2.ReleaseBlocksRequest(token=kept.token))
    assert released.HasField("released")
    assert not server.cache.leases.lease_count


async def test_a_rank_that_dies_takes_the_put_with_it(connect: Connect, stub: Any, server: Server) -> None:
    """It may still be writing there: nobody waits for its part, and the next ones begin anew."""
    ranks = block_pb2.BlockSpace(
        model_fingerprint=bytes(32), parts=[block_pb2.BlockPart(layer_end=1, rank=rank) for rank in range(2)]
    )
    blocks = [block_pb2.NewBlock(key=key_of(1), part_bytes=[3, 3])]
    look_up = block_pb2.LookupBlocksRequest(space=ranks, keys=[key_of(1)])
    first, second = await connect(), await connect()
    for connection, part in ((first, 0), (second, 1)):
        reserve = block_pb2.ReserveBlocks(space=ranks, blocks=blocks, parts=[part])
        [room] = (await connection.one(reserve_blocks=reserve)).reserved_blocks.rooms
        if connection is first:
            commit = block_pb2.CommitBlocks(
                reservation_ids=[room.reservation_id], parts=[part], checksums=[0]
            )
            assert (await connection.one(commit_blocks=commit)).HasField("committed_blocks")
    assert list((await stub.LookupBlocks(look_up)).states) == [PENDING]
    second.die()
    await until(lambda: not server.cache.ledger.blocks())
    assert list((await stub.LookupBlocks(look_up)).states) == [MISS]
    both = block_pb2.PutBlocksHeader(blocks=block_pb2.ReserveBlocks(space=ranks, blocks=blocks))
    put = [bytes_of(0, b"abc"), bytes_of(0, b"def", part=1)]
    response = await stub.PutBlocks(iter([block_pb2.PutBlocksRequest(header=both), *put]))
    assert (list(response.states), response.put_count) == ([HIT], 1)


async def test_a_reservation_is_given_up_on_request(access: Access, stub: Any) -> None:
    """As a session's is."""
    [room] = (await access.one(reserve_blocks=reserve_of(1))).reserved_blocks.rooms
    result = await access.one(release_reservation={"reservation_id": room.reservation_id})
    assert result.HasField("released")
    assert await states(stub, 1) == [MISS]
    lists = block_pb2.CommitBlocks(reservation_ids=[room.reservation_id], parts=[0, 0], checksums=[0])
    assert (await access.one(commit_blocks=lists)).error.metadata["field"] == "parts"
    lists = block_pb2.CommitBlocks(reservation_ids=[room.reservation_id], parts=[0])
    assert (await access.one(commit_blocks=lists)).error.metadata["field"] == "checksums"


class Follower:
    """A subscription, and what it says of each block: its key's number, state and where it is."""

    def __init__(self, stub: Any, **changes: Any) -> None:
        self.call = stub.SubscribeBlocks(block_pb2.SubscribeBlocksRequest(space=SPACE, **changes))
        self.numbers = {key_of(i): i for i in range(100)}
        self.told: dict[int, tuple[Any, int, bool, int | None]] = {}

    async def hear(self) -> list[int]:
        """Take a message; the numbers of its keys, those of the last one that makes it current included."""
        heard = []
        while True:
            news = await self.call.read()
            lists = news.keys, news.states, news.size_bytes, news.are_in_dram, news.parent_keys
            for key, state, size_bytes, is_in_dram, parent in zip(*lists, strict=True):
                number = self.numbers[key]
                heard.append(number)
                self.told[number] = state, size_bytes, is_in_dram, self.numbers.get(parent)
            if news.is_current:
                return heard


async def put(stub: Any, *numbers: int, **changes: Any) -> None:
    """Put these blocks by stream."""
    messages = [header_of(*numbers, **changes)]
    messages += [bytes_of(i, data_of(number)) for i, number in enumerate(numbers)]
    await stub.PutBlocks(iter(messages))


async def test_a_subscriber_hears_of_what_is_there_and_of_what_becomes_of_it(stub: Any) -> None:
    """Put before, put later, deleted; of another space, and of what is only being written, nothing."""
    await put(stub, 1, 2)
    follower = Follower(stub)
    assert sorted(await follower.hear()) == [1, 2]
    there = HIT, SIZE_BYTES, True, None
    assert follower.told == {1: there, 2: there}
    await put(stub, 7, space=block_pb2.BlockSpace(model_fingerprint=bytes(32), parts=SPACE.parts))
    child = block_pb2.NewBlock(key=key_of(3), part_bytes=[SIZE_BYTES], parent_key=key_of(2))
    await stub.PutBlocks(
        iter(
            [
                block_pb2.PutBlocksRequest(
                    header=block_pb2.PutBlocksHeader(
                        blocks=block_pb2.ReserveBlocks(space=SPACE, blocks=[child])
                    )
                ),
                bytes_of(0, data_of(3)),
            ]
        )
    )
    assert await follower.hear() == [3]
    assert follower.told[3] == (HIT, SIZE_BYTES, True, 2)
    await stub.DeleteBlocks(block_pb2.DeleteBlocksRequest(space=SPACE, keys=[key_of(3), key_of(1)]))
    while len([one for one in follower.told.values() if one[0] == MISS]) < 2:
        await follower.hear()
    assert follower.told == {1: (MISS, 0, False, None), 2: there, 3: (MISS, 0, False, None)}
    follower.call.cancel()


async def test_a_subscriber_of_nothing_is_answered_at_once(stub: Any) -> None:
    """An empty message says that no block is there."""
    follower = Follower(stub)
    assert await follower.hear() == []
    follower.call.cancel()


async def test_a_slow_subscriber_finds_the_newest_state(stub: Any) -> None:
    """A block that came and went before it read is a miss; one that came again is there."""
    follower = Follower(stub)
    await follower.hear()
    for _ in range(3):
        await put(stub, 1, 2)
        await stub.DeleteBlocks(block_pb2.DeleteBlocksRequest(space=SPACE, keys=[key_of(1), key_of(2)]))
    await put(stub, 2)
    await put(stub, 9)
    while 9 not in follower.told:
        await follower.hear()
    assert {number: one[0] for number, one in follower.told.items()} == {1: MISS, 2: HIT, 9: HIT}
    follower.call.cancel()


async def test_subscriptions_are_counted_and_end_with_their_callers(stub: Any, server: Server) -> None:
    """More than the limit are refused; one that ends makes room; nothing of them stays."""
    limit = server.settings.max_engines
    followers = [Follower(stub) for _ in range(limit)]
    for follower in followers:
        await follower.hear()
    late = stub.SubscribeBlocks(block_pb2.SubscribeBlocksRequest(space=SPACE))
    await refused(late, Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    for follower in followers:
        follower.call.cancel()
    await until(lambda: not len(server.cache.blocks.subscriptions))
    follower = Follower(stub)
    await follower.hear()
    follower.call.cancel()


async def test_no_task_of_a_subscription_stays(stub: Any) -> None:
    """Each would wait for news of one that nobody hears, until it is collected with a complaint."""

    def waiting() -> int:
        return sum(
            getattr(task.get_coro(), "__qualname__", "") == "Event.wait" for task in asyncio.all_tasks()
        )

    before_count = waiting()
    followers = [Follower(stub) for _ in range(3)]
    for follower in followers:
        await follower.hear()
    assert waiting() > before_count
    for follower in followers:
        follower.call.cancel()
    await until(lambda: waiting() == before_count)


async def test_a_subscription_of_a_bad_space_is_refused(stub: Any) -> None:
    """With the field."""
    request = block_pb2.SubscribeBlocksRequest(space=block_pb2.BlockSpace(model_fingerprint=b"x"))
    facts = await refused(stub.SubscribeBlocks(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert facts["field"] == "space.model_fingerprint"


async def test_a_drain_ends_a_subscription_with_its_reason(stub: Any, client: Client) -> None:
    """The caller knows that it may come again."""
    follower = Follower(stub)
    await follower.hear()
    drain = client.admin.Drain(operations_pb2.DrainRequest())
    await drain.read()
    await refused(follower.call.read(), Code.UNAVAILABLE, "DRAINING")


async def test_a_subscriber_that_takes_nothing_is_cut_off(settings: Settings) -> None:
    """After the stall timeout, with the reason; nothing of its subscription stays."""
    server = await Server.start(settings.model_copy(update={"stall_timeout_s": 0.2}))
    keys = [key_of(i) for i in range(60)]
    blocks = [block_pb2.NewBlock(key=key, part_bytes=[1]) for key in keys]
    header = block_pb2.PutBlocksRequest(
        header=block_pb2.PutBlocksHeader(blocks=block_pb2.ReserveBlocks(space=SPACE, blocks=blocks))
    )
    # A window that does not grow: nothing is taken off the server's hands unread.
    options = [("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)]
    async with (
        grpc.aio.insecure_channel(server.addresses[0], options=options) as stuck,
        grpc.aio.insecure_channel(
            server.addresses[0], options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel,
    ):
        follower = Follower(block_pb2_grpc.BlockServiceStub(stuck))
        await follower.hear()
        stub: Any = block_pb2_grpc.BlockServiceStub(channel)
        async with asyncio.timeout(30):
            while len(server.cache.blocks.subscriptions):
                await stub.PutBlocks(iter([header, *(bytes_of(i, b"x") for i in range(len(keys)))]))
                await stub.DeleteBlocks(block_pb2.DeleteBlocksRequest(space=SPACE, keys=keys))
        with suppress(grpc.aio.AioRpcError):
            while await follower.call.read():
                continue
        assert await follower.call.code() is Code.DEADLINE_EXCEEDED
        assert not server.cache.ledger.placement.watched
    await server.stop()
