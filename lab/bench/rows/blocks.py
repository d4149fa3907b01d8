"""Blocks as engines put them: sixteen at a time, beside a file per block and beside Redis.

The blocks of a round are new ones; those of the round before are removed outside what is timed.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import ctxcache
from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import FoundBlock, LookupState
from lab.bench.contexts import POPULATED_S, Bytes, check, content, seconds
from lab.bench.peers import RedisClient, redis_client
from lab.bench.row import QUICK, Goal, Place, Row, Sides, WrongBytes, at_most
from lab.bench.rows.calls import timed_calls
from lab.bench.server import serving

BLOCK_COUNT = 16
SPACE = BlockSpace(model_fingerprint=bytes(32), layout_tag="bench")
ROOM_BLOCKS = 8 * BLOCK_COUNT
"""Blocks that there is room for, in both tiers: those of some rounds."""
LEAST_ROOM_BYTES = 64 << 20
KEPT = 1 << 32
"""Stands for a round: of the blocks that stay."""


class _Blocks:
    """Sixteen blocks, under other keys in each round."""

    def __init__(self, place: Place, mib: int) -> None:
        self.size_bytes = (mib << 16) if place.scale is QUICK else (mib << 20)
        self.data: list[Bytes] = [content(i, self.size_bytes) for i in range(BLOCK_COUNT)]
        self._kept = self._keys(KEPT)
        self.found = FoundBlock(LookupState.HIT, self.size_bytes, is_in_dram=True)
        """The state of each block, as a look-up says it."""
        self.into: list[Bytes] = [np.ones(self.size_bytes, np.uint8) for _ in range(BLOCK_COUNT)]

    def keys(self, number: int) -> list[bytes]:
        """Those of a round; no work for those that stay, so that calls of microseconds can be timed."""
        return self._kept if number == KEPT else self._keys(number)

    def _keys(self, number: int) -> list[bytes]:
        return [hashlib.sha256(b"%d of %d" % (i, number)).digest() for i in range(BLOCK_COUNT)]

    def check_loaded(self, what: str) -> None:
        """Fail unless what was loaded is what was put; forget it."""
        for found, expected in zip(self.into, self.data, strict=True):
            check(found, expected, what)
            found[:] = 1

    @property
    def notes(self) -> dict[str, object]:
        """Facts to print."""
        return {"blocks a round": BLOCK_COUNT, "bytes of a block": self.size_bytes}


@contextmanager
def _client(place: Place, blocks: _Blocks) -> Iterator[Client]:
    room_bytes = max(ROOM_BLOCKS * (blocks.size_bytes + 4096), LEAST_ROOM_BYTES)
    directory = place.directory / "blocks"
    with (
        serving(directory, arena_bytes=room_bytes, ssd_bytes=room_bytes) as server,
        ctxcache.connect(server.target("unix"), access="local", transport="socket") as client,
    ):
        _put(client, blocks, KEPT)
        _load(client, blocks, KEPT)
        attachment = client.routes.attach()
        if attachment is not None:
            # In the background, so that on a busy machine the first rounds would be all page faults. An
            # engine maps the arena once.
            attachment.arena.wait_populated(POPULATED_S)
        yield client


def _put(client: Client, blocks: _Blocks, number: int) -> None:
    count = client.blocks.put(SPACE, dict(zip(blocks.keys(number), blocks.data, strict=True)))
    if count != BLOCK_COUNT:
        raise WrongBytes(f"{count} of {BLOCK_COUNT} blocks were put")


def _load(client: Client, blocks: _Blocks, number: int) -> None:
    if None in client.blocks.load(SPACE, blocks.keys(number), into=blocks.into):
        raise WrongBytes("blocks are missing")


def _look_up(client: Client, blocks: _Blocks, number: int) -> None:
    found = client.blocks.look_up(SPACE, blocks.keys(number))
    if found != [blocks.found] * BLOCK_COUNT:
        raise WrongBytes("blocks are not found")


def _get_all(redis: RedisClient, blocks: _Blocks, number: int) -> None:
    for target, value in zip(blocks.into, redis.mget(blocks.keys(number)), strict=True):
        if value is None:
            raise WrongBytes("blocks are missing in Redis")
        target[:] = np.frombuffer(value, np.uint8)


def _exist_all(redis: RedisClient, blocks: _Blocks, number: int) -> None:
    if redis.exists(*blocks.keys(number)) != BLOCK_COUNT:
        raise WrongBytes("blocks are not found in Redis")


def _write_all(directory: Path, blocks: _Blocks, number: int) -> None:
    for key, data in zip(blocks.keys(number), blocks.data, strict=True):
        (directory / key.hex()).write_bytes(data.data)


def _putting(mib: int) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: sixteen blocks put, beside sixteen files written, nothing synced by either."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        blocks, files = _Blocks(place, mib), place.directory / "files"
        files.mkdir()
        with _client(place, blocks) as client:

            def ours(number: int) -> float:
                taken = seconds(partial(_put, client, blocks, number))
                _load(client, blocks, number)
                blocks.check_loaded("put")
                client.blocks.delete(SPACE, blocks.keys(number))
                return taken

            def beside(number: int) -> float:
                taken = seconds(partial(_write_all, files, blocks, number))
                for path in list(files.iterdir()):
                    path.unlink()
                return taken

            yield Sides(ours, beside, blocks.notes)

    return setup


def _beside_redis(
    mib: int,
    ours_of: Callable[[Client, _Blocks, int], None],
    redis_of: Callable[[RedisClient, _Blocks, int], None],
    *,
    is_loading: bool,
) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: what is asked of sixteen blocks that are there, of both."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        blocks = _Blocks(place, mib)
        with redis_client(place) as redis, _client(place, blocks) as client:
            for key, data in zip(blocks.keys(KEPT), blocks.data, strict=True):
                redis.set(key, data.data)

            def ours(_: int) -> float:
                return _timed(lambda: ours_of(client, blocks, KEPT), "load")

            def beside(_: int) -> float:
                return _timed(lambda: redis_of(redis, blocks, KEPT), "Redis")

            def _timed(call: Callable[[], None], what: str) -> float:
                if not is_loading:
                    return timed_calls(call, place.scale.call_count, 50)
                taken = seconds(call)
                blocks.check_loaded(what)
                return taken

            notes = {**blocks.notes, "transport of Redis": place.transport}
            if not is_loading:
                notes["calls a round, of which the median counts"] = place.scale.call_count
            yield Sides(ours, beside, notes)

    return setup


def _rows(mib: int) -> Iterator[Row]:
    many = f"{BLOCK_COUNT} x {mib} MiB"
    goals: dict[str, Goal] = {"put": at_most(1.2), "look-up": at_most(1), "load": at_most(0.5)}
    yield Row(
        f"blocks-put-{mib}",
        f"blocks put, {many}",
        "a file per block",
        goals["put"],
        _putting(mib),
        is_moving=False,
    )
    yield Row(
        f"blocks-look-up-redis-{mib}",
        f"blocks looked up, {many}",
        "Redis EXISTS",
        goals["look-up"],
        _beside_redis(mib, _look_up, _exist_all, is_loading=False),
        is_moving=False,
    )
    yield Row(
        f"blocks-load-redis-{mib}",
        f"blocks loaded, {many}",
        "Redis MGET",
        goals["load"],
        _beside_redis(mib, _load, _get_all, is_loading=True),
        is_moving=False,
    )


ROWS = (*_rows(1), *_rows(4))
