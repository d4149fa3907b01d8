"""When jobs start: by the order that is said, or by that in which they came where it is false."""

from collections.abc import Callable, Sequence

from ctxcache.core.placement.value import Forecast

LENGTH = 20


def _serve(queue: Forecast, count: int, place: Callable[[int], float], pace_s: float = 1.0) -> None:
    """Keep `LENGTH` jobs, each at its `place`, and start them as they came."""
    waiting: list[int] = []
    for number in range(count + LENGTH):
        queue.put(b"served %d" % number, place(number))
        waiting.append(number)
        if len(waiting) > LENGTH:
            uid = b"served %d" % waiting.pop(0)
            queue.started(uid, pace_s * number)
            queue.discard(uid)
    for number in waiting:
        queue.discard(b"served %d" % number)


def _by_wait(queue: Forecast, uids: Sequence[bytes]) -> list[bytes]:
    return sorted(uids, key=queue.wait_s)


def test_an_order_that_comes_true_is_believed_whatever_the_pace() -> None:
    """That a queue grows slow, or that most of its jobs are never heard of, says nothing of its order."""
    queue = Forecast()
    _serve(queue, 200, float)
    _serve(queue, 200, float, pace_s=50.0)

    assert queue.said_share == queue.share == 1


def test_where_the_order_that_is_said_is_false_jobs_start_as_they_came() -> None:
    """A scheduler that says the last come first, and serves the first."""
    queue = Forecast()
    _serve(queue, 200, lambda number: -number)
    for order, uid in enumerate((b"a", b"b", b"c")):
        queue.put(uid, -1000.0 - order)

    assert queue.said_share == 0
    assert queue.share == 1
    assert _by_wait(queue, (b"c", b"b", b"a")) == [b"a", b"b", b"c"]


def test_a_job_that_is_moved_has_come_when_it_did() -> None:
    """A store estimates starts anew as time goes by; that moves a job in the order that is said alone."""
    queue = Forecast()
    _serve(queue, 200, float)
    for order, uid in enumerate((b"a", b"b", b"c"), 1000):
        queue.put(uid, order)
    queue.put(b"b", 2000.0)
    assert _by_wait(queue, (b"a", b"b", b"c")) == [b"a", b"c", b"b"]

    _serve(queue, 200, lambda number: -number)
    assert _by_wait(queue, (b"a", b"b", b"c")) == [b"a", b"b", b"c"]


def test_a_job_that_others_overtook_is_late() -> None:
    """So many in a row that stood behind it started: of when it starts its place says nothing."""
    queue = Forecast()
    queue.put(b"phantom", -1.0)
    _serve(queue, 4, float)
    assert not queue.is_late(b"phantom")

    _serve(queue, 100, float)
    assert queue.is_late(b"phantom")
    assert not queue.discard(b"nobody")
