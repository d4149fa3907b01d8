"""A pool's threads are there before its first work, and none is begun after."""

import threading

import pytest

from ctxcache.runtime.threads import started_pool


def test_all_threads_are_begun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of as many callers at a time starts no thread more."""
    pool = started_pool(3, "pool-test")
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    together = threading.Barrier(3, timeout=10)

    work = [pool.submit(together.wait) for _ in range(3)]

    assert sorted(done.result(10) for done in work) == [0, 1, 2]
    assert started == []
    pool.shutdown()


def test_threads_that_cannot_be_had_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those begun before the one that could not be are let go."""
    begun: list[threading.Thread] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    with pytest.raises(RuntimeError, match="start new thread"):
        started_pool(3, "pool-test")

    for thread in begun:
        thread.join(10)
        assert not thread.is_alive()
