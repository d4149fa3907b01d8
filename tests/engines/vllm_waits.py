"""How long the connector holds a request up for a store that stops answering, wherever it stops.

Both sides of the connector, and the tier behind vLLM's host memory, run here without an engine, on a real
store. A clock that only waits move counts what a request is made to wait: all of it together is `timeout_s`,
not so much for each thing it waits for.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_really
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ctxcache.client import CallerModel, Client, SessionRows
from ctxcache.client.engine_queue import QueuedJob
from ctxcache.errors import CorruptSegment
from ctxcache.format.streams import TOKENS
from gpu_worker.engines import link
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.vllm import scheduler, worker
from gpu_worker.engines.vllm import tier as tiers
from gpu_worker.engines.vllm.engine_blocks import EngineBlocks
from gpu_worker.engines.vllm.plan import BlockLayout, StepReport
from gpu_worker.engines.vllm.settings import ConnectorSettings
from gpu_worker.engines.vllm.tier import CtxcacheTier
from lab.engines.families import SHAPE
from tests.engines.tier_jobs import job_of
from tests.server_process import ServerProcess

BLOCK_TOKENS = 32
BLOCK_COUNT = 64
TIMEOUT_S = 600.0
"""No call of this test's own ends by its deadline: the clock alone decides."""
STEP_S = TIMEOUT_S / 200
"""As a look-up's patience is of a second."""
READY_S = 60.0


class Waits:
    """The time that was waited: nothing else moves this clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.is_stopped = False
        """Whether the store answers nothing."""
        self.links: list[Any] = []

    def monotonic(self) -> float:
        """The time."""
        return self.now_s

    def wait(self, futures: Iterable["Future[Any]"], timeout_s: float, *_: object) -> None:
        """As concurrent.futures' `wait`, on this clock."""
        waiting = list(futures)
        # Long enough for a store that answers on a busy machine: such a question is never late by this clock.
        while not self.is_stopped and any(one._asked_s is not None for one in self.links):
            time.sleep(0.001)
        wait_really(waiting, 0.002, FIRST_COMPLETED)
        if not any(one.done() for one in waiting):
            self.now_s += timeout_s


class Model(torch.nn.Module):
    """The module that a worker finds an attention layer in, and whose weights it watches."""

    def __init__(self, layer_count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(layer_count)])

    def compute_logits(self) -> None:
        """Nothing: a model is known by having it."""


def configs_of(model: Path, role: str = "kv_both") -> tuple[VllmConfig, KVCacheConfig]:
    """The configuration of an engine, and that of its blocks."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        kv_transfer_config=KVTransferConfig(kv_connector="CtxcacheConnector", kv_role=role),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    names = [f"layers.{layer}" for layer in range(SHAPE["num_hidden_layers"])]
    return config, KVCacheConfig(BLOCK_COUNT, [], [KVCacheGroupSpec(names, spec)])


class Sides:
    """Both sides of a connector, and the engine between them as far as they see it."""

    def __init__(self, model: Path, store: ServerProcess, waits: Waits, role: str = "kv_both") -> None:
        self.store, self.waits = store, waits
        config, kv_cache_config = configs_of(model, role)
        (group,) = kv_cache_config.kv_cache_groups
        names, page_bytes = group.layer_names, group.kv_cache_spec.page_size_bytes
        caches = {name: torch.zeros(BLOCK_COUNT, page_bytes // 4, dtype=torch.float32) for name in names}
        self._model = Model(len(names))
        layers = dict(zip(names, self._model.layers, strict=True))
        config.compilation_config.static_forward_context.update(layers)
        settings = ConnectorSettings(
            target=store.target, timeout_s=TIMEOUT_S, restore_timeout_s=5 * TIMEOUT_S, durability="memory"
        )
        self.worker = worker.WorkerSide(config, kv_cache_config, settings)
        self.worker.attach(caches)
        self.scheduler = scheduler.SchedulerSide(config, kv_cache_config, settings)
        self.scheduler.layouts.set_result(self.worker.layouts.result())
        self.links = waits.links = [self.scheduler.link, self.worker.link]
        for one in self.links:
            assert one.wait(READY_S) is LinkState.READY
            one._clock = waits.monotonic
        self._next_block = 0

    def stop(self) -> None:
        """The store answers nothing from here on."""
        self.store.signal(signal.SIGSTOP)
        self.waits.is_stopped = True

    def close(self) -> None:
        """Let the store go on, and end both sides."""
        self.store.signal(signal.SIGCONT)
        self.waits.is_stopped = False
        self.scheduler.close()
        self.worker.close()

    def blocks(self, count: int) -> KVCacheBlocks:
        """So many blocks that nobody has."""
        begin, self._next_block = self._next_block, self._next_block + count
        numbers = range(begin, begin + count)
        return KVCacheBlocks(([KVCacheBlock(number % BLOCK_COUNT) for number in numbers],))

    def step(self, output: SchedulerOutput | None = None) -> tuple[set[str], set[str]]:
        """A step of the engine; the requests whose loads ended, and those that failed."""
        plan = self.scheduler.step(output or SchedulerOutput.make_empty())
        self.worker.begin_step(plan)
        self.worker.load(plan.loads)
        self.worker.save(plan.saves)
        ended = self.worker.take_loaded(STEP_S)
        if saved := self.worker.take_saved():
            report = StepReport(dict.fromkeys(saved, 1))
            self.scheduler.reported(KVConnectorOutput(kv_connector_worker_meta=report))
        return ended

    def hold_up(
        self, *requests: Request, before_load: Callable[[], None] = lambda: None
    ) -> dict[str, tuple[float, bool]]:
        """How long each of them waited until its prompt could be computed, and whether it was restored."""
        begun_s = self.waits.now_s
        ended: dict[str, tuple[float, bool]] = {}
        for request in requests:
            self.scheduler.arrived(request)
        waiting, loading = list(requests), set[str]()
        while waiting or loading:
            for request in list(waiting):
                count = self.scheduler.matched(request, 0)
                if count is None:
                    continue
                waiting.remove(request)
                blocks = self.blocks(-(-len(request.prompt_token_ids or ()) // BLOCK_TOKENS))
                self.scheduler.allocated(request, blocks, count)
                if count:
                    before_load()
                    loading.add(request.request_id)
                else:
                    ended[request.request_id] = self.waits.now_s - begun_s, False
            loaded, failed = self.step()
            ended |= {one: (self.waits.now_s - begun_s, one not in failed) for one in loading & loaded}
            loading -= loaded
        for request in requests:
            # Of what failed nothing is looked up again: it is computed.
            assert self.scheduler.matched(request, 0) == 0
        return ended

    def compute(self, request: Request) -> None:
        """Compute a request's prompt, which fills its blocks."""
        followed = self.scheduler._followed[request.request_id]
        blocks = self.blocks(-(-len(followed.asked.prompt) // BLOCK_TOKENS))
        self.scheduler.blocks_of = {request.request_id: blocks}.__getitem__
        is_computed = False
        # A session that is made beside the first step is there in a later one.
        while not is_computed or not followed.is_open:
            output = SchedulerOutput.make_empty()
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(None if is_computed else blocks.get_block_ids())
            cached.num_computed_tokens.append(0)
            output.num_scheduled_tokens[request.request_id] = len(followed.asked.prompt)
            self.step(output)
            is_computed = True

    def save(self, request: Request) -> None:
        """Serve a request whose prompt is nowhere, until it is saved."""
        ((_, is_restored),) = self.hold_up(request).values()
        assert not is_restored
        self.compute(request)
        self.scheduler.finished(request)
        self.until_saved()

    def token_ids(self, session: str) -> list[int]:
        """Token ids of a session, as the store has them."""
        used = self.worker.link.use()
        assert used is not None
        client, model = used
        with client.sessions.open(f"sessions/{session}", model).read(streams=[TOKENS]) as rows:
            return rows.token_ids()

    def until_saved(self) -> None:
        """Steps until nothing is being saved."""
        while self.scheduler._saving:
            self.step()
            time.sleep(0.001)


def prompt_of(number: int) -> list[int]:
    """A prompt that shares nothing with another one."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(97)]


def request_of(request_id: str, session: str, number: int = 0) -> Request:
    """A request of that session."""
    return Request(request_id, prompt_of(number), SamplingParams(max_tokens=24), None, session_id=session)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, in files."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("waits") / "tiny"
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


@pytest.fixture
def sides(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    """Both sides on a store of their own, and on a clock that waits alone move."""
    waits = Waits()
    for module in (scheduler, worker, link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=waits.monotonic))
    for side in (scheduler, worker):
        monkeypatch.setattr(side, "wait", waits.wait)
    monkeypatch.setattr(scheduler, "LOOKUP_PATIENCE_S", STEP_S)
    monkeypatch.setattr(scheduler, "SAVE_WAIT_S", 5 * TIMEOUT_S)
    with ServerProcess(tmp_path / "data") as store:
        both = Sides(model, store, waits)
        try:
            yield both
        finally:
            both.close()


def slowly(sides: Sides, monkeypatch: pytest.MonkeyPatch, part: float) -> None:
    """Let look-ups by name take so much of `timeout_s`, while the store answers."""
    used = sides.scheduler.link.use()
    assert used is not None
    sessions, end_s = used[0].sessions, sides.waits.now_s + part * TIMEOUT_S
    get = sessions.get

    def get_slowly(name: str) -> Any:
        while sides.waits.now_s < end_s:
            time.sleep(0.0005)
        return get(name)

    monkeypatch.setattr(sessions, "get", get_slowly)


@pytest.mark.parametrize("point", ["look-up", "slow look-up", "load", "load after a slow look-up", "rows"])
def test_a_request_waits_once_for_a_store_that_stops(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Before its look-up, within it, between it and the load, and within the load."""
    sides.save(request_of("first", "alice"))
    before_load: Callable[[], None] = lambda: None  # noqa: E731
    if point == "look-up":
        sides.stop()
    if "slow" in point:
        slowly(sides, monkeypatch, 0.75)
    if point == "slow look-up":
        used = sides.scheduler.link.use()
        assert used is not None
        get = used[0].sessions.get

        def get_and_stop(name: str) -> Any:
            found = get(name)
            sides.stop()
            return found

        monkeypatch.setattr(used[0].sessions, "get", get_and_stop)
    if point.startswith("load"):
        before_load = sides.stop
    if point == "rows":
        load = EngineBlocks.load

        def stop_and_load(self: EngineBlocks, rows: SessionRows, *arguments: Any) -> None:
            sides.stop()
            load(self, rows, *arguments)

        monkeypatch.setattr(EngineBlocks, "load", stop_and_load)
    ((waited_s, is_restored),) = sides.hold_up(request_of("next", "alice"), before_load=before_load).values()
    # Rows that lie in shared memory are there without the store.
    assert is_restored is (point == "rows")
    assert waited_s <= TIMEOUT_S


def test_a_conversations_next_request_waits_once_for_a_store_that_stops(sides: Sides) -> None:
    """While the request before it is being saved, which ends when the store goes on."""
    sides.save(request_of("first", "alice"))
    sides.stop()
    second = request_of("second", "alice", 1)
    sides.scheduler._saving["sessions/alice"] = "first"
    ((waited_s, is_restored),) = sides.hold_up(second).values()
    assert not is_restored
    assert waited_s <= TIMEOUT_S
    # Nor once more: the store is left alone until it answers.
    ((waited_s, _),) = sides.hold_up(request_of("third", "bob", 2)).values()
    assert waited_s == 0


def test_two_requests_of_a_conversation_at_once_both_go_on(sides: Sides) -> None:
    """Both have looked it up before the first has its blocks: the second one is computed, and not saved."""
    sides.save(request_of("first", "alice"))
    one, two = request_of("one", "alice"), request_of("two", "alice")
    for request in (one, two):
        sides.scheduler.arrived(request)
    lookups = [followed.lookup for followed in sides.scheduler._followed.values()]
    assert all(lookup is not None and lookup.result(READY_S) for lookup in lookups)
    count = sides.scheduler.matched(one, 0)
    assert count
    sides.scheduler.allocated(one, sides.blocks(4), count)
    # What vLLM is told to wait for has to come.
    assert sides.scheduler.matched(two, 0) == 0
    sides.scheduler.allocated(two, sides.blocks(4), 0)
    while "one" not in sides.step()[0]:
        pass
    sides.scheduler.finished(two)
    sides.scheduler.finished(one)
    sides.until_saved()
    assert sides.token_ids("alice") == prompt_of(0)[: 3 * BLOCK_TOKENS]


@pytest.mark.parametrize("has_priorities", [False, True])
def test_sessions_are_expected_in_the_order_in_which_their_requests_run(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, *, has_priorities: bool
) -> None:
    """That of arrivals; where vLLM schedules by priority, by that first: less is sooner."""
    places: dict[str, float] = {}
    waits = sides.scheduler._queue.waits

    def noted(client: Client, model: CallerModel, job: QueuedJob) -> None:
        assert job.position is not None
        places[job.job_id] = job.position
        waits(client, model, job)

    monkeypatch.setattr(sides.scheduler._queue, "waits", noted)
    monkeypatch.setattr(sides.scheduler, "_has_priorities", has_priorities)
    for number, name in enumerate(("late", "sooner", "soonest")):
        sides.save(request_of(f"save-{name}", name, number))
    places.clear()
    for number, (name, priority) in enumerate((("late", 5), ("sooner", 0), ("soonest", -3))):
        request = request_of(name, name, number)
        request.priority = priority
        sides.hold_up(request)
    expected = ["soonest", "sooner", "late"] if has_priorities else ["late", "sooner", "soonest"]
    assert sorted(places, key=places.__getitem__) == expected


@pytest.mark.parametrize("changed", [None, "v2"])
def test_a_session_is_saved_when_every_rank_has_saved_it(changed: str | None) -> None:
    """Reports of ranks are added up, in any order."""
    one, two = StepReport({"a": 1, "b": 1}), StepReport({"b": 1}, changed)
    for report in (one.aggregate(two), two.aggregate(one)):
        assert report == StepReport({"a": 1, "b": 2}, changed)


def test_many_requests_wait_together_for_a_store_that_stops(sides: Sides) -> None:
    """A step of the scheduler waits as long for two hundred look-ups as for one."""
    sides.stop()
    held = sides.hold_up(*(request_of(f"r{number}", f"s{number}", number) for number in range(200)))
    assert len(held) == 200
    assert max(waited_s for waited_s, _ in held.values()) <= TIMEOUT_S


def test_a_load_that_fails_late_ends_no_other_requests_save(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was aborted, and the conversation's next one is being saved by the time it fails."""
    sides.save(request_of("first", "alice"))
    may_fail, has_begun = threading.Event(), threading.Event()

    def fail_late(*_: Any) -> None:
        has_begun.set()
        assert may_fail.wait(READY_S)
        raise CorruptSegment(segment_id="1", problem="is planted")

    monkeypatch.setattr(EngineBlocks, "load", fail_late)
    try:
        aborted = request_of("aborted", "alice")
        sides.scheduler.arrived(aborted)
        while (count := sides.scheduler.matched(aborted, 0)) is None:
            sides.step()
        assert count
        sides.scheduler.allocated(aborted, sides.blocks(4), count)
        sides.step()
        assert has_begun.wait(READY_S)
        sides.scheduler.finished(aborted)
        sides.until_saved()
        following = request_of("following", "alice", 1)
        sides.hold_up(following)
        load = sides.worker._loading["aborted"].future
        may_fail.set()
        assert not load.result(READY_S)
        sides.compute(following)
        sides.scheduler.finished(following)
        sides.until_saved()
        assert sides.token_ids("alice") == prompt_of(1)[: 3 * BLOCK_TOKENS]
    finally:
        may_fail.set()


@pytest.fixture
def tier(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CtxcacheTier, ServerProcess, Waits]]:
    """The tier on a store of its own, with one chunk in it, and on a clock that its caller moves."""
    waits = Waits()
    for module in (tiers, link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=waits.monotonic, perf_counter=float))
    with ServerProcess(tmp_path / "data") as store:
        made = tier_of(model, store.target)
        made.layouts.set_result({(0, 0): BlockLayout((1,), "none")})
        try:
            assert made.link.wait(READY_S) is LinkState.READY
            made.link._clock = waits.monotonic
            waits.links = [made.link]
            made.submit_store(job_of(1, [KEY], [0], ReqContext("first"), is_load=False))
            assert until_ended(made, waits).success
            yield made, store, waits
        finally:
            store.signal(signal.SIGCONT)
            made.shutdown()


def tier_of(model: Path, target: str) -> CtxcacheTier:
    """The tier of an engine whose workers have not said how their blocks lie."""
    spec: Any = SimpleNamespace(
        config=SimpleNamespace(
            engine_id="engine", groups=[SimpleNamespace(tokens_per_block=BLOCK_TOKENS, layer_names=["0"])]
        ),
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    chunks: Any = np.ones((4, 4096), np.uint8)
    return CtxcacheTier(
        spec,
        memoryview(chunks),
        "store",
        engine="none",
        directory=str(model),
        target=target,
        timeout_s=TIMEOUT_S,
    )


KEY = OffloadKey(bytes(36))


def until_ended(tier: CtxcacheTier, waits: Waits) -> JobResult:
    """Wait for the only job."""
    while not (ended := list(tier.get_finished_jobs())):
        waits.wait(list(tier._running), STEP_S)
    return ended[0]


@pytest.mark.parametrize("point", ["look-up", "load", "load after a slow look-up"])
def test_a_request_waits_once_for_a_tier_whose_store_stops(
    tier: tuple[CtxcacheTier, ServerProcess, Waits], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Before its look-up, and between it and the load."""
    made, store, waits = tier
    begun_s = waits.now_s
    used = made.link.use()
    assert used is not None
    look_up, end_s = used[0].blocks.look_up, begun_s + 0.75 * TIMEOUT_S

    def look_up_slowly(*arguments: Any) -> Any:
        # Of the question, which has another key, each answer comes at once.
        while arguments[1] != [bytes(32)] and waits.now_s < end_s:
            time.sleep(0.0005)
        return look_up(*arguments)

    def stop() -> None:
        store.signal(signal.SIGSTOP)
        waits.is_stopped = True

    if "slow" in point:
        monkeypatch.setattr(used[0].blocks, "look_up", look_up_slowly)
    if point == "look-up":
        stop()
    request = ReqContext("next")
    while (found := made.lookup(KEY, request)) is LookupResult.RETRY:
        made.on_schedule_end(None)
        waits.wait([Future()], STEP_S)
    assert found is (LookupResult.MISS if point == "look-up" else LookupResult.HIT)
    if found is LookupResult.HIT:
        stop()
        made.submit_load(job_of(2, [KEY], [1], request, is_load=True))
        assert not until_ended(made, waits).success
        assert made.lookup(KEY, request) is LookupResult.MISS
    assert waits.now_s - begun_s <= TIMEOUT_S
    made.on_request_finished(request)
    assert not made._asked_s
    assert not made._waited_s


@pytest.mark.parametrize("part", ["tier", "scheduler", "worker"])
def test_an_engine_that_fails_to_start_leaves_no_thread(model: Path, tmp_path: Path, part: str) -> None:
    """None of its workers has said how its blocks lie, and none ever will: nobody waits for it."""
    with ServerProcess(tmp_path / "data") as store:
        if part == "tier":
            tier_of(model, store.target).shutdown()
        else:
            side = scheduler.SchedulerSide if part == "scheduler" else worker.WorkerSide
            side(*configs_of(model), ConnectorSettings(target=store.target)).close()
        assert "ctxcache-link" not in [thread.name for thread in threading.enumerate()]
