"""Why conversations were not restored or saved: counted by sort, and named once for each conversation.

A sort that is named once for a process hides every later conversation's; one that is named at each turn
fills the engine's log.
"""

import logging
import threading
from collections import Counter, OrderedDict

MOST_NAMED = 4096
"""Pairs of conversation and sort that are remembered; beyond, the oldest is named again."""


class Reasons:
    """Counts and names. Thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._lock = log, threading.Lock()
        self._counts: Counter[str] = Counter()
        self._named: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def counts(self) -> dict[str, int]:
        """How often each sort came."""
        with self._lock:
            return dict(self._counts)

    def tell(self, session: str, sort: str, detail: object) -> None:
        """A conversation was not restored or saved; `sort` says it in few words, `detail` as it was met."""
        with self._lock:
            self._counts[sort] += 1
            count, is_named = self._counts[sort], (session, sort) in self._named
            self._named[session, sort] = None
            while len(self._named) > MOST_NAMED:
                self._named.popitem(last=False)
        if not is_named:
            # `%a`: a name may have characters that a log cannot write, or that end its line.
            self._log.warning("conversation %a %s: %s (%d such so far)", session, sort, detail, count)
