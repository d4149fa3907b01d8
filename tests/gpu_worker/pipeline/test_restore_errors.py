"""Every way a restore can be fed wrongly raises its own error and hands out no cache."""

from typing import Any

import pytest
import torch
from sessions import contents, relative_error, restored_cache, saved_session
from tiny_models import build, random_model
from transformers import (
    DynamicCache,
    GPT2Config,
    StaticCache,
)

from ctxcache.client.arena import Bytes
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.errors import (
    RestoreFailed,
    ShapeMismatch,
    UnsupportedArchitecture,
    UnsupportedDtype,
)
from gpu_worker.model.proof import adapt
from gpu_worker.pipeline.compute import Modules, Restorer
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method, RestorePlan
from lab.quality.restoring import HeldRows

T = 82
KV_SIZE = 64


@pytest.mark.parametrize(
    ("method", "shape", "begin"),
    [
        (Method.HIDDEN, (8, 63), 0),
        (Method.KV, (8, KV_SIZE // 2), 0),
        (Method.KV, (8, 2, KV_SIZE // 2), 0),
        (Method.KV, (8, KV_SIZE), T - 7),
        (Method.KV, (8, KV_SIZE), -1),
        (Method.HIDDEN, (T + 1, 64), 0),
    ],
)
def test_ill_shaped_rows_are_refused(method: Method, shape: tuple[int, ...], begin: int) -> None:
    """Rows of another width, rank or token range raise ShapeMismatch naming layer, method and token."""
    session = saved_session("llama")
    restorer = Restorer(session.adapter, session.positions)

    with pytest.raises(ShapeMismatch, match=f"layer 1 {method.value} rows at token {begin}"):
        restorer.layer(1, method, torch.zeros(shape), begin=begin)


def test_rows_of_another_type_are_refused() -> None:
    """Rows are never converted: bf16 rows for an fp32 model raise UnsupportedDtype."""
    session = saved_session("llama")

    with pytest.raises(UnsupportedDtype, match=r"expected torch.float32, got torch.bfloat16"):
        Restorer(session.adapter, session.positions).layer(
            0, Method.KV, torch.zeros(1, KV_SIZE, dtype=torch.bfloat16)
        )


@pytest.mark.parametrize(
    ("layer", "method", "field"), [(3, Method.KV, "layer"), (0, Method.LATENT, "method")]
)
def test_layers_and_methods_the_model_lacks_are_refused(layer: int, method: Method, field: str) -> None:
    """A layer past the last or a method of another family raises InvalidArgument for its field."""
    session = saved_session("llama")

    with pytest.raises(InvalidArgument) as caught:
        Restorer(session.adapter, session.positions).layer(layer, method, torch.zeros(1, KV_SIZE))

    assert caught.value.field == field


def test_short_layer_gives_no_cache() -> None:
    """When the last rows of one layer are missing, restore names the stream and hands nothing out."""
    session = saved_session("llama")

    class Short:
        """The rows that a client reads: the third layer ends after 64 tokens."""

        def pieces(self, stream: Stream) -> list[Any]:
            rows = session.rows[stream].view(torch.uint8).numpy()
            return [rows[:40], rows[40 : 64 if stream.layer == 2 else T]]

    class FromClient(HeldRows):
        def __init__(self) -> None:
            super().__init__(session.rows.__getitem__)
            # Any: of a client's rows only the pieces are asked for.
            rows: Any = Short()
            self.fill = LeasedSource(rows).fill  # type: ignore[method-assign]

    with pytest.raises(ShapeMismatch, match=r"kv.* rows: expected shape up to 64, got \[0, 82\)"):
        restored_cache(
            session.adapter, RestorePlan.uniform(Method.KV, 3), FromClient(), positions=session.positions
        )


def test_layers_may_arrive_interleaved() -> None:
    """Pieces of different layers in any order give the same cache as layer after layer."""
    session = saved_session("gemma3")
    compute = Modules(session.adapter, session.positions)
    target = CacheTarget(session.adapter, T)
    for step in (0, 1):
        for layer in (2, 0, 1):
            first = target.first_token(layer)
            middle = (first + T) // 2
            begin, end = ((first, middle), (middle, T))[step]
            rows = session.rows[Stream(layer, StateKind.KV)][begin:end].view(torch.uint8)
            compute.restore(layer, Method.KV, rows, begin, target.room(layer, begin, end))

    cache = target.cache

    assert all(
        relative_error(contents(cache, i)[0], contents(session.kept_cache, i)[0]) == 0.0 for i in range(3)
    )
    assert session.continue_on(cache) == session.expected_ids


def test_sliding_layers_are_read_only_as_far_as_they_attend() -> None:
    """A window of W tokens needs W-1 rows, and the layer still counts all tokens of the session."""
    session = saved_session("mistral-sliding")
    asked: list[tuple[int, int]] = []

    class Asked(HeldRows):
        def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
            asked.append((begin, end))
            super().fill(stream, begin, end, into)

    source = Asked(session.rows.__getitem__)
    cache = restored_cache(
        session.adapter, RestorePlan.uniform(Method.KV, 3), source, positions=session.positions
    )

    assert asked == [(T - 23, T)] * 3
    assert cache.get_seq_length() == T


def test_errors_of_the_reader_are_the_cause() -> None:
    """An error of a bug in reading reaches the caller as the cause of a failed restore."""
    session = saved_session("llama")

    class Broken(HeldRows):
        def fill(self, *_: Any, **__: Any) -> None:  # Any: never looked at
            raise KeyError("planted")

    source = Broken(session.rows.__getitem__)
    with pytest.raises(RestoreFailed, match="planted") as caught:
        restored_cache(
            session.adapter, RestorePlan.uniform(Method.KV, 3), source, positions=session.positions
        )

    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("plan", "field"), [("kv:0-1", "plan"), ("tokens:0,kv:1-2", "token_ids")])
def test_plans_that_do_not_fit_are_refused(plan: str, field: str) -> None:
    """A plan for another number of layers, or one that recomputes without token ids, is refused."""
    session = saved_session("llama")

    with pytest.raises(InvalidArgument) as caught:
        restored_cache(
            session.adapter,
            RestorePlan.parse(plan),
            session.rows.__getitem__,
            positions=session.positions,
        )

    assert caught.value.field == field


def test_token_ids_of_another_length_are_refused() -> None:
    """Recomputing needs one token id per position."""
    session = saved_session("llama")

    with pytest.raises(ShapeMismatch, match="token ids"):
        restored_cache(
            session.adapter,
            RestorePlan.uniform(Method.TOKENS, 3),
            session.rows.__getitem__,
            positions=session.positions,
            token_ids=session.token_ids[1:],
        )


def test_cache_in_use_is_refused() -> None:
    """Restore fills an empty cache only, so that no other session's state can be mixed in."""
    session = saved_session("llama")

    with pytest.raises(InvalidArgument, match="cache: is not empty"):
        session.restore("kv:0-2", cache=session.kept_cache)


def test_static_cache_without_room_is_refused() -> None:
    """A preallocated cache shorter than the session is refused before anything is read."""
    session = saved_session("llama")
    small = StaticCache(config=session.adapter.model.config, max_cache_len=T - 1)

    with pytest.raises(InvalidArgument, match="room for 81 of 82 tokens"):
        session.restore("kv:0-2", cache=small)


def test_empty_session_restores_to_an_empty_cache() -> None:
    """A session of no tokens is a cache of no tokens."""
    session = saved_session("llama")

    cache = restored_cache(
        session.adapter,
        RestorePlan.uniform(Method.KV, 3),
        session.rows.__getitem__,
        positions=torch.arange(0),
    )

    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            GPT2Config(vocab_size=9, n_embd=8, n_head=2, n_layer=1, add_cross_attention=True),
            "cross-attention",
        ),
    ],
)
def test_unsupported_models_name_themselves_and_why(config: Any, problem: str) -> None:
    """A model that cannot be served raises UnsupportedArchitecture with its class and the reason."""
    with pytest.raises(UnsupportedArchitecture, match=problem):
        adapt(random_model(config))


def test_length_dependent_angles_are_refused() -> None:
    """Rotary angles that change as the session grows cannot be restored exactly and are refused."""
    model = build("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

    with pytest.raises(UnsupportedArchitecture, match="'dynamic' depend on the session's length"):
        adapt(model)
