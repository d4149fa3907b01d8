"""Failures.

A restore that is late, cancelled, broken or stuck is a miss with a reason, and leaves nothing behind.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import Session, saved_session
from slow_pipelines import (
    SMALL,
    RowsSource,
    SlowHost,
    is_equal,
    poisoned_target,
    restored,
    schedule_of,
    slowed,
    start,
)

from ctxcache.client.arena import Bytes
from ctxcache.errors import CacheError, CorruptSegment, InvalidArgument, LeaseNotFound
from ctxcache.format.streams import Stream
from gpu_worker.engines.transformers_restoring import SessionRestorer
from gpu_worker.errors import LaneStuck, RestoreCancelled, RestoreFailed, RestoreTooLate
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.pipeline import LayerState, Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.planned import Choice, Chooser
from gpu_worker.planning.plan import Method, RestorePlan

LAYERS = range(3)


def _session() -> Session:
    return saved_session("llama")


class _At(RowsSource):
    """Rows of which one piece, counted from 0, does something first."""

    def __init__(self, session: Session, piece: int, action: Callable[[], object]) -> None:
        super().__init__(session)
        self._left, self._action = piece, action

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        if not self._left:
            self._action()
        self._left -= 1
        super().fill(stream, begin, end, into)


def _raising(error: Exception) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def _free_counts(pipeline: Pipeline) -> list[int]:
    return [ring.free_count for ring in pipeline.rings if ring is not None]


@pytest.mark.parametrize("piece", [0, 1, 7, 17])
@pytest.mark.parametrize(
    "error", [CorruptSegment(segment_id="7", problem="planted"), LeaseNotFound(lease_id=3)]
)
def test_a_failed_read_is_a_miss_with_its_reason(piece: int, error: CacheError) -> None:
    """Whichever piece it is: no layer is usable, and the next restore on the same pipeline is right."""
    session = _session()
    target = poisoned_target(session)
    with slowed() as pipeline:
        with start(pipeline, session, target, source=_At(session, piece, _raising(error))) as restoration:
            with pytest.raises(type(error)):
                restoration.wait_all()
            states = [restoration.state(layer) for layer in LAYERS]

        assert states == [LayerState.INVALID] * 3
        assert _free_counts(pipeline) == [SMALL.slot_count] * 2
        assert is_equal(restored(pipeline, session), session)


def test_whatever_breaks_has_a_reason() -> None:
    """An error that is nobody's reason becomes one, with its cause."""
    session = _session()
    source = _At(session, 2, _raising(MemoryError("planted")))

    with slowed() as pipeline, pytest.raises(RestoreFailed, match="MemoryError: planted") as raised:
        restored(pipeline, session, source=source)

    assert isinstance(raised.value.__cause__, MemoryError)


@pytest.mark.parametrize("piece", [0, 1, 7, 17])
@pytest.mark.parametrize("is_unified", [True, False])
def test_cancelled_at_any_point_leaves_nothing_behind(piece: int, *, is_unified: bool) -> None:
    """After the drain all buffers are free, and nothing is written to them or to the target any more."""
    session = _session()
    target = poisoned_target(session)
    begun: Future[Restoration] = Future()
    source = _At(session, piece, lambda: begun.result().cancel())
    with slowed("compute", is_unified=is_unified) as pipeline:
        with start(pipeline, session, target, source=source) as restoration:
            begun.set_result(restoration)
            with pytest.raises(RestoreCancelled):
                restoration.wait_all()
        for layer in LAYERS:
            for half in target.tensors(layer):
                half.fill_(torch.nan)

        assert _free_counts(pipeline) == [SMALL.slot_count] * (1 if is_unified else 2)
    assert all(bool(half.isnan().all()) for layer in LAYERS for half in target.tensors(layer))


def test_a_late_layer_fails_the_restore_for_all() -> None:
    """A waiter that waits too long is told so, and so are all others; the lanes stop."""
    session = _session()
    target = poisoned_target(session)
    may_go_on = threading.Event()
    with slowed() as pipeline:
        source = _At(session, 8, may_go_on.wait)
        with start(pipeline, session, target, source=source) as restoration:
            with pytest.raises(RestoreTooLate):
                restoration.wait(2, Deadline.after_s(0.02))
            with pytest.raises(RestoreTooLate):
                restoration.wait(0)
            may_go_on.set()
        assert _free_counts(pipeline) == [SMALL.slot_count] * 2


def test_a_deadline_that_has_passed_starts_nothing() -> None:
    """No row is read for a restore that would be too late anyway."""
    session = _session()
    read: list[int] = []
    source = _At(session, 0, lambda: read.append(1))

    with (
        slowed() as pipeline,
        start(pipeline, session, poisoned_target(session), source=source, deadline_s=0.0) as restoration,
        pytest.raises(RestoreTooLate),
    ):
        restoration.wait_all()

    assert read == []


def _stopping(is_there: threading.Event, may_go_on: threading.Event) -> Callable[[], None]:
    def stop() -> None:
        is_there.set()
        may_go_on.wait()

    return stop


def test_a_stuck_lane_is_told_and_not_used_again() -> None:
    """A read that never ends does not hang the drain; the pipeline takes no further restore."""
    session = _session()
    is_there, may_go_on = threading.Event(), threading.Event()

    source = _At(session, 3, _stopping(is_there, may_go_on))
    with slowed() as pipeline:
        restoration = start(pipeline, session, poisoned_target(session), source=source)
        is_there.wait()
        restoration.cancel()
        with pytest.raises(LaneStuck):
            restoration.drain(Deadline.after_s(0.02))
        with pytest.raises(LaneStuck):
            start(pipeline, session, poisoned_target(session))
        may_go_on.set()


def _lane_threads() -> set[threading.Thread]:
    lanes = {f"ctxcache-{name}" for name in ("read", "copy", "compute", "announce")}
    return {thread for thread in threading.enumerate() if thread.name in lanes}


def _have_ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(30)
    return not any(thread.is_alive() for thread in threads)


def test_closing_a_stuck_pipeline_leaves_no_thread_but_that_one() -> None:
    """The lane whose read never ends is told, the others end at once.

    And so does that one when its read does.
    """
    session, before = _session(), _lane_threads()
    is_there, may_go_on = threading.Event(), threading.Event()
    source = _At(session, 3, _stopping(is_there, may_go_on))
    pipeline = Pipeline(SlowHost(), SMALL)
    restoration = start(pipeline, session, poisoned_target(session), source=source)
    assert is_there.wait(30)
    restoration.cancel()

    with pytest.raises(LaneStuck, match="read"):
        pipeline.close(timeout_s=0.02)

    mine = _lane_threads() - before
    reading = {thread for thread in mine if thread.name == "ctxcache-read"}
    assert _have_ended(mine - reading)
    assert len(reading) == 1
    may_go_on.set()
    assert _have_ended(reading)


def test_a_pipeline_that_was_stuck_is_replaced_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's restorer goes on with another one, whose lanes end with it."""
    session, before = _session(), _lane_threads()
    is_there, may_go_on = threading.Event(), threading.Event()
    sources = [RowsSource(session), _At(session, 3, _stopping(is_there, may_go_on))]
    monkeypatch.setattr("gpu_worker.pipeline.sources.LeasedSource", lambda _rows: sources.pop())
    rows: Any = SimpleNamespace(close=lambda: None)
    plan = RestorePlan.parse("kv:0-2")
    chooser = Chooser(session.adapter, plan, None)
    restorer = SessionRestorer(session.adapter, chooser, timeout_s=30, settings=SMALL)
    stuck = restorer.begin(rows, Choice(plan, None), session.token_ids.tolist())
    assert is_there.wait(30)
    stuck.restoration.cancel()
    with pytest.raises(LaneStuck):
        stuck.restoration.drain(Deadline.after_s(0.02))

    again = restorer.begin(rows, Choice(plan, None), session.token_ids.tolist())
    again.wait_for_lead()
    restorer.close()

    assert is_equal(again.cache, session)
    mine = _lane_threads() - before
    reading = {thread for thread in mine if thread.name == "ctxcache-read"}
    assert _have_ended(mine - reading)
    may_go_on.set()
    assert _have_ended(reading)


def test_two_restores_interleave() -> None:
    """Two sessions on one pipeline at a time each get their own rows.

    One that fails does not harm the other.
    """
    one, other = saved_session("llama"), saved_session("qwen3")
    targets = [poisoned_target(one), poisoned_target(other), poisoned_target(one)]
    failing = _At(one, 4, _raising(LeaseNotFound(lease_id=1)))
    with (
        slowed("compute") as pipeline,
        start(pipeline, one, targets[0]) as first,
        start(pipeline, one, targets[2], source=failing) as bad,
        start(pipeline, other, targets[1]) as second,
    ):
        first.wait_all()
        second.wait_all()
        with pytest.raises(LeaseNotFound):
            bad.wait_all()

    assert is_equal(targets[0].cache, one)
    assert is_equal(targets[1].cache, other)


def test_a_row_that_no_buffer_holds_is_refused() -> None:
    """Before anything is submitted: rows of an earlier layer that would fit are not written either."""
    session = saved_session("deepseek")
    target = poisoned_target(session)

    settings = PipelineSettings(slot_bytes=200, slot_count=2)
    with slowed(settings=settings) as pipeline, pytest.raises(InvalidArgument, match="slot_bytes"):
        start(pipeline, session, target, "saved:0,hidden:1-2")

    assert all(bool(half.isnan().all()) for layer in LAYERS for half in target.tensors(layer))


def test_a_schedule_of_another_length_is_refused() -> None:
    """A plan for fewer tokens than the target has would leave some of it as it was."""
    session = _session()
    target, other = poisoned_target(session), poisoned_target(saved_session("llama", layer_count=2))

    with Pipeline(SlowHost()) as pipeline, pytest.raises(InvalidArgument, match="schedule"):
        pipeline.start(
            schedule_of(session, target, "saved:0-2"),
            RowsSource(session),
            other,
            Modules(session.adapter, session.positions),
            deadline=Deadline.after_s(1),
        )


class _Late(Modules):
    """Computes only once it may."""

    def __init__(self, session: Session, may_go_on: threading.Event) -> None:
        super().__init__(session.adapter, session.positions)
        self._may_go_on = may_go_on

    def restore(self, layer: int, method: Method, data: torch.Tensor, begin: int, room: Any) -> None:
        self._may_go_on.wait()
        super().restore(layer, method, data, begin, room)


def test_reads_run_ahead_no_further_than_the_ring() -> None:
    """While nothing is computed, no more pieces are read than there are buffers."""
    session = _session()
    may_go_on = threading.Event()
    filled: list[int] = []
    source = RowsSource(session)
    fill = source.fill

    def counting(stream: Stream, begin: int, end: int, into: Bytes) -> None:
        filled.append(begin)
        fill(stream, begin, end, into)

    source.fill = counting  # type: ignore[method-assign]
    target = poisoned_target(session)
    with slowed(is_unified=True) as pipeline:
        compute = _Late(session, may_go_on)
        with start(pipeline, session, target, source=source, compute=compute) as restoration:
            while len(filled) < pipeline.rings.staging.count:
                threading.Event().wait(0.001)
            ahead = len(filled)
            may_go_on.set()
            restoration.wait_all()

    assert ahead == SMALL.slot_count
    assert is_equal(target.cache, session)
