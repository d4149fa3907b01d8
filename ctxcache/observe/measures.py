"""Measures: what an alert looks at. Each is PromQL for Prometheus, and a number on the status page.

Pure. Both are of one declaration, so that they cannot differ. The page knows gauges as they are now, and
counters as they grew in the last hour, by minute; a rule's `for` it does not know.

    Value("ctxcache_path_state", state="lost")        ctxcache_path_state{state="lost"}
    Average(Value(...), minutes=15)                   avg_over_time(...[15m])
    Grown("ctxcache_corrupt_segments_total", 60)      increase(...[60m])
    Late("ctxcache_rpc_seconds", 5)                   histogram_quantile(0.99, ... rate(..._bucket[5m]))
    Ratio(Value("ctxcache_leases"), Value(...))       ctxcache_leases / ctxcache_lease_limit
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ctxcache.observe.moment import Moment, Ring, quantile
from ctxcache.observe.table import METRICS

Chosen = Mapping[str, str | tuple[str, ...]]
"""The values of labels that count, one or several by label."""
Groups = dict[tuple[str, ...], float]
INSTANCE = ("instance", "job")
"""The labels that Prometheus gives to each scrape."""


class Measure(Protocol):
    """A number that an alert compares with its bound."""

    def promql(self) -> str:
        """The number in Prometheus' language."""
        ...

    def now(self, moment: Moment, ring: Ring) -> float:
        """The largest number that Prometheus would have, of any labels; 0 where there is none."""
        ...


def _selected(name: str, chosen: Chosen) -> str:
    if not chosen:
        return name
    parts = (
        f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"'
        for label, value in chosen.items()
    )
    return f"{name}{{{','.join(parts)}}}"


def _is_chosen(name: str, labels: tuple[str, ...], chosen: Chosen) -> bool:
    values = dict(zip(METRICS[name].labels, labels, strict=True))
    return all(
        values[label] == value if isinstance(value, str) else values[label] in value
        for label, value in chosen.items()
    )


@dataclass(frozen=True, slots=True)
class Value:
    """A gauge as it is now. `chosen`: of these labels alone."""

    name: str
    chosen: Chosen

    def promql(self) -> str:
        """The gauge."""
        return _selected(self.name, self.chosen)

    def now(self, moment: Moment, ring: Ring) -> float:
        """The largest value."""
        del ring
        return max((value for _, value in self.by_labels(moment)), default=0)

    def by_labels(self, moment: Moment) -> Iterator[tuple[dict[str, str], float]]:
        """The values with the labels that tell them apart."""
        for labels, value in moment.of(self.name).items():
            if _is_chosen(self.name, labels, self.chosen):
                named = zip(METRICS[self.name].labels, labels, strict=True)
                yield {label: text for label, text in named if label not in self.chosen}, value


def value(name: str, **chosen: str) -> Value:
    """A gauge of these labels."""
    return Value(f"ctxcache_{name}", chosen)


@dataclass(frozen=True, slots=True)
class Below:
    """The distance of a gauge of 0 or 1 from 1."""

    of: Value

    def promql(self) -> str:
        """1 where the gauge is 0."""
        return f"1 - {self.of.promql()}"

    def now(self, moment: Moment, ring: Ring) -> float:
        """1 where the gauge is 0."""
        return 1 - self.of.now(moment, ring)


@dataclass(frozen=True, slots=True)
class Average:
    """A gauge's average over the last minutes; on the page, which keeps no gauges, its value now."""

    of: Value
    minutes: int

    def promql(self) -> str:
        """The average."""
        return f"avg_over_time({self.of.promql()}[{self.minutes}m])"

    def now(self, moment: Moment, ring: Ring) -> float:
        """The value now."""
        return self.of.now(moment, ring)


@dataclass(frozen=True, slots=True)
class Grown:
    """The growth of a counter, or of a distribution's count, within the last minutes, by the labels `by`."""

    name: str
    minutes: int
    chosen: Chosen
    by: tuple[str, ...]
    is_rate: bool = False
    """Whether it is told per second."""
    counts_first: bool = False
    """Whether a counter that appears has grown by its value: Prometheus sees no growth there."""

    def promql(self) -> str:
        """The growth, summed over the labels that are not in `by`."""
        counter = _selected(self._series(), self.chosen)
        grown = f"{'rate' if self.is_rate else 'increase'}({counter}[{self.minutes}m])"
        if set(METRICS[self.name].labels) - set(self.by):
            grown = f"sum by ({', '.join((*INSTANCE, *self.by))}) ({grown})"
        if not self.counts_first:
            return grown
        return f"({grown} > 0 or {counter} unless {counter} offset {self.minutes}m)"

    def _series(self) -> str:
        return self.name if self.name.endswith("_total") else f"{self.name}_count"

    def now(self, moment: Moment, ring: Ring) -> float:
        """The largest growth."""
        return max(self.groups(moment, ring).values(), default=0)

    def groups(self, moment: Moment, ring: Ring) -> Groups:
        """The growth by the values of `by`."""
        grown = ring.last(moment, self.minutes)
        counts = dict(grown.of(self.name))
        counts |= {labels: sum(one.counts) for labels, one in grown.distributions(self.name).items()}
        seconds = 60 * self.minutes if self.is_rate else 1
        names, groups = METRICS[self.name].labels, Groups()
        for labels, count in counts.items():
            if _is_chosen(self.name, labels, self.chosen):
                group = tuple(text for name, text in zip(names, labels, strict=True) if name in self.by)
                groups[group] = groups.get(group, 0) + count / seconds
        return groups


def grown(name: str, minutes: int, *, by: tuple[str, ...] = (), **chosen: str) -> Grown:
    """A counter's growth."""
    return Grown(f"ctxcache_{name}_total", minutes, chosen, by)


def per_second(name: str, minutes: int, *, by: tuple[str, ...] = (), **chosen: str) -> Grown:
    """A counter's growth per second."""
    return Grown(f"ctxcache_{name}_total", minutes, chosen, by, is_rate=True)


@dataclass(frozen=True, slots=True)
class Late:
    """The value of a distribution that one in a hundred of the last minutes is above."""

    name: str
    minutes: int
    chosen: Chosen

    def promql(self) -> str:
        """The quantile."""
        rate = f"rate({_selected(f'{self.name}_bucket', self.chosen)}[{self.minutes}m])"
        return f"histogram_quantile(0.99, sum by ({', '.join((*INSTANCE, 'le'))}) ({rate}))"

    def now(self, moment: Moment, ring: Ring) -> float:
        """The quantile, as Prometheus reckons it."""
        values = ring.last(moment, self.minutes).distributions(self.name)
        return quantile(
            (value for labels, value in values.items() if _is_chosen(self.name, labels, self.chosen)), 0.99
        )


def late(name: str, minutes: int, **chosen: tuple[str, ...]) -> Late:
    """A distribution's upper end."""
    return Late(f"ctxcache_{name}_seconds", minutes, chosen)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A gauge over its limit, those of the same labels."""

    of: Value
    limit: Value

    def promql(self) -> str:
        """The ratio; without the chosen labels, which the limit has not."""
        ignoring = f"ignoring ({', '.join(self.of.chosen)}) " if self.of.chosen else ""
        return f"{self.of.promql()} / {ignoring}{self.limit.promql()}"

    def now(self, moment: Moment, ring: Ring) -> float:
        """The largest ratio; a limit of 0 is none."""
        del ring
        limits = {tuple(labels.items()): value for labels, value in self.limit.by_labels(moment)}
        ratios = (
            value / limits[tuple(labels.items())]
            for labels, value in self.of.by_labels(moment)
            if limits.get(tuple(labels.items()))
        )
        return max(ratios, default=0)


def ratio(of: Value, limit: str) -> Ratio:
    """A gauge over its limit."""
    return Ratio(of, value(limit))


@dataclass(frozen=True, slots=True)
class Share:
    """A counter's growth as a part of another's, in the same minutes."""

    part: Grown
    of: Grown

    def promql(self) -> str:
        """The share."""
        return f"{self.part.promql()} / {self.of.promql()}"

    def now(self, moment: Moment, ring: Ring) -> float:
        """The share; 0 of nothing."""
        whole = sum(self.of.groups(moment, ring).values())
        return sum(self.part.groups(moment, ring).values()) / whole if whole else 0
