"""Counts of the connector, in vLLM's own metrics and log: what came of hints, and why turns had no store.

connector, each side ── ConnectorCounts, with vLLM's steps ──► ConnectorMetrics: vllm:ctxcache_..._total
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ctxcache.errors import CacheError
from gpu_worker.engines.link import GONE
from gpu_worker.engines.reasons import Reasons

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Each counter's name, what it counts, and its labels.
COUNTERS = {
    "hints": (
        "vllm:ctxcache_hints",
        "Hints about conversations that the context store was told, by what came of them.",
        ["hint", "outcome"],
    ),
    "misses": (
        "vllm:ctxcache_misses",
        "Turns for which the context store was not used to the end, by what was not done, and why.",
        ["what", "why"],
    ),
}


class Misses:
    """Why conversations were not restored, saved or shared. Thread-safe, but for `take_counts`."""

    def __init__(self, log: logging.Logger) -> None:
        self._reasons = Reasons(log)
        self._taken: Counter[str] = Counter()

    def tell(self, session: str, what: str, error: Exception) -> None:
        """A conversation is `what`, such as `not saved`, because of this error."""
        why = error.reason.lower() if isinstance(error, CacheError) else type(error).__name__
        # The link tells of a store that is gone, for all conversations together.
        who = "any" if isinstance(error, GONE) else session
        self._reasons.tell(who, f"is {what}, {why}", error)

    def take_counts(self) -> dict[str, int]:
        """Misses since the last call, by `what/why`."""
        before, self._taken = self._taken, Counter(self._reasons.counts)
        new = self._taken - before
        return {sort.removeprefix("is ").replace(", ", "/"): count for sort, count in new.items()}


class ConnectorCounts(KVConnectorStats):
    """Counts since the last report, by `counter/label/label`."""

    @classmethod
    def of(cls, **counts: Mapping[str, int]) -> Self:
        """Take each counter's counts, by its labels."""
        return cls({f"{name}/{labels}": n for name, some in counts.items() for labels, n in some.items()})

    def reset(self) -> None:
        """Forget all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "ConnectorCounts":
        """The sums of both reports."""
        return ConnectorCounts(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Counts under the names that vLLM logs."""
        return {name.replace("/", " ", 1): count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Adds the counts to vLLM's Prometheus counters."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            key: counter(name=name, documentation=text, labelnames=[*labelnames, *labels])
            for key, (name, text, labels) in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last report."""
        for name, count in transfer_stats_data.items():
            key, *labels = name.split("/")
            self._counters[key].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(count)
