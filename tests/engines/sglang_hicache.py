"""SGLang's hierarchical cache on a real store: by its own factory, interfaces and failure injector.

Run by `make engines`. SGLang's engine and host pools need a GPU; pools here lie in memory as SGLang's do.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

import ctxcache
from gpu_worker.engines.link import Refused
from tests.engines.engine_names import check_names
from tests.engines.tls_store import tls_store
from tests.server_process import ServerProcess

LINK_S = 20.0
PAGE_TOKENS, PAGES, LAYERS, HEADS, SIZE = 16, 32, 3, 2, 32


class KvPool:
    """K/V of tokens in host memory, by page or by layer, and where a page's pieces are."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.bfloat16, pages: int = PAGES) -> None:
        self.layout, self.dtype, self.page_size, self.size = layout, dtype, PAGE_TOKENS, pages * PAGE_TOKENS
        self.head_num, self.head_dim, self.start_layer, self.end_layer = HEADS, SIZE, 0, LAYERS
        order = (self.size, LAYERS) if layout == "page_first" else (LAYERS, self.size)
        self.kv_buffer = torch.zeros((2, *order, HEADS, SIZE), dtype=dtype)

    def page(self, number: int) -> torch.Tensor:
        """A view of a page."""
        begin = number * PAGE_TOKENS
        return self.kv_buffer.narrow(1 if self.layout == "page_first" else 2, begin, PAGE_TOKENS)

    def indices(self, *numbers: int) -> torch.Tensor:
        """Indices of the tokens of pages."""
        return torch.cat([torch.arange(PAGE_TOKENS) + number * PAGE_TOKENS for number in numbers])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of pages: K and V, and of each layer where layers come first."""
        row_bytes = HEADS * SIZE * self.dtype.itemsize
        pointers = []
        for begin in indices[::PAGE_TOKENS].tolist():
            for half in self.kv_buffer:
                pieces = [half[begin]] if self.layout == "page_first" else list(half[:, begin])
                pointers += [piece.data_ptr() for piece in pieces]
        layers = LAYERS if self.layout == "page_first" else 1
        return pointers, [PAGE_TOKENS * layers * row_bytes] * len(pointers)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A page of zeroes."""
        return torch.zeros_like(self.page(0)).flatten()

    def get_data_page(self, index: int, *, flat: bool = True) -> torch.Tensor:
        """A copy of a page."""
        page = self.page(index // PAGE_TOKENS)
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        """Fill a page."""
        page = self.page(index // PAGE_TOKENS)
        page[:] = data.reshape(page.shape)


class StatePool:
    """A state for each page, which says nothing of where it lies, as Mamba's do."""

    page_size = 1
    layout = "layer_first"
    dtype = torch.float32

    def __init__(self) -> None:
        self.states = torch.zeros((PAGES, 500))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A state of zeroes."""
        return torch.zeros(2000, dtype=torch.uint8)

    def get_data_page(self, index: int, *, flat: bool = True) -> torch.Tensor:
        """A copy of a state."""
        del flat
        return self.states[index].view(torch.uint8).clone()

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        """Fill a state."""
        self.states[index] = data.view(torch.float32)


def fill(pool: KvPool, *numbers: int) -> None:
    """Give pages bytes of their own."""
    for number in numbers:
        torch.manual_seed(number)
        pool.page(number)[:] = torch.randn(pool.page(number).shape)


def keys_of(*numbers: int) -> list[str]:
    """Hashes of pages."""
    return [f"{number:064x}" for number in numbers]


def backend_on(target: str, pool: Any, *, extra: dict[str, Any] | None = None, **facts: Any) -> Any:
    """A backend made by SGLang's own factory, linked."""
    config = {
        "backend_name": "ctxcache",
        "module_path": "ctxcache.engines.sglang",
        "class_name": "CtxcacheHiCache",
        "interface_v1": 1,
        "target": target,
    }
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    kinds = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    given = {**ranks, **kinds, "model_name": "tiny", "extra_config": config | (extra or {})} | facts
    backend = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**given), pool)
    backend.register_mem_pool_host(pool)
    assert getattr(backend, "_backend", backend).wait_until_linked(LINK_S) or target == "127.0.0.1:1"
    return backend


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_the_names_that_users_import_are_the_adapters() -> None:
    """As configurations name them."""
    check_names("sglang")


def test_a_store_on_another_host_is_reached_by_tls(tmp_path: Path) -> None:
    """By the settings of all plugins."""
    pool = KvPool("page_first")
    fill(pool, 1)
    with tls_store(tmp_path) as store:
        backend = backend_on(store.server.target, pool, extra=store.settings)
        assert backend.batch_set_v1(keys_of(1), pool.indices(1)) == [True]
        assert backend.batch_exists(keys_of(1)) == 1
        backend.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_where_they_are_wanted(store: ServerProcess, layout: str) -> None:
    """To other places of the pool, in another process of the engine, after the store was killed."""
    pool, extra = KvPool(layout), {"durability": "disk"}
    fill(pool, *range(8))
    saved = [pool.page(number).clone() for number in range(8)]
    backend = backend_on(store.target, pool, extra=extra)
    assert backend.batch_exists(keys_of(*range(8))) == 0
    assert backend.batch_set_v1(keys_of(*range(8)), pool.indices(*range(8))) == [True] * 8
    assert backend.batch_exists(keys_of(*range(10))) == 8
    assert backend.batch_exists(keys_of(20, *range(8))) == 0
    backend.close()
    store.kill9()
    store.start()
    pool.kv_buffer.zero_()
    again = backend_on(store.target, pool, extra=extra)
    found = again.batch_get_v1(keys_of(*range(9)), pool.indices(*range(8, 17)))
    assert found == [True] * 8 + [False]
    for number in range(8):
        assert torch.equal(pool.page(number + 8), saved[number])
    assert not pool.page(16).any()
    again.close()


def test_pages_are_stored_and_found_as_tensors(store: ServerProcess) -> None:
    """By the interface with which SGLang copies pages itself."""
    pool = KvPool("page_first")
    backend = backend_on(store.target, pool)
    pages = [torch.full_like(pool.get_dummy_flat_data_page(), number) for number in range(3)]
    assert backend.batch_set(keys_of(0, 1, 2), pages)
    targets = [pool.get_dummy_flat_data_page() for _ in range(4)]
    loaded = backend.batch_get(keys_of(0, 1, 9, 2), targets)
    assert [one is not None for one in loaded] == [True, True, False, True]
    assert torch.equal(targets[3], pages[2])
    assert backend.get(keys_of(1)[0], pool.get_dummy_flat_data_page()).equal(pages[1])
    assert backend.get(keys_of(1)[0]) is None
    backend.close()


def test_a_pool_that_does_not_fit_is_told_of_once(
    store: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Pools that are unknown share one line: their names are the caller's."""
    pool = KvPool("page_first")
    backend = backend_on(store.target, pool)
    short = PoolTransfer(PoolName.KV, host_indices=torch.tensor([0]), keys=keys_of(3, 4))
    unknown = [PoolTransfer(f"pool {number}", torch.tensor([0]), keys=keys_of(3)) for number in range(5)]
    for transfer in [short, short, *unknown, *unknown]:
        assert backend.batch_set_v2([transfer]) == {transfer.name: [False] * len(transfer.keys)}
    told = [record.getMessage() for record in caplog.records if "not stored or loaded" in record.message]
    assert len(told) == 2, told
    backend.close()


def test_a_hybrid_model_is_restored_where_all_its_state_is(store: ServerProcess) -> None:
    """K/V of each page and a recurrent state at some: the longest prefix with both counts."""
    kv, states = KvPool("page_first"), StatePool()
    backend = backend_on(store.target, kv)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    fill(kv, *range(6))
    states.states[:] = torch.randn(states.states.shape)
    saved = kv.page(3).clone(), states.states[3].clone()
    everything = [
        PoolTransfer(PoolName.KV, host_indices=kv.indices(*range(6)), keys=keys_of(*range(6))),
        PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1, 3]), keys=keys_of(1, 3)),
    ]
    assert backend.batch_set_v2(everything) == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True] * 2}
    trailing = PoolTransfer(PoolName.MAMBA, keys=keys_of(0), hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(keys_of(*range(8)), [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    every = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(keys_of(*range(8)), [every]).kv_hit_pages == 0
    for policy in set(PoolHitPolicy) - {PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES}:
        unknown = PoolTransfer(PoolName.MAMBA, hit_policy=policy)
        assert backend.batch_exists_v2(keys_of(*range(8)), [unknown]).kv_hit_pages == 0, policy
    kv.kv_buffer.zero_()
    states.states.zero_()
    wanted = [
        PoolTransfer(PoolName.KV, host_indices=kv.indices(3), keys=keys_of(3)),
        PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([9, 10]), keys=keys_of(3, 2)),
    ]
    assert backend.batch_get_v2(wanted) == {PoolName.KV: [True], PoolName.MAMBA: [True, False]}
    assert torch.equal(kv.page(3), saved[0])
    assert torch.equal(states.states[9], saved[1])
    assert not states.states[10].any()
    short = PoolTransfer(PoolName.KV, host_indices=torch.tensor([0]), keys=keys_of(3))
    assert backend.batch_get_v2([short]) == {PoolName.KV: [False]}
    backend.close()


@pytest.mark.parametrize(
    "other",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"model_name": "another"},
        {"pool": KvPool("page_first", torch.float16)},
        {"pool": KvPool("layer_first")},
    ],
    ids=["rank", "stage", "model", "dtype", "layout"],
)
def test_what_another_engine_saved_is_not_found(store: ServerProcess, other: dict[str, Any]) -> None:
    """Equal tokens of another rank, model or layout are other bytes."""
    pool = KvPool("page_first")
    fill(pool, 0)
    first = backend_on(store.target, pool)
    assert first.batch_set_v1(keys_of(0), pool.indices(0)) == [True]
    facts = {name: value for name, value in other.items() if name != "pool"}
    second = backend_on(store.target, other.get("pool", pool), **facts)
    assert second.batch_exists(keys_of(0)) == 0
    assert first.batch_exists(keys_of(0)) == 1
    first.close()
    second.close()


def test_replicas_of_latent_attention_share_pages(store: ServerProcess) -> None:
    """Each rank of tensor parallelism has the same K/V; one writes it."""
    pool = KvPool("page_first")
    first, second = (
        backend_on(store.target, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)
    )
    assert first.batch_set_v1(keys_of(0), pool.indices(0)) == [True]
    assert second.batch_exists(keys_of(0)) == 1
    first.close()
    second.close()


def test_other_weights_in_the_same_directory_find_nothing(store: ServerProcess, tmp_path: Path) -> None:
    """A model is told by its files, wherever they lie."""
    pool, directory = KvPool("page_first"), tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    found = []
    for fill_with, name in ((1.0, "model"), (2.0, "model"), (1.0, "model"), (2.0, "moved")):
        directory = directory.rename(tmp_path / name)
        save_file({"weight": torch.full((4,), fill_with)}, directory / "model.safetensors")
        backend = backend_on(store.target, pool, model_name=str(directory))
        found.append(backend.batch_exists(keys_of(0)))
        backend.batch_set_v1(keys_of(0), pool.indices(0))
        backend.close()
    assert found == [0, 0, 1, 1]


def test_a_store_that_hangs_or_is_gone_costs_a_bounded_time(store: ServerProcess) -> None:
    """Nothing is found, nothing raises, and it goes on when the store does."""
    pool = KvPool("page_first")
    fill(pool, 0)
    backend = backend_on(store.target, pool, extra={"timeout_s": 0.5})
    assert backend.batch_set_v1(keys_of(0), pool.indices(0)) == [True]
    store.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert backend.batch_exists(keys_of(0)) == 0
    assert backend.batch_get_v1(keys_of(0), pool.indices(1)) == [False]
    assert backend.batch_set_v1(keys_of(1), pool.indices(0)) == [False]
    assert time.monotonic() - began_s < 5
    store.signal(signal.SIGCONT)
    assert backend.wait_until_linked(LINK_S)
    assert backend.batch_get_v1(keys_of(0), pool.indices(1)) == [True]
    assert torch.equal(pool.page(0), pool.page(1))
    backend.close()


def test_a_damaged_page_is_a_miss(store: ServerProcess, tmp_path: Path) -> None:
    """One bit in the file, and the page is computed again."""
    pool = KvPool("page_first")
    fill(pool, *range(4))
    backend = backend_on(store.target, pool, extra={"durability": "disk"})
    assert all(backend.batch_set_v1(keys_of(*range(4)), pool.indices(*range(4))))
    needle = pool.page(2)[0].contiguous().view(torch.uint8).numpy().tobytes()
    store.kill9()
    damaged = 0
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file() and (place := (data := bytearray(path.read_bytes())).find(needle)) >= 0:
            data[place + 100] ^= 1
            path.write_bytes(data)
            damaged += 1
    assert damaged == 1
    store.start()
    assert backend.wait_until_linked(LINK_S)
    deadline_s = time.monotonic() + LINK_S
    while not backend.batch_exists(keys_of(0)):
        assert time.monotonic() < deadline_s
    assert backend.batch_get_v1(keys_of(*range(4)), pool.indices(*range(4, 8))) == [True, True, False, True]
    backend.close()


def test_sglangs_own_injected_failures_never_give_wrong_bytes(store: ServerProcess) -> None:
    """Calls fail and are delayed at random; whatever is said to be there is right."""
    if not hasattr(envs, "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"):
        pytest.skip("SGLang injects failures from 0.5.23 on")
    pool = KvPool("page_first")
    fill(pool, *range(8))
    limits = envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE, envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY
    with limits[0].override(0.4), limits[1].override(0.005):
        backend = backend_on(store.target, pool)
    assert type(backend).__name__ == "HiCacheStorageFailureInjector"
    loaded = 0
    for turn in range(60):
        number, place = turn % 8, 8 + turn % 16
        backend.batch_set_v1(keys_of(number), pool.indices(number))
        pool.page(place).zero_()
        if backend.batch_get_v1(keys_of(number), pool.indices(place)) == [True]:
            assert torch.equal(pool.page(number), pool.page(place))
            loaded += 1
    assert 0 < loaded < 60
    backend._backend.close()


def test_clearing_deletes_this_engines_pages_alone(store: ServerProcess) -> None:
    """Another rank's pages stay."""
    pool = KvPool("page_first")
    first, second = (backend_on(store.target, pool, tp_rank=rank, tp_size=2) for rank in range(2))
    for backend in (first, second):
        backend.batch_set_v1(keys_of(0, 1), pool.indices(0, 1))
    first.clear()
    assert (first.batch_exists(keys_of(0)), second.batch_exists(keys_of(0, 1))) == (0, 2)
    first.close()
    second.close()


def test_clearing_begins_another_version_of_the_weights(store: ServerProcess) -> None:
    """A trainer's way to say that they changed: what comes is not found by engines on the old ones."""
    pool = KvPool("page_first")
    trained, healthy = (backend_on(store.target, pool) for _ in range(2))
    trained.batch_set_v1(keys_of(0), pool.indices(0))
    assert healthy.batch_exists(keys_of(0)) == 1
    trained.clear()
    assert getattr(trained, "_backend", trained).wait_until_linked(LINK_S)
    trained.batch_set_v1(keys_of(0, 1), pool.indices(0, 1))
    assert (trained.batch_exists(keys_of(0, 1)), healthy.batch_exists(keys_of(0, 1))) == (2, 0)
    trained.close()
    healthy.close()


def test_a_version_is_shared_by_who_says_it(store: ServerProcess) -> None:
    """And found by nobody else; all of it goes by its name."""
    pool = KvPool("page_first")
    given = [{"weights_version": one} for one in ("step-1", "step-1", "step-2")] + [{}]
    backends = [backend_on(store.target, pool, extra=one) for one in given]
    backends[0].batch_set_v1(keys_of(0, 1), pool.indices(0, 1))
    assert [one.batch_exists(keys_of(0, 1)) for one in backends] == [2, 2, 0, 0]
    with ctxcache.connect(store.target) as cache:
        forgotten = cache.models.forget("models/tiny", "step-1")
    assert forgotten.block_count == 2
    assert backends[1].batch_exists(keys_of(0, 1)) == 0
    for one in backends:
        one.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"targget": "x"}, "extra_config.targget: not one of"),
        ({"durability": "tape"}, "extra_config.durability: .* 'memory' or 'disk', not 'tape'"),
        ({"model_directory": "/nowhere"}, "extra_config.model_directory: /nowhere is no directory"),
    ],
)
def test_bad_settings_are_refused(extra: dict[str, Any], message: str) -> None:
    """With the one that is wrong."""
    with pytest.raises(Refused, match=message):
        backend_on("127.0.0.1:1", KvPool("page_first"), extra=extra)


def test_pages_that_are_too_large_are_refused(store: ServerProcess) -> None:
    """When the pool is registered, with what to do."""
    pool = KvPool("page_first")
    pool.get_dummy_flat_data_page = lambda: torch.zeros((16 << 20) + 1, dtype=torch.uint8)  # type: ignore[method-assign]
    with pytest.raises(Refused, match="lower --page-size"):
        backend_on(store.target, pool)
