"""Targets: vLLM's layouts, windows and splits.

The engine's own blocks are filled, and no other memory is touched.
"""

import enum

import pytest
import slow_pipelines
import torch
from sessions import RELATIVE_BOUND, Session, contents, relative_error, saved_session
from slow_pipelines import RowsSource, poisoned_target, schedule_of, slowed, start
from torch import Tensor

from ctxcache.errors import InvalidArgument
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.target import PagedTarget
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule

BLOCK_TOKENS = 16
BLOCK_COUNT = 12


class CacheAxes(enum.Enum):
    """How an engine lays out one layer's cache of B blocks of P tokens; the value is its order of axes."""

    TOKENS_FIRST = "2 B P H C"
    HEADS_FIRST = "2 B H P C"
    BLOCKS_TOKENS_FIRST = "B 2 P H C"
    BLOCKS_HEADS_FIRST = "B 2 H P C"


def split_cache(cache: Tensor, layout: CacheAxes) -> tuple[Tensor, Tensor]:
    """One tensor of both halves -> keys and values [B, P, H, C], views."""
    axis = 0 if layout in (CacheAxes.TOKENS_FIRST, CacheAxes.HEADS_FIRST) else 1
    halves = cache.unbind(axis)
    if layout in (CacheAxes.HEADS_FIRST, CacheAxes.BLOCKS_HEADS_FIRST):
        halves = tuple(half.transpose(1, 2) for half in halves)
    return halves[0], halves[1]


def _axes(layout: CacheAxes, heads: int, size: int) -> list[int]:
    sizes = {"2": 2, "B": BLOCK_COUNT, "P": BLOCK_TOKENS, "H": heads, "C": size}
    return [sizes[axis] for axis in layout.value.split()]


def _paged(session: Session, layout: CacheAxes) -> tuple[list[Tensor], PagedTarget]:
    """Caches of NaN, and a session's blocks in no order, the last of them not full."""
    adapter = session.adapter
    caches = [
        torch.full(
            _axes(layout, adapter.key.head_count, adapter.key.head_size), torch.nan, dtype=adapter.model.dtype
        )
        for _ in adapter.layers
    ]
    blocks = torch.tensor([7, 2, 9, 0, 5, 11])
    tokens = torch.arange(session.token_count)
    slots = blocks[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
    windows = [decoder.window for decoder in adapter.layers]
    return caches, PagedTarget([split_cache(cache, layout) for cache in caches], slots, windows=windows)


def _gathered(cache: Tensor, layout: CacheAxes, target: PagedTarget, layer: int) -> list[Tensor]:
    """The blocks' content of the tokens that a layer needs, in the order of the engine's own cache."""
    slots = target._slots[target.first_token(layer) :]
    halves = split_cache(cache, layout)
    return [half[slots // BLOCK_TOKENS, slots % BLOCK_TOKENS].transpose(0, 1).unsqueeze(0) for half in halves]


@pytest.mark.parametrize("layout", CacheAxes)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("plan", ["saved:0-2", "tokens:0,hidden:1,saved:2"])
def test_every_layout_of_blocks_is_filled(name: str, layout: CacheAxes, plan: str) -> None:
    """Each token's keys and values are in its slot, and no other slot was written to."""
    session = saved_session(name)
    caches, target = _paged(session, layout)

    with slowed() as pipeline, start(pipeline, session, target, plan) as restoration:
        restoration.wait_all()

    for layer, cache in enumerate(caches):
        held = _gathered(cache, layout, target, layer)
        for mine, theirs in zip(held, contents(session.kept_cache, layer), strict=True):
            assert relative_error(mine, theirs) < RELATIVE_BOUND
        written = sum(half.numel() for half in held)
        assert int((~cache.isnan()).sum()) == written
    assert target.invalid_blocks() == []


def test_blocks_of_a_failed_restore_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was usable before: all blocks of the session, and no others."""
    # The end comes before the second layer is computed, also on a busy machine.
    monkeypatch.setattr(slow_pipelines, "DELAY_S", 0.3)
    session = saved_session("llama")
    _, target = _paged(session, CacheAxes.TOKENS_FIRST)
    source = RowsSource(session)
    with slowed("compute") as pipeline, start(pipeline, session, target, source=source) as restoration:
        restoration.wait(0)
        assert target.invalid_blocks() == [0, 2, 5, 7, 9, 11]
        restoration.cancel()

    assert target.invalid_blocks() == [0, 2, 5, 7, 9, 11]


def test_slots_outside_the_cache_are_refused() -> None:
    """The kernels do not look: one slot too far would write over whatever lies behind."""
    keys = torch.empty(4, BLOCK_TOKENS, 2, 8)

    with pytest.raises(InvalidArgument, match="slots"):
        PagedTarget([(keys, keys)], torch.tensor([0, 4 * BLOCK_TOKENS]))


SPLITS = [
    [
        [("hidden", 0, 40), ("saved", 40, None)],
        [("saved", 0, None)],
        [("hidden", 0, 64), ("saved", 64, None)],
    ],
    [[("tokens", 0, None)], [("tokens", 0, 64), ("saved", 64, None)], [("hidden", 0, None)]],
    [[("tokens", 0, 64), ("hidden", 64, None)], [("saved", 0, None)], [("saved", 0, None)]],
]


@pytest.mark.parametrize("name", ["llama", "neox", "deepseek", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("pieces", SPLITS)
def test_layers_may_be_split(name: str, pieces: list[list[tuple[str, int, int | None]]]) -> None:
    """Hidden rows before a token and saved ones behind it, or the first tokens recomputed."""
    session = saved_session(name)
    target = poisoned_target(session)
    count = session.token_count
    kind = Method[session.adapter.kind.name]
    layers = [
        [(kind if what == "saved" else Method(what), begin, end or count) for what, begin, end in some]
        for some in pieces
    ]
    schedule = RestoreSchedule.of_pieces(layers, count, [target.first_token(layer) for layer in range(3)])

    with (
        slowed() as pipeline,
        pipeline.start(
            schedule,
            RowsSource(session),
            target,
            Modules(session.adapter, session.positions),
            deadline=Deadline.after_s(20),
            token_ids=session.token_ids,
        ) as restoration,
    ):
        restoration.wait_all()

    for layer in range(3):
        for mine, theirs in zip(target.tensors(layer), contents(session.kept_cache, layer), strict=True):
            assert relative_error(mine, theirs) < RELATIVE_BOUND
    assert session.continue_on(target.cache) == session.expected_ids


@pytest.mark.parametrize(
    "layers",
    [
        [[(Method.KV, 0, 82)], [(Method.TOKENS, 0, 82)]],
        [[(Method.KV, 0, 40), (Method.TOKENS, 40, 82)], [(Method.KV, 0, 82)]],
        [[(Method.TOKENS, 0, 40), (Method.KV, 40, 82)], [(Method.TOKENS, 0, 40), (Method.KV, 40, 82)]],
        [[(Method.KV, 0, 40), (Method.HIDDEN, 41, 82)], [(Method.KV, 0, 82)]],
        [[(Method.KV, 0, 81)], [(Method.KV, 0, 82)]],
        [[(Method.KV, 0, 82)]],
    ],
)
def test_what_cannot_be_run_is_refused(layers: list[list[tuple[Method, int, int]]]) -> None:
    """A layer is recomputed from the one before it, from the first token on."""
    with pytest.raises(InvalidArgument, match="plan"):
        RestoreSchedule.of_pieces(layers, 82, [0, 0])


def test_a_schedule_reads_what_it_restores() -> None:
    """Its streams are those of its parts; token ids only where something is recomputed."""
    session = saved_session("llama")
    target = poisoned_target(session)

    rows = schedule_of(session, target, "hidden:0,saved:1-2")
    mixed = schedule_of(session, target, "tokens:0,saved:1-2")

    assert [str(stream) for stream in rows.streams()] == ["layer 0 hidden", "layer 1 kv", "layer 2 kv"]
    assert [str(stream) for stream in mixed.streams()] == ["tokens", "layer 1 kv", "layer 2 kv"]
    assert RestorePlan.parse("hidden:0,kv:1-2").streams() == rows.streams()
