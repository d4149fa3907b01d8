"""Passes ahead in a thread of its own: what waits is computed, one conversation after the other.

`planning/ahead.py` decides which conversation is next and when; this waits, calls, and counts what came of
it. What runs a pass gives way to whatever is asked meanwhile, and says so. Worst case: each pass ends with a
reason, and what was offered is computed by the turns, as without this.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ctxcache.client.wire import Closing
from gpu_worker.planning.ahead import MOST_WAITING, SHARE, WORTH, AheadQueue

log = logging.getLogger(__name__)

Work = TypeVar("Work")


class IdlePasses(Closing, Generic[Work]):
    """The thread, and what waits for it. Thread-safe. Close it before what runs the passes."""

    def __init__(
        self,
        run: Callable[[str, Work], str],
        *,
        share: float = SHARE,
        most_waiting: int = MOST_WAITING,
        worth: float = WORTH,
    ) -> None:
        """`run` does a conversation's pass, and says what came of it: GAVE_WAY where it goes on later.

        Raises InvalidArgument(field="share" | "most_waiting" | "worth").
        """
        self._pass = run
        self._queue: AheadQueue[Work] = AheadQueue(share=share, most_waiting=most_waiting, worth=worth)
        self._changed = threading.Condition()
        self._is_closing = False
        self._outcomes: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="ctxcache-ahead", daemon=True)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        """Whether a pass is to end behind its step."""
        return self._is_closing

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many passes ended how."""
        with self._changed:
            return dict(self._outcomes)

    def is_worth(self, spared_count: int, cost_count: int) -> bool:
        """Whether a pass pays that spares a turn so many tokens and computes so many."""
        return self._queue.is_worth(spared_count, cost_count)

    def offer(self, session_id: str, work: Work, return_s: float = math.inf) -> None:
        """A conversation's turn has ended. `return_s`: when it is expected back, on the monotonic clock."""
        with self._changed:
            self._queue.offer(session_id, work, return_s)
            self._changed.notify_all()

    def turn_begins(self, session_id: str) -> None:
        """A conversation is back: what waits for it is forgotten."""
        with self._changed:
            self._queue.turn_begins(session_id, time.monotonic())
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do. False where something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue.is_idle, timeout_s)

    def close(self) -> None:
        """End the thread, behind the step that it is at. What waits is forgotten."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                offer = None
                while not self._is_closing and (offer := self._queue.take(time.monotonic())) is None:
                    pause_s = self._queue.due_s() - time.monotonic()
                    self._changed.wait(None if pause_s == math.inf else max(pause_s, 0))
                if offer is None:
                    return
            try:
                outcome = self._pass(offer.session_id, offer.work)
            # The thread goes on: an error of one conversation is no other's.
            except Exception as error:
                log.exception("ahead_broken session=%a", offer.session_id)
                outcome = getattr(error, "reason", type(error).__name__)
            with self._changed:
                self._outcomes[outcome] += 1
                self._queue.ended(outcome, time.monotonic())
                self._changed.notify_all()
