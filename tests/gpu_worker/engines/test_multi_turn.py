"""A conversation whose cache is dropped after every turn is the conversation that never was."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import all_streams, relative_errors, restored_cache, saved_session
from tiny_models import CONFIGS, build
from torch import Tensor
from transformers import DynamicCache

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, continue_greedy
from gpu_worker.model.proof import adapt
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method, RestorePlan

TURNS = [list(range(40)), [9, 41, 3], [7, 7, 60, 12, 33]]
REPLY_TOKENS = 6


def _talk(adapter: Adapter, plan: RestorePlan | None) -> list[int]:
    """Every reply of the conversation; with a plan, the cache is dropped and restored before each turn."""
    rows: dict[Stream, Tensor] = defaultdict(lambda: torch.empty(0))
    cached_ids: list[int] = []
    said: list[int] = []
    cache = DynamicCache(config=adapter.model.config)

    def sink(layer: int, kind: StateKind, new: Tensor) -> None:
        stream = Stream(layer, kind)
        rows[stream] = torch.cat((rows[stream], new)) if stream in rows else new

    for turn in TURNS:
        new_ids = [*said[-1:], *turn]
        if plan is not None and cached_ids:
            restored = restored_cache(
                adapter,
                plan,
                rows.__getitem__,
                positions=torch.arange(len(cached_ids)),
                token_ids=torch.tensor(cached_ids),
            )
            assert isinstance(restored, DynamicCache)
            cache = restored
        with Capture(adapter, all_streams(adapter), sink):
            reply = continue_greedy(adapter.model, cache, new_ids, max_new_tokens=REPLY_TOKENS).token_ids
        said += reply
        cached_ids += new_ids + reply[:-1]
    return said


@pytest.mark.parametrize("method", ["hidden", "saved", "tokens"])
@pytest.mark.parametrize("name", CONFIGS)
def test_dropped_every_turn_says_the_same(name: str, method: str) -> None:
    """Three turns, each on a cache restored from what the turns before saved, give the same replies."""
    adapter = adapt(build(name))
    chosen = Method[adapter.kind.name] if method == "saved" else Method(method)

    assert _talk(adapter, RestorePlan.uniform(chosen, 3)) == _talk(adapter, None)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8))
def test_any_cut_into_pieces_restores_the_same(sizes: list[int]) -> None:
    """However the rows of a layer are cut into pieces, empty ones too, the cache is bit for bit the same."""
    session = saved_session("neox")
    compute = Modules(session.adapter, session.positions)
    target = CacheTarget(session.adapter, session.token_count)
    for layer in range(3):
        rows, begin = session.rows[Stream(layer, StateKind.KV)].view(torch.uint8), 0
        for size in [*sizes, session.token_count]:
            end = min(begin + size, session.token_count)
            compute.restore(layer, Method.KV, rows[begin:end], begin, target.room(layer, begin, end))
            begin = end

    assert relative_errors(target.cache, session.kept_cache) == [0.0] * 6
