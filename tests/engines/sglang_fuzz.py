"""Fuzz of SGLang's storage backend: whatever keys, places and pools come, its calls are answered.

Run by `make engines`; see `hostile` for a long run. Indices lie in the pool: they are SGLang's own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

import ctxcache
from tests.engines.hostile import COUNT, Hostile
from tests.engines.sglang_hicache import PAGE_TOKENS, KvPool, StatePool, backend_on, fill, keys_of
from tests.server_process import ServerProcess


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def problems_of(backend: Any, pool: KvPool, count: int) -> list[str]:
    """Calls in any order; those that raised, or answered for another number of pages."""
    hostile, problems = Hostile(3), list[str]()
    draw = hostile.draw

    def indices(page_count: int) -> torch.Tensor:
        kind = draw.random()
        if kind < 0.7:
            return (
                pool.indices(*(draw.randrange(31) for _ in range(page_count)))
                if page_count
                else torch.arange(0)
            )
        return torch.zeros(draw.choice((0, 1, PAGE_TOKENS - 1, 7 * PAGE_TOKENS)), dtype=torch.int64)

    def tensors(page_count: int) -> Any:
        made = [torch.zeros(draw.choice((1, 2, 2000)), draw.choice((1, 3))) for _ in range(page_count)]
        return draw.choice((made, [one.t() for one in made], made[1:], None, [None] * page_count))

    def transfers(keys: list[str]) -> list[PoolTransfer]:
        name = draw.choice((PoolName.KV, PoolName.MAMBA, "nowhere", hostile.text()))
        policy = draw.choice(list(PoolHitPolicy))
        given = draw.choice((keys, None, keys[1:]))
        return [PoolTransfer(name=name, host_indices=indices(len(keys)), keys=given, hit_policy=policy)]

    def calls_of(keys: list[str]) -> dict[str, Callable[[], Any]]:
        return {
            "batch_exists": lambda: backend.batch_exists(keys) <= len(keys),
            "get_v1": lambda: len(backend.batch_get_v1(keys, indices(len(keys)))) == len(keys),
            "set_v1": lambda: len(backend.batch_set_v1(keys, indices(len(keys)))) == len(keys),
            "exists_v2": lambda: backend.batch_exists_v2(keys, transfers(keys)) is not None,
            "get_v2": lambda: backend.batch_get_v2(transfers(keys)) is not None,
            "set_v2": lambda: backend.batch_set_v2(transfers(keys)) is not None,
            "exists": lambda: backend.exists(hostile.text()) in (True, False),
            "get": lambda: backend.get(hostile.text(), torch.zeros(3, 2).t()) is None or True,
            "batch_get": lambda: len(backend.batch_get(keys, tensors(len(keys)))) == len(keys),
            "set": lambda: backend.set(hostile.text(), draw.choice((None, torch.zeros(7)))) in (True, False),
            "batch_set": lambda: backend.batch_set(keys, tensors(len(keys))) in (True, False),
        }

    for _ in range(count):
        keys = [hostile.text() for _ in range(draw.randrange(4))]
        asked, calls = len(keys), calls_of(keys)
        name = draw.choice(list(calls))
        try:
            if not calls[name]():
                problems.append(f"{name}: another number than {asked}")
        except Exception as error:  # noqa: BLE001  it is what is looked for
            problems.append(f"{name} {keys!r}: {error!r}"[:500])
    return problems


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_fuzz_of_the_backend(store: ServerProcess, layout: str) -> None:
    """A page of before is there afterwards as it was, or went for room; the next one is kept."""
    pool = KvPool(layout)
    backend = backend_on(store.target, pool)
    backend.register_mem_host_pool_v2(StatePool(), PoolName.MAMBA)
    fill(pool, 31)
    canary = pool.page(31).clone()
    assert backend.batch_set_v1(keys_of(31), pool.indices(31)) == [True]
    problems = problems_of(backend, pool, COUNT)
    assert problems == [], "\n".join(problems[:20])
    for _ in range(2):
        pool.page(31).zero_()
        if backend.batch_get_v1(keys_of(31), pool.indices(31)) == [True]:
            break
        with ctxcache.connect(store.target) as client:
            assert client.admin.stats().evicted_session_count
        pool.page(31).copy_(canary)
        assert backend.batch_set_v1(keys_of(31), pool.indices(31)) == [True]
    assert torch.equal(pool.page(31), canary)
    backend.close()


def test_fuzz_finds_a_guard_that_is_missing(store: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call meets raises, where nobody catches it."""
    monkeypatch.setattr("gpu_worker.engines.link.StoreLink.tried", lambda _link, work, _otherwise: work())
    pool = KvPool("page_first")
    backend = backend_on(store.target, pool)
    assert problems_of(backend, pool, 500)
    backend.close()
