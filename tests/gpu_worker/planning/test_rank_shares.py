"""Shares and profiles of several ranks: what each reads and keeps, and what gathering costs in plans."""

import pytest
from planning_requests import request

from ctxcache.errors import InvalidArgument
from gpu_worker.parallel.share import ModelShare
from gpu_worker.planning.adaptive import stage_seconds
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.holding import EngineAbilities
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.planner import Plan, plan
from gpu_worker.planning.profile import Link, Profile


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (5, 9), (3, 130)])
def test_ranks_read_every_token_once(ranks: int, begin: int, end: int) -> None:
    """Parts are disjoint, in order, and all."""
    parts = [ModelShare(0, 1, rank, ranks).tokens(begin, end) for rank in range(ranks)]

    assert [token for part in parts for token in range(*part)] == list(range(begin, end))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 4), (8, 8), (2, 4), (1, 3)])
def test_every_head_is_kept_and_few_heads_are_kept_by_several(heads: int, ranks: int) -> None:
    """As many on each rank; a head more than once only where there are fewer than ranks."""
    kept = [range(heads)[ModelShare(0, 1, rank, ranks).heads(heads)] for rank in range(ranks)]

    times = max(ranks // heads, 1)
    assert [head for some in kept for head in some] == [head for head in range(heads) for _ in range(times)]


def test_heads_that_do_not_come_out_even_are_refused() -> None:
    """Six heads on four ranks."""
    with pytest.raises(InvalidArgument):
        ModelShare(0, 1, 0, 4).heads(6)


def test_a_plan_counts_gathering_as_a_stage_of_its_own() -> None:
    """Four ranks copy at four times the rate; each receives three quarters of all bytes from the others."""
    one, slow = known_profile("a100-40gb"), Link(1e9)
    alone, at_once, gathered = (_planned(each) for each in (one, one.shared_by(4), one.shared_by(4, slow)))

    assert at_once.restored_s < alone.restored_s < gathered.restored_s
    assert stage_seconds(at_once)[Stage.GATHER] == 0
    size_bytes = sum(piece.size_bytes for pieces in gathered.layers for piece in pieces)
    assert stage_seconds(gathered)[Stage.GATHER] == pytest.approx(slow.seconds(size_bytes * 3 / 4))


def _planned(profile: Profile) -> Plan:
    return plan(request("llama-2-7b", 2048, profile=profile, engine=EngineAbilities(can_recompute=False)))
