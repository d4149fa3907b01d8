"""Greedy generation with transformers on a cache that may hold a restored session, and capture of its rows.

Also says which tokens a turn reuses, prefills and drops, by arithmetic over token ids. Knows the model's
forward pass, not the store. Worst case: a prefill, run in pieces so that activations stay bounded and logits
exist for one position.

Capture is hooks that hand over the rows of new tokens while the model runs. It knows one model through its
adapter, not what the sink does with rows, and costs nothing unless attached. Worst case: on a GPU, rows
asked for on the host are copied layer by layer and each copy waits for that layer.
"""

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import is_on_tokens, unpacked
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import UnsupportedBatch
from gpu_worker.families import Adapter
from gpu_worker.families.projections import Handle, without_gradient

# Pieces of another size may round otherwise: products of other shapes are summed in another order.
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

    `is_stepwise`: the model goes on from a state by one token at a time. Without a state, `is_first`, it
    takes several. `stops`: where passes end besides.
    """
    begin = 0
    while begin < token_count:
        # Jamba-like models (stepwise), a cache that has tokens already:   [1][1][1]...
        # the same from an empty cache:                                    [512][1][1]...
        # others, with stops every 1,024 tokens, 900 done:                 [124][512][512][512]...
        most = piece_tokens if is_first or not is_stepwise else 1
        end = min(begin + most, token_count)
        if stops is not None:
            end = min(end, begin + stops.every - (stops.done_count + begin) % stops.every)
        yield begin, end
        begin, is_first = end, False


def is_empty(cache: Cache) -> bool:
    """Whether a cache has taken no token in."""
    # Caches of states alone have no length; they have a mark.
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


_COUNTING_ANEW: WeakSet[PreTrainedModel] = WeakSet()


def count_positions(model: PreTrainedModel, *, is_counting_anew: bool) -> None:
    """Say whether a model takes each pass for its first unless it is told positions (Bamba does)."""
    (_COUNTING_ANEW.add if is_counting_anew else _COUNTING_ANEW.discard)(model)


def run_pass(
    model: PreTrainedModel, cache: Cache, token_ids: Sequence[int], around: Around = _nothing
) -> Tensor:
    """One forward pass; the logits of the last token, [V]."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    given: dict[str, Cache | Tensor] = {**cache_argument(model, cache)}
    if model in _COUNTING_ANEW:
        given["position_ids"] = (
            int(cache.get_seq_length()) + torch.arange(ids.shape[1], device=ids.device)[None]
        )
    with torch.no_grad(), around(token_ids):
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
    logits: Tensor = output.logits[0, -1]
    return logits


def cache_argument(module: nn.Module, cache: Cache) -> dict[str, Cache]:
    """A cache as a model's forward pass takes it: Mamba 2 has another name for it."""
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


# -- tokens that stay --------------------------------------------------------------------------------

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
        # A history of few tokens has sinks and recent ones that overlap: none is kept twice.
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
    # window 16, 14 tokens of history, 6 new, 4 sinks (history 14 + 6 > 16):
    #
    #     keep    0 1 2 3 │ 4 ... 6 dropped │ 7 ... 13        recent = 7: 4 + 7 + 6 = 17, still too many
    #     keep    0 1 2 3 │ 4 ... 9 dropped │ 10 ... 13       recent = 4: 4 + 4 + 6 = 14
    #
    # Half at a time, as CachedAttention does: dropping just enough would cut again at the next turn.
    recent = history_count - history_count // 2
    while sink_count + recent + new_count > window:
        recent -= max(recent // 2, 1)
    return Truncation(history_count, min(sink_count, history_count), recent)


# -- rows of new tokens ------------------------------------------------------------------------------

Sink = Callable[[int, StateKind, Tensor], None]
"""(layer, kind, rows [T_new, row]): called once per stream and forward pass, layer 0 first."""


class Hooked:
    """A context manager with hooks on modules, which go at its end."""

    def __init__(self) -> None:
        self._hooks: list[Handle] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Capture(Hooked):
    """Context manager: within it, each forward pass of the model feeds the sink.

    Rows are what the engine's cache needs, bit for bit: HIDDEN the layer's input, KV and LATENT the halves
    before positions. Rows of packed kinds are as wide as others: packing takes time, and is left to the
    saver. Rows may share memory with activations: the sink must not write to them. Restoring within it
    captures nothing. Batches of more than one sequence raise UnsupportedBatch out of the forward pass. Passes
    are taken to be unpadded, and rows of tokens that the engine later crops (assisted decoding) are the
    caller's to drop.
    """

    def __init__(
        self, adapter: Adapter, streams: Iterable[Stream], sink: Sink, *, is_on_host: bool = True
    ) -> None:
        """`streams`: those to capture; token ids among them are passed over, the caller has them.

        Where layer 1 is a delta to what token ids give, layer 0's inputs come as well. Raises
        InvalidArgument(field="streams") for one the model does not have.
        """
        super().__init__()
        self._adapter = adapter
        asked = {stream for stream in streams if stream.kind is not StateKind.TOKENS}
        if is_on_tokens(asked):
            asked.add(Stream(0, StateKind.HIDDEN))
        self._streams = sorted(asked)
        for stream in self._streams:
            is_known = 0 <= stream.layer < len(adapter.layers)
            if not is_known or adapter.element_count(stream.kind, stream.layer) is None:
                raise InvalidArgument(field="streams", problem=f"{adapter.architecture} has no {stream}")
        self._sink = sink
        self._is_on_host = is_on_host
        self._is_in_pass = False

    def __enter__(self) -> Self:
        self._hooks = [*self._watch_passes()]
        for stream in self._streams:
            self._hooks += self._watch(stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._is_in_pass = False

    def _watch_passes(self) -> Iterable[RemovableHandle]:
        base = self._adapter.base
        yield base.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        # Also after an error: a pass that broke must not leave capture listening to a restore.
        yield base.register_forward_hook(self._end_pass, always_call=True)

    # Any: a hook sees whatever the model passes to its layers.
    def _begin_pass(self, _base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _check_batch(args, kwargs)
        self._is_in_pass = True

    def _end_pass(self, _base: nn.Module, _args: object, _output: object) -> None:
        self._is_in_pass = False

    def _watch(self, stream: Stream) -> Sequence[Handle]:
        decoder = self._adapter.layers[stream.layer]
        if unpacked(stream.kind) is not StateKind.HIDDEN:
            pack = self._adapter.pack
            # K and V before positions: what hooks see between the projection and the rotation.
            return decoder.projection.watch(lambda first, second: self._emit(stream, pack(first, second)))

        # Any: a hook sees whatever the model passes to its layer.
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A residual stream in float32 (Mamba 2): its norm rounds it first, or no proof passes.
            rows = without_gradient(layer_input(args, kwargs)[0])
            self._emit(stream, rows.to(self._adapter.model.dtype))

        return [decoder.block.register_forward_pre_hook(hook, with_kwargs=True)]

    def _emit(self, stream: Stream, rows: Tensor) -> None:
        # A restore projects rows through the same modules; outside of a pass nothing is new.
        if self._is_in_pass:
            self._sink(stream.layer, stream.kind, rows.cpu() if self._is_on_host else rows)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input [B, T, D] of a layer, from what a hook sees: families pass it first or by name."""
    # Any: what a hook sees.
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _check_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Any: what a hook sees. The inputs of the whole stack are looked at: some layers take several streams of
    # each token, and the place of the batch among the dimensions is each model's own (Gemma 3n, HY v4).
    given = [*args[:1], *(kwargs[name] for name in _INPUTS if kwargs.get(name) is not None)]
    if given and len(given[0]) != 1:
        raise UnsupportedBatch(batch_size=len(given[0]))


_INPUTS = ("input_ids", "inputs_embeds", "hidden_states")
"""Names of what a stack of layers takes first: [B, T] or [B, T, D]."""
