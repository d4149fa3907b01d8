"""vLLM's own offloading with the store behind host memory: replies are those of an engine without either.

Run by `make engines`. vLLM refuses to offload from a CPU: `TieringOnCpu` copies in the place of a GPU's
worker, all else is vLLM's own. Host memory is small, or the process a new one: chunks come from the store.
"""

import hashlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common as offloading_common
from vllm.v1 import kv_offload
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

import ctxcache
from ctxcache.client.types import BlockChange, BlockNews, LookupState
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.vllm.offloading import VLLM_SETTINGS
from gpu_worker.engines.vllm.tier import chain_of
from gpu_worker.engines.vllm.tier_events import StoreEvents
from lab.engines.families import SHAPE
from lab.engines.vllm_process import VllmEngine
from tests.engines.stalling_proxy import StallingProxy
from tests.engines.tier_jobs import job_of
from tests.engines.vllm_small import store
from tests.server_process import ServerProcess

__all__ = ["store"]

BLOCK_TOKENS = 32
COUNT = 16
SLOW_LOADS = """
import sys, time
from ctxcache.client import block_leases, blocks
from gpu_worker.engines.vllm import tier
# Given up because the store does not answer, and not because it is slow.
tier.SLOWEST_BYTES_PER_S = 1e-3
put, copied = blocks._put_into, block_leases.LeasedBlocks.copied
def slowly(call):
    def wrapped(*words, **named):
        done = call(*words, **named)
        sys.stderr.write("a chunk is loaded\\n")
        time.sleep(0.3)
        return done
    return wrapped
blocks._put_into, block_leases.LeasedBlocks.copied = slowly(put), slowly(copied)
class Slow:
    pass
"""
PROMPT_TOKENS = 300
FOUND = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens of a prompt in whole blocks, its last one left to be computed."""
CHUNK_BYTES = SHAPE["num_hidden_layers"] * 2 * 2 * 32 * 4 * BLOCK_TOKENS
"""A token's bytes of the model above in fp32."""


def prompt_of(number: int, count: int = PROMPT_TOKENS) -> list[int]:
    """Another prompt for each number."""
    draw = random.Random(number)
    return [draw.randrange(3, 500) for _ in range(count)]


def build(directory: Path, seed: int = 0) -> Path:
    """A small Llama with random weights, in files."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of most tests."""
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def replies(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The replies of an engine that keeps nothing, to the first prompts."""
    with VllmEngine(model, None, tmp_path_factory.mktemp("plain") / "log") as engine:
        return [engine.turn(prompt_of(number), None, COUNT).token_ids for number in range(12)]


def offloading(model: Path, target: str, log: Path, *, host_chunks: int = 1024, **options: Any) -> VllmEngine:
    """An engine that offloads to host memory, with the store behind it."""
    extra = {
        "spec_name": "TieringOnCpu",
        "spec_module_path": "lab.engines.offload_on_cpu",
        "cpu_bytes_to_use": host_chunks * CHUNK_BYTES,
        "target": target,
    } | options.pop("extra", {})
    transfer = {
        "kv_connector": "CtxcacheOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    defaults = {"enable_prefix_caching": True, "num_gpu_blocks_override": 48}
    return VllmEngine(model, None, log, kv_transfer_config=transfer, **(defaults | options))


def ask(engine: VllmEngine, replies: Sequence[tuple[int, ...]], numbers: Sequence[int]) -> list[int]:
    """Ask for prompts, each reply compared; tokens that were not computed, by prompt."""
    found = []
    for number in numbers:
        reply = engine.turn(prompt_of(number), None, COUNT)
        assert reply.finish_reason == "length"
        assert reply.token_ids == replies[number], number
        found.append(reply.cached_count)
    return found


def wait_for_blocks(store: ServerProcess, count: int) -> None:
    """Wait until the store holds so many chunks."""
    deadline_s = time.monotonic() + 30
    with ctxcache.connect(store.target) as cache:
        while (found := cache.admin.stats().segment_count) < count:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.02)


def test_another_process_finds_what_one_has_computed(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """Over the engine's end, and over a restart of the store."""
    with offloading(model, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, range(4)) == [0] * 4
        wait_for_blocks(store, 4 * FOUND // BLOCK_TOKENS)
    with offloading(model, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, range(4)) == [FOUND] * 4
    store.terminate()
    store.start()
    with offloading(model, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, range(4)) == [FOUND] * 4


def test_what_host_memory_evicted_comes_from_the_store(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """Host memory has room for two prompts of eight."""
    with offloading(model, store.target, tmp_path / "log", host_chunks=20) as engine:
        ask(engine, replies, range(8))
        wait_for_blocks(store, 8 * FOUND // BLOCK_TOKENS)
        found = ask(engine, replies, range(8))
    assert sum(found) > 4 * FOUND


def test_a_model_with_sliding_windows_is_served(store: ServerProcess, tmp_path: Path) -> None:
    """Its windows are a group of caches of their own, whose blocks are chunks of their own."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **{**SHAPE, "tie_word_embeddings": True}, query_pre_attn_scalar=32, sliding_window=64
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    options: dict[str, Any] = {"num_gpu_blocks_override": 400}
    with VllmEngine(tmp_path / "gemma", None, tmp_path / "plain", **options) as engine:
        replies = [engine.turn(prompt_of(number), None, COUNT).token_ids for number in range(3)]
    for expected in (0, FOUND):
        with offloading(tmp_path / "gemma", store.target, tmp_path / "log", **options) as engine:
            assert ask(engine, replies, range(3)) == [expected] * 3
            # Chunks of two groups; of the windows the last ones are kept.
            time.sleep(1)


def test_two_ranks_save_and_load_their_parts(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """A chunk has the parts of both, and is there whole or not at all. One rank alone has other chunks."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    for expected in (0, FOUND):
        with offloading(model, store.target, tmp_path / "log", **options) as engine:
            assert ask(engine, replies, range(3)) == [expected] * 3
            wait_for_blocks(store, 3 * FOUND // BLOCK_TOKENS)
    with offloading(model, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, range(3)) == [0] * 3


def test_other_weights_in_the_same_place_find_nothing(
    replies: list[tuple[int, ...]], model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """A model is told by its files: not by its name, and not by where they lie."""
    place = tmp_path / "here"
    build(place, seed=1)
    with offloading(place, store.target, tmp_path / "log") as engine:
        engine.turn(prompt_of(0), None, COUNT)
        wait_for_blocks(store, FOUND // BLOCK_TOKENS)
    shutil.rmtree(place)
    shutil.copytree(model, place)
    with offloading(place, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, [0]) == [0]
        wait_for_blocks(store, 2 * FOUND // BLOCK_TOKENS)
    with offloading(model, store.target, tmp_path / "log") as engine:
        assert ask(engine, replies, [0]) == [FOUND]


def test_a_store_that_is_killed_costs_computed_prompts(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """Nothing fails without it; when it is back, it is used again."""
    with offloading(model, store.target, tmp_path / "log", host_chunks=12) as engine:
        ask(engine, replies, range(3))
        store.kill9()
        ask(engine, replies, [0, 1, 2, 3])
        store.start()
        deadline_s = time.monotonic() + 30
        while not any(ask(engine, replies, [4, 5, 6, 7, 8])):
            assert time.monotonic() < deadline_s, engine.log


def test_a_store_that_hangs_costs_computed_prompts(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """It is waited for once, for a second; then it is left alone."""
    with offloading(model, store.target, tmp_path / "log", host_chunks=12) as engine:
        ask(engine, replies, range(3))
        store.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        ask(engine, replies, [0, 1, 2, 3])
        took_s = time.monotonic() - began_s
        store.signal(signal.SIGCONT)
        assert "the context store does not answer" in engine.log
        # Two waits of a second, the engine's own work, and a busy machine: a hang would be a minute.
        assert took_s < 30
        deadline_s = time.monotonic() + 30
        while not any(ask(engine, replies, [4, 5, 6, 7, 8])):
            assert time.monotonic() < deadline_s, engine.log


def test_a_load_that_stalls_leaves_nothing_wrong(
    model: Path, replies: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """It is given up at its deadline: the prompt is computed, and what came late touches nothing."""
    remote_only = ("--control-socket", "", "--bulk-listen", "", "--arena-sealed", "true")
    with (
        ServerProcess(tmp_path / "data", *remote_only) as server,
        StallingProxy(server.target) as proxy,
    ):
        with offloading(model, proxy.target, tmp_path / "log") as engine:
            ask(engine, replies, range(3))
            wait_for_blocks(server, 3 * FOUND // BLOCK_TOKENS)
        with offloading(model, proxy.target, tmp_path / "log") as engine:
            proxy.stall(after_bytes=128 << 10)
            assert ask(engine, replies, [0]) == [0]
            assert proxy.is_stalled
            proxy.go_on()
            deadline_s = time.monotonic() + 60
            while not any(ask(engine, replies, [0, 1, 2])):
                assert time.monotonic() < deadline_s, engine.log


@pytest.mark.parametrize("access", ["local", "remote"])
def test_a_store_that_is_stopped_in_the_middle_of_a_load_is_not_waited_for(
    model: Path, replies: list[tuple[int, ...]], tmp_path: Path, access: str
) -> None:
    """The prompt is computed within the time of a call; chunks that come when it goes on touch nothing."""
    remote_only = ("--control-socket", "", "--bulk-listen", "", "--arena-sealed", "true")
    (tmp_path / "slow.py").write_text(SLOW_LOADS)
    slowly: dict[str, Any] = {"worker_extension_cls": "slow.Slow", "packages": str(tmp_path)}
    options = remote_only if access == "remote" else ()
    with ServerProcess(tmp_path / "data", *options) as server:
        with offloading(model, server.target, tmp_path / "log") as engine:
            ask(engine, replies, range(3))
            wait_for_blocks(server, 3 * FOUND // BLOCK_TOKENS)
        with offloading(model, server.target, tmp_path / "log", **slowly) as engine:
            # Host memory has the first prompt after this, the store alone the others.
            assert ask(engine, replies, [0]) == [FOUND]
            computed_s = engine.turn(prompt_of(8), None, COUNT).took_s
            loaded = engine.log.count("a chunk is loaded")
            with ThreadPoolExecutor(1) as asking:
                asked = asking.submit(engine.turn, prompt_of(1), None, COUNT)
                while engine.log.count("a chunk is loaded") == loaded:
                    time.sleep(0.001)
                server.signal(signal.SIGSTOP)
                reply = asked.result()
            assert reply.token_ids == replies[1]
            assert reply.cached_count < FOUND
            assert "come too late" in engine.log
            # What loads slowly takes 2 s and more in all; the question is answered by nobody for .75 s.
            assert reply.took_s < 1.6 + 5 * computed_s
            # Not another time: the store is left alone until it answers a question.
            began_s = time.monotonic()
            time.sleep(3)
            assert ask(engine, replies, [2]) == [0]
            assert time.monotonic() - began_s < 4 + 5 * computed_s
            server.signal(signal.SIGCONT)
            deadline_s = time.monotonic() + 30
            while not any(ask(engine, replies, [4, 5, 6, 7, 8])):
                assert time.monotonic() < deadline_s, engine.log


def test_a_chunk_continues_the_one_right_before_it_and_no_other() -> None:
    """Behind a gap in the job's positions it names none: that chunk's life must not hang on another's."""
    context = ReqContext("request")
    keys = [make_offload_key(bytes([number]) * 32, number % 2) for number in range(8)]
    positions = [64, 32, 128, 64, 256, 96, 320, None]
    for key, position in zip(keys, positions, strict=True):
        if position is not None:
            context.set_offload_key_position(key, position)
    job = job_of(1, keys, range(8), context, is_load=False)
    name = {hashlib.sha256(key).digest(): number for number, key in enumerate(keys)}
    parents = {
        name[key]: None if parent is None else name[parent] for key, parent in chain_of(job, [64, 32]).items()
    }
    assert parents == {0: None, 2: 0, 4: None, 6: 4, 1: None, 3: 1, 5: 3, 7: None}


def test_a_store_that_is_full_gives_wrong_replies_to_nobody(
    model: Path, replies: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """It has room for two prompts of eight."""
    size = str(2 << 20)
    with (
        ServerProcess(tmp_path / "data", "--ssd-size-bytes", size, "--arena-size-bytes", size) as server,
        offloading(model, server.target, tmp_path / "log", host_chunks=12) as engine,
    ):
        for _ in range(3):
            ask(engine, replies, range(8))


def test_damaged_chunks_are_computed(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """A changed byte of every chunk on SSD is noticed."""
    with offloading(model, store.target, tmp_path / "log") as engine:
        ask(engine, replies, range(4))
        wait_for_blocks(store, 4 * FOUND // BLOCK_TOKENS)
    store.terminate()
    (path,) = (store.data_directory / "ssd").glob("*.dat")
    data = bytearray(path.read_bytes())
    for offset in range(8192 + 2000, len(data), 16384):
        data[offset] ^= 0x40
    path.write_bytes(data)
    store.start()
    with offloading(model, store.target, tmp_path / "log") as engine:
        ask(engine, replies, range(4))
        ask(engine, replies, range(4))


class Router:
    """Hears vLLM's KV events as routers do: by ZMQ, decoded by vLLM's own classes."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.stored: dict[Any, BlockStored] = {}
        """Events of the chunks that the store has, by block hash."""
        self.removed: set[Any] = set()

    def hear(self) -> None:
        """Take what has come."""
        while self._socket.poll(200):
            _topic, _sequence, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                if event.ownership != "ctxcache":
                    continue
                for block_hash in event.block_hashes:
                    if isinstance(event, BlockStored):
                        self.stored[block_hash] = event
                    elif self.stored.pop(block_hash, None):
                        self.removed.add(block_hash)

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close(0)


def test_routers_hear_what_the_store_has(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """Stored by this engine or found there, with tokens; removed when the store deletes it, or is another."""
    endpoint = f"ipc://{tmp_path / 'events'}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with offloading(model, store.target, tmp_path / "log") as engine:
        ask(engine, replies, [0])
        wait_for_blocks(store, FOUND // BLOCK_TOKENS)
    with offloading(model, store.target, tmp_path / "log", kv_events_config=events) as engine:
        router = Router(endpoint)

        def until(condition: Callable[[], bool]) -> None:
            deadline_s = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < deadline_s, (len(router.stored), len(router.removed))
                # Events are published with the engine's steps.
                engine.turn([5, 6, 7], None, 1)
                router.hear()

        router.hear()
        assert ask(engine, replies, [0, 1]) == [FOUND, 0]
        count = 2 * FOUND // BLOCK_TOKENS
        until(lambda: len(router.stored) >= count)
        tokens = {tuple(event.token_ids) for event in router.stored.values()}
        cut = [
            prompt_of(number)[begin : begin + BLOCK_TOKENS]
            for number in (0, 1)
            for begin in range(0, FOUND, BLOCK_TOKENS)
        ]
        assert tokens >= set(map(tuple, cut))
        assert {event.medium for event in router.stored.values()} == {"STORAGE"}
        store.kill9()
        shutil.rmtree(tmp_path / "data")
        (tmp_path / "data").mkdir()
        store.start()
        until(lambda: len(router.removed) >= count)
        router.close()


def test_a_subscription_that_begins_anew_takes_nothing_back_before_it_has_told_all() -> None:
    """A long one comes in several messages; what is in none of them is gone, once the last one is there."""
    link: Any = SimpleNamespace(use=lambda: None, state=LinkState.CONNECTING)
    events = StoreEvents(link)
    keys = [bytes([number]) * 32 for number in range(3)]
    events.met((key, OffloadKey(key)) for key in keys)

    def hear(*messages: BlockNews) -> list[tuple[tuple[bytes, ...], bool]]:
        subscription: Any = messages
        events._hear(subscription)
        return [(tuple(sorted(event.keys)), event.removed) for event in events.take()]

    def news(*there: bytes, is_current: bool) -> BlockNews:
        changes = (BlockChange(key, LookupState.HIT, 1, is_in_dram=True, parent_key=b"") for key in there)
        return BlockNews(tuple(changes), is_current)

    try:
        assert hear(news(*keys, is_current=True)) == [(tuple(keys), False)]
        assert hear(news(keys[0], is_current=False), news(keys[1], is_current=True)) == [((keys[2],), True)]
        # It is not met any more: nobody here knows its tokens.
        assert hear(news(keys[0], keys[2], is_current=False)) == []
    finally:
        events.close()


def test_routers_hear_what_becomes_of_chunks_while_nobody_asks(
    model: Path, replies: list[tuple[int, ...]], store: ServerProcess, tmp_path: Path
) -> None:
    """An engine without requests, in a process of its own, publishes what the store has and what it lost."""
    endpoint = f"ipc://{tmp_path / 'events'}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options: dict[str, Any] = {"kv_events_config": events, "environment": own_process}
    with offloading(model, store.target, tmp_path / "log", **options) as engine:
        router = Router(endpoint)

        def until(condition: Callable[[], bool]) -> None:
            deadline_s = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < deadline_s, (len(router.stored), len(router.removed))
                router.hear()

        # The engine links to the store in the background: only what it computes then is saved.
        for number in range(12):
            ask(engine, replies, [number])
            with ctxcache.connect(store.target) as cache:
                if cache.admin.stats().segment_count:
                    break
            time.sleep(1)
        until(lambda: len(router.stored) > 0)
        wait_for_blocks(store, FOUND // BLOCK_TOKENS)
        with ctxcache.connect(store.target) as cache:
            count = cache.admin.stats().segment_count
        until(lambda: len(router.stored) >= count)
        store.kill9()
        shutil.rmtree(tmp_path / "data")
        (tmp_path / "data").mkdir()
        store.start()
        until(lambda: len(router.removed) >= count)
        router.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"durability": "tape"}}, "durability: .* 'memory' or 'disk', not 'tape'"),
        ({"extra": {"tokenfile": "t"}}, r"config.tokenfile: not one of .*; did you mean token_file\?"),
        ({"extra": {"cpu_bytes": 1 << 30}}, r"not one of .*; did you mean cpu_bytes_to_use\?"),
        ({"enable_lora": True}, "LoRA"),
        ({"extra": {"blocks_per_chunk": 512}}, "lower kv_connector_extra_config.blocks_per_chunk"),
    ],
    ids=["unknown durability", "misspelt", "misspelt of vLLM's", "adapters", "large chunks"],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """The engine does not start, and says why."""
    with (
        pytest.raises(RuntimeError, match=message),
        offloading(model, "127.0.0.1:1", tmp_path / "log", **options),
    ):
        pass


def test_the_settings_that_vllm_reads_are_passed_on() -> None:
    """Of this vLLM's sources: a setting that it reads and we do not know would be refused."""
    places = [Path(kv_offload.__file__).parent, Path(offloading_common.__file__).parent]
    # Tiers of its own read their own entries of `secondary_tiers`.
    sources = [
        path.read_text()
        for place in places
        for path in place.rglob("*.py")
        if path.parent.parent.name != "tiering"
    ]
    read = {
        name for source in sources for name in re.findall(r'extra_config(?:\.get\(|\[)\s*"(\w+)"', source)
    }
    assert read
    assert not read - set(VLLM_SETTINGS)


def test_a_tier_without_the_connector_is_refused(model: Path, tmp_path: Path) -> None:
    """It would not see which model its chunks are of."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [{"type": "CtxcacheTier", "module_path": "gpu_worker.engines.vllm.tier"}],
        },
    }
    with (
        pytest.raises(RuntimeError, match="use kv_connector CtxcacheOffloadingConnector"),
        VllmEngine(model, None, tmp_path / "log", kv_transfer_config=transfer),
    ):
        pass
