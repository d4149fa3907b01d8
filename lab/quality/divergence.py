"""The cost of rows in fewer bits: how far a model's predictions move when its cache comes from them.

A context is run once. Its rows are rounded, restored by the pipeline that restores sessions, and the tokens
that follow are predicted from them and from the cache that was never dropped. Through a real store the same
says what a layout costs: predictions, bytes on disk, and the time to save and to restore.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, DynamicCache

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture
from gpu_worker.kernels.quantization import OUTLIERS, dequantize, quantize
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.saving import Saver, Slice
from lab.quality.restoring import HeldRows, pipeline_for, restored_cache

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
    """Predictions from stored rows beside those from the cache that stayed.

    `kl_nats` is the mean of the tokens, `agreement` of the likeliest token.
    """

    kl_nats: float
    perplexity: float
    agreement: float
    bytes_per_token: float
    worst_token_nats: float = 0.0


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
    adapter: Adapter,
    token_ids: Sequence[int],
    forms: Sequence[Form],
    *,
    context_count: int,
    step: Callable[[str], None] = lambda _title: None,
) -> dict[str, Divergence]:
    """Measure each form on the tokens behind the first `context_count`; the first key is "kept".

    Nothing stored.
    """
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
    plan = RestorePlan.uniform(Method[form.kind.name], len(adapter.layers))
    source = HeldRows(lambda stream: stored[stream][0])
    with pipeline_for(adapter) as pipeline:
        cache = restored_cache(pipeline, adapter, plan, source, positions=torch.arange(token_count))
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
    nats = functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    losses = functional.cross_entropy(logits[:-1], torch.tensor(list(token_ids[1:])))
    agreement = float((logits.argmax(-1) == standard.argmax(-1)).float().mean())
    return Divergence(float(nats.mean()), float(losses.exp()), agreement, bytes_per_token, float(nats.max()))


@dataclass(frozen=True, slots=True)
class Stored:
    """One layout, in seconds and bytes.

    `pass_s` is the forward pass with its rows taken out, `save_s` from its end until they are durable,
    `restore_s` from the lease to the cache. `slot_bytes_per_token` is what lies on SSD, headers and padding
    included.
    """

    divergence: Divergence
    slot_bytes_per_token: float
    pass_s: float
    save_s: float
    restore_s: float


def stored(
    adapter: Adapter,
    client: Client,
    spec: ModelSpec,
    plans: Sequence[str],
    token_ids: Sequence[int],
    *,
    context_count: int,
    repeat_count: int = 3,
    rounding: Callable[[int], Tensor | None] = lambda _layer: None,
    step: Callable[[str], None] = lambda _plan: None,
) -> dict[str, Stored]:
    """Measure each plan, in its compact form, on the tokens behind the first `context_count`.

    `rounding`: how deltas are rounded. Raises what saving and reading raise; a save that ended early is its
    error.
    """
    context, new = token_ids[:context_count], token_ids[context_count:]
    kept = DynamicCache(config=adapter.model.config)
    _pass(adapter, kept, context)
    standard = logits_of(adapter, copy.deepcopy(kept), new)
    model = client.models.register(spec)
    found = {}
    for text in plans:
        step(text)
        plan = RestorePlan.parse(text)
        times = []
        for _ in range(repeat_count):
            session = client.sessions.create(model, layout=plan.streams()).info
            times.append(_save(adapter, client, model, plan, session, context, rounding))
        pass_s, save_s = map(median, zip(*times, strict=True))
        with pipeline_for(adapter) as pipeline:
            cache, restore_s = _restore(pipeline, adapter, client, model, plan, session.name, repeat_count)
        row_bytes = sum(item.row_bytes for item in spec.resolve(plan.streams()))
        found[text] = Stored(
            compare(logits_of(adapter, cache, new), standard, new, row_bytes),
            client.sessions.get(session.name).ssd_bytes / context_count,
            pass_s,
            save_s,
            restore_s,
        )
    return found


def restored_through(
    adapter: Adapter,
    client: Client,
    spec: ModelSpec,
    text: str,
    token_ids: Sequence[int],
    rounding: Callable[[int], Tensor | None] = lambda _layer: None,
) -> Cache:
    """The cache of some tokens, saved by a plan in its compact form and restored. Raises as `stored` does."""
    model, plan = client.models.register(spec), RestorePlan.parse(text)
    session = client.sessions.create(model, layout=plan.streams()).info
    _save(adapter, client, model, plan, session, token_ids, rounding)
    with pipeline_for(adapter) as pipeline:
        return _restore(pipeline, adapter, client, model, plan, session.name, 1)[0]


def _save(
    adapter: Adapter,
    client: Client,
    model: CallerModel,
    plan: RestorePlan,
    session: SessionInfo,
    token_ids: Sequence[int],
    rounding: Callable[[int], Tensor | None],
) -> tuple[float, float]:
    """Run the tokens and save what comes out; seconds of the pass, and from there until all is durable."""
    streams = [stream for stream in plan.streams() if stream != TOKENS]
    cache = DynamicCache(config=adapter.model.config)
    device = adapter.layers[0].device
    with Saver(client, model, plan.streams(), device=device, rounding=rounding) as saver:
        saver.open(session)
        begin_s = time.perf_counter()
        with (
            Capture(adapter, streams, saver.put, is_on_host=False),
            saver.passing([Slice(session.name, 0, len(token_ids))], token_ids),
        ):
            _pass(adapter, cache, token_ids)
        passed_s = time.perf_counter()
        saver.finish(session.name, durability=Durability.DISK)
        failure = saver.wait(session.name)
        if failure is not None:
            raise failure
        return passed_s - begin_s, time.perf_counter() - passed_s


def _pass(adapter: Adapter, cache: Cache, token_ids: Sequence[int]) -> None:
    with torch.no_grad():
        adapter.base(input_ids=torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True)


def _restore(
    pipeline: Pipeline,
    adapter: Adapter,
    client: Client,
    model: CallerModel,
    plan: RestorePlan,
    name: str,
    repeat_count: int,
) -> tuple[Cache, float]:
    """The cache, and the median of the seconds that it took."""
    taken = []
    for _ in range(repeat_count):
        begin_s = time.perf_counter()
        with client.sessions.open(name, model).read(streams={TOKENS, *plan.streams()}) as rows:
            ids = torch.tensor(rows.token_ids())
            source = LeasedSource(rows)
            cache = restored_cache(
                pipeline, adapter, plan, source, positions=torch.arange(len(ids)), token_ids=ids
            )
        taken.append(time.perf_counter() - begin_s)
    return cache, median(taken)
