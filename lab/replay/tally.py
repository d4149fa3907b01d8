"""Tally.

A store's calls and answers, counted by one rule for a recording and for the store it is played against.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeAlias

from ctxcache.client import Client
from ctxcache.client.types import RecordedCall, RecordingPart
from ctxcache.errors import CacheError, Unavailable
from ctxcache.recordings import values_of
from ctxcache.simulate.recorded import Called
from ctxcache.simulate.tally import FineHistogram

Figures: TypeAlias = dict[str, Any]
"""Numbers and texts by name, as JSON has them."""
ASKED = {"lookup": "lookups", "read": "reads"}
RESULTS = ("dram", "ssd", "missed", "empty", "refused")
NOT_THERE = "SESSION_NOT_FOUND"
QUANTILES = (0.5, 0.95, 0.99)

PATIENCE_S = 30.0
LONGEST_S = 7 * 86400.0
PARTS_UNTIL_ALL = 2
"""The next part may have been on its way already when the last call was made; the one behind it was not."""


@dataclass(slots=True)
class Tally:
    """Counts. `took` is what the store itself needed for reads until all was in DRAM."""

    calls: Counter[str] = field(default_factory=Counter)
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    read_tokens: int = 0
    dram_tokens: int = 0
    appended_tokens: int = 0
    took: FineHistogram = field(default_factory=FineHistogram)

    def add(self, call: Called) -> None:
        """Count a call."""
        self.calls[call.kind] += 1
        if call.is_refused:
            self.refused[call.kind, call.text("reason")] += 1
        if call.kind in ASKED:
            self.found[call.kind, result_of(call)] += 1
        if call.is_refused:
            return
        if call.kind == "read":
            self.read_tokens += call.count("tokens")
            self.dram_tokens += call.count("dram_tokens")
            self.took.add(call.count("took_us") / 10**6)
        elif call.kind == "append":
            self.appended_tokens += call.count("tokens")

    def figures(self) -> Figures:
        """All of it."""
        refused: dict[str, dict[str, int]] = {}
        for (kind, reason), count in sorted(self.refused.items()):
            refused.setdefault(kind, {})[reason] = count
        return {
            **{
                name: {result: self.found[kind, result] for result in RESULTS} for kind, name in ASKED.items()
            },
            "read_tokens": self.read_tokens,
            "dram_tokens": self.dram_tokens,
            "appended_tokens": self.appended_tokens,
            "evicted": self.calls["evict"],
            "expired": self.calls["expire"],
            "cut": self.calls["cut"],
            "calls": dict(sorted(self.calls.items())),
            "refused": refused,
            "read_in_store": quantiles(self.took),
        }


def result_of(call: Called) -> str:
    """The outcome of a call for tokens."""
    if call.is_refused:
        return "missed" if call.text("reason") == NOT_THERE else "refused"
    if not call.count("tokens"):
        return "empty"
    return "dram" if call.count("dram_tokens") == call.count("tokens") else "ssd"


def quantiles(took: FineHistogram) -> Figures:
    """Quantiles of a duration, in milliseconds."""
    named = {f"p{round(share * 100)}_ms": round(took.quantile_s(share) * 1000, 3) for share in QUANTILES}
    return {"count": took.count, **named}


class Watch:
    """Counts what a store is asked within the block, by the rule that counts a recording.

    The store's own recording is read in a thread. Raises what the recording's beginning does.
    Worst case: that store is being recorded already, which is TooManyRequests.
    """

    def __init__(self, client: Client) -> None:
        self.tally, self.lost_count = Tally(), 0
        self._client = client
        self._parts: Iterator[RecordingPart] | None = None
        self._heard = threading.Condition()
        self._part_count = 0
        self._failure: CacheError | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._count, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._await(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True

    def settle(self) -> None:
        """Wait until all that the store was asked before is counted. Raises CacheError."""
        self._await(self._part_count + PARTS_UNTIL_ALL)
        self._is_over = True
        self._thread.join(PATIENCE_S)

    def _await(self, part_count: int) -> None:
        with self._heard:
            is_there = self._heard.wait_for(
                lambda: self._failure is not None or self._part_count >= part_count, PATIENCE_S
            )
        if self._failure is not None:
            raise self._failure
        if not is_there:
            raise Unavailable(target="the store", problem="its recording stands still")

    def _count(self) -> None:
        failure: CacheError = Unavailable(target="the store", problem="it ended its recording")
        try:
            for part in self._client.admin.record(timedelta(seconds=LONGEST_S)):
                for call in part.calls:
                    self.tally.add(_called(call))
                self.lost_count += part.lost_count
                # Only the last part of one turn's calls tells the time.
                if part.store is not None or part.elapsed_ns is not None:
                    self._tell()
                if self._is_over:
                    return
        except CacheError as error:
            failure = error
        with self._heard:
            self._failure = failure
            self._heard.notify_all()

    def _tell(self) -> None:
        with self._heard:
            self._part_count += 1
            self._heard.notify_all()


def _called(call: RecordedCall) -> Called:
    """A call as a reader of the file finds it."""
    values = values_of(call)
    return Called(
        str(values["call"]), call.at_ns / 10**9, str(values["session"]), call.session_tokens, values
    )
