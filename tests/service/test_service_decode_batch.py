"""Decode-time appends against a real server: steps of many sessions, each session by itself."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from server_process import ServerProcess

import ctxcache
from ctxcache.client import CallerModel, Client, DecodeBatch
from ctxcache.client.grpc_access import GrpcAccess
from ctxcache.client.types import Durability
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    DeadlineExceeded,
    GenerationMismatch,
    IncompleteAppend,
    InvalidArgument,
    ReservationNotFound,
    WriteInProgress,
)
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1.arena_pb2 import AccessResponse, AcquireLease, Operation, ReleaseLease, ReleaseReservation
from lab.routes import route_options
from tests.model_specs import small_model

KV, HIDDEN, ODD = Stream(0, StateKind.KV), Stream(1, StateKind.HIDDEN), Stream(2, StateKind.HIDDEN)
ROW_BYTES = {TOKENS: 4, KV: 4096, HIDDEN: 12288, ODD: 6}
SPEC = small_model(
    *[StreamSpec(stream, ROW_BYTES[stream], DType.FLOAT16) for stream in (KV, HIDDEN, ODD)],
    architecture="Tiny",
    weights_digest="w",
    tokenizer_digest="t",
    layer_count=3,
    hidden_size=4,
    head_size=4,
)
OWN = CallerModel(SPEC)
LANES = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all."""
    with ServerProcess(tmp_path_factory.mktemp("decode") / "data") as running:
        yield running


@pytest.fixture(params=["local-socket", "local-grpc"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """A client by either way."""
    with ExitStack() as stack:
        made = stack.enter_context(ctxcache.connect(server.target, **route_options(request.param)))
        made.models.register(SPEC)
        yield made
        for session in list(made.sessions.list()):
            made.sessions.open(session.name).delete()


def rows(step: int, stream: Stream, lanes: Sequence[int]) -> np.ndarray:
    """Rows that tell step, lane and stream."""
    size = ROW_BYTES[stream]
    spelt = [np.arange(size) + step * 7 + lane * 31 + stream.layer * 3 for lane in lanes]
    return np.array(spelt).astype(np.uint8)


def create(client: Client, count: int = LANES) -> list[str]:
    """Sessions of different lengths, so that their segments end at different steps."""
    names = []
    for lane in range(count):
        session = client.sessions.create(OWN, id=f"s{lane}", layout=list(ROW_BYTES))
        names.append(session.name)
        if lane:
            first = {s: np.concatenate([rows(i, s, [lane]) for i in range(-lane * 9, 0)]) for s in ROW_BYTES}
            session.append(first)
    return names


@pytest.mark.parametrize("streams", [[TOKENS, KV], None], ids=["other", "same"])
def test_a_session_that_was_made_anew_is_a_failed_lane(client: Client, streams: list[Stream] | None) -> None:
    """With another layout or the same: nothing is put behind its tokens, and the others go on."""
    infos = [client.sessions.get(name) for name in create(client)]
    client.sessions.open(infos[0].name).delete()
    other = client.sessions.create(OWN, id="s0", layout=streams or list(ROW_BYTES)).info

    with client.sessions.decode_batch(infos, OWN) as batch:
        assert [type(error) for error in batch.failures.values()] == [GenerationMismatch]
        assert set(batch.failures) == {0}
        step(batch, 0)
        batch.commit()
    assert client.sessions.get(other.name).generation == other.generation
    for info in infos[1:]:
        assert client.sessions.get(info.name).token_count == info.token_count + 1
        client.sessions.open(info.name, OWN).append({s: rows(0, s, [1]) for s in ROW_BYTES})


def step(batch: DecodeBatch, number: int) -> None:
    """Write every stream of one step."""
    for stream in ROW_BYTES:
        batch.write(stream, rows(number, stream, range(batch.session_count)))


def check(client: Client, name: str, lane: int, steps: int) -> None:
    """Every row of a session is what was written."""
    with client.sessions.open(name, OWN).read() as found:
        assert found.end == lane * 9 + steps
        for stream in ROW_BYTES:
            expected = np.concatenate([rows(i, stream, [lane]) for i in range(-lane * 9, steps)])
            np.testing.assert_array_equal(found.array(stream), expected)


def test_steps_arrive_across_segments_and_rooms(client: Client) -> None:
    """Room for 50 steps at a time, segments of 64 tokens, 120 steps: each row is where it belongs."""
    names = create(client)
    with client.sessions.decode_batch(names, OWN, room_tokens=50) as batch:
        for number in range(120):
            step(batch, number)
            assert batch.commit().tolist() == list(range(LANES))
        counts, generations = batch.token_counts.tolist(), batch.generations.tolist()

    sessions = [client.sessions.get(name) for name in names]
    assert counts == [session.token_count for session in sessions]
    assert generations == [session.generation for session in sessions]
    for lane, name in enumerate(names):
        check(client, name, lane, 120)
    # Unused room is given back: another writer may come at once.
    client.sessions.open(names[0], OWN).append({s: rows(120, s, [0]) for s in ROW_BYTES})


def test_a_session_that_fails_leaves_the_others_alone(client: Client, server: ServerProcess) -> None:
    """Its lane is left out from then on, with its reason."""
    names = create(client)
    with (
        ctxcache.connect(server.target, access="local") as other,
        other.sessions.open(names[1], OWN).writer(1),
        client.sessions.decode_batch(names, OWN, room_tokens=10) as batch,
    ):
        assert isinstance(batch.failures[1], WriteInProgress)
        for number in range(15):
            if number == 5:
                _lose_reservation(client, batch, 3)
            step(batch, number)
            expected = [0, 2, 4] if number >= 5 else [0, 2, 3, 4]
            assert batch.commit().tolist() == expected
        assert isinstance(batch.failures[3], ReservationNotFound)
        assert batch.token_counts.tolist() == [15, 9, 33, 32, 51]
    for lane, steps in ((0, 15), (1, 0), (2, 15), (3, 5), (4, 15)):
        check(client, names[lane], lane, steps)


def _lose_reservation(client: Client, batch: DecodeBatch, lane: int) -> None:
    release = ReleaseReservation(reservation_id=int(batch._reservation_ids[lane]))
    attachment = client.routes.attach()
    assert attachment is not None
    attachment.stream.carry_out(Operation(release_reservation=release))


def test_an_answer_of_many_locations_arrives(client: Client) -> None:
    """A batch of full leases fills more than an answer over gRPC may.

    That has what stock clients can take.
    """
    session = client.sessions.create(OWN, id="long", layout=[ODD]).info
    handle = client.sessions.open(session, OWN)
    for _ in range(100):
        # One at a time: appended at once they would lie in a few long segments.
        handle.append({TOKENS: np.zeros((64, 4), np.uint8), ODD: np.zeros((64, 6), np.uint8)})
    acquire = AcquireLease(session=session.name, model_fingerprint=session.model_fingerprint)
    attachment = client.routes.attach()
    assert attachment is not None
    results = attachment.stream.call([Operation(acquire_lease=acquire)] * 1024)

    granted = [result for result in results if result.HasField("lease")]
    refused = [result.error.reason for result in results if not result.HasField("lease")]
    assert set(refused) <= {"CAPACITY_EXCEEDED"}
    assert {len(result.lease.segments) for result in granted} == {100}
    # One lease more would be over it. Frames of results count, and where slots lie decides their size.
    limit_bytes = 1 << 20 if refused else 3 << 20
    lease_bytes = AccessResponse(results=granted[:1]).ByteSize()
    assert AccessResponse(results=granted).ByteSize() + lease_bytes > limit_bytes, (
        len(granted),
        len(refused),
    )
    if refused:
        assert AccessResponse(results=results).ByteSize() < 2 << 20
    attachment.stream.send(
        [Operation(release_lease=ReleaseLease(lease_id=r.lease.lease_id)) for r in granted]
    )


@pytest.mark.parametrize("client", ["local-grpc"], indirect=True)
def test_a_batch_that_was_frozen_asks_before_it_writes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots may be others' by now; the server's answer decides."""
    with client.sessions.decode_batch(create(client, 2), OWN) as batch:
        stream = batch._stream
        assert isinstance(stream, GrpcAccess)
        stream.sure_until_ns = 0
        step(batch, 0)
        batch.commit()
        stream.sure_until_ns = 0
        monkeypatch.setattr(stream, "exchange", _unheard)
        with pytest.raises(ReservationNotFound):
            batch.write(TOKENS, rows(1, TOKENS, range(2)))


def _unheard(_: list[Operation]) -> AccessResponse:
    raise DeadlineExceeded(target="server", timeout_s=1)


def test_a_step_can_be_durable(client: Client) -> None:
    """The commit waits for the disk when it is asked to."""
    names = create(client, 3)
    with client.sessions.decode_batch(names, OWN) as batch:
        step(batch, 0)
        batch.commit(Durability.DISK)

    sessions = [client.sessions.get(name) for name in names]
    assert [session.durable_token_count for session in sessions] == [1, 10, 19]


def test_a_step_without_a_stream_is_not_committed(client: Client) -> None:
    """Nothing becomes visible that nobody wrote; the step may be completed then."""
    names = create(client, 2)
    with client.sessions.decode_batch(names, OWN) as batch:
        batch.write(TOKENS, rows(0, TOKENS, range(2)))
        with pytest.raises(IncompleteAppend):
            batch.commit()
        with pytest.raises(InvalidArgument, match="lanes"):
            batch.write(KV, rows(0, KV, range(3)))
        step(batch, 0)
        batch.commit()

    check(client, names[1], 1, 1)


def test_sessions_that_differ_are_no_batch(client: Client) -> None:
    """One write fits all or none."""
    client.sessions.create(OWN, id="a", layout=[TOKENS, KV])
    client.sessions.create(OWN, id="b", layout=[TOKENS, HIDDEN])
    for sessions in ([], ["sessions/a", "sessions/b"]):
        with pytest.raises(InvalidArgument, match="sessions"):
            client.sessions.decode_batch(sessions, OWN)
    assert client.admin.stats().reservation_count == 0


def test_a_lane_that_cannot_be_durable_leaves_its_session_free(tmp_path: Path) -> None:
    """Its step is visible and not on disk, as its failure says; another writer may come at once."""
    with (
        ServerProcess(tmp_path / "data", "--ssd-size-bytes=4194304") as server,
        ctxcache.connect(server.target, access="local") as client,
    ):
        client.models.register(SPEC)
        names = [
            client.sessions.create(OWN, layout=list(ROW_BYTES), is_pinned=True).name for _ in range(LANES)
        ]
        with client.sessions.decode_batch(names, OWN) as batch:
            step(batch, 0)
            done = batch.commit(Durability.DISK).tolist()
            failed = sorted(batch.failures)
            counts = batch.token_counts.tolist()
            for lane in failed:
                assert isinstance(batch.failures[lane], CapacityExceeded)
                client.sessions.open(names[lane], OWN).append({s: rows(1, s, [lane]) for s in ROW_BYTES})

        assert done
        assert failed
        assert sorted([*done, *failed]) == list(range(LANES))
        assert counts == [1] * LANES


def test_batches_of_several_clients_lose_one_session_only(server: ServerProcess) -> None:
    """Three clients decode at once; one session of each is deleted on the way, and made anew by others."""
    failures: list[BaseException] = []

    def decode(number: int) -> None:
        try:
            with ctxcache.connect(server.target, **route_options("local-socket")) as client:
                names = [client.sessions.create(OWN, layout=list(ROW_BYTES)).name for _ in range(LANES)]
                with client.sessions.decode_batch(names, OWN, room_tokens=20) as batch:
                    for at in range(70):
                        if at == 30:
                            _lose_reservation(client, batch, number)
                            client.sessions.open(names[number]).delete()
                        step(batch, at)
                        left = [lane for lane in range(LANES) if lane != number or at < 30]
                        assert batch.commit().tolist() == left
                for lane, name in enumerate(names):
                    if lane != number:
                        with client.sessions.open(name, OWN).read() as found:
                            expected = np.concatenate([rows(i, KV, [lane]) for i in range(70)])
                            np.testing.assert_array_equal(found.array(KV), expected)
                        client.sessions.open(name).delete()
        except BaseException as error:  # noqa: BLE001  # for the thread that waits
            failures.append(error)

    with ctxcache.connect(server.target) as first:
        first.models.register(SPEC)
    threads = [threading.Thread(target=decode, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_steps_that_were_acknowledged_as_durable_survive_a_kill(tmp_path: Path) -> None:
    """A step is durable, the next ones are not; the server is killed behind the answer, and started again."""
    with ServerProcess(tmp_path / "data") as server:
        with ctxcache.connect(server.target, **route_options("local-socket")) as client:
            client.models.register(SPEC)
            names = [
                client.sessions.create(OWN, id=f"s{lane}", layout=list(ROW_BYTES)).name
                for lane in range(LANES)
            ]
            batch = client.sessions.decode_batch(names, OWN)
            for number in range(70):
                step(batch, number)
                is_durable = number % 23 == 22
                batch.commit(Durability.DISK if is_durable else Durability.MEMORY)
            assert not batch.failures
            step(batch, 70)
            assert batch.commit(Durability.DISK).tolist() == list(range(LANES))
            server.kill9()
            # Nobody answers any more, and nobody is waited for.
            with suppress(CacheError):
                step(batch, 71)
                batch.commit(Durability.DISK)
        server.start()
        with ctxcache.connect(server.target, **route_options("local-socket")) as client:
            for lane, name in enumerate(names):
                with client.sessions.open(name, OWN).read() as found:
                    assert found.end == 71
                    for stream in ROW_BYTES:
                        expected = np.concatenate([rows(i, stream, [lane]) for i in range(71)])
                        np.testing.assert_array_equal(found.array(stream), expected)


def test_rows_of_another_type_or_shape_are_looked_at_anew(client: Client) -> None:
    """What was accepted of one step says nothing of another array."""
    names = create(client, 2)
    with client.sessions.decode_batch(names, OWN) as batch:
        step(batch, 0)
        batch.commit()
        with pytest.raises(InvalidArgument, match="C-contiguous"):
            batch.write(KV, np.zeros((ROW_BYTES[KV], 2), np.uint8).T)
        with pytest.raises(InvalidArgument, match="rows of"):
            batch.write(KV, np.zeros((2, ROW_BYTES[KV] - 1), np.uint8))
        with pytest.raises(InvalidArgument, match="float32"):
            batch.write(KV, np.zeros((2, ROW_BYTES[KV] // 4), np.float32))
        for stream in ROW_BYTES:
            typed = rows(1, stream, range(2)).view(np.int32 if stream == TOKENS else np.float16)
            batch.write(stream, typed.reshape(2, -1, typed.shape[-1]) if stream == KV else typed)
        batch.commit()

    check(client, names[1], 1, 2)
