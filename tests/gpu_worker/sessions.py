"""A saved session of a tiny model: what capture saw, and the run that was never dropped."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from tiny_models import VOCABULARY_SIZE, build
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import StateKind, Stream, StreamSpec
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, continue_greedy, prefill
from gpu_worker.forms.rows import stored_dtype
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline, Host
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import RestorePlan, RestoreSchedule
from lab.quality.restoring import HeldRows

PROMPT_TOKENS = 70
DECODED_TOKENS = 12
NEW_TOKENS = 16
RELATIVE_BOUND = 1e-5
RESTORE_TIMEOUT_S = 60.0


def never_dropped(
    model: PreTrainedModel, turns: Sequence[Sequence[int]], reply_tokens: int
) -> list[list[int]]:
    """The replies to these turns of a conversation whose cache stays where it is."""
    kept = DynamicCache(config=model.config)
    replies = []
    for turn in turns:
        reply = continue_greedy(model, kept, turn, max_new_tokens=reply_tokens, eos_token_ids=())
        replies.append(reply.token_ids)
        prefill(model, kept, reply.token_ids[-1:])
    return replies


def history_of(turns: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> list[int]:
    """All that was said in these turns, to which there may be more replies."""
    return [token for turn, reply in zip(turns, replies, strict=False) for token in (*turn, *reply)]


def made_once() -> tuple[Callable[[str], PreTrainedModel], Callable[[str], Adapter]]:
    """Two functions of a tiny model's name, for a module's own: its model, and what that has proven."""
    model = cache(build)
    return model, cache(lambda name: adapt(model(name)))


@dataclass(frozen=True)
class Conversation:
    """A conversation with a tiny Llama whose cache stays where it is: what other caches must say too."""

    model_id: str
    turns: Sequence[Sequence[int]]
    reply_tokens: int

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, the same for all turns."""
        torch.set_num_threads(1)
        return build("llama")

    @cached_property
    def adapter(self) -> Adapter:
        """What the model has proven."""
        return adapt(self.model)

    @cached_property
    def spec(self) -> ModelSpec:
        """As the store knows it."""
        return model_spec(self.model, model_id=self.model_id)

    @cached_property
    def replies(self) -> list[list[int]]:
        """The reply to each turn."""
        return never_dropped(self.model, self.turns, self.reply_tokens)

    def history(self, turn_count: int) -> list[int]:
        """All that was said in the first turns."""
        return history_of(self.turns[:turn_count], self.replies)


def restored_cache(
    adapter: Adapter,
    plan: RestorePlan,
    source: HeldRows | Callable[[Stream], Tensor],
    *,
    positions: Tensor,
    token_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Cache:
    """The cache of a session that a pipeline of its own restores by the plan. Raises why it could not."""
    count = len(positions)
    target = CacheTarget(adapter, count, cache)
    first_tokens = [target.first_token(layer) for layer in range(target.layer_count)]
    schedule = RestoreSchedule.of_methods(plan, count, first_tokens)
    with (
        Pipeline(Host(), PipelineSettings(slot_bytes=1 << 16, slot_count=2)) as pipeline,
        pipeline.start(
            schedule,
            source if isinstance(source, HeldRows) else HeldRows(source),
            target,
            Modules(adapter, positions),
            deadline=Deadline.after_s(RESTORE_TIMEOUT_S),
            token_ids=token_ids,
        ) as restoration,
    ):
        restoration.wait_all()
    return target.cache


@dataclass(frozen=True)
class Session:
    """One turn that was saved while it ran, and the turn after it on the cache that stayed."""

    adapter: Adapter
    token_ids: Tensor
    rows: dict[Stream, Tensor]
    kept_cache: Cache
    next_ids: list[int]
    expected_ids: list[int]

    @property
    def token_count(self) -> int:
        """Tokens whose state was saved."""
        return len(self.token_ids)

    @property
    def positions(self) -> Tensor:
        """Where they stand: 0..T-1."""
        return torch.arange(self.token_count)

    def restore(self, plan: str, *, positions: Tensor | None = None, cache: Cache | None = None) -> Cache:
        """The session restored by the plan in its compact form."""
        return restored_cache(
            self.adapter,
            RestorePlan.parse(plan),
            self.rows.__getitem__,
            positions=self.positions if positions is None else positions,
            token_ids=self.token_ids,
            cache=cache,
        )

    def continue_on(self, cache: Cache) -> list[int]:
        """The next turn, generated on `cache`, which it extends."""
        return continue_greedy(self.adapter.model, cache, self.next_ids, max_new_tokens=NEW_TOKENS).token_ids


@cache
def saved_session(name: str, dtype: torch.dtype = torch.float32, layer_count: int = 3) -> Session:
    """Prefill a prompt, decode a reply, save all streams of both; then keep the cache and go on."""
    torch.set_num_threads(1)
    adapter = adapt(build(name, dtype=dtype, layer_count=layer_count))
    model = adapter.model
    pieces: dict[Stream, list[Tensor]] = defaultdict(list)
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(VOCABULARY_SIZE, (PROMPT_TOKENS,), generator=generator).tolist()
    kept = DynamicCache(config=model.config)

    def sink(layer: int, kind: StateKind, rows: Tensor) -> None:
        pieces[Stream(layer, kind)].append(rows)

    with Capture(adapter, all_streams(adapter), sink):
        reply = continue_greedy(model, kept, prompt, max_new_tokens=DECODED_TOKENS + 1).token_ids
    rows = {stream: torch.cat(parts) for stream, parts in pieces.items()}
    session = Session(adapter, torch.tensor(prompt + reply[:-1]), rows, kept, [reply[-1], 5, 3, 8], [])
    session.expected_ids.extend(session.continue_on(copy.deepcopy(kept)))
    return session


def all_streams(adapter: Adapter) -> list[Stream]:
    """Every stream the model can save, token ids apart."""
    kinds = (StateKind.HIDDEN, adapter.kind)
    return [Stream(layer, kind) for layer in range(len(adapter.layers)) for kind in kinds]


def rows_of(data: memoryview, spec: StreamSpec) -> Tensor:
    """Rows [T, row] of the bytes that the store keeps of them."""
    stored = torch.empty(data.nbytes // spec.row_bytes, spec.row_bytes, dtype=torch.uint8)
    np.copyto(stored.numpy(), np.frombuffer(data, np.uint8).reshape(stored.shape))
    return stored.view(stored_dtype(spec))


def relative_errors(actual: Cache, expected: Cache) -> list[float]:
    """Largest difference over largest magnitude, of keys and of values, layer by layer."""
    return [
        relative_error(mine, theirs)
        for layer in range(len(expected.layers))
        for mine, theirs in zip(contents(actual, layer), contents(expected, layer), strict=True)
    ]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over largest magnitude of two tensors of one shape."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def contents(cache: Cache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values that a cache holds for one layer."""
    held = cache.layers[layer]
    assert isinstance(held, CacheLayerMixin)
    assert held.keys is not None
    assert held.values is not None
    return held.keys, held.values
