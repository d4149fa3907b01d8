"""Every family, every method: the restored cache is the engine's own and the text goes on the same."""

import copy

import pytest
import torch
from sessions import RELATIVE_BOUND, Session, relative_errors, saved_session
from tiny_models import CONFIGS
from transformers import StaticCache

from ctxcache.format.streams import StateKind, Stream

LAST = 2


def _plan(session: Session, text: str) -> str:
    return text.replace("saved", session.adapter.kind.name.lower())


@pytest.mark.parametrize("plan", ["hidden:0-2", "tokens:0-2", "tokens:0,hidden:1,saved:2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_restored_session_continues_as_if_never_dropped(name: str, plan: str) -> None:
    """In fp32 a session restored by any method has the engine's cache to 1e-5 and the same next text."""
    session = saved_session(name)

    cache = session.restore(_plan(session, plan))

    assert max(relative_errors(cache, session.kept_cache)) < RELATIVE_BOUND
    assert session.continue_on(cache) == session.expected_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_kv_restores_bit_for_bit(name: str) -> None:
    """Rows of K and V (or latents) saved in prefill and in decode give exactly the engine's cache."""
    session = saved_session(name)

    cache = session.restore(_plan(session, "saved:0-2"))

    assert relative_errors(cache, session.kept_cache) == [0.0] * 6
    assert session.continue_on(cache) == session.expected_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_kv_restores_bit_for_bit_in_bf16(name: str) -> None:
    """The same holds in bf16, where the text may still differ from run to run."""
    session = saved_session(name, torch.bfloat16)

    cache = session.restore(_plan(session, "saved:0-2"))

    assert relative_errors(cache, session.kept_cache) == [0.0] * 6


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_in_bf16_restores_within_rounding(name: str) -> None:
    """In bf16 projecting saved hidden states differs from the engine's cache by at most 2 % of its range."""
    session = saved_session(name, torch.bfloat16)

    cache = session.restore("hidden:0-2")

    assert max(relative_errors(cache, session.kept_cache)) < 0.02


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "falcon-new", "opt", "deepseek"])
@pytest.mark.parametrize("plan", ["saved:0-2", "tokens:0,hidden:1-2"])
def test_static_cache_takes_a_restored_session(name: str, plan: str) -> None:
    """A preallocated cache filled by restore continues with the same text."""
    session = saved_session(name)
    static = StaticCache(config=session.adapter.model.config, max_cache_len=128)

    cache = session.restore(_plan(session, plan), cache=static)

    assert cache is static
    assert session.continue_on(cache) == session.expected_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_positions_or_layers_do_not_pass(name: str) -> None:
    """The comparison notices positions off by one and two layers swapped, so equality means something."""
    session = saved_session(name)
    swapped = copy.copy(session)
    kind = session.adapter.kind
    object.__setattr__(swapped, "rows", {s: session.rows[_swap(s, kind)] for s in session.rows})

    exchanged = swapped.restore(_plan(session, "saved:0-2"))
    if session.adapter.is_relocatable:
        shifted = session.restore(_plan(session, "saved:0-2"), positions=session.positions + 1)
        assert max(relative_errors(shifted, session.kept_cache)) > 100 * RELATIVE_BOUND

    assert max(relative_errors(exchanged, session.kept_cache)) > 100 * RELATIVE_BOUND
    assert session.continue_on(exchanged) != session.expected_ids


def _swap(stream: Stream, kind: StateKind) -> Stream:
    layers = {0: LAST, LAST: 0}
    return Stream(layers.get(stream.layer, stream.layer), stream.kind) if stream.kind is kind else stream


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_diverse(name: str) -> None:
    """The tiny models do not repeat themselves, so that equal text is evidence of an equal cache."""
    assert len(set(saved_session(name).expected_ids)) >= 5
