"""A metric as it is defined: name, type, labels, unit, meaning, and what to do. Facts, without a value."""

import enum
from dataclasses import dataclass


class MetricKind(enum.Enum):
    """The type of a metric's values: ever growing, going up and down, or a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    `labels` have values from closed sets, but for tenants, of which there are as many as are shown.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    unit: str
    meaning: str
    when_bad: str
    """The values when something is wrong, and the action to take."""
    counted: str = ""
    """The field of the cache's `Counters` that it shows; empty where the exposition says how it is read."""


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics of one subject, in the order in which they are shown."""

    title: str
    metrics: tuple[Metric, ...]


def counter(name: str, unit: str, meaning: str, when_bad: str, *labels: str, counted: str = "") -> Metric:
    """A metric that only grows while the server runs."""
    return Metric(f"ctxcache_{name}_total", MetricKind.COUNTER, labels, unit, meaning, when_bad, counted)


def gauge(name: str, unit: str, meaning: str, when_bad: str, *labels: str) -> Metric:
    """A metric that is what it is at the moment."""
    return Metric(f"ctxcache_{name}", MetricKind.GAUGE, labels, unit, meaning, when_bad)


def histogram(name: str, unit: str, meaning: str, when_bad: str, *labels: str) -> Metric:
    """A distribution: `_bucket`, `_sum` and `_count`."""
    return Metric(f"ctxcache_{name}", MetricKind.HISTOGRAM, labels, unit, meaning, when_bad)
