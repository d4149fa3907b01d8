"""Edited conversations are computed ahead of their turns, in the time in which an engine has nothing to do.

```
   a reply ends ──► offer: the tokens of the next prompt ──► queue ──► engine.rerendered, in a thread
   a turn comes ──► the pass gives way behind its step; what was offered for that conversation is forgotten
```

Worst case: the store is gone, and each pass ends with a reason; what was offered is then computed by the
turns, as without this.
"""

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from datetime import timedelta

from ctxcache.client.wire import Closing
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.idle_passes import IdlePasses
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.planning.ahead import GAVE_WAY, MOST_WAITING, SHARE, WORTH

STEP_TOKENS = 128
"""Tokens of a step, for the end of which a turn waits at most."""


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
        self._passes: IdlePasses[array[int]] = IdlePasses(
            self._passed, share=share, most_waiting=most_waiting, worth=worth
        )
        engine.turn_begins = self._passes.turn_begins

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many passes ended how: `in place`, `gave way`, `nothing to do`, or the reason of an error."""
        return self._passes.outcomes

    def offer(self, session_id: str, history: Sequence[int], *, return_in: timedelta | None = None) -> None:
        """Say what a conversation's next prompt begins with, when its reply has ended. Returns at once.

        `return_in`: when it is expected back, where that is known. Of many that wait, those go first, and
        then the one that was offered last.
        """
        return_s = math.inf if return_in is None else time.monotonic() + return_in.total_seconds()
        self._passes.offer(session_id, array("i", history), return_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do. False where something still is."""
        return self._passes.wait(timeout_s)

    def close(self) -> None:
        """End the thread, behind the step that it is at. What waits is forgotten."""
        self._engine.turn_begins = lambda _session_id: None
        self._passes.close()

    def _passed(self, session_id: str, history: Sequence[int]) -> str:
        done = self._engine.rerendered(
            session_id,
            history,
            step_tokens=self._step_tokens,
            is_worth=self._passes.is_worth,
            goes_on=lambda: not self._passes.is_closing,
        )
        if done.reason:
            return done.reason
        if done.gave_way:
            return GAVE_WAY
        return "in place" if done.is_in_place else "nothing to do"
