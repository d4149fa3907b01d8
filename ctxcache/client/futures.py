"""Futures: calls that one thread carries out in order, and a descriptor that says when some have ended.

    submit ──► waiting ──► running ──► done ──► the descriptor is readable until `clear`
                  └── cancel, close ──► cancelled ──► likewise

An engine's poll loop waits on the descriptor beside its own, and then looks at the futures that it keeps. The
thread and the descriptor are made when first needed. Thread-safe. Worst case: a call that takes its deadline
holds up those behind it; beyond LIMIT that wait, another one is refused.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from ctxcache.client.process_forks import end_in_children
from ctxcache.errors import TooManyRequests, Unavailable

LIMIT = 4096
"""Calls that wait for the thread."""
P = ParamSpec("P")
T = TypeVar("T")


class Completions:
    """Carries out calls of one client. `fileno` is for `select`, `poll` and `epoll`: readable means ended."""

    def __init__(self, target: str = "", *, limit: int = LIMIT) -> None:
        self._target, self._limit = target, limit
        # `_state` guards all below. The descriptor is an eventfd that counts the futures that have ended:
        #
        #     _ended   + 1     each, whether anybody polls or not
        #     clear    → 0     one read takes the whole count; there may be no descriptor
        self._state = threading.Condition()
        self._waiting: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._ended_count = 0
        self._is_closed = False
        end_in_children(self)

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a call carried out behind those that wait. Its errors are the future's.

        Raises TooManyRequests, Unavailable (the client is closed).
        """
        future: Future[T] = Future()
        with self._state:
            if self._is_closed:
                raise Unavailable(target=self._target, problem="the client is closed")
            if len(self._waiting) >= self._limit:
                raise TooManyRequests(what="calls that wait for the client's thread", limit=self._limit)
            self._waiting.append((future, partial(call, *args, **kwargs)))  # type: ignore[arg-type]  # of any result
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxcache-calls", daemon=True)
                self._thread.start()
            self._state.notify()
        return future

    def fileno(self) -> int:
        """A descriptor that is readable while futures have ended since the last `clear`: poll it, no more.

        Valid until the client is closed. Raises Unavailable then.
        """
        with self._state:
            if self._is_closed:
                raise Unavailable(target=self._target, problem="the client is closed")
            if self._descriptor < 0:
                # Begins with what has ended before it was asked for: nothing is missed by an engine that
                # polls late.
                self._descriptor = os.eventfd(self._ended_count, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._descriptor

    def clear(self) -> int:
        """How many futures have ended since the last time; the descriptor is not readable before the next."""
        with self._state:
            count, self._ended_count = self._ended_count, 0
            if count and self._descriptor >= 0:
                os.eventfd_read(self._descriptor)
            return count

    def stop(self) -> None:
        """Take nothing more, and cancel what waits. The call that runs goes on."""
        with self._state:
            self._is_closed = True
            waiting = [future for future, _ in self._waiting]
            self._waiting.clear()
            self._state.notify()
        # Outside the lock: a future's callbacks run here, and may submit or clear.
        for future in waiting:
            future.cancel()

    def forked(self) -> None:
        """See Shared: the thread is the parent's."""
        self._state, self._thread, self._is_closed = threading.Condition(), None, True

    def close(self) -> None:
        """Stop, and wait for the call that runs. Called by one of its calls, it does not wait for itself."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._state:
            # Taken away under the lock and closed behind it: the thread may be about to count one more.
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            future, call = item
            # The references are let go one by one: a waiting thread would keep the last call's arrays alive.
            del item
            # False for one that was cancelled while it waited.
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  # whatever it is, it is the future's
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # A call's result is let go before the next call is waited for.
            del future, call
            self._ended()

    def _next(self) -> tuple[Future[object], Callable[[], object]] | None:
        with self._state:
            while not self._waiting and not self._is_closed:
                self._state.wait()
            return self._waiting.popleft() if self._waiting else None

    def _ended(self) -> None:
        with self._state:
            self._ended_count += 1
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)
