"""The faults of the duel reach what they are meant for, and the store gives out no byte of them."""

import random
from pathlib import Path

import pytest
from server_process import ServerProcess

import ctxcache
from ctxcache.client import BlockSpace
from ctxcache.client.types import Durability
from lab.engines.duel import FAULTS, Extent, FileTier, StoreTier, nothing

BLOCK_BYTES = 48 << 10
SPACE = BlockSpace(bytes(32), layout_tag="duel")
DAMAGES = [name for name, (_, damage) in FAULTS.items() if damage is not nothing]


@pytest.fixture
def blocks() -> dict[bytes, bytes]:
    """Blocks of random bytes, by their keys."""
    draw = random.Random(3)
    return {draw.randbytes(32): draw.randbytes(BLOCK_BYTES) for _ in range(12)}


def contents(extents: list[Extent]) -> list[bytes]:
    """The bytes of the extents; of a file that was cut, what is left."""
    found = []
    for extent in extents:
        with extent.path.open("rb") as file:
            file.seek(extent.begin)
            found.append(file.read(extent.end - extent.begin))
    return found


@pytest.mark.parametrize("fault", DAMAGES)
def test_the_store_gives_no_damaged_byte(fault: str, blocks: dict[bytes, bytes], tmp_path: Path) -> None:
    """Each block is what was put, or is not there, after its bytes on SSD were damaged behind its back."""
    state = tmp_path / "state"
    with ServerProcess(state) as server:
        with ctxcache.connect(server.target) as cache:
            cache.blocks.put(SPACE, blocks, durability=Durability.DISK)
        server.terminate()
    extents = StoreTier().extents(tmp_path)
    before = contents(extents)
    FAULTS[fault][1](extents, random.Random(5))
    assert len(extents) == len(blocks)
    assert sum(one != other for one, other in zip(before, contents(extents), strict=True)) >= len(blocks) // 2
    with ServerProcess(state) as server, ctxcache.connect(server.target) as cache:
        for (key, content), found in zip(blocks.items(), cache.blocks.load(SPACE, list(blocks)), strict=True):
            assert found is None or found[0].tobytes() == content, key.hex()


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_file_a_block_is_damaged_in_the_same_way(fault: str, tmp_path: Path) -> None:
    """Every file is another than it was."""
    draw = random.Random(4)
    for i in range(6):
        path = tmp_path / "state" / "model" / f"{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(BLOCK_BYTES))
    extents = FileTier().extents(tmp_path)
    before = contents(extents)
    FAULTS[fault][1](extents, random.Random(5))
    assert len(extents) == 6
    assert all(one != other for one, other in zip(before, contents(extents), strict=True))
