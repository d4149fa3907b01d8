"""Blocks of the typed client, against a real server, by each way that a call may take."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from live_server import WAYS, LiveServer, connected, serving_small

import ctxcache
from ctxcache.client import BlockPart, BlockSpace, Client, Durability
from ctxcache.client.arena import MappedArena
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.types import BlockChange, FoundBlock, LookupState
from ctxcache.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    LeaseNotFound,
    ReservationNotFound,
    TierFailure,
    TooManyRequests,
)
from ctxcache.v1.arena_pb2 import Operation

WHOLE = BlockSpace(model_fingerprint=bytes(range(32)), layout_tag="engine x")
RANKS = replace(WHOLE, parts=(BlockPart(0, 4, 0), BlockPart(0, 4, 1)))
MISS = FoundBlock(LookupState.MISS)


def key_of(number: int) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(b"key %d" % number).digest()


def data_of(number: int, size_bytes: int = 100_000) -> np.ndarray:
    """Bytes that are others for each number."""
    return np.random.default_rng(number).integers(0, 256, size_bytes, np.uint8)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A small server."""
    with serving_small(tmp_path, arena_size_bytes=8 << 20, ssd_size_bytes=32 << 20) as made:
        yield made


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Client]:
    """A client by each way that a call may take."""
    with connected(live, request.param) as made:
        yield made


@pytest.fixture
def local(live: LiveServer) -> Iterator[Client]:
    """A client of the control socket."""
    with ctxcache.connect(live.target, timeout_s=10, access="local", transport="socket") as made:
        yield made


def test_many_blocks_are_put_found_loaded_and_deleted(client: Client) -> None:
    """In one call each; what is there already is not written again."""
    keys = [key_of(i) for i in range(20)]
    data = [data_of(i) for i in range(20)]
    assert client.blocks.look_up(WHOLE, keys[:2]) == [MISS, MISS]
    assert client.blocks.put(WHOLE, dict(zip(keys[:12], data[:12], strict=True))) == 12
    assert client.blocks.put(WHOLE, dict(zip(keys, data, strict=True)), durability=Durability.DISK) == 8
    found = client.blocks.look_up(WHOLE, [*keys, key_of(99)])
    assert found == [FoundBlock(LookupState.HIT, 100_000, is_in_dram=True)] * 20 + [MISS]
    loaded = client.blocks.load(WHOLE, [keys[3], key_of(99), *keys])
    assert loaded[1] is None
    for one, expected in zip([loaded[0], *loaded[2:]], [data[3], *data], strict=True):
        assert one is not None
        [part] = one
        assert part.tobytes() == expected.tobytes()
    assert client.blocks.delete(WHOLE, [keys[0], keys[1], key_of(99)]) == 2
    assert client.blocks.look_up(WHOLE, keys[:3])[:2] == [MISS, MISS]
    assert client.blocks.load(WHOLE, keys[:2]) == [None, None]


def mapped_arena_bytes() -> int:
    """Bytes of arenas that this process has mapped and populated, by all mappings."""
    sizes_kb, is_arena = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_arena = words[-1].endswith(".arena")
        elif is_arena and words[0] == "Rss:":
            sizes_kb.append(int(words[1]))
    return sum(sizes_kb) << 10


def test_the_arena_is_mapped_ahead_of_its_use(client: Client, live: LiveServer) -> None:
    """For reads, then for writes too, and populated when the call ends; elsewhere there is none."""
    live.until(lambda server: server.storage.arena.prefaulted_bytes == 8 << 20)
    before = mapped_arena_bytes()
    for is_written, mapping_count in ((False, 1), (True, 2)):
        is_mapped = client.map_arena(is_written=is_written, timeout_s=60)
        assert mapped_arena_bytes() - before == is_mapped * mapping_count * (8 << 20)


def test_memory_that_was_taken_back_is_not_written_to(client: Client) -> None:
    """A caller that takes its memory back in the middle of a load: what comes later touches nothing."""
    keys = [key_of(i) for i in range(6)]
    data = [data_of(i) for i in range(6)]
    client.blocks.put(WHOLE, dict(zip(keys, data, strict=True)))
    into = [np.zeros(100_000, np.uint8) for _ in keys]
    entered: list[int] = []

    @contextmanager
    def writing() -> Iterator[None]:
        entered.append(len(entered))
        if len(entered) > 3:
            raise TimeoutError("its owner has it back")
        yield

    with pytest.raises(TimeoutError, match="its owner has it back"):
        client.blocks.load(WHOLE, keys, into, writing=writing)
    assert [bool(one.any()) for one in into] == [True] * 3 + [False] * 3
    # Nothing is held, and the way is as good as before.
    assert all(client.blocks.load(WHOLE, keys, into))
    assert [one.tobytes() for one in into] == [one.tobytes() for one in data]
    while client.admin.stats().lease_count:
        threading.Event().wait(0.001)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_named(client: Client, length: int) -> None:
    """Also behind keys that are right, whichever way the look-up goes."""
    with pytest.raises(InvalidArgument, match=r"keys\[1\]: 32 bytes expected") as refused:
        client.blocks.look_up(WHOLE, [key_of(1), bytes(length), key_of(2)])
    assert refused.value.field == "keys[1]"


def test_answers_to_many_keys_are_those_of_each(client: Client) -> None:
    """In any order and of any number: an answer that was read before is the same only if it says the same."""
    sizes = {key_of(i): 1000 + i % 3 for i in range(40)}
    client.blocks.put(WHOLE, {key: data_of(1, size) for key, size in sizes.items()})
    for count in (1, 2, 16, 40, 400):
        for first in (0, 7, 39):
            keys = [key_of((first + i) % 50) for i in range(count)]
            found = client.blocks.look_up(WHOLE, keys)
            assert [one.size_bytes for one in found] == [sizes.get(key, 0) for key in keys]
            found.clear()
            assert len(client.blocks.look_up(WHOLE, keys)) == count


def test_large_blocks_take_several_messages(client: Client) -> None:
    """Any size, also more than a message has."""
    data = data_of(1, (2 << 20) + 4321)
    assert client.blocks.put(WHOLE, {key_of(1): data}) == 1
    [loaded] = client.blocks.load(WHOLE, [key_of(1)])
    assert loaded is not None
    assert loaded[0].tobytes() == data.tobytes()


def test_more_than_the_arena_has_room_for_is_put_and_loaded(client: Client) -> None:
    """In several calls: a stream holds room for all of its bytes, too."""
    blocks = {key_of(number): data_of(number, 1 << 20) for number in range(20)}
    assert client.blocks.put(WHOLE, blocks, durability=Durability.DISK) == len(blocks)
    found = client.blocks.load(WHOLE, list(blocks))
    into = [np.empty(1 << 20, np.uint8) for _ in blocks]
    client.blocks.load(WHOLE, list(blocks), into)
    for data, loaded, place in zip(blocks.values(), found, into, strict=True):
        assert loaded is not None
        assert loaded[0].tobytes() == data.tobytes() == place.tobytes()


def test_strided_arrays_are_gathered_and_scattered(client: Client) -> None:
    """A page of an engine's cache, [layers, blocks, heads, size], of any type and strides."""
    cache = np.random.default_rng(1).standard_normal((4, 10, 8, 32)).astype(np.float16)
    other = np.zeros_like(cache)
    blocks = {key_of(i): cache[:, i] for i in range(10)}
    assert client.blocks.put(WHOLE, blocks) == 10
    loaded = client.blocks.load(WHOLE, list(blocks), into=[other[:, i] for i in range(10)])
    assert None not in loaded
    assert np.array_equal(cache, other)
    backwards = bytearray(cache[:, 0].nbytes)
    client.blocks.load(WHOLE, [key_of(0)], into=[backwards])
    assert bytes(backwards) == cache[:, 0].tobytes()


def test_ranks_put_their_parts(client: Client) -> None:
    """The block is there when all are; no other space has it."""
    parts = [data_of(1, 5000), data_of(2, 3000)]
    sizes, key = [5000, 3000], key_of(1)
    assert client.blocks.put(RANKS, {key: parts[1]}, parts=[1], part_bytes=sizes) == 1
    [found] = client.blocks.look_up(RANKS, [key])
    assert (found.state, found.size_bytes) == (LookupState.PENDING, 8000)
    assert client.blocks.load(RANKS, [key]) == [None]
    assert client.blocks.put(RANKS, {key: parts[1]}, parts=[1], part_bytes=sizes) == 0
    assert client.blocks.put(RANKS, {key: [parts[0]]}, parts=[0], part_bytes=sizes) == 1
    [loaded] = client.blocks.load(RANKS, [key])
    assert loaded is not None
    assert [part.tobytes() for part in loaded] == [part.tobytes() for part in parts]
    assert client.blocks.look_up(WHOLE, [key]) == [MISS]
    assert client.blocks.look_up(replace(RANKS, salt=b"adapter"), [key]) == [MISS]
    assert client.blocks.put(RANKS, {key_of(2): parts}) == 1


BAD_SPACES = {
    "fingerprint": (replace(WHOLE, model_fingerprint=b"short"), "space.model_fingerprint: 32 bytes expected"),
    "tag": (replace(WHOLE, layout_tag="x" * 1025), "space.layout_tag: is longer than 1024 bytes"),
    "salt": (replace(WHOLE, salt=bytes(65)), "space.salt: is longer than 64 bytes"),
    "no parts": (replace(WHOLE, parts=()), "space.parts: 0 are not 1 to 256"),
    "no layers": (replace(WHOLE, parts=(BlockPart(2, 2, 0),)), r"layers \[2, 2\) are no range of layers"),
    "overlap": (
        replace(WHOLE, parts=(BlockPart(0, 2, 0), BlockPart(1, 4, 0))),
        "space.parts: of rank 0 overlap at layer 1",
    ),
    "hole": (
        replace(WHOLE, parts=(BlockPart(0, 2, 0), BlockPart(3, 4, 0))),
        "space.parts: of rank 0 lack layer 2",
    ),
    "short rank": (
        replace(WHOLE, parts=(BlockPart(0, 4, 0), BlockPart(0, 3, 1))),
        "space.parts: of rank 1 lack layer 3",
    ),
    "no rank 1": (
        replace(WHOLE, parts=(BlockPart(0, 4, 0), BlockPart(0, 4, 2))),
        r"space.parts: ranks \[0, 2\] are not all ranks from 0 on",
    ),
}


def test_a_space_that_makes_no_sense_is_refused(client: Client) -> None:
    """By every call, with what is wrong with it."""
    for space, problem in BAD_SPACES.values():
        with pytest.raises(InvalidArgument, match=problem):
            client.blocks.look_up(space, [key_of(1)])
        with pytest.raises(InvalidArgument):
            client.blocks.load(space, [key_of(1)])
        with pytest.raises(InvalidArgument):
            client.blocks.delete(space, [key_of(1)])


def test_bad_puts_change_nothing(client: Client, live: LiveServer) -> None:
    """Each has a precise error."""
    client.blocks.put(WHOLE, {key_of(1): data_of(1)})
    before = live.ask(lambda server: server.cache.ledger.memory.free_bytes)
    fresh = {key_of(2): data_of(2)}
    for blocks, parents, problem in (
        ({b"short": data_of(1)}, {}, "key: 32 bytes expected, 5 given"),
        ({key_of(2): b""}, {}, "part_bytes: 0 B are no part"),
        ({key_of(2): np.zeros((16 << 20) + 1, np.uint8)}, {}, "16777217 B together are more than 16777216"),
        (fresh, {key_of(2): b"short"}, "parent_key: 32 bytes expected, 5 given"),
        (fresh, {key_of(2): key_of(9)}, "parent_key: is not there"),
        (fresh, {key_of(2): key_of(2)}, "parent_key: is not there"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            client.blocks.put(WHOLE, blocks, parents=parents)
    with pytest.raises(InvalidArgument, match="part_bytes"):
        client.blocks.put(RANKS, fresh, parts=[1])
    with pytest.raises(InvalidArgument, match="part_bytes"):
        client.blocks.put(RANKS, fresh, parts=[1], part_bytes=[5, 5])
    with pytest.raises(InvalidArgument, match="parts: names one twice"):
        client.blocks.put(RANKS, {key_of(2): [b"a", b"b"]}, parts=[1, 1], part_bytes=[1, 1])
    with pytest.raises(InvalidArgument, match="ttl"):
        client.blocks.put(WHOLE, fresh, ttl_s=0.5)
    with pytest.raises((CapacityExceeded, TooManyRequests)):
        client.blocks.put(WHOLE, {key_of(3): np.zeros(9 << 20, np.uint8)})
    with pytest.raises(InvalidArgument, match="part_bytes"):
        client.blocks.load(WHOLE, [key_of(1)], into=[np.empty(5, np.uint8)])
    with pytest.raises(InvalidArgument, match="written"):
        client.blocks.load(WHOLE, [key_of(1)], into=[bytes(100_000)])
    assert live.ask(lambda server: server.cache.ledger.memory.free_bytes) == before
    assert client.blocks.look_up(WHOLE, [key_of(2), key_of(3)]) == [MISS, MISS]


def test_durable_blocks_survive_the_server(live: LiveServer, client: Client) -> None:
    """An end in order keeps the others too."""
    client.blocks.put(WHOLE, {key_of(1): data_of(1)}, durability=Durability.DISK)
    client.blocks.put(WHOLE, {key_of(2): data_of(2)}, parents={key_of(2): key_of(1)})
    live.stop()
    live.start()
    found = client.blocks.look_up(WHOLE, [key_of(1), key_of(2)])
    assert found == [FoundBlock(LookupState.HIT, 100_000, is_in_dram=False)] * 2
    for number, loaded in enumerate(client.blocks.load(WHOLE, [key_of(1), key_of(2)]), 1):
        assert loaded is not None
        assert loaded[0].tobytes() == data_of(number).tobytes()
    assert client.blocks.look_up(WHOLE, [key_of(1)])[0].is_in_dram


def test_what_is_there_is_made_durable_when_asked(live: LiveServer, client: Client) -> None:
    """Though nothing of it is written again; parts that others write are theirs."""

    def durable_count() -> int:
        return live.ask(lambda server: sum(block.durable_end for block in server.cache.ledger.blocks()))

    client.blocks.put(WHOLE, {key_of(1): data_of(1)})
    assert durable_count() == 0
    assert client.blocks.put(WHOLE, {key_of(1): data_of(1)}, durability=Durability.DISK) == 0
    assert durable_count() == 1


def test_a_lease_is_used_by_another_client_of_the_tenant(live: LiveServer, local: Client) -> None:
    """A scheduler leases and goes, a worker loads; at its end the lease is over for both."""
    local.blocks.put(WHOLE, {key_of(1): data_of(1)})
    with ctxcache.connect(live.target, timeout_s=10, access="local") as scheduler:
        held = scheduler.blocks.lease(WHOLE, [key_of(1), key_of(2)], ttl_s=100, outlives_client=True)
        brief = scheduler.blocks.lease(WHOLE, [key_of(1)])
    live.until(lambda server: server.cache.leases.lease_count == 1)
    with pytest.raises(LeaseNotFound):
        local.blocks.leased(brief.token)
    worker = local.blocks.leased(held.token)
    copied = worker.copy(0)
    assert copied is not None
    assert copied[0].tobytes() == data_of(1).tobytes()
    assert worker.parts(1) is None
    worker.check()
    worker.release()
    live.until(lambda server: server.cache.leases.lease_count == 0)
    with pytest.raises(LeaseNotFound):
        local.blocks.leased(held.token)
    with pytest.raises(InvalidArgument, match="token: 16 bytes expected"):
        local.blocks.leased(b"short")
    with pytest.raises(InvalidArgument, match="token: is empty"):
        local.blocks.leased(b"")
    for ttl_s in (301, float("nan"), float("inf"), 1e30):
        with pytest.raises(InvalidArgument, match="ttl: "):
            local.blocks.lease(WHOLE, [key_of(1)], ttl_s=ttl_s)


def test_a_look_up_holds_what_it_finds_in_dram(live: LiveServer, client: Client) -> None:
    """More goes through meanwhile than memory holds. A store elsewhere holds nothing for its caller."""
    client.blocks.put(WHOLE, {key_of(number): data_of(number) for number in (1, 2)})
    found, holds = client.blocks.look_up_and_hold(WHOLE, [key_of(1), key_of(99)], ttl_s=100)
    assert found == [FoundBlock(LookupState.HIT, 100_000, is_in_dram=True), MISS]
    for number in range(100, 300):
        client.blocks.put(WHOLE, {key_of(number): data_of(number)})
    is_held = live.ask(lambda server: server.cache.leases.lease_count) == 1
    assert is_held == bool(holds)
    kept, *others = client.blocks.look_up(WHOLE, [key_of(1), *map(key_of, range(100, 300))])
    # Which of the others leave is the policy's choice.
    assert not all(one.is_in_dram for one in others)
    assert kept.is_in_dram or not holds
    for hold in holds:
        hold.check()
        hold.release_soon()
        with pytest.raises(LeaseNotFound):
            hold.check_known()
    live.until(lambda server: server.cache.leases.lease_count == 0)


def test_a_look_up_that_holds_is_waited_for_as_long_as_its_caller_likes(
    live: LiveServer, client: Client
) -> None:
    """Meanwhile it goes on; given up, it holds nothing."""
    client.blocks.put(WHOLE, {key_of(1): data_of(1)})
    expected, holds = client.blocks.look_up_and_hold(WHOLE, [key_of(1), key_of(2)])
    looking = client.blocks.begin_to_look_up_and_hold(WHOLE, [key_of(1), key_of(2)])
    if not holds:
        assert looking is None
        return
    assert looking is not None
    found, more = looking.result()
    assert found == expected
    for hold in (*holds, *more):
        hold.release_soon()
    thawed = threading.Event()
    live._loop.call_soon_threadsafe(thawed.wait, 10)
    kept, dropped = (client.blocks.begin_to_look_up_and_hold(WHOLE, [key_of(1)]) for _ in range(2))
    assert kept is not None
    assert dropped is not None
    assert not kept.is_over(0)
    dropped.give_up()
    thawed.set()
    found, [hold] = kept.result()
    assert found == expected[:1]
    live.until(lambda server: server.cache.leases.lease_count == 1)
    hold.release_soon()
    live.until(lambda server: server.cache.leases.lease_count == 0)
    refused = client.blocks.begin_to_look_up_and_hold(WHOLE, [b"short"])
    assert refused is not None
    with pytest.raises(InvalidArgument, match=r"keys\[0\]"):
        refused.result()


def test_what_look_ups_hold_leaves_room_for_loads(live: LiveServer, local: Client) -> None:
    """However often they look; and it ends with its client."""
    keys = [key_of(number) for number in range(5)]
    local.blocks.put(WHOLE, {key: data_of(7, 1 << 20) for key in keys})
    holds = [local.blocks.look_up_and_hold(WHOLE, [key])[1] for key in keys * 3]
    assert holds[0]
    assert not holds[4]
    limit = live.ask(lambda server: server.cache.leases.pins.client_limit_bytes)
    assert 0 < live.ask(lambda server: server.cache.leases.pins.used_bytes) <= limit // 2
    assert None not in local.blocks.load(WHOLE, keys)
    local.close()
    live.until(lambda server: server.cache.leases.lease_count == 0)


@pytest.fixture
def on_ssd(live: LiveServer, client: Client) -> dict[bytes, np.ndarray]:
    """Blocks of several sizes that lie on SSD alone."""
    sizes = enumerate((1, 4096, 4097, 100_000, 700_001, *[70_000] * 8))
    blocks = {key_of(number): data_of(number, size_bytes) for number, size_bytes in sizes}
    client.blocks.put(WHOLE, blocks, durability=Durability.DISK)
    live.stop()
    live.start()
    return blocks


def test_blocks_are_read_past_dram(on_ssd: dict[bytes, np.ndarray], live: LiveServer, client: Client) -> None:
    """From the server's files, the first time, where they can be opened, else as any: the same bytes."""
    into = [np.zeros((block.size, 2), np.uint8)[:, 0] for block in on_ssd.values()]
    keys = [key_of(99), *on_ssd]
    loaded = client.blocks.load(WHOLE, keys, [np.empty(1, np.uint8), *into], past_dram=True)
    assert loaded[0] is None
    assert [one is not None for one in loaded[1:]] == [True] * len(on_ssd)
    is_local = client.map_arena()
    assert {one.is_in_dram for one in client.blocks.look_up(WHOLE, list(on_ssd))} == {not is_local}
    made = client.blocks.load(WHOLE, list(on_ssd), past_dram=True)
    # A second read says that the block is needed often.
    assert all(one.is_in_dram for one in client.blocks.look_up(WHOLE, list(on_ssd)))
    for place, fresh, block in zip(into, made, on_ssd.values(), strict=True):
        assert place.tobytes() == block.tobytes()
        assert fresh is not None
        assert fresh[0].tobytes() == block.tobytes()
    live.until(lambda server: server.cache.leases.lease_count == 0)


def test_parts_of_ranks_are_read_past_dram(live: LiveServer, local: Client) -> None:
    """Each to its own place; what is in DRAM is taken from there."""
    parts = [data_of(1, 5000), data_of(2, 9000)]
    for rank, data in enumerate(parts):
        local.blocks.put(
            RANKS, {key_of(1): data}, parts=[rank], part_bytes=[5000, 9000], durability=Durability.DISK
        )
    live.stop()
    live.start()
    local.blocks.put(RANKS, {key_of(2): list(reversed(parts))})
    loaded = local.blocks.load(RANKS, [key_of(1), key_of(2)], past_dram=True)
    assert [[part.tobytes() for part in one or []] for one in loaded] == [
        [part.tobytes() for part in parts],
        [part.tobytes() for part in reversed(parts)],
    ]


def test_what_cannot_be_read_past_dram_comes_through_it(
    on_ssd: dict[bytes, np.ndarray], live: LiveServer, local: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may not open the server's files, or whose reads fail."""
    expected = [block.tobytes() for block in on_ssd.values()]
    with monkeypatch.context() as patched:
        patched.setattr(SsdReader, "read", _failing)
        loaded = local.blocks.load(WHOLE, list(on_ssd), past_dram=True)
        assert [one and one[0].tobytes() for one in loaded] == expected
    live.stop()
    live.start()
    monkeypatch.setattr(MappedArena, "ssd_files", lambda _: SsdReader([]))
    loaded = local.blocks.load(WHOLE, list(on_ssd), past_dram=True)
    assert [one and one[0].tobytes() for one in loaded] == expected


def _failing(_: SsdReader, path_index: int, offset_bytes: int, into: memoryview) -> None:
    raise TierFailure(path=str(path_index), problem=f"read at {offset_bytes}, {into.nbytes} B")


def test_damage_on_ssd_is_a_miss_also_past_dram(
    on_ssd: dict[bytes, np.ndarray], live: LiveServer, local: Client
) -> None:
    """Neither the rows nor the header: nothing of it is written to the caller's memory."""
    files = local.ssd_files()
    assert files is not None
    raw = Path(files.paths[0]).read_bytes()
    rows = raw.index(on_ssd[key_of(3)].tobytes())
    header = raw.rindex(b"CTXCSEG\0", 0, raw.index(on_ssd[key_of(4)].tobytes()))
    with Path(files.paths[0]).open("r+b") as file:
        for at in (rows + 77, header + 20):
            file.seek(at)
            file.write(bytes([raw[at] ^ 1]))
    keys = [key_of(number) for number in (3, 4, 5)]
    into = [np.zeros(on_ssd[key].size, np.uint8) for key in keys]
    loaded = local.blocks.load(WHOLE, keys, into, past_dram=True)
    assert [one is None for one in loaded] == [True, True, False]
    assert not into[0].any()
    assert not into[1].any()
    assert into[2].tobytes() == on_ssd[keys[2]].tobytes()


def test_a_device_that_hangs_is_not_waited_for(
    on_ssd: dict[bytes, np.ndarray], live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that ends after its load writes nothing; nothing stays held."""
    answers, ended = threading.Event(), threading.Semaphore(0)
    read = SsdReader.read

    def late(self: SsdReader, path_index: int, offset_bytes: int, into: memoryview) -> None:
        answers.wait(20)
        read(self, path_index, offset_bytes, into)
        ended.release()

    monkeypatch.setattr(SsdReader, "read", late)
    key = key_of(3)
    into = np.zeros(on_ssd[key].size, np.uint8)
    with ctxcache.connect(live.target, timeout_s=0.2, access="local") as client:
        with pytest.raises(DeadlineExceeded):
            client.blocks.load(WHOLE, [key], [into], past_dram=True)
        live.until(lambda server: server.cache.leases.lease_count == 0)
        answers.set()
        assert ended.acquire(timeout=10)
        # Behind it in the thread's line: by then it has ended.
        files = client.ssd_files()
        assert files is not None
        assert files.spread_within([lambda: None] * 8, 10)
        assert not into.any()


def test_a_caller_that_takes_its_memory_back_ends_a_read_past_dram(
    on_ssd: dict[bytes, np.ndarray], live: LiveServer, local: Client
) -> None:
    """No byte is written afterwards, and nothing stays held; another size is refused before any."""

    def given_up() -> AbstractContextManager[None]:
        raise TooManyRequests(what="time")

    keys = list(on_ssd)
    into = [np.zeros(on_ssd[key].size, np.uint8) for key in keys[:-1]]
    with pytest.raises(TooManyRequests):
        local.blocks.load(WHOLE, keys[:3], into[:3], writing=given_up, past_dram=True)
    with pytest.raises(InvalidArgument, match="part_bytes"):
        local.blocks.load(WHOLE, keys[3:], [*into[3:], np.zeros(5, np.uint8)], past_dram=True)
    assert not any(place.any() for place in into)
    live.until(lambda server: server.cache.leases.lease_count == 0)


def test_nothing_is_brought_to_be_held(live: LiveServer, local: Client) -> None:
    """A block on SSD alone is found, and stays there."""
    local.blocks.put(WHOLE, {key_of(1): data_of(1)}, durability=Durability.DISK)
    live.stop()
    live.start()
    found, holds = local.blocks.look_up_and_hold(WHOLE, [key_of(1)])
    assert found == [FoundBlock(LookupState.HIT, 100_000, is_in_dram=False)]
    assert holds == []


def test_what_cannot_be_held_is_refused_by_its_field(live: LiveServer, local: Client) -> None:
    """Also in a drain, in which looks go on."""
    many = [key_of(number) for number in range(300)]
    for ttl_s in (0, 301, float("nan")):
        with pytest.raises(InvalidArgument, match=r"(hold|ttl): "):
            local.blocks.look_up_and_hold(WHOLE, [key_of(1)], ttl_s=ttl_s)
    with pytest.raises(InvalidArgument, match=r"keys\[0\]"):
        local.blocks.look_up_and_hold(WHOLE, [b"short"])
    local.blocks.put(WHOLE, {key_of(1): data_of(1), key_of(200): data_of(1)})
    found, [hold] = local.blocks.look_up_and_hold(WHOLE, many)
    assert [one.state for one in found].count(LookupState.HIT) == 2
    live.ask(lambda server: server.admissions.local_clients.drain())
    for keys in (many[:1], many):
        with pytest.raises(Draining):
            local.blocks.look_up_and_hold(WHOLE, keys)
        assert len(local.blocks.look_up(WHOLE, keys)) == len(keys)
    hold.release_soon()


def test_what_changed_in_memory_is_mended_or_a_miss(live: LiveServer, local: Client) -> None:
    """Never other bytes than were put."""
    local.blocks.put(WHOLE, {key_of(1): data_of(1)}, durability=Durability.DISK)
    local.blocks.put(WHOLE, {key_of(2): data_of(2)})
    attachment = local.routes.attach()
    assert attachment is not None
    arena = attachment.arena.writable()
    assert arena is not None
    with local.blocks.lease(WHOLE, [key_of(1), key_of(2)]) as held:
        for number in range(2):
            [part] = held.parts(number) or []
            begin = part.ctypes.data - attachment.arena.readable.ctypes.data
            arena[begin + 77] ^= 1
    mended, lost = local.blocks.load(WHOLE, [key_of(1), key_of(2)])
    assert mended is not None
    assert mended[0].tobytes() == data_of(1).tobytes()
    assert lost is None
    assert local.blocks.put(WHOLE, {key_of(2): data_of(2)}) == 1


def test_a_client_that_goes_gives_its_puts_up(live: LiveServer, local: Client) -> None:
    """The next one puts the same key."""
    with ctxcache.connect(live.target, timeout_s=10, access="local") as other:
        other.blocks.put(RANKS, {key_of(1): b"abc"}, parts=[0], part_bytes=[3, 3])
        attachment = other.routes.attach()
        assert attachment is not None
        operation = Operation()
        operation.reserve_blocks.space.model_fingerprint = WHOLE.model_fingerprint
        operation.reserve_blocks.space.parts.add(layer_end=1)
        operation.reserve_blocks.blocks.add(key=key_of(2), part_bytes=[5])
        [room] = attachment.stream.carry_out(operation).reserved_blocks.rooms
        commit = Operation()
        commit.commit_blocks.reservation_ids.append(room.reservation_id)
        commit.commit_blocks.parts.append(0)
        commit.commit_blocks.checksums.append(1)
        own = local.routes.attach()
        assert own is not None
        with pytest.raises(ReservationNotFound):
            own.stream.carry_out(commit)
    live.until(lambda server: len(server.cache.ledger.blocks()) == 1)
    assert local.blocks.look_up(replace(WHOLE, layout_tag=""), [key_of(2)]) == [MISS]
    # The first rank's committed part is whole with the other rank's part.
    assert local.blocks.put(RANKS, {key_of(1): b"def"}, parts=[1], part_bytes=[3, 3]) == 1
    [loaded] = local.blocks.load(RANKS, [key_of(1)])
    assert loaded is not None
    assert b"".join(part.tobytes() for part in loaded) == b"abcdef"


def test_a_subscriber_hears_of_every_block_and_of_what_becomes_of_it(client: Client) -> None:
    """First the blocks that are there, then each that comes or goes; closing ends it."""
    keys = [key_of(i) for i in range(400)]
    client.blocks.put(WHOLE, {key: data_of(i, 1000) for i, key in enumerate(keys)})
    known: dict[bytes, BlockChange] = {}
    with client.blocks.subscribe(WHOLE) as subscription:
        messages = iter(subscription)
        for news in messages:
            known |= {change.key: change for change in news.changes}
            if news.is_current:
                break
        assert set(known) == set(keys)
        assert known[keys[0]] == BlockChange(keys[0], LookupState.HIT, 1000, is_in_dram=True, parent_key=b"")
        client.blocks.put(WHOLE, {key_of(999): data_of(9)}, parents={key_of(999): keys[3]})
        client.blocks.delete(WHOLE, keys[:2])
        while known[keys[1]].state is LookupState.HIT or known[keys[0]].state is LookupState.HIT:
            known |= {change.key: change for change in next(messages).changes}
        assert known[key_of(999)].parent_key == keys[3]
        assert known[keys[1]] == BlockChange(keys[1], LookupState.MISS, 0, is_in_dram=False, parent_key=b"")
        subscription.close()
        assert list(messages) == []


def test_a_subscription_closed_by_another_thread_ends(client: Client) -> None:
    """The thread that waits for news goes on."""
    with client.blocks.subscribe(WHOLE) as subscription:
        messages = iter(subscription)
        assert next(messages).is_current
        closing = threading.Timer(0.2, subscription.close)
        closing.start()
        assert list(messages) == []
        closing.join()


def test_a_subscriber_is_told_why_it_ends(client: Client, live: LiveServer) -> None:
    """A bad space at the first look; a server that ends, by Draining."""
    with (
        pytest.raises(InvalidArgument, match="model_fingerprint"),
        client.blocks.subscribe(BlockSpace(model_fingerprint=b"x")) as bad,
    ):
        list(bad)
    with client.blocks.subscribe(WHOLE) as subscription:
        messages = iter(subscription)
        assert next(messages).is_current
        live.stop()
        with pytest.raises(Draining):
            list(messages)
