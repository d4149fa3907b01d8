"""The rules of docs/worker.md: held with every edge delayed, and every plant that breaks one is found."""

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import Driver, FakeGpu, driver
from plants import PLANTS
from sessions import Session, contents, saved_session
from slow_pipelines import DEADLINE_S, SMALL, RowsSource, SlowHost, poisoned_target, start
from torch import Tensor

from ctxcache.errors import CacheError, LeaseNotFound
from gpu_worker.pipeline import pipeline as pipeline_module
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline, Device, HostLane, Lane
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import Method

__all__ = ["driver"]
LANES = ["read", "copy", "compute", "announce"]
ATTEMPTS = 10
Snapshot = list[tuple[Tensor, Tensor]]


def _session() -> Session:
    return saved_session("llama")


def _as_announced(device: Device, source: RowsSource | None = None) -> Snapshot:
    """Each layer of a session as it is at the moment when it was announced."""
    session = _session()
    target = poisoned_target(session)
    found = []
    with Pipeline(device, SMALL) as pipeline, start(pipeline, session, target, source=source) as restoration:
        for layer in range(target.layer_count):
            restoration.wait(layer)
            keys, values = target.tensors(layer)
            found.append((keys.clone(), values.clone()))
    return found


def _is_right(snapshot: Snapshot) -> bool:
    kept = _session().kept_cache
    return all(
        torch.equal(mine, theirs)
        for layer, halves in enumerate(snapshot)
        for mine, theirs in zip(halves, contents(kept, layer), strict=True)
    )


def _is_equal_on_threads(slow: Collection[str]) -> bool:
    return _is_right(_as_announced(SlowHost(slow)))


def _is_equal_on_streams(driver: Driver, slow: Collection[str], slow_issuers: Collection[str] = ()) -> bool:
    return _is_right(_as_announced(FakeGpu(driver, slow, slow_issuers)))


def _is_stale_lease_refused() -> bool:
    source = RowsSource(_session())
    source.error = LeaseNotFound(lease_id=7)
    try:
        _as_announced(SlowHost(), source)
    except LeaseNotFound:
        return True
    return False


def _is_engine_waited_for(driver: Driver) -> bool:
    """Whether work that the engine issued before still sees the memory as it was.

    It goes on when the restore waits for it; one that does not has ended by then.
    """
    session = _session()
    target = poisoned_target(session)
    seen: list[bool] = []
    engine, done = driver.default, threading.Event()

    def read() -> None:
        engine.awaited.wait(DEADLINE_S)
        seen.append(all(_is_nan(target, layer) for layer in range(target.layer_count)))

    driver.launch(read)
    with Pipeline(FakeGpu(driver, ()), SMALL) as pipeline, start(pipeline, session, target) as restoration:
        restoration.wait_all()
    engine.awaited.set()
    engine.issue(done.set)
    done.wait(DEADLINE_S)
    return seen == [True]


class _Stopping(Modules):
    """Before it writes to `layer`, says so and waits until it may go on."""

    def __init__(self, session: Session, layer: int) -> None:
        super().__init__(session.adapter, session.positions)
        self._layer = layer
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: Any) -> None:
        if layer == self._layer:
            self.begun.set()
            self.may_go_on.wait(DEADLINE_S)
        super().restore(layer, method, data, begin, room)


def _is_last_layer_untouched_after_cancel() -> bool:
    """Whether what was submitted before a cancel is not done behind it."""
    session = _session()
    target = poisoned_target(session)
    compute = _Stopping(session, 0)
    with (
        Pipeline(SlowHost(), SMALL) as pipeline,
        start(pipeline, session, target, compute=compute) as restoration,
    ):
        compute.begun.wait(DEADLINE_S)
        restoration.cancel()
        compute.may_go_on.set()
    return _is_nan(target, target.layer_count - 1)


class _FencedHost(SlowHost):
    """Says when somebody waits for the end of what the computing lane was given."""

    def __init__(self, fenced: threading.Event) -> None:
        super().__init__()
        self._fenced = fenced

    def lane(self, name: str) -> Lane:
        """See Device."""
        return _FencedLane(name, self._fenced) if name == "compute" else super().lane(name)


class _FencedLane(HostLane):
    def __init__(self, name: str, fenced: threading.Event) -> None:
        super().__init__(name)
        self._fenced = fenced

    def fence(self, deadline: Deadline) -> None:
        self._fenced.set()
        super().fence(deadline)


def _is_quiet_after_drain() -> bool:
    """Whether nothing writes to the target or to a buffer once a cancelled restore is drained."""
    session = _session()
    target = poisoned_target(session)
    compute = _Stopping(session, 0)
    # Buffers for all of it, so that reading waits for nobody.
    settings = replace(SMALL, slot_count=32)
    with Pipeline(_FencedHost(compute.may_go_on), settings) as pipeline:
        with start(pipeline, session, target, compute=compute) as restoration:
            compute.begun.wait(DEADLINE_S)
            restoration.cancel()
        for layer in range(target.layer_count):
            for half in target.tensors(layer):
                half.fill_(torch.nan)
        compute.may_go_on.set()
        rings = pipeline.rings
        is_free = all(ring is not None and ring.free_count == ring.count for ring in rings)
    # The lanes have ended: whatever was still under way has been done.
    return is_free and all(_is_nan(target, layer) for layer in range(target.layer_count))


def _is_nan(target: CacheTarget, layer: int) -> bool:
    return all(bool(half.isnan().all()) for half in target.tensors(layer))


CHECKS: dict[str, Callable[[Driver | None], bool]] = {
    "position_off_by_one": lambda _: _is_equal_on_threads([]),
    "layers_swapped": lambda _: _is_equal_on_threads([]),
    "copy_not_waited_for": lambda _: _is_equal_on_threads(["copy"]),
    "buffers_reused_early": lambda _: _is_equal_on_threads(["copy"]),
    "buffers_reused_when_issued": lambda driver: _is_equal_on_streams(_given(driver), ["copy", "compute"]),
    "engine_not_waited_for": lambda driver: _is_engine_waited_for(_given(driver)),
    "issue_not_waited_for": lambda driver: _is_equal_on_streams(_given(driver), [], ["copy"]),
    "announced_early": lambda _: _is_equal_on_threads(["compute"]),
    "lease_not_checked": lambda _: _is_stale_lease_refused(),
    "failure_not_looked_at": lambda _: _is_last_layer_untouched_after_cancel(),
    "lanes_not_fenced": lambda _: _is_quiet_after_drain(),
}
ON_STREAMS = ("buffers_reused_when_issued", "engine_not_waited_for", "issue_not_waited_for")


def _given(driver: Driver | None) -> Driver:
    assert driver is not None
    return driver


def _check(name: str, request: pytest.FixtureRequest) -> bool:
    found: Driver | None = request.getfixturevalue("driver") if name in ON_STREAMS else None
    try:
        return CHECKS[name](found)
    except CacheError:
        return False


@pytest.mark.parametrize("slow", LANES)
def test_any_lane_may_be_slow(slow: str) -> None:
    """With one lane delayed at each piece of work, every layer is the engine's own when it is announced."""
    assert _is_equal_on_threads([slow])


@pytest.mark.parametrize("slow", ["copy", "compute"])
def test_any_stream_may_be_slow(driver: Driver, slow: str) -> None:
    """The same where work is issued long before it is done, as on a GPU."""
    assert _is_equal_on_streams(driver, [slow])


@pytest.mark.parametrize("slow", ["copy", "compute"])
def test_any_issuer_may_be_slow(driver: Driver, slow: str) -> None:
    """The same where work is issued late: nobody waits for an event that was not recorded."""
    assert _is_equal_on_streams(driver, [], [slow])


class _Recomputing(Modules):
    """Recomputes only once a copy behind it was issued."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.adapter, session.positions)
        self.copied, self.was_copied = threading.Event(), False

    def recompute(self, *given: Any) -> None:
        """See Compute."""
        self.was_copied = self.copied.wait(DEADLINE_S)
        super().recompute(*given)


def test_recomputation_holds_up_no_copy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is another one; what is computed behind it comes behind it."""
    session = _session()
    # Behind the session, which is proven by restores on the real device.
    driver: Driver = request.getfixturevalue("driver")
    target, compute = poisoned_target(session), _Recomputing(session)
    copy = pipeline_module._copy

    def copied(rows: Tensor, landed: Tensor) -> None:
        compute.copied.set()
        copy(rows, landed)

    monkeypatch.setattr(pipeline_module, "_copy", copied)
    with (
        Pipeline(FakeGpu(driver, ()), SMALL) as pipeline,
        start(pipeline, session, target, "tokens:0,saved:1-2", compute=compute) as restoration,
    ):
        restoration.wait_all()

    assert compute.was_copied
    assert session.continue_on(target.cache) == session.expected_ids


@pytest.mark.parametrize("name", PLANTS)
def test_a_rule_holds(name: str, request: pytest.FixtureRequest) -> None:
    """The check that finds a plant finds nothing in the pipeline as it is."""
    assert _check(name, request)


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_is_found(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken rule is found by a test: in most runs of it, where lanes are held up for a time."""
    if name in ON_STREAMS:
        request.getfixturevalue("driver")
    PLANTS[name](monkeypatch)

    assert not all(_check(name, request) for _ in range(ATTEMPTS))
