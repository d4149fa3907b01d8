"""Lanes of a GPU: whoever submits work issues it, and nothing overtakes what had to be handed over."""

import threading

import pytest
import torch
from fake_cuda import Driver, FakeGpu, Stream, driver
from torch import Tensor

from gpu_worker.errors import LaneStuck, RestoreFailed, RestoreTooLate
from gpu_worker.pipeline.lane import CudaLane, Deadline, HostEvent, HostLane, passed

__all__ = ["driver"]
PATIENCE_S = 20.0


def _soon() -> Deadline:
    return Deadline.after_s(PATIENCE_S)


class Issued:
    """Pieces of work that were issued, in order, and the thread that issued each."""

    def __init__(self, driver: Driver) -> None:
        self.lane = CudaLane("lane", FakeGpu(driver, ()).device)
        self.names: list[str] = []
        self.threads: list[str] = []

    def note(self, name: str) -> None:
        """The calling thread issues a piece."""
        self.names.append(name)
        self.threads.append(threading.current_thread().name)


def test_the_submitter_issues(driver: Driver) -> None:
    """Behind events that were issued; its own settings of torch stay, and tensors made there need no grad."""
    issued, weight = Issued(driver), torch.nn.Parameter(torch.ones(2))
    products: list[Tensor] = []
    first = issued.lane.submit(lambda: issued.note("a"), deadline=_soon())
    issued.lane.submit(lambda: products.append(weight * 2), after=[first], deadline=_soon()).wait(_soon())
    issued.lane.close(_soon())

    assert issued.threads == [threading.current_thread().name]
    assert not products[0].requires_grad
    assert torch.is_grad_enabled()
    assert not any(thread.name == "ctxcache-lane" for thread in threading.enumerate())


def test_work_that_waits_holds_up_the_lane_and_no_submitter(driver: Driver) -> None:
    """What is submitted behind it comes behind it; then the submitter issues again."""
    issued, may_go_on = Issued(driver), threading.Event()

    def wait() -> None:
        assert may_go_on.wait(PATIENCE_S)
        issued.note("a")

    first = issued.lane.submit(wait, deadline=_soon(), does_wait=True)
    second = issued.lane.submit(lambda: issued.note("b"), deadline=_soon())
    assert (first.is_issued, second.is_issued, issued.names) == (False, False, [])
    may_go_on.set()
    second.wait(_soon())
    issued.lane.submit(lambda: issued.note("c"), deadline=_soon())
    issued.lane.close(_soon())

    assert issued.names == ["a", "b", "c"]
    assert issued.threads == ["ctxcache-lane", "ctxcache-lane", threading.current_thread().name]


def test_work_behind_what_is_not_issued_is_handed_over(driver: Driver) -> None:
    """A thread's work that has not ended, or another lane's that was handed over."""
    issued, other, host = Issued(driver), Issued(driver), HostEvent()
    first = other.lane.submit(lambda: other.note("a"), after=[host], deadline=_soon())
    second = issued.lane.submit(lambda: issued.note("b"), after=[first], deadline=_soon())
    assert not second.is_issued
    host.end(None, 0.0)
    second.wait(_soon())
    issued.lane.close(_soon())
    other.lane.close(_soon())

    assert (other.names, issued.names) == (["a"], ["b"])
    assert {*issued.threads, *other.threads} == {"ctxcache-lane"}


def test_two_threads_that_submit_do_not_wait_for_one_another(driver: Driver) -> None:
    """While one issues, the other's work goes to the lane's thread, behind it."""
    issued = Issued(driver)

    def issue_slowly() -> None:
        # From another thread, while this one is in the middle of its work.
        other = threading.Thread(target=issued.lane.submit, args=[lambda: issued.note("b")], kwargs=named)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive()
        issued.note("a")

    named = {"deadline": _soon()}
    issued.lane.submit(issue_slowly, deadline=_soon())
    issued.lane.close(_soon())

    assert issued.names == ["a", "b"]


@pytest.mark.parametrize("does_wait", [False, True])
def test_work_that_breaks_fails_its_event_and_what_is_behind(driver: Driver, *, does_wait: bool) -> None:
    """The submitter goes on: it hears by the event, and by `on_error`."""
    issued, heard = Issued(driver), list[str]()

    def breaks() -> None:
        raise ZeroDivisionError("planted")

    first = issued.lane.submit(
        breaks, deadline=_soon(), on_error=lambda error: heard.append(error.reason), does_wait=does_wait
    )
    second = issued.lane.submit(lambda: issued.note("b"), after=[first], deadline=_soon())
    for event in (first, second):
        with pytest.raises(RestoreFailed, match="planted"):
            event.wait(_soon())
    issued.lane.close(_soon())

    assert heard == ["RESTORE_FAILED"]
    assert issued.names == []


def test_a_fence_waits_for_what_was_handed_over(driver: Driver) -> None:
    """And says so where that does not end: what is not issued has no place on the stream yet."""
    issued, may_go_on = Issued(driver), threading.Event()

    def wait() -> None:
        may_go_on.wait(PATIENCE_S)

    issued.lane.submit(wait, deadline=_soon(), does_wait=True)
    with pytest.raises(LaneStuck):
        issued.lane.fence(Deadline.after_s(0.01))
    may_go_on.set()
    issued.lane.fence(_soon())
    issued.lane.close(_soon())


def test_each_piece_is_issued_into_its_lanes_stream(driver: Driver) -> None:
    """By turns from a thread of the lanes, whose stream stays as it was left; an engine gets its own back."""
    lanes = [CudaLane(name, torch.device("cpu")) for name in "ab"]
    own, host = driver.current(), HostLane("read")
    found, left = list[Stream](), list[Stream]()

    def work() -> None:
        for lane in (*lanes, lanes[0]):
            lane.submit(lambda: found.append(driver.current()), deadline=_soon()).wait(_soon())
            left.append(driver.current())

    host.submit(work, deadline=_soon()).wait(_soon())
    first, second = driver.streams[-2:]
    assert found == left == [first, second, first]
    work()
    assert found[3:] == [first, second, first]
    assert left[3:] == [own, own, own]

    def outer() -> None:
        lanes[1].submit(lambda: found.append(driver.current()), deadline=_soon())
        found.append(driver.current())

    host.submit(lambda: lanes[0].submit(outer, deadline=_soon()).wait(_soon()), deadline=_soon()).wait(
        _soon()
    )
    assert found[6:] == [second, first]
    host.close(_soon())
    for lane in lanes:
        lane.close(_soon())


def test_an_event_that_passed_is_no_wait() -> None:
    """Not even where no time is left, and others wait for it; one that has not ended is too late then."""
    event, running = passed(), HostEvent()
    with pytest.raises(RestoreTooLate):
        running.wait(Deadline.after_s(0))
    waiters = [threading.Thread(target=event.wait, args=[_soon()]) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    for _ in range(1000):
        assert event.settle_by(Deadline.after_s(0))
    for waiter in waiters:
        waiter.join()
