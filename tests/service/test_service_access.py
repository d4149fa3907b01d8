"""The Access stream: leases and reservations over shared memory, bound to the stream that made them."""

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from integrity import check_integrity
from service_rig import STREAMS, Access, Client, SocketWay, all_rows, refused, rows, until
from xxhash import xxh3_64_intdigest

from ctxcache.cache.appends import GRACE_NS, RESERVATION_LIFETIME_NS
from ctxcache.cache.leases import LEASE_LIFETIME_NS
from ctxcache.server.server import Server
from ctxcache.service import control_socket, convert, fairness
from ctxcache.v1 import arena_pb2, session_pb2
from ctxcache.v1.session_pb2 import TokenRange

Code = grpc.StatusCode
Connect = Callable[[], Awaitable[Access]]
SLOT_BYTES = 28672


def lease_of(client: Client, name: str = "a", **changes: Any) -> arena_pb2.AcquireLease:
    """Ask for a lease."""
    facts: dict[str, Any] = {"session": f"sessions/{name}", "model_fingerprint": client.fingerprint}
    return arena_pb2.AcquireLease(**(facts | changes))


def reserve_of(client: Client, offset: int, count: int, name: str = "a", **changes: Any) -> arena_pb2.Reserve:
    """Ask for room."""
    facts: dict[str, Any] = {
        "session": f"sessions/{name}", "model_fingerprint": client.fingerprint, "write_offset": offset,
        "token_count": count,
    }  # fmt: skip
    return arena_pb2.Reserve(**(facts | changes))


def commit_of(reservation_id: int, count: int, **changes: Any) -> arena_pb2.CommitReservation:
    """Make rows visible."""
    return arena_pb2.CommitReservation(reservation_id=reservation_id, token_count=count, **changes)


def refusal(result: arena_pb2.OperationResult, code: Code, reason: str) -> None:
    """Fail unless the operation was refused with that code and reason."""
    assert (result.error.code, result.error.reason) == (code.value[0], reason)


class Mapped:
    """The arena as a client on the same host sees it."""

    def __init__(self, arena: arena_pb2.Arena) -> None:
        with Path(arena.path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), arena.size_bytes)
        assert self._map[:16] == arena.arena_id

    def write(
        self, reservation: arena_pb2.Reservation, tag: int, *, begin: int = 0, end: int = 1 << 20
    ) -> list[int]:
        """Write every row that was asked for, of tokens [begin, end); returns what a commit says of them."""
        checksums = []
        for segment in reservation.segments:
            for run in segment.rows:
                first = max(run.token_begin, begin)
                last = min(run.token_begin + run.row_end - run.row_begin, end)
                for item in reservation.layout if first < last else ():
                    row = run.row_begin + first - run.token_begin
                    at = segment.offset_bytes + item.offset_bytes + row * item.row_bytes
                    data = rows(tag, first, last, item.stream)
                    self._map[at : at + len(data)] = data
                    checksums.append(xxh3_64_intdigest(data))
        return checksums

    def flip(self, segment: arena_pb2.SegmentLocation, item: arena_pb2.ChunkLayout, row: int = 0) -> None:
        """Change a bit of a row, as broken memory would."""
        self._map[segment.offset_bytes + item.offset_bytes + row * item.row_bytes] ^= 1

    def read(self, lease: arena_pb2.Lease) -> dict[int, bytes]:
        """Every leased row, by layer."""
        found = dict.fromkeys((s.layer for s in STREAMS), b"")
        for segment in lease.segments:
            for run in segment.rows:
                for item in lease.layout:
                    begin = segment.offset_bytes + item.offset_bytes
                    found[item.stream.layer] += self._map[
                        begin + run.row_begin * item.row_bytes : begin + run.row_end * item.row_bytes
                    ]
        return found

    def checksums(self, lease: arena_pb2.Lease, segment: arena_pb2.SegmentLocation) -> list[int]:
        """The expected checksums of a segment, from its bytes."""
        found = []
        for item in lease.layout:
            begin = segment.offset_bytes + item.offset_bytes
            data = self._map[begin : begin + segment.token_count * item.row_bytes]
            found.append(xxh3_64_intdigest(data))
        return found


@pytest.fixture
async def mapped(client: Client) -> Mapped:
    """The arena."""
    return Mapped(await client.arena.GetArena(arena_pb2.GetArenaRequest()))


async def test_rows_written_in_place_are_read_in_place(
    client: Client, access: Access, mapped: Mapped
) -> None:
    """Reserve, write, commit in parts, lease: the same bytes, and the same by stream."""
    await client.create("a")
    reservation = (await access.one(reserve=reserve_of(client, 0, 150))).reservation
    first, rest = mapped.write(reservation, 1, end=70), mapped.write(reservation, 1, begin=70)
    number = reservation.reservation_id
    part = await access.one(commit=commit_of(number, 70, keep_open=True, checksums=first))
    whole = await access.one(
        commit=commit_of(number, 150, durability=session_pb2.DURABILITY_DISK, checksums=rest)
    )
    lease = (await access.one(acquire_lease=lease_of(client))).lease
    some = (await access.one(acquire_lease=lease_of(client, range=TokenRange(begin=60, end=70)))).lease

    assert (part.committed.token_count, whole.committed.durable_token_count) == (70, 150)
    assert mapped.read(lease) == all_rows(1, 150)
    assert mapped.read(some) == {s.layer: rows(1, 60, 70, s) for s in STREAMS}
    assert [run.token_begin for segment in some.segments for run in segment.rows] == [60, 64]
    assert all(list(s.checksums) == mapped.checksums(lease, s) for s in lease.segments)
    assert [segment.token_count for segment in lease.segments] == [64, 64, 22]
    assert await client.read_rows("a") == all_rows(1, 150)


async def test_a_session_says_whether_more_may_be_committed_to_it(
    client: Client, access: Access, mapped: Mapped
) -> None:
    """From its reservation on, between two commits, and no more behind the last one."""
    await client.create("a")
    told = [await client.get("a")]
    reservation = (await access.one(reserve=reserve_of(client, 0, 150))).reservation
    told.append(await client.get("a"))
    first, rest = mapped.write(reservation, 1, end=70), mapped.write(reservation, 1, begin=70)
    number = reservation.reservation_id
    await access.one(commit=commit_of(number, 70, keep_open=True, checksums=first))
    told.append(await client.get("a"))
    await access.one(commit=commit_of(number, 150, checksums=rest))
    told.append(await client.get("a"))

    assert [(one.token_count, one.is_being_appended) for one in told] == [
        (0, False),
        (0, True),
        (70, True),
        (150, False),
    ]


async def test_rows_marked_as_written_show_nowhere_and_are_committed_as_others(
    client: Client, access: Access, mapped: Mapped
) -> None:
    """A mark is a hint: the session is as it was until the commit, which finds the rows there."""
    await client.create("a")
    reservation = (await access.one(reserve=reserve_of(client, 0, 150))).reservation
    checksums, number = mapped.write(reservation, 1), reservation.reservation_id
    mark = arena_pb2.MarkWritten(reservation_id=number, token_count=150, checksums=checksums)
    marked = await access.one(mark_written=mark)
    before = await client.get("a")
    whole = await access.one(
        commit=commit_of(number, 150, durability=session_pb2.DURABILITY_DISK, checksums=checksums)
    )

    assert marked.WhichOneof("result") == "marked"
    assert before.token_count == 0
    assert whole.committed.durable_token_count == 150
    assert await client.read_rows("a") == all_rows(1, 150)


async def test_a_batch_is_carried_out_in_order(client: Client, access: Access, mapped: Mapped) -> None:
    """Each operation succeeds or fails by itself, and sees what those before it did."""
    await client.create("a")
    reservation = (await access.one(reserve=reserve_of(client, 0, 10))).reservation
    checksums = mapped.write(reservation, 1)
    op = arena_pb2.Operation
    results = await access.send(
        op(acquire_lease=lease_of(client)),
        op(commit=commit_of(reservation.reservation_id, 11)),
        op(commit=commit_of(reservation.reservation_id, 10, checksums=checksums)),
        op(acquire_lease=lease_of(client)),
        op(),
    )

    kinds = [result.WhichOneof("result") for result in results]
    assert kinds == ["lease", "error", "committed", "lease", "error"]
    assert (results[0].lease.range.end, results[3].lease.range.end) == (0, 10)
    refusal(results[1], Code.INVALID_ARGUMENT, "INVALID_FIELD")
    refusal(results[4], Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_every_refusal_has_its_code_and_reason(client: Client, access: Access, server: Server) -> None:
    """The result of the operation says what a unary rpc's status would say."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    await client.create("busy")
    await access.one(reserve=reserve_of(client, 0, 1, "busy"))
    for operation, code, reason in (
        ({"acquire_lease": lease_of(client, "none")}, Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        ({"acquire_lease": lease_of(client, "../a")}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (
            {"acquire_lease": lease_of(client, model_fingerprint=bytes(32))},
            Code.FAILED_PRECONDITION,
            "MODEL_FINGERPRINT_MISMATCH",
        ),
        ({"acquire_lease": lease_of(client, if_generation_match=9)}, Code.ABORTED, "GENERATION_MISMATCH"),
        (
            {"acquire_lease": lease_of(client, range=TokenRange(begin=0, end=11))},
            Code.OUT_OF_RANGE,
            "TOKEN_RANGE_OUT_OF_BOUNDS",
        ),
        ({"release_lease": arena_pb2.ReleaseLease(lease_id=99)}, Code.NOT_FOUND, "LEASE_NOT_FOUND"),
        ({"reserve": reserve_of(client, 0, 1, "none")}, Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        ({"reserve": reserve_of(client, 9, 1)}, Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        ({"reserve": reserve_of(client, 10, 0)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"reserve": reserve_of(client, 10, (1 << 20) + 1)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"reserve": reserve_of(client, 10, 1 << 20)}, Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED"),
        (
            {"reserve": reserve_of(client, 10, 1, model_fingerprint=bytes(32))},
            Code.FAILED_PRECONDITION,
            "MODEL_FINGERPRINT_MISMATCH",
        ),
        ({"reserve": reserve_of(client, 10, 1, if_generation_match=9)}, Code.ABORTED, "GENERATION_MISMATCH"),
        ({"reserve": reserve_of(client, 0, 1, "busy")}, Code.ABORTED, "WRITE_IN_PROGRESS"),
        ({"commit": commit_of(99, 1)}, Code.NOT_FOUND, "RESERVATION_NOT_FOUND"),
        (
            {"mark_written": arena_pb2.MarkWritten(reservation_id=99, token_count=1)},
            Code.NOT_FOUND,
            "RESERVATION_NOT_FOUND",
        ),
        (
            {"release_reservation": arena_pb2.ReleaseReservation(reservation_id=99)},
            Code.NOT_FOUND,
            "RESERVATION_NOT_FOUND",
        ),
    ):
        refusal(await access.one(**operation), code, reason)

    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []
    assert (server.cache.leases.lease_count, server.cache.appends.reservation_count) == (0, 1)


async def test_another_stream_cannot_touch_what_is_not_its_own(
    client: Client, access: Access, connect: Connect
) -> None:
    """Numbers are no secrets: a foreign lease or reservation does not exist."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    lease = (await access.one(acquire_lease=lease_of(client))).lease
    reservation = (await access.one(reserve=reserve_of(client, 10, 5))).reservation
    other = await connect()
    number = reservation.reservation_id
    release = arena_pb2.ReleaseReservation(reservation_id=number)
    foreign_lease = await other.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease.lease_id))
    refusal(foreign_lease, Code.NOT_FOUND, "LEASE_NOT_FOUND")
    refusal(await other.one(commit=commit_of(number, 15)), Code.NOT_FOUND, "RESERVATION_NOT_FOUND")
    refusal(await other.one(release_reservation=release), Code.NOT_FOUND, "RESERVATION_NOT_FOUND")
    other.die()

    assert (await access.one(release_reservation=release)).HasField("released")
    ended = await access.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease.lease_id))
    assert ended.HasField("released")
    again = await access.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease.lease_id))
    refusal(again, Code.NOT_FOUND, "LEASE_NOT_FOUND")


async def break_off(access: Access) -> None:
    """The client dies."""
    access.die()


async def finish(access: Access) -> None:
    """The client says that it is done."""
    await access.finish()
    assert await access.read() is None


@pytest.mark.parametrize("end", [break_off, finish])
async def test_leases_and_reservations_end_with_their_stream(
    client: Client,
    access: Access,
    server: Server,
    clock: FakeClock,
    end: Callable[[Access], Awaitable[None]],
) -> None:
    """A dead client's leases end at once; its slots wait until it has surely stopped writing.

    gRPC says the same of one that was killed as of one that is done; only a control socket's END is a word.
    """
    kept_bytes = 0 if end is finish and isinstance(access, SocketWay) else 2 * SLOT_BYTES
    await client.create("a")
    await client.append("a", 1, 0, 10)
    await client.create("b")
    await access.one(acquire_lease=lease_of(client))
    await access.one(reserve=reserve_of(client, 0, 100, "b"))
    cache = server.cache
    await end(access)
    await until(lambda: not cache.leases.lease_count and not cache.appends.reservation_count)
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/a"))

    await cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(cache) == []
    assert cache.ledger.memory.used_bytes == kept_bytes
    clock.advance(ns=GRACE_NS)
    cache.appends.end_overdue()
    assert cache.ledger.memory.used_bytes == 0
    await client.append("b", 1, 0, 10)


async def test_a_message_out_of_bounds_ends_the_stream(
    client: Client, server: Server, connect: Connect
) -> None:
    """A batch of no operations or of too many is no batch; what the stream held ends with it."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    for count in (0, 1025):
        access = await connect()
        await access.one(acquire_lease=lease_of(client))
        await access.write(arena_pb2.AccessRequest(operations=[arena_pb2.Operation()] * count))
        facts = await access.ended(Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert facts == {"field": "operations", "problem": f"{count} is not within [1, 1024]"}
        await until(lambda: server.cache.leases.lease_count == 0)


async def test_deadlines_are_told_and_kept(
    client: Client, access: Access, server: Server, clock: FakeClock
) -> None:
    """A lease and a reservation end when they said they would."""
    await client.create("a", ttl={"seconds": 10**6})
    await client.append("a", 1, 0, 10)
    lease = (await access.one(acquire_lease=lease_of(client))).lease
    reservation = (await access.one(reserve=reserve_of(client, 10, 5))).reservation
    clock.advance(ns=max(LEASE_LIFETIME_NS, RESERVATION_LIFETIME_NS))
    server.cache.leases.end_overdue()
    server.cache.appends.end_overdue()

    assert lease.expire_time.ToNanoseconds() == clock.now_ns()
    assert reservation.expire_time.ToNanoseconds() == clock.now_ns()
    release = arena_pb2.ReleaseLease(lease_id=lease.lease_id)
    refusal(await access.one(release_lease=release), Code.NOT_FOUND, "LEASE_NOT_FOUND")
    late = await access.one(commit=commit_of(reservation.reservation_id, 15))
    refusal(late, Code.NOT_FOUND, "RESERVATION_NOT_FOUND")
    for _ in range(3):
        await access.one(acquire_lease=lease_of(client))
        clock.advance(ns=LEASE_LIFETIME_NS)
        server.cache.leases.end_overdue()
    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []


async def test_a_commit_to_an_expired_session_is_refused(
    client: Client, access: Access, mapped: Mapped, clock: FakeClock
) -> None:
    """For its writer it is as gone as for everybody else, alone and in a batch; the reservation has ended."""
    numbers, sums = [], []
    for name in ("a", "b"):
        await client.create(name, ttl=Duration(seconds=10))
        reservation = (await access.one(reserve=reserve_of(client, 0, 1, name))).reservation
        numbers.append(reservation.reservation_id)
        sums.append(mapped.write(reservation, 7))
    clock.advance(seconds=10)
    alone = await access.one(commit=commit_of(numbers[0], 1, checksums=sums[0]))
    batch = arena_pb2.CommitReservations(reservation_ids=numbers[1:], token_counts=[1], checksums=[1])
    together = await access.one(commit_many=batch)
    again = await access.one(commit=commit_of(numbers[0], 1, checksums=sums[0]))

    refusal(alone, Code.NOT_FOUND, "SESSION_NOT_FOUND")
    assert [one.error.reason for one in together.committed_many.failures] == ["SESSION_NOT_FOUND"]
    refusal(again, Code.NOT_FOUND, "RESERVATION_NOT_FOUND")
    for name in ("a", "b"):
        await refused(client.get(name), Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_a_lease_that_does_not_fit_is_refused_and_a_smaller_one_granted(
    client: Client, access: Access
) -> None:
    """The arena bounds what can be leased at once, and says so; a part of it can be had."""
    await client.create("a")
    for begin in range(0, 64 * 40, 64 * 10):
        await client.append("a", 1, begin, begin + 64 * 10, is_durable=True)
    refusal(await access.one(acquire_lease=lease_of(client)), Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED")
    part = await access.one(acquire_lease=lease_of(client, range=TokenRange(begin=1000, end=2000)))

    assert part.lease.range.end == 2000


async def test_local_clients_are_bounded_apart_from_calls(client: Client, connect: Connect) -> None:
    """Ways that are kept open use up their own room; calls still go through."""
    for _ in range(4):
        await (await connect()).one()
    facts = await (await connect()).ended(Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    assert facts == {"what": "local clients", "limit": "4"}
    await client.create("a")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done on the loop has taken too long already."""
    monkeypatch.setattr(fairness, "SLICE_NS", 0)


NOTHING = arena_pb2.Operation(release_lease=arena_pb2.ReleaseLease(lease_id=0))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param([NOTHING] * 1024, id="many operations"),
        pytest.param(
            [{"reservation_ids": range(1, 2000), "token_counts": [1] * 1999, "checksums": [1] * 1999}],
            id="an operation of many",
        ),
    ],
)
async def test_a_large_batch_leaves_turns_to_others(
    hurried: None, access: Access, connect: Connect, operation: list[Any]
) -> None:
    """Another client's operation comes between, and the batch is done in full."""
    other = await connect()
    await access.send(NOTHING)
    await other.send(NOTHING)
    batch = [
        one
        if isinstance(one, arena_pb2.Operation)
        else arena_pb2.Operation(commit_many=arena_pb2.CommitReservations(**one))
        for one in operation
    ]
    order = []

    async def carry_out(name: str, way: Access, *operations: arena_pb2.Operation) -> int:
        results = await way.send(*operations)
        order.append(name)
        return len(results)

    large = asyncio.ensure_future(carry_out("large", access, *batch))
    await asyncio.sleep(0)
    await carry_out("small", other, NOTHING)

    assert await large == len(batch)
    assert order == ["small", "large"]


async def test_a_full_leases_locations_take_turns(
    hurried: None, client: Client, access: Access, server: Server
) -> None:
    """Interrupted after each segment, they are whole; a client that goes away meanwhile leaves nothing."""
    await client.create("a")
    await client.append("a", 1, 0, 640)
    lease = (await access.one(acquire_lease=lease_of(client))).lease
    assert [segment.position_begin for segment in lease.segments] == list(range(0, 640, 64))
    await access.write(
        arena_pb2.AccessRequest(operations=[arena_pb2.Operation(acquire_lease=lease_of(client))] * 100)
    )
    access.die()
    await until(lambda: not server.cache.leases.lease_count)


async def test_answers_are_bounded(
    client: Client,
    connect: Callable[[], Awaitable[Access]],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locations that would be too long are refused and held by nobody; brief ones, and parts, can be had."""
    await client.create("a")
    await client.append("a", 1, 0, 640)
    for way in (convert, control_socket):
        monkeypatch.setattr(way, "ANSWER_LIMIT_BYTES", 600)
    access = await connect()
    refusal(await access.one(acquire_lease=lease_of(client)), Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED")
    assert server.cache.leases.lease_count == 0
    part = lease_of(client, range=TokenRange(begin=0, end=128))
    assert len((await access.one(acquire_lease=part)).lease.segments) == 2
    brief = lease_of(client, is_brief=True)
    results = await access.send(*[arena_pb2.Operation(acquire_lease=brief)] * 10)
    kinds = [result.WhichOneof("result") for result in results]
    granted = kinds.index("error")

    assert 0 < granted < 10
    assert set(kinds[granted:]) == {"error"}
    refusal(results[-1], Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED")
    assert server.cache.leases.lease_count == 1 + granted
