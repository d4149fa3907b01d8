"""The fifth story: a turn whose session lies only on SSD, from the engine's call to its saved rows.

Store and engine are in this process, so that both sides of every request are traced, in every thread. Lanes
and savers run at the same time and wait for each other more or less often, by a percent of all calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import ctxcache
from ctxcache.client import Client
from ctxcache.settings.config import Settings
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from tests.client.live_server import LiveServer
from tests.gpu_worker.tiny_models import build
from tests.stories.store import still, undisturbed
from tests.stories.tracer import PRODUCT, Told, Tracer, Walk

REPETITIONS = 8
WARM = 3
MODEL = "llama"
FIRST, SECOND = list(range(5, 75)), [3, 4, 5]
REPLY_TOKENS = 4


def tell(directory: Path) -> Told:
    """Several restored turns of new sessions."""
    torch.set_num_threads(1)
    tracer = Tracer(*PRODUCT)
    with tracer.installed(), undisturbed(), _store(directory) as client:
        model = build(MODEL)
        spec = model_spec(model, model_id=MODEL)
        plan = RestorePlan.uniform(Method.HIDDEN, spec.layer_count)
        walks = list[Walk]()
        with TransformersEngine(model, client, spec, plan) as engine:
            for number in range(WARM):
                _turn(tracer, client, engine, f"warm{number}")
            walks += [_turn(tracer, client, engine, f"story{number}") for number in range(REPETITIONS)]
    return Told.of(walks)


def _turn(tracer: Tracer, client: Client, engine: TransformersEngine, session_id: str) -> Walk:
    first = engine.turn(session_id, FIRST, max_new_tokens=REPLY_TOKENS)
    engine.wait(session_id)
    assert client.admin.demote_session(f"sessions/{session_id}").dram_bytes == 0
    with tracer.walk() as walk:
        second = engine.turn(session_id, SECOND, max_new_tokens=REPLY_TOKENS)
        engine.wait(session_id)
    assert second.reused_token_count == len(FIRST) + len(first.token_ids), second
    return walk


@contextmanager
def _store(directory: Path) -> Iterator[Client]:
    settings = Settings(
        data_directory=directory / "data",
        listen="",
        unix_socket=str(directory / "story.sock"),
        metrics_listen="",
        arena_size_bytes=16 << 20,
        ssd_size_bytes=64 << 20,
        arena_huge_pages="off",
    )
    live = LiveServer(settings)
    try:
        live.run(still(live.server))
        with ctxcache.connect(live.target, access="local") as client:
            yield client
    finally:
        live.stop()
        live.close()
