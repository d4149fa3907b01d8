"""A space of blocks finds what the simulator says, through a real store and its calls."""

from pathlib import Path

import pytest

from ctxcache.simulate.rows import TraceTurn
from lab.placement.regimes import REGIMES
from tests.live.blocks import live, simulated

DRAM_BLOCKS, SSD_BLOCKS, REQUESTS = 64, 360, 150


@pytest.mark.parametrize(
    ("policy", "regime"),
    [
        ("lru", "shared"),
        ("value", "rag"),
        pytest.param("value", "fresh", marks=pytest.mark.long),
        pytest.param("value", "shared", marks=pytest.mark.long),
    ],
)
def test_blocks_that_a_store_finds_are_those_of_the_simulator(
    policy: str, regime: str, tmp_path: Path
) -> None:
    """Within one point of all blocks that are asked for; under LRU in every request."""
    turns = list(REGIMES[regime](5, REQUESTS))
    running = live(turns, tmp_path / "data", policy, DRAM_BLOCKS, SSD_BLOCKS)
    expected = simulated(turns, policy, DRAM_BLOCKS, SSD_BLOCKS)
    asked_count = sum(len(turn.blocks or ()) for turn in turns)

    assert sum(running) > asked_count / 10
    assert sum(running) < sum(found_without_bound(turns)) - asked_count / 20, "something was given up"
    assert abs(sum(running) - sum(expected)) <= asked_count / 100
    if policy == "lru":
        assert running == expected


def found_without_bound(turns: list[TraceTurn]) -> list[int]:
    """By turn, how many of its first blocks came before."""
    seen: set[bytes] = set()
    found = []
    for turn in turns:
        blocks = turn.blocks or ()
        found.append(next((n for n, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(blocks)
    return found
