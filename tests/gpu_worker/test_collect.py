"""Rows of passes become rows of tokens."""

import numpy as np
import torch
from tiny_models import build
from transformers import DynamicCache

from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from gpu_worker.capture import Capture
from gpu_worker.collect import Collector, token_ids_of
from gpu_worker.families import adapt
from gpu_worker.generation import prefill
from gpu_worker.model_spec import model_spec
from gpu_worker.rows import unpack_rows

_KV = Stream(0, StateKind.KV)
_HIDDEN = Stream(0, StateKind.HIDDEN)


def _collector() -> Collector:
    return Collector(
        [StreamSpec(_KV, 8, DType.FLOAT32), StreamSpec(_HIDDEN, 12, DType.FLOAT32)],
    )


def _pass(collector: Collector, token_ids: list[int], fill: float) -> None:
    collector(0, StateKind.KV, torch.full((len(token_ids), 2), fill))
    collector(0, StateKind.HIDDEN, torch.full((len(token_ids), 3), fill))
    collector.passed(token_ids)


def test_passes_are_put_together_in_order() -> None:
    """Rows of three tokens and then one are four rows of every stream, token ids among them."""
    collector = _collector()
    _pass(collector, [7, 8, 9], 1.0)
    _pass(collector, [10], 2.0)

    rows = collector.take()

    assert token_ids_of(rows) == [7, 8, 9, 10]
    assert {stream: part.shape for stream, part in rows.items()} == {
        TOKENS: (4, 4),
        _KV: (4, 8),
        _HIDDEN: (4, 12),
    }
    assert rows[_KV].view(np.float32)[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_what_was_taken_is_gone() -> None:
    """A second take holds the tokens since the first."""
    collector = _collector()
    _pass(collector, [7, 8], 1.0)
    collector.take()
    _pass(collector, [9], 3.0)

    count = collector.token_count
    rows = collector.take()

    assert count == 1
    assert collector.token_count == 0
    assert token_ids_of(rows) == [9]
    assert rows[_HIDDEN].view(np.float32).tolist() == [[3.0, 3.0, 3.0]]


def test_a_models_own_passes_are_collected_bit_for_bit() -> None:
    """The bytes of a prefill in two pieces are the rows that capture saw."""
    model = build("llama")
    adapter = adapt(model)
    spec = next(
        item for item in model_spec(model, model_id="m").streams if item.stream == Stream(1, StateKind.KV)
    )
    collector, seen = Collector([spec]), []
    ids, cache = list(range(3, 40)), DynamicCache(config=model.config)

    def sink(layer: int, kind: StateKind, rows: torch.Tensor) -> None:
        seen.append(rows.clone())
        collector(layer, kind, rows)

    with Capture(adapter, [spec.stream], sink):
        prefill(model, cache, ids, piece_tokens=20)
    collector.passed(ids)
    rows = collector.take()

    assert torch.equal(unpack_rows(rows[spec.stream].data.cast("B"), spec), torch.cat(seen))
