"""The running store does what the simulator says: real calls, bytes and files against the same load simulated."""

from pathlib import Path

import pytest

from tests.live.compare import Setting, Sizes, differences, live_here, simulated
from tests.live.load import Shape, make_turns

SMALL, LARGE = Sizes(64, 256), Sizes(128, 384)
QUICK = Shape(session_count=50)
QUEUED = Shape(session_count=70, most_turns=6, most_segments=3, spacing_s=2.0)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [("lru", SMALL), ("lru", LARGE), ("look-ahead", SMALL), ("value", LARGE), ("value-by-tokens", SMALL)],
)
def test_every_turn_finds_what_it_finds_in_the_simulator(policy: str, sizes: Sizes, tmp_path: Path) -> None:
    """Each hit, in DRAM or on SSD, each miss and each eviction is the simulator's, but for one in a hundred."""
    turns, setting = make_turns(QUICK), Setting(sizes, policy)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert len(differences(running, expected)) <= len(turns) / 100
    assert min(running.counts().values()) > len(turns) / 50
    # Or nothing would tell one policy from another.
    assert differences(running, simulated(turns, Setting(sizes, "fifo")))


def test_turns_beside_one_another_find_the_same_too(tmp_path: Path) -> None:
    """Three turns at a time, each with its lease, and others waiting for them."""
    turns, setting = make_turns(QUEUED), Setting(Sizes(96, 384), "lru", slot_count=3)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert expected.tally.longest_queue > 1
    assert not differences(running, expected)
    assert running.counts() == expected.counts()
