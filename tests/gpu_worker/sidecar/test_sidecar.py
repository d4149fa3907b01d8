"""The sidecar whole: a worker's process, a store's process, and an engine whose cache is in shared memory."""

from pathlib import Path

import pytest
from attached import BLOCKS
from paged_engine import (
    PROMPT_TOKENS,
    conversation,
    generate,
    running_engine,
    write_weights,
)

from ctxcache.format.streams import StateKind
from gpu_worker.sidecar.client import WorkerClient


@pytest.mark.parametrize(
    ("family", "kind", "order"),
    [
        ("llama", StateKind.KV, "tokens_first"),
        ("llama", StateKind.HIDDEN, "heads_first"),
        ("qwen3", StateKind.HIDDEN, "tokens_first"),
        ("deepseek-halves", StateKind.LATENT, "tokens_first"),
        ("opt", StateKind.HIDDEN, "heads_first"),
    ],
)
def test_an_engine_that_lost_its_cache_goes_on_as_if_nothing_had_been(
    client: WorkerClient, weights: Path, session_id: str, family: str, kind: StateKind, order: str
) -> None:
    """Saved through the worker, lost, restored through it: the engine's own rows, and the same words."""
    prompt, rows, held, expected = conversation(family)
    with (
        running_engine(family, order=order) as engine,
        client.attach(engine.hello(write_weights(family, weights))) as attached,
    ):
        engine.put(held, BLOCKS, PROMPT_TOKENS)
        before = engine.rows(BLOCKS, PROMPT_TOKENS)
        saved = {stream: part for stream, part in rows.items() if stream.kind is kind}
        session = attached.save(
            f"sessions/{session_id}", engine.stage(saved, prompt), write_offset=0, token_count=PROMPT_TOKENS
        )
        engine.poison()

        layers: list[int] = []
        result = attached.restore(
            session.name, BLOCKS, token_end=PROMPT_TOKENS, token_ids=prompt, on_layer=layers.append
        )

        assert result.is_restored, result
        assert layers == [0, 1, 2]
        after = engine.rows(BLOCKS, PROMPT_TOKENS)
        for mine, theirs in zip(after, before, strict=True):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert generate(family, engine.take(BLOCKS, PROMPT_TOKENS)) == expected
        assert result.methods == f"{kind.name.lower()}:0-2"
        assert result.actual.ToNanoseconds() > 0
        assert result.predicted.ToNanoseconds() > 0
