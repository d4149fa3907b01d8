"""One load of blocks through a running store's space of blocks, and through the simulator.

As an engine does that knows no conversations: the keys of a prompt are looked up, what is there from its
beginning is loaded and compared, the rest is put, each block with the one that it continues.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ctxcache
from ctxcache.client import BlockSpace
from ctxcache.client.types import LookupState
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.served import RANKED
from ctxcache.simulate.blocks import BlockReplay
from ctxcache.simulate.load import Load
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.trace import BLOCK_TOKENS
from tests.live.running import BUFFER_SHARE, RunningServer, store_settings

SLOT_BYTES = 64 << 10
BLOCK_BYTES = SLOT_BYTES - (4 << 10)
"""With its header a block fills a slot."""
SPACE = BlockSpace(model_fingerprint=bytes(range(32)), layout_tag="live")


def key_of(block: bytes) -> bytes:
    """The key of a block of the trace."""
    return hashlib.sha256(block).digest()


def data_of(block: bytes) -> np.ndarray:
    """Its bytes, others for each block."""
    return np.frombuffer(key_of(block) * (BLOCK_BYTES // 32), np.uint8)


def live(
    turns: Sequence[TraceTurn], directory: Path, policy: str, dram_blocks: int, ssd_blocks: int
) -> list[int]:
    """By turn, how many of the first blocks a running store had; every one is compared."""
    found_counts: list[int] = []
    settings = store_settings(
        directory, policy, dram_bytes=dram_blocks * SLOT_BYTES, ssd_bytes=ssd_blocks * SLOT_BYTES
    )
    with (
        RunningServer(settings) as server,
        ctxcache.connect(server.target) as client,
    ):
        for turn in turns:
            blocks = turn.blocks or ()
            server.set_time(turn.arrival_s)
            keys = [key_of(block) for block in blocks]
            states = [each.state for each in client.blocks.look_up(SPACE, keys)]
            count = next((n for n, state in enumerate(states) if state is not LookupState.HIT), len(blocks))
            found_counts.append(count)
            if count:
                loaded = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(count)]
                client.blocks.load(SPACE, keys[:count], into=loaded)
                assert all(
                    np.array_equal(one, data_of(block)) for one, block in zip(loaded, blocks, strict=False)
                )
            if count < len(blocks):
                parents = {keys[n]: keys[n - 1] for n in range(max(count, 1), len(blocks))}
                new = {keys[n]: data_of(blocks[n]) for n in range(count, len(blocks))}
                client.blocks.put(SPACE, new, parents=parents)
            server.rest()
    return found_counts


def simulated(turns: Sequence[TraceTurn], policy: str, dram_blocks: int, ssd_blocks: int) -> list[int]:
    """The same in the simulator."""
    dram_bytes = int(dram_blocks * (1 - BUFFER_SHARE)) * SLOT_BYTES
    load = Load(
        token_bytes=SLOT_BYTES // BLOCK_TOKENS,
        dram_bytes=dram_bytes,
        ssd_bytes=ssd_blocks * SLOT_BYTES - dram_bytes,
    )
    made = RANKED[policy](Capacities(load.dram_bytes, load.ssd_bytes))
    replay = BlockReplay(load, made, BLOCK_TOKENS, is_space=True)
    found_counts: list[int] = []
    found = replay.store.found

    def noted(asked: tuple[bytes, ...]) -> int:
        found_counts.append(found(asked))
        return found_counts[-1]

    replay.store.found = noted  # type: ignore[method-assign]
    replay.run(turns)
    return found_counts
