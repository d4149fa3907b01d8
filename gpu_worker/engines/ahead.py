"""Edited conversations are computed ahead of their turns, in the time in which an engine has nothing to do.

```
   a reply ends ──► offer: the tokens of the next prompt ──► queue ──► engine.rerendered, in a thread
   a turn comes ──► the pass gives way behind its step; what was offered for that conversation is forgotten
```

`planning/ahead.py` decides which conversation is next and when; this carries it out. Worst case: the store is
gone, and each pass ends with a reason; what was offered is then computed by the turns, as without this.
"""

import logging
import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ctxcache.client.wire import Closing
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Rerendered
from gpu_worker.families.generation import common_prefix
from gpu_worker.planning.ahead import GAVE_WAY, MOST_WAITING, SHARE, WORTH, AheadQueue

log = logging.getLogger(__name__)

STEP_TOKENS = 128
"""Tokens of a step, for the end of which a turn waits at most."""

# Any: what a chat template takes.
Message = Mapping[str, Any]


def next_history(render: Callable[[list[Message]], Sequence[int]], messages: Sequence[Message]) -> list[int]:
    """The tokens that the next prompt begins with, whatever the user writes.

    `render` gives a conversation's token ids, as a chat template has them; the last of `messages` is the
    reply as the client will send it. Knows no template: the conversation is rendered with two different next
    messages, and what both begin with is the answer.
    """
    first, second = (render([*messages, {"role": "user", "content": text}]) for text in ("a", "b"))
    return list(first[: common_prefix(first, second)])


class Ahead(Closing):
    """Passes ahead for one engine, in a thread of its own. Close it before the engine."""

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        share: float = SHARE,
        most_waiting: int = MOST_WAITING,
        worth: float = WORTH,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """`share`: the most of the time that passes take, within (0, 1]. `worth`: see `planning/ahead.py`.

        Raises InvalidArgument(field="share" | "most_waiting" | "worth" | "step_tokens").
        """
        if step_tokens < 1:
            raise InvalidArgument(field="step_tokens", problem=f"{step_tokens} is no number of tokens")
        self._engine, self._step_tokens = engine, step_tokens
        self._queue: AheadQueue[array[int]] = AheadQueue(share=share, most_waiting=most_waiting, worth=worth)
        self._changed = threading.Condition()
        self._is_closing = False
        self._outcomes: Counter[str] = Counter()
        engine.turn_begins = self._turn_begins
        self._thread = threading.Thread(target=self._run, name="ctxcache-ahead", daemon=True)
        self._thread.start()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many passes ended how: `in place`, `gave way`, `nothing to do`, or the reason of an error."""
        with self._changed:
            return dict(self._outcomes)

    def offer(self, session_id: str, history: Sequence[int], *, return_in: timedelta | None = None) -> None:
        """Say what a conversation's next prompt begins with, when its reply has ended. Returns at once.

        `return_in`: when it is expected back, where that is known. Of many that wait, those go first, and
        then the one that was offered last.
        """
        return_s = math.inf if return_in is None else time.monotonic() + return_in.total_seconds()
        with self._changed:
            self._queue.offer(session_id, array("i", history), return_s)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do. False where something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue.is_idle, timeout_s)

    def close(self) -> None:
        """End the thread, behind the step that it is at. What waits is forgotten."""
        self._engine.turn_begins = lambda _session_id: None
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _turn_begins(self, session_id: str) -> None:
        with self._changed:
            self._queue.turn_begins(session_id, time.monotonic())
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                offer = None
                while not self._is_closing and (offer := self._queue.take(time.monotonic())) is None:
                    pause_s = self._queue.due_s() - time.monotonic()
                    self._changed.wait(None if pause_s == math.inf else max(pause_s, 0))
                if offer is None:
                    return
            outcome = self._passed(offer.session_id, offer.work)
            with self._changed:
                self._outcomes[outcome] += 1
                self._queue.ended(outcome, time.monotonic())
                self._changed.notify_all()

    def _passed(self, session_id: str, history: Sequence[int]) -> str:
        try:
            done = self._engine.rerendered(
                session_id,
                history,
                step_tokens=self._step_tokens,
                is_worth=self._queue.is_worth,
                goes_on=lambda: not self._is_closing,
            )
        # The thread goes on: an error of one conversation is no other's.
        except Exception as error:
            log.exception("ahead_broken session=%a", session_id)
            return getattr(error, "reason", type(error).__name__)
        return _outcome(done)


def _outcome(done: Rerendered) -> str:
    if done.reason:
        return done.reason
    if done.gave_way:
        return GAVE_WAY
    return "in place" if done.is_in_place else "nothing to do"
