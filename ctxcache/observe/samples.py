"""Samples: values of metrics at one moment, and the families that the Prometheus library writes out of them."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

from ctxcache.core.observations import Histogram
from ctxcache.observe.metric import Kind, Metric


class Distribution(NamedTuple):
    """A histogram as it was: counts by bucket, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """One value. `labels` are in the order of the metric's."""

    name: str
    value: float | Distribution
    labels: tuple[str, ...] = ()


def taken(histogram: Histogram) -> Distribution:
    """A histogram as it is now."""
    return Distribution(histogram.bounds, tuple(histogram.counts), histogram.total)


def families(metrics: Iterable[Metric], samples: Iterable[Sample]) -> Iterator[Family]:
    """The samples by metric, in the metrics' order. Raises KeyError for a sample of none of them."""
    by_name: dict[str, list[Sample]] = {metric.name: [] for metric in metrics}
    for sample in samples:
        by_name[sample.name].append(sample)
    for metric in metrics:
        yield _family(metric, by_name[metric.name])


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    if metric.kind is Kind.HISTOGRAM:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for sample in samples:
            assert isinstance(sample.value, Distribution)  # noqa: S101  # as the table says
            family.add_metric(sample.labels, _cumulative(sample.value), sample.value.total)
        return family
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    made = make(metric.name, metric.meaning, labels=metric.labels)
    for sample in samples:
        assert not isinstance(sample.value, Distribution)  # noqa: S101  # as the table says
        made.add_metric(sample.labels, sample.value)
    return made


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = (*(f"{bound:g}" for bound in distribution.bounds), "+Inf")
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
