"""A context that is cut when it is full: the token ids, rows and engine cache of one conversation.

The rows are what a store would have kept, the cuts what a store would make; the cache after a cut comes from
`restore_cache`. Knows one model through its adapter. Worst case in memory: rows and cache of one window.
"""

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.capture import Capture
from gpu_worker.families import Adapter
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.positions import positions_after_truncation
from gpu_worker.restore import restore_cache


class Cut(enum.Enum):
    """What becomes of the state when the earliest half of a full context is dropped."""

    NONE = "no truncation"
    """Nothing is dropped: what the model does with everything."""
    RECOMPUTE = "recompute"
    """The kept tokens are run anew (the paper's TT): the standard the others are held to."""
    SINKS = "decoupled, sinks kept"
    """As DECOUPLED, and the session's first tokens are among the kept: what ctxcache does by default."""
    FRESH_START = "decoupled, start recomputed"
    """As DECOUPLED, and the first kept tokens are run anew, as if the session began with them."""
    DECOUPLED = "decoupled"
    """The kept rows are embedded at positions 0..n-1 (the paper's CA)."""
    NAIVE = "naive"
    """The kept keys stay as they were embedded, and new tokens follow at n (the paper's NKVT)."""


@dataclass(slots=True)
class Context:
    """Tokens in the window, and their state. `sink_count`: first tokens that SINKS keeps and FRESH_START runs anew."""

    adapter: Adapter
    cut: Cut
    sink_count: int
    token_ids: list[int]
    rows: dict[Stream, Tensor]
    cache: Cache

    @classmethod
    def empty(cls, adapter: Adapter, cut: Cut, *, sink_count: int) -> "Context":
        """A conversation that has not begun."""
        return cls(adapter, cut, sink_count, [], {}, DynamicCache(config=adapter.model.config))

    def fork(self, cut: Cut | None = None) -> "Context":
        """The same, to go on with apart."""
        rows = dict(self.rows)
        cache = copy.deepcopy(self.cache)
        return Context(self.adapter, cut or self.cut, self.sink_count, list(self.token_ids), rows, cache)

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Run tokens after what is there; their logits [T, V]."""
        logits, rows = _run(self.adapter, self.cache, token_ids)
        before = self.rows or {stream: new[:0] for stream, new in rows.items()}
        self.rows = {stream: torch.cat((before[stream], new)) for stream, new in rows.items()}
        self.token_ids += token_ids
        return logits

    def halve(self) -> None:
        """Drop the earliest half, as the cut says."""
        if self.cut is Cut.NONE:
            return
        count = len(self.token_ids)
        sinks = self.sink_count if self.cut is Cut.SINKS else 0
        live = [(0, sinks), (count - count // 2 + sinks, count)]
        if not sinks:
            del live[0]
        kept = torch.cat([torch.arange(begin, end) for begin, end in live])
        self.token_ids = [self.token_ids[i] for i in kept.tolist()]
        self.rows = {stream: rows[kept] for stream, rows in self.rows.items()}
        self.cache = self._cache_of(kept, positions_after_truncation(self.adapter, live))

    def _cache_of(self, kept: Tensor, positions: Tensor) -> Cache:
        adapter = self.adapter
        if self.cut is Cut.NAIVE:
            return _selected(adapter, self.cache, kept)
        fresh = DynamicCache(config=adapter.model.config)
        if self.cut is Cut.RECOMPUTE:
            _, self.rows = _run(adapter, fresh, self.token_ids)
            return fresh
        if self.cut is Cut.FRESH_START:
            _, start = _run(adapter, fresh, self.token_ids[: self.sink_count])
            self.rows = {
                stream: torch.cat((start[stream], rows[self.sink_count :]))
                for stream, rows in self.rows.items()
            }
        plan = RestorePlan.uniform(Method[adapter.kind.name], len(adapter.layers))
        return restore_cache(
            adapter, plan, lambda stream, begin, end: [self.rows[stream][begin:end]], positions=positions
        )


def _run(adapter: Adapter, cache: Cache, token_ids: Sequence[int]) -> tuple[Tensor, dict[Stream, Tensor]]:
    """Logits [T, V] of tokens after what the cache holds, and their rows."""
    rows: dict[Stream, Tensor] = {}

    def sink(layer: int, kind: StateKind, new: Tensor) -> None:
        rows[Stream(layer, kind)] = new.clone()

    streams = [Stream(layer, adapter.kind) for layer in range(len(adapter.layers))]
    with Capture(adapter, streams, sink), torch.no_grad():
        output = adapter.model(
            input_ids=torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True
        )
    logits: Tensor = output.logits[0]
    return logits, rows


def _selected(adapter: Adapter, cache: Cache, kept: Tensor) -> Cache:
    selected = DynamicCache(config=adapter.model.config)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None:
            selected.update(layer.keys[:, :, kept], layer.values[:, :, kept], number)
    return selected
