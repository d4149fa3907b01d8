"""Truncation with sinks: kept rows stand at new positions, as if they had always been there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sessions import RELATIVE_BOUND, Session, contents, relative_error, restored_cache, saved_session
from tiny_models import ROPE_FAMILIES
from torch import Tensor
from transformers import DynamicCache
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_neox
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama

from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families.generation import prefill
from gpu_worker.planning.plan import RestorePlan

LIVE = [(0, 4), (40, 82)]


def _kept(rows: Tensor) -> Tensor:
    return torch.cat([rows[begin:end] for begin, end in LIVE])


def _restore_truncated(session: Session, kind: StateKind) -> DynamicCache:
    cache = restored_cache(
        session.adapter,
        RestorePlan.parse(f"{kind.name.lower()}:0-{len(session.adapter.layers) - 1}"),
        lambda stream: _kept(session.rows[stream]),
        positions=torch.arange(sum(end - begin for begin, end in LIVE)),
    )
    assert isinstance(cache, DynamicCache)
    return cache


@pytest.mark.parametrize(("name", "rotate"), [("llama", rotate_llama), ("neox", rotate_neox)])
def test_kept_keys_are_embedded_at_their_new_positions(
    name: str, rotate: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """A truncated session's keys are its saved keys rotated by transformers' own code for 0..n-1."""
    session = saved_session(name)
    adapter = session.adapter
    keys, _ = adapter.unpack(_kept(session.rows[Stream(1, StateKind.KV)]), 1)
    keys = keys.transpose(0, 1).unsqueeze(0)
    # Any: transformers types submodules as Tensor | Module.
    base: Any = adapter.base
    table = base.rotary_emb(keys, torch.arange(46).unsqueeze(0))

    restored = _restore_truncated(session, StateKind.KV)

    assert torch.equal(contents(restored, 1)[0], rotate(keys, keys, *table)[1])


@pytest.mark.parametrize("name", ROPE_FAMILIES)
def test_one_layer_truncation_equals_a_fresh_prefill(name: str) -> None:
    """With one layer, whose input knows no other token, truncation is exact; leaving positions is not."""
    session = saved_session(name, layer_count=1)
    fresh = DynamicCache(config=session.adapter.model.config)
    prefill(session.adapter.model, fresh, _kept(session.token_ids).tolist())
    is_windowed = session.adapter.layers[0].window is not None

    restored = _restore_truncated(session, session.adapter.kind)
    naive = session.restore(f"{session.adapter.kind.name.lower()}:0", positions=session.positions)

    rotated = 1 if session.adapter.kind is StateKind.LATENT else 0
    for half in (0, 1):
        assert relative_error(contents(restored, 0)[half], contents(fresh, 0)[half]) < RELATIVE_BOUND
    if not is_windowed:
        left = torch.cat([contents(naive, 0)[rotated][:, :, begin:end] for begin, end in LIVE], dim=2)
        assert relative_error(left, contents(fresh, 0)[rotated]) > 100 * RELATIVE_BOUND


@pytest.mark.parametrize("kind", [StateKind.HIDDEN, StateKind.KV])
def test_hidden_and_kv_truncate_alike(kind: StateKind) -> None:
    """Whether hidden states or K and V were saved, the truncated cache is the same to rounding."""
    session = saved_session("qwen3")

    cache = _restore_truncated(session, kind)

    reference = _restore_truncated(session, StateKind.KV)
    assert relative_error(contents(cache, 2)[0], contents(reference, 2)[0]) < RELATIVE_BOUND
