"""Tokens that stay after a truncation stand at 0..n-1, where the model allows that."""

import pytest
from tiny_models import build

from ctxcache.errors import InvalidArgument, PositionsNotRelocatable
from gpu_worker.model.proof import adapt
from lab.quality.truncation import positions_after_truncation

LIVE = [(0, 4), (40, 82)]


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_learned_positions_refuse_to_move(name: str) -> None:
    """Where positions are learned, dropping tokens before kept ones is refused with the reason."""
    adapter = adapt(build(name))

    with pytest.raises(PositionsNotRelocatable, match="only the newest tokens can be dropped"):
        positions_after_truncation(adapter, LIVE)

    assert len(positions_after_truncation(adapter, [(0, 40)])) == 40


@pytest.mark.parametrize("live", [[(4, 4)], [(0, 8), (6, 9)], [(5, 3)]])
def test_ranges_must_ascend(live: list[tuple[int, int]]) -> None:
    """Empty, overlapping and reversed ranges are refused."""
    with pytest.raises(InvalidArgument, match="live_ranges"):
        positions_after_truncation(adapt(build("llama")), live)


def test_kept_tokens_stand_one_after_the_other() -> None:
    """Rotary models take any kept ranges; tokens are counted from 0."""
    assert positions_after_truncation(adapt(build("llama")), LIVE).tolist() == list(range(46))
