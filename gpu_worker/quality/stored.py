"""What a layout costs through a real store: predictions, bytes on disk, and the time to save and to restore.

A context is run once per layout, saved by the code that saves sessions, read back and restored, and the tokens
that follow are predicted from it and from the cache that was never dropped.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ctxcache.client import CallerModel, Client, SessionRows
from ctxcache.format.layout import SEGMENT_TOKENS, SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.v1.session_pb2 import DURABILITY_DISK, Session
from gpu_worker.capture import Capture
from gpu_worker.families import Adapter
from gpu_worker.plan import RestorePlan
from gpu_worker.quality.divergence import Divergence, compare, logits_of
from gpu_worker.restore import ReadRows, restore_cache
from gpu_worker.rows import in_batches, token_ids_of, unpack_rows
from gpu_worker.saving import Saver, Slice


@dataclass(frozen=True, slots=True)
class Stored:
    """One layout, in seconds and bytes.

    `pass_s` is the forward pass with its rows taken out, `save_s` from its end until they are durable, `restore_s`
    from the lease to the cache. `slot_bytes_per_token` counts headers and padding of full segments.
    """

    divergence: Divergence
    slot_bytes_per_token: float
    pass_s: float
    save_s: float
    restore_s: float


def stored(
    adapter: Adapter, client: Client, spec: ModelSpec, plans: Sequence[str], token_ids: Sequence[int], *,
    context_count: int, repeat_count: int = 3, step: Callable[[str], None] = lambda _plan: None,
) -> dict[str, Stored]:  # fmt: skip
    """Measure each plan, in its compact form, on the tokens behind the first `context_count`.

    Raises what saving and reading raise; a save that ended early is its error.
    """
    context, new = token_ids[:context_count], token_ids[context_count:]
    kept = DynamicCache(config=adapter.model.config)
    _pass(adapter, kept, context)
    standard = logits_of(adapter, copy.deepcopy(kept), new)
    model = client.register_model(spec)
    found = {}
    for text in plans:
        step(text)
        plan = RestorePlan.parse(text)
        times = []
        for _ in range(repeat_count):
            session = client.create_session(model.name, layout=plan.streams())
            times.append(_save(adapter, client, model, plan, session, context))
        pass_s, save_s = map(median, zip(*times, strict=True))
        cache, restore_s = _restore(adapter, client, model, plan, session.name, repeat_count)
        layout = SegmentLayout(spec.resolve(plan.streams()))
        row_bytes = sum(item.row_bytes for item in layout.specs)
        found[text] = Stored(
            compare(logits_of(adapter, cache, new), standard, new, row_bytes),
            layout.size_bytes / SEGMENT_TOKENS, pass_s, save_s, restore_s,
        )  # fmt: skip
    return found


def _save(
    adapter: Adapter,
    client: Client,
    model: CallerModel,
    plan: RestorePlan,
    session: Session,
    token_ids: Sequence[int],
) -> tuple[float, float]:
    """Run the tokens and save what comes out; seconds of the pass, and from there until all is durable."""
    streams = [stream for stream in plan.streams() if stream != TOKENS]
    cache = DynamicCache(config=adapter.model.config)
    with Saver(client, model, plan.streams(), device=adapter.layers[0].device) as saver:
        saver.open(session)
        begin_s = time.perf_counter()
        with (
            Capture(adapter, streams, saver.put, is_on_host=False),
            saver.passing([Slice(session.name, 0, len(token_ids))], token_ids),
        ):
            _pass(adapter, cache, token_ids)
        passed_s = time.perf_counter()
        saver.finish(session.name, durability=DURABILITY_DISK)
        failure = saver.wait(session.name)
        if failure is not None:
            raise failure
        return passed_s - begin_s, time.perf_counter() - passed_s


def _pass(adapter: Adapter, cache: Cache, token_ids: Sequence[int]) -> None:
    with torch.no_grad():
        adapter.base(input_ids=torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True)


def _restore(
    adapter: Adapter, client: Client, model: CallerModel, plan: RestorePlan, name: str, repeat_count: int
) -> tuple[Cache, float]:
    """The cache, and the median of the seconds that it took."""
    taken = []
    for _ in range(repeat_count):
        begin_s = time.perf_counter()
        with client.read(name, model, streams={TOKENS, *plan.streams()}) as rows:
            ids = torch.tensor(token_ids_of(rows.array(TOKENS)))
            read = _reader(rows, model.spec, plan)
            cache = restore_cache(adapter, plan, read, positions=torch.arange(len(ids)), token_ids=ids)
            rows.check()
        taken.append(time.perf_counter() - begin_s)
    return cache, median(taken)


def _reader(rows: SessionRows, spec: ModelSpec, plan: RestorePlan) -> ReadRows:
    specs = {item.stream: item for item in spec.resolve(plan.streams())}

    def read(stream: Stream, begin: int, end: int) -> Iterator[Tensor]:
        for batch in in_batches(rows.pieces(stream), begin, end):
            yield unpack_rows(batch.data.cast("B"), specs[stream])

    return read
