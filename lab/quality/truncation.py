"""A context that is cut when it is full, by each way to cut it: what a model then predicts and finds.

The rows of a conversation are those that a store would have kept, the cuts those that a store would make, and
the cache after a cut comes from the pipeline. Perplexity: how well text after the cut is predicted
(CachedAttention, USENIX ATC '24, section 4.3.5 and Table 1, at a window and a text of one's own). Retrieval:
whether names with numbers in the kept half are still found, in the manner of LongEval's lines (its Table 2).

Knows one model through its adapter. Worst case: rows and cache of one window in memory; kept tokens that
attended to dropped ones, whose state only recomputing them would change.
"""

import copy
import enum
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ctxcache.errors import InvalidArgument, PositionsNotRelocatable
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture
from gpu_worker.planning.plan import Method, RestorePlan
from lab.quality.restoring import HeldRows, pipeline_for, restored_cache


class Cut(enum.Enum):
    """The treatment of state when the earliest half of a full context is dropped."""

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
    """Tokens in the window, and their state.

    `sink_count`: first tokens that SINKS keeps and FRESH_START runs anew.
    """

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
        source = HeldRows(self.rows.__getitem__)
        with pipeline_for(adapter) as pipeline:
            return restored_cache(pipeline, adapter, plan, source, positions=positions)


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


TokenRange = tuple[int, int]
"""[begin, end) in the numbering that the session had when the rows were saved."""


def positions_after_truncation(adapter: Adapter, live_ranges: Sequence[TokenRange]) -> Tensor:
    """Positions [T] int64 for the rows of `live_ranges`, in order: 0..T-1.

    Raises PositionsNotRelocatable where tokens before kept ones are gone and the model learned
    absolute positions; InvalidArgument(field="live_ranges") unless they ascend and do not overlap.
    Source: decoupled truncation, CachedAttention, USENIX ATC '24, section 3.4.
    """
    _check(live_ranges)
    token_count = sum(end - begin for begin, end in live_ranges)
    is_prefix = not live_ranges or live_ranges[-1][1] == token_count
    if not is_prefix and not adapter.is_relocatable:
        raise PositionsNotRelocatable(model=adapter.architecture)
    return torch.arange(token_count)


def _check(live_ranges: Sequence[TokenRange]) -> None:
    last_end = 0
    for begin, end in live_ranges:
        if begin < last_end or end <= begin:
            raise InvalidArgument(field="live_ranges", problem=f"[{begin}, {end}) after token {last_end}")
        last_end = end


@dataclass(frozen=True, slots=True)
class Predicted:
    """How well tokens were predicted: the sum of -ln p over `token_count` of them."""

    loss_nats: float
    token_count: int

    @property
    def perplexity(self) -> float:
        """E to the mean loss."""
        return math.exp(self.loss_nats / self.token_count)


def perplexities(
    adapter: Adapter,
    token_ids: Sequence[int],
    cuts: Sequence[Cut],
    *,
    window: int,
    sink_count: int,
    step: Callable[[Cut, int], None] = lambda _cut, _count: None,
) -> dict[Cut, Predicted]:
    """Feed a text half a window at a time, cut whenever the window is full, score what follows the first cut.

    The same tokens are scored for every cut: all but the first of each half window. `step` hears how many
    tokens a cut has seen. Raises ValueError unless a whole half window follows the first full one.
    """
    half = window // 2
    if len(token_ids) < window + half or half <= sink_count + 1:
        raise ValueError(
            f"{len(token_ids)} tokens, a window of {window} and {sink_count} sinks leave nothing to score"
        )
    begun = Context.empty(adapter, Cut.NONE, sink_count=sink_count)
    for begin in range(0, window, half):
        begun.feed(token_ids[begin : begin + half])
    found = {}
    for cut in cuts:
        context, loss_nats, token_count = begun.fork(cut), 0.0, 0
        for begin in range(window, len(token_ids) - half + 1, half):
            context.halve()
            new = token_ids[begin : begin + half]
            loss_nats += _loss_nats(context.feed(new), new)
            token_count += half - 1
            step(cut, begin + half)
        found[cut] = Predicted(loss_nats, token_count)
    return found


def _loss_nats(logits: Tensor, token_ids: Sequence[int]) -> float:
    losses = functional.cross_entropy(logits[:-1].float(), torch.tensor(token_ids[1:]), reduction="sum")
    return float(losses)


Encode = Callable[[str], list[int]]
_NAMES = (
    "apple",
    "river",
    "candle",
    "garden",
    "silver",
    "window",
    "basket",
    "thunder",
    "pepper",
    "castle",
    "ribbon",
    "marble",
    "forest",
    "button",
    "anchor",
    "violin",
    "copper",
    "meadow",
    "pillow",
    "dragon",
)
DIGITS = 3


def accuracies(
    adapter: Adapter,
    filler: Sequence[int],
    encode: Encode,
    cuts: Sequence[Cut],
    *,
    window: int,
    sink_count: int,
    seed: int = 1,
    step: Callable[[Cut, int], None] = lambda _cut, _count: None,
) -> dict[Cut, float]:
    """The share of questions answered digit by digit, greedily, after the context was cut.

    The window is `filler` and then facts, which are in the half that stays. Raises ValueError for too little
    filler.
    """
    facts = _facts(seed)
    told = [token for name, number in facts for token in encode(_fact(name, number))]
    if len(told) > window // 2 - sink_count or len(filler) < window - len(told):
        raise ValueError(f"{len(told)} tokens of facts, {len(filler)} of filler, a window of {window}")
    begun = Context.empty(adapter, Cut.NONE, sink_count=sink_count)
    begun.feed([*filler[: window - len(told)], *told])
    found = {}
    for cut in cuts:
        context = begun.fork(cut)
        context.halve()
        right_count = 0
        for number, (name, expected) in enumerate(facts, 1):
            right_count += _answer(context.fork(), encode(_question(name)), encode(f" {expected}"))
            step(cut, number)
        found[cut] = right_count / len(facts)
    return found


def _answer(context: Context, question: Sequence[int], expected: Sequence[int]) -> bool:
    new = list(question)
    for token in expected:
        if int(context.feed(new)[-1].argmax()) != token:
            return False
        new = [token]
    return True


def _facts(seed: int) -> list[tuple[str, str]]:
    numbers = random.Random(seed)  # noqa: S311  a load, no secret
    return [(name, "".join(str(numbers.randrange(10)) for _ in range(DIGITS))) for name in _NAMES]


def _fact(name: str, number: str) -> str:
    return f" The code of the {name} is {number}.\n"


def _question(name: str) -> str:
    return f" Question: what is the code of the {name}? Answer: The code of the {name} is"
