"""Sessions that begin alike find in a store what the simulator says, through its real calls."""

from pathlib import Path

import pytest

from ctxcache.simulate.load import TraceHint
from lab.placement.regimes import REGIMES
from tests.live.prefixes import Setting, live, scaled, simulated

REQUESTS = 800
ENDS = frozenset((TraceHint.ENDS,))


@pytest.mark.parametrize(
    ("regime", "hints"), [("rag", frozenset()), ("forks", frozenset()), ("shared", ENDS)]
)
def test_prompts_find_as_much_of_others_as_in_the_simulator(
    regime: str, hints: frozenset[TraceHint], tmp_path: Path
) -> None:
    """Within one point of all blocks that are asked for, of which many were given up meanwhile."""
    turns = scaled(REGIMES[regime](5, REQUESTS))
    setting = Setting("value", hints=hints)
    running, expected = live(turns, setting, tmp_path / "data"), simulated(turns, setting)
    asked_count = sum(len(turn.blocks or ()) for turn in turns)

    assert sum(running) > asked_count / 10
    assert abs(sum(running) - sum(expected)) <= asked_count / 100
