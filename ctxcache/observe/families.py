"""Families: samples as the Prometheus library writes them."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

from ctxcache.observe.metric import Metric, MetricKind
from ctxcache.observe.moment import Distribution, Sample


def families(metrics: Iterable[Metric], samples: Iterable[Sample]) -> Iterator[Family]:
    """The samples by metric, in the metrics' order. Raises KeyError for a sample of none of them."""
    by_name: dict[str, list[Sample]] = {metric.name: [] for metric in metrics}
    for sample in samples:
        by_name[sample.name].append(sample)
    for metric in metrics:
        yield _family(metric, by_name[metric.name])


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    if metric.kind is MetricKind.HISTOGRAM:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for sample in samples:
            assert isinstance(sample.value, Distribution)  # noqa: S101  # as the table says
            family.add_metric(sample.labels, _cumulative(sample.value), sample.value.total)
        return family
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    made = make(metric.name, metric.meaning, labels=metric.labels)
    for sample in samples:
        assert not isinstance(sample.value, Distribution)  # noqa: S101  # as the table says
        made.add_metric(sample.labels, sample.value)
    return made


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = (*(f"{bound:g}" for bound in distribution.bounds), "+Inf")
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
