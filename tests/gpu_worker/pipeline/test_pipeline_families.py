"""Every family through the pipeline: its cache is the engine's own, however the plan mixes methods."""

import pytest
import torch
from sessions import RELATIVE_BOUND, contents, relative_errors, saved_session
from slow_pipelines import is_equal, poisoned_target, restored, slowed, start
from tiny_models import CONFIGS
from transformers import StaticCache


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_unified", [True, False])
def test_saved_rows_restore_bit_for_bit(name: str, *, is_unified: bool) -> None:
    """K/V and latents saved in prefill and in decode give exactly the engine's cache, in bf16."""
    session = saved_session(name, torch.bfloat16)

    with slowed(is_unified=is_unified) as pipeline:
        cache = restored(pipeline, session)

    assert is_equal(cache, session)


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "deepseek"])
def test_fp16_rows_restore_bit_for_bit(name: str) -> None:
    """The third type that engines keep their caches in."""
    session = saved_session(name, torch.float16)

    with slowed() as pipeline:
        cache = restored(pipeline, session)

    assert is_equal(cache, session)


@pytest.mark.parametrize("plan", ["hidden:0-2", "tokens:0-2", "tokens:0,hidden:1,saved:2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_mix_of_methods_continues_as_if_never_dropped(name: str, plan: str) -> None:
    """In fp32 the cache is the engine's to 1e-5 and the next text the same."""
    session = saved_session(name)

    with slowed() as pipeline:
        cache = restored(pipeline, session, plan)

    assert max(relative_errors(cache, session.kept_cache)) < RELATIVE_BOUND
    assert session.continue_on(cache) == session.expected_ids


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "falcon-new", "opt", "deepseek"])
@pytest.mark.parametrize("plan", ["saved:0-2", "tokens:0,hidden:1-2"])
def test_static_cache_takes_a_restored_session(name: str, plan: str) -> None:
    """A preallocated cache is filled through its own update and continues with the same text."""
    session = saved_session(name)
    static = StaticCache(config=session.adapter.model.config, max_cache_len=128)

    with slowed() as pipeline:
        cache = restored(pipeline, session, plan, cache=static)

    assert cache is static
    assert session.continue_on(cache) == session.expected_ids


@pytest.mark.parametrize("room", [82, 83])
def test_a_static_cache_may_have_no_room_to_spare(room: int) -> None:
    """As many tokens as were saved, and one more: each is where it was."""
    session = saved_session("llama")
    static = StaticCache(config=session.adapter.model.config, max_cache_len=room)

    with slowed() as pipeline:
        cache = restored(pipeline, session, cache=static)

    assert session.token_count == 82
    assert int(cache.get_seq_length()) == 82
    for layer in range(3):
        for mine, theirs in zip(contents(cache, layer), contents(session.kept_cache, layer), strict=True):
            assert torch.equal(mine[:, :, :82], theirs)


def test_layers_may_be_waited_for_in_any_order() -> None:
    """The last one first, by an engine that asks as it likes: each is whole when it is said to be."""
    session = saved_session("llama")
    target = poisoned_target(session)

    with slowed("compute") as pipeline, start(pipeline, session, target) as restoration:
        for layer in (2, 0, 1, 2):
            restoration.wait(layer)
            for mine, theirs in zip(target.tensors(layer), contents(session.kept_cache, layer), strict=True):
                assert torch.equal(mine, theirs)
