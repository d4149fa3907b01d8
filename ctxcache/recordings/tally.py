"""Tally: what a store was asked and gave, counted the same for a recording and for what is played against another."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ctxcache.simulate.histogram import Histogram
from ctxcache.simulate.recorded import Called

Figures: TypeAlias = dict[str, Any]
"""Numbers and texts by name, as JSON has them."""
ASKED = {"lookup": "lookups", "read": "reads"}
RESULTS = ("dram", "ssd", "missed", "empty", "refused")
NOT_THERE = "SESSION_NOT_FOUND"
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Tally:
    """Counts. `took` is what the store itself needed for reads until all was in DRAM."""

    calls: Counter[str] = field(default_factory=Counter)
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    read_tokens: int = 0
    dram_tokens: int = 0
    appended_tokens: int = 0
    took: Histogram = field(default_factory=Histogram)

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
            **{name: {result: self.found[kind, result] for result in RESULTS} for kind, name in ASKED.items()},
            "read_tokens": self.read_tokens, "dram_tokens": self.dram_tokens,
            "appended_tokens": self.appended_tokens, "evicted": self.calls["evict"],
            "expired": self.calls["expire"], "cut": self.calls["cut"], "calls": dict(sorted(self.calls.items())),
            "refused": refused, "read_in_store": quantiles(self.took),
        }  # fmt: skip


def result_of(call: Called) -> str:
    """What somebody who asked for tokens was given."""
    if call.is_refused:
        return "missed" if call.text("reason") == NOT_THERE else "refused"
    if not call.count("tokens"):
        return "empty"
    return "dram" if call.count("dram_tokens") == call.count("tokens") else "ssd"


def quantiles(took: Histogram) -> Figures:
    """Of a duration, in milliseconds."""
    named = {f"p{round(share * 100)}_ms": round(took.quantile_s(share) * 1000, 3) for share in QUANTILES}
    return {"count": took.count, **named}
