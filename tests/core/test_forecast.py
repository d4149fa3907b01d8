"""When jobs start: by the pace at which those before them did, from the moment at which their place was said."""

from ctxcache.core.placement.forecast import TOLERANCE_S, Forecast


def _serving(job_count: int) -> Forecast:
    """A queue of `a`, `b` and `c` since second 100, which starts a job each second."""
    queue = Forecast()
    for number in range(job_count):
        queue.put(b"served %d" % number, float(number), float(number))
        queue.started(b"served %d" % number, float(number))
        queue.discard(b"served %d" % number)
    for order, uid in enumerate((b"a", b"b", b"c"), job_count):
        queue.put(uid, float(order), 100.0)
    return queue


def test_a_job_that_keeps_its_place_is_due_when_it_was() -> None:
    """A store estimates starts anew as time goes by: that says nothing of the queue."""
    queue = _serving(100)
    late_s = 100 + 4 * TOLERANCE_S
    assert queue.is_late(b"b", late_s)

    queue.put(b"b", 100.5, late_s)
    assert queue.is_late(b"b", late_s)
    assert queue.wait_s(b"a") < queue.wait_s(b"b") < queue.wait_s(b"c")


def test_a_job_that_is_moved_is_due_by_its_new_place() -> None:
    """A scheduler that puts it behind another has said something new."""
    queue = _serving(100)
    late_s = 100 + 4 * TOLERANCE_S
    queue.put(b"b", 103.0, late_s)

    assert not queue.is_late(b"b", late_s)
    assert queue.wait_s(b"c") < queue.wait_s(b"b")
