"""Greedy generation with transformers on a cache that may hold a restored session.

And which tokens a turn reuses, prefills and drops: arithmetic over token ids. Knows the model's forward pass,
not the store. Worst case: a prefill, run in pieces so that activations stay bounded and logits exist for one
position.
"""

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.errors import InvalidArgument

PREFILL_PIECE_TOKENS = 512
"""Tokens per prefill pass; more is faster on a GPU, less bounds memory."""

Around = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Makes a context that is entered around each forward pass over these tokens."""


def _nothing(_token_ids: Sequence[int]) -> AbstractContextManager[None]:
    return nullcontext()


class Stops(NamedTuple):
    """Passes end at each multiple of `every` tokens of a session, of which `done_count` are in the cache."""

    done_count: int
    every: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens of one turn, and how long the first took from the call."""

    token_ids: list[int]
    first_token_ns: int


def prefill(
    model: PreTrainedModel,
    cache: Cache,
    token_ids: Sequence[int],
    *,
    piece_tokens: int = PREFILL_PIECE_TOKENS,
    around: Around = _nothing,
    is_stepwise: bool = False,
    stops: Stops | None = None,
) -> Tensor:
    """Run `token_ids` after what `cache` holds; the logits of the last one, [V].

    `is_stepwise`, `stops`: see `pieces`. Raises InvalidArgument(field="token_ids") when there are none.
    """
    if not token_ids:
        raise InvalidArgument(field="token_ids", problem="at least one token is needed to continue")
    is_first = not is_stepwise or is_empty(cache)
    for begin, end in pieces(
        len(token_ids), piece_tokens, is_stepwise=is_stepwise, is_first=is_first, stops=stops
    ):
        logits = run_pass(model, cache, token_ids[begin:end], around)
    return logits


def pieces(
    token_count: int, piece_tokens: int, *, is_stepwise: bool, is_first: bool, stops: Stops | None = None
) -> Iterator[tuple[int, int]]:
    """The token ranges of passes, in order.

    `is_stepwise`: models that go on from a state by one token at a time. Only from none, `is_first`, do they
    take several. `stops`: where passes end besides.
    """
    begin = 0
    while begin < token_count:
        most = piece_tokens if is_first or not is_stepwise else 1
        end = min(begin + most, token_count)
        if stops is not None:
            end = min(end, begin + stops.every - (stops.done_count + begin) % stops.every)
        yield begin, end
        begin, is_first = end, False


def is_empty(cache: Cache) -> bool:
    """Whether a cache has taken no token in."""
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return not int(cache.get_seq_length())
    return not cache.has_previous_state()


def stream_greedy(
    model: PreTrainedModel,
    cache: Cache,
    new_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] | None = None,
    piece_tokens: int = PREFILL_PIECE_TOKENS,
    around: Around = _nothing,
    is_stepwise: bool = False,
    stops: Stops | None = None,
) -> Iterator[int]:
    """Yield the most likely next tokens, one forward pass each, up to and including an end token.

    Afterwards `cache` holds every token but the last one yielded, as in `generate`.
    `eos_token_ids` default to the model's; an empty collection never ends early.
    """
    ends = end_token_ids(model) if eos_token_ids is None else eos_token_ids
    logits = prefill(
        model,
        cache,
        new_token_ids,
        piece_tokens=piece_tokens,
        around=around,
        is_stepwise=is_stepwise,
        stops=stops,
    )
    for step in range(max_new_tokens):
        token = int(logits.argmax())
        yield token
        if token in ends or step + 1 == max_new_tokens:
            return
        logits = run_pass(model, cache, [token], around)


def continue_greedy(
    model: PreTrainedModel,
    cache: Cache,
    new_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] | None = None,
    piece_tokens: int = PREFILL_PIECE_TOKENS,
    is_stepwise: bool = False,
) -> Continuation:
    """Generate a whole turn; see `stream_greedy`."""
    begin_ns = time.perf_counter_ns()
    first_token_ns = 0
    token_ids: list[int] = []
    for token in stream_greedy(
        model,
        cache,
        new_token_ids,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        piece_tokens=piece_tokens,
        is_stepwise=is_stepwise,
    ):
        first_token_ns = first_token_ns or time.perf_counter_ns() - begin_ns
        token_ids.append(token)
    return Continuation(token_ids, first_token_ns)


def run_pass(
    model: PreTrainedModel, cache: Cache, token_ids: Sequence[int], around: Around = _nothing
) -> Tensor:
    """One forward pass; the logits of the last token, [V]."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.no_grad(), around(token_ids):
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    logits: Tensor = output.logits[0, -1]
    return logits


def cache_argument(module: nn.Module, cache: Cache) -> dict[str, Cache]:
    """A cache as a model's forward pass takes it: Mamba 2 calls it otherwise."""
    return {_cache_name(type(module).forward): cache}


@functools.cache
def _cache_name(forward: Callable[..., object]) -> str:
    names = inspect.signature(forward).parameters
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


def end_token_ids(model: PreTrainedModel) -> Collection[int]:
    """The tokens that end a reply, as the model says."""
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


SINK_TOKENS = 4
"""First tokens that truncation keeps: without them real models lose half their quality."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep the first `sink_count` and the last `recent_count` of `token_count` tokens."""

    token_count: int
    sink_count: int
    recent_count: int

    @property
    def kept_count(self) -> int:
        """Tokens that stay."""
        return min(self.token_count, self.sink_count + self.recent_count)

    def apply(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that stay."""
        begin = max(self.token_count - self.recent_count, self.sink_count)
        return [*token_ids[: self.sink_count], *token_ids[begin:]]


def fit(
    history_count: int, new_count: int, *, window: int, sink_count: int = SINK_TOKENS
) -> Truncation | None:
    """How to truncate a history so that `new_count` more tokens fit into the context window.

    None: they fit as it is. Else the oldest half behind the sinks goes, again and again until the
    rest fits. Raises InvalidArgument when not even the sinks leave room.
    Source: CachedAttention, section 3.4 (ratio 0.5); sinks: docs/architecture.md.
    """
    if history_count + new_count <= window:
        return None
    if sink_count + new_count > window:
        problem = f"{new_count} tokens and {sink_count} sinks do not fit into a window of {window}"
        raise InvalidArgument(field="new_token_ids", problem=problem)
    recent = history_count - history_count // 2
    while sink_count + recent + new_count > window:
        recent -= max(recent // 2, 1)
    return Truncation(history_count, min(sink_count, history_count), recent)
