"""Connectors of one engine behind vLLM's MultiConnector, in all orders, and what is refused of them.

Run by `make engines`. vLLM hands the first connector's message about its blocks to all of them, and goes by
its own configuration and not by theirs.
"""

import itertools
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from gpu_worker.engines.vllm.handover import KEY
from lab.engines.vllm_process import VllmEngine
from tests.engines.foreign_connector import NIXLS
from tests.engines.vllm_small import model, plain, store
from tests.engines.vllm_tier import CHUNK_BYTES, FOUND, prompt_of, wait_for_blocks
from tests.server_process import ServerProcess

__all__ = ["model", "plain", "store"]

COUNT = 16
SESSION, OFFLOADING, FOREIGN = "CtxcacheConnector", "CtxcacheOffloadingConnector", "ForeignConnector"


def child(name: str, target: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """A connector's own configuration."""
    if name == FOREIGN:
        return {
            "kv_connector": name,
            "kv_role": role,
            "kv_connector_module_path": "tests.engines.foreign_connector",
        }
    extra = {"target": target} | extra
    if name == OFFLOADING:
        extra |= {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 1024 * CHUNK_BYTES,
        }
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def together(model: Path, log: Path, children: Sequence[dict[str, Any]], **outer: str) -> VllmEngine:
    """An engine with these connectors, and an own cache that has room for a prompt."""
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [*children]},
    } | outer
    options: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 48}
    return VllmEngine(model, None, log, kv_transfer_config=transfer, **options)


def asked(engine: VllmEngine, plain: VllmEngine, number: int, session: str | None = None) -> int:
    """Ask for a prompt, its reply compared; tokens that were not computed."""
    reply = engine.turn(prompt_of(number), session, COUNT)
    assert reply.finish_reason == "length"
    assert reply.token_ids == plain.turn(prompt_of(number), None, COUNT).token_ids
    return reply.cached_count


@pytest.mark.parametrize("order", [*itertools.permutations([SESSION, OFFLOADING])], ids="-".join)
def test_both_connectors_find_what_each_finds_alone(
    order: Sequence[str], model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """In either order: what one alone has saved is found, under the same layout and no other name."""
    for name in order:
        with together(model, tmp_path / "log", [child(name, store.target)]) as engine:
            number = 10 + order.index(name)
            assert asked(engine, plain, number, f"alone-{number}") == 0
    wait_for_blocks(store, FOUND // 32)
    children = [child(name, store.target) for name in order]
    with together(model, tmp_path / "log", children) as engine:
        for number in (10, 11):
            assert asked(engine, plain, number, f"alone-{number}") == FOUND
        assert asked(engine, plain, 12, "both") == 0
    with together(model, tmp_path / "log", children) as engine:
        assert asked(engine, plain, 12, "both") == FOUND
        store.signal(signal.SIGSTOP)
        try:
            for number in range(13, 16):
                asked(engine, plain, number, f"stopped-{number}")
            asked(engine, plain, 12, "both")
        finally:
            store.signal(signal.SIGCONT)


@pytest.mark.parametrize("name", [SESSION, OFFLOADING])
def test_no_layout_is_no_link(
    name: str, model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """Behind another connector with a handshake: nothing is saved or found, and that is said."""
    children = [child(FOREIGN, ""), child(name, store.target)]
    with together(model, tmp_path / "log", children) as engine:
        assert [asked(engine, plain, number, "alice") for number in (1, 2, 3)] == [0] * 3
        assert (
            "the context store is not used: MultiConnector hands on what its first connector says"
            in engine.log
        )
    with ctxcache.connect(store.target) as cache:
        stats = cache.admin.stats()
        assert (stats.session_count, stats.segment_count) == (0, 0)
    with together(model, tmp_path / "log", children) as engine:
        assert asked(engine, plain, 1, "alice") == 0


def test_rows_need_no_layout(model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path) -> None:
    """Behind another connector with a handshake, rows of K and V are saved and found."""
    children = [child(FOREIGN, ""), child(SESSION, store.target, state="kv", model_id="tiny")]
    for expected in (0, FOUND):
        with together(model, tmp_path / "log", children) as engine:
            assert asked(engine, plain, 1, "alice") == expected


@pytest.mark.parametrize("order", [*itertools.permutations([SESSION, FOREIGN])], ids="-".join)
def test_a_prompt_is_handed_over_beside_another_connector(
    order: Sequence[str], model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """Each says its own, since a key of two connectors ends vLLM's engine: Nixl's names are the other's."""
    children = [child(name, store.target, state="kv", model_id="tiny", timeout_s=60) for name in order]
    prompt = prompt_of(1)
    with together(model, tmp_path / "first", children) as first:
        request = {"prompt": prompt, "session": None, "count": 1, "says": {"do_remote_decode": True}}
        (reply,) = first.ask(request)
        own = f"{KEY}{store.target}"
        assert reply.says is not None
        assert reply.says.keys() - {"remote_prefill_cached_tokens"} == {own, *NIXLS}
        assert reply.says["remote_num_tokens"] == 1
    with together(model, tmp_path / "second", children) as second:
        (goes_on,) = second.ask(
            {"prompt": prompt, "session": None, "count": COUNT, "says": {own: reply.says[own]}}
        )
    assert goes_on.token_ids == plain.turn(prompt, None, COUNT).token_ids
    assert goes_on.cached_count == len(prompt) - 1


def test_two_stores_of_one_engine_both_have_a_conversation(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """Each connector's two sides are its own: a turn's save is over before the next one asks for it."""
    draw = random.Random(7)
    with ServerProcess(tmp_path / "second") as second:
        children = [child(SESSION, store.target), child(SESSION, second.target)]
        with together(model, tmp_path / "log", children) as engine:
            prompt = prompt_of(1)
            for turn in range(3):
                for filler in range(2):
                    engine.turn(prompt_of(100 + 2 * turn + filler, 700), f"other-{turn}-{filler}", 1)
                reply = engine.turn(prompt, "alice", COUNT)
                assert reply.token_ids == plain.turn(prompt, None, COUNT).token_ids
                assert (reply.cached_count > 0) == (turn > 0)
                prompt = [*prompt, *reply.token_ids, *(draw.randrange(3, 500) for _ in range(20))]
        counts = []
        for server in (store, second):
            with ctxcache.connect(server.target) as cache:
                counts.append(cache.sessions.get("sessions/alice").token_count)
        assert counts[0] == counts[1] >= len(prompt) - 20 - 32


@pytest.mark.parametrize(
    ("children", "outer", "told"),
    [
        ([SESSION], {"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy":"recompute" beside'),
        ([OFFLOADING], {"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy":"recompute" beside'),
        ([SESSION], {"kv_role": "kv_producer"}, 'say "kv_role":"kv_both" beside "kv_connector":"Multi'),
        ([OFFLOADING], {"kv_role": "kv_producer"}, 'say "kv_role":"kv_both" beside'),
        ([SESSION, SESSION], {}, "CtxcacheConnector of one engine twice for"),
        ([OFFLOADING, OFFLOADING], {}, "of one engine twice for their host memory: leave one out"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    children: Sequence[str],
    outer: dict[str, str],
    told: str,
    model: Path,
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """At the start, with the words that put it right: later a store's failure would be a request's."""
    engine = together(model, tmp_path / "log", [child(name, store.target) for name in children], **outer)
    with pytest.raises(RuntimeError, match="vLLM ended"), engine:
        pass
    assert told in engine.log
