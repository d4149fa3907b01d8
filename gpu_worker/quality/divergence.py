"""What storing rows in fewer bits costs: how far a model's predictions move when its cache comes from them.

A context is run once; its rows are rounded, restored by the code that restores sessions, and the tokens that follow
are predicted from them and from the cache that was never dropped.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.capture import Capture
from gpu_worker.families import Adapter
from gpu_worker.kernels.quantization import OUTLIERS, dequantize, quantize
from gpu_worker.plan import Method, RestorePlan
from gpu_worker.restore import restore_cache

Rounding = Callable[[Tensor], tuple[Tensor, int]]
"""Rows [T, row] -> what is read back of them, and the bytes they took."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store rows: which, and how they are rounded."""

    title: str
    kind: StateKind
    rounding: Rounding


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of predictions from stored rows to those from the cache that stayed; `agreement` of the likeliest token."""

    kl_nats: float
    perplexity: float
    agreement: float
    bytes_per_token: float


def half(dtype: torch.dtype) -> Rounding:
    """Rows in 16 bits."""
    return lambda rows: (rows.to(dtype).to(rows.dtype), 2 * rows.numel())


def few_bits(bits: int, group_size: int, outlier_count: int = OUTLIERS) -> Rounding:
    """Rows in `bits` with a least value and a step in float16 per token and group, and a token's outliers."""

    def rounding(rows: Tensor) -> tuple[Tensor, int]:
        stored = quantize(rows, bits=bits, group_size=group_size, outlier_count=outlier_count)
        return dequantize(stored).to(rows.dtype), stored.size_bytes

    return rounding


def one_scale(bits: int) -> Rounding:
    """Rows in `bits` with one step a token, and no outliers."""
    return lambda rows: few_bits(bits, 1 << (rows.shape[1] - 1).bit_length(), 0)(rows)


def divergences(
    adapter: Adapter, token_ids: Sequence[int], forms: Sequence[Form], *, context_count: int,
    step: Callable[[str], None] = lambda _title: None,
) -> dict[str, Divergence]:  # fmt: skip
    """Measure each form on the tokens behind the first `context_count`; the first key is "kept": nothing stored."""
    context, new = token_ids[:context_count], token_ids[context_count:]
    kept = DynamicCache(config=adapter.model.config)
    rows: dict[Stream, Tensor] = {}

    def sink(layer: int, kind: StateKind, part: Tensor) -> None:
        rows[Stream(layer, kind)] = part.clone()

    kinds = {form.kind for form in forms}
    streams = [Stream(layer, kind) for layer in range(len(adapter.layers)) for kind in kinds]
    with Capture(adapter, streams, sink):
        logits_of(adapter, kept, context)
    standard = logits_of(adapter, copy.deepcopy(kept), new)
    found = {"kept": compare(standard, standard, new, 0.0)}
    for form in forms:
        cache, size_bytes = _restored(adapter, rows, form, context_count)
        found[form.title] = compare(logits_of(adapter, cache, new), standard, new, size_bytes / context_count)
        step(form.title)
    return found


def _restored(
    adapter: Adapter, rows: Mapping[Stream, Tensor], form: Form, token_count: int
) -> tuple[Cache, int]:
    stored = {stream: form.rounding(part) for stream, part in rows.items() if stream.kind is form.kind}
    cache = restore_cache(
        adapter,
        RestorePlan.uniform(Method[form.kind.name], len(adapter.layers)),
        lambda stream, begin, end: [stored[stream][0][begin:end]],
        positions=torch.arange(token_count),
    )
    return cache, sum(size_bytes for _, size_bytes in stored.values())


def logits_of(adapter: Adapter, cache: Cache, token_ids: Sequence[int]) -> Tensor:
    """Run tokens on a cache, which they extend; float32 [T, vocabulary]."""
    with torch.no_grad():
        output = adapter.model(
            input_ids=torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True
        )
    logits: Tensor = output.logits[0].float()
    return logits


def compare(logits: Tensor, standard: Tensor, token_ids: Sequence[int], bytes_per_token: float) -> Divergence:
    """Compare predictions on `token_ids`, both [T, vocabulary]; the first token is given, not predicted."""
    ours, theirs = logits.log_softmax(-1), standard.log_softmax(-1)
    kl_nats = float(functional.kl_div(ours, theirs, log_target=True, reduction="batchmean"))
    losses = functional.cross_entropy(logits[:-1], torch.tensor(list(token_ids[1:])))
    agreement = float((logits.argmax(-1) == standard.argmax(-1)).float().mean())
    return Divergence(kl_nats, float(losses.exp()), agreement, bytes_per_token)
