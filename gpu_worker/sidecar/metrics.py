"""A worker's metrics: its counts as Prometheus reads them, over HTTP, by the Prometheus library's own server.

Reads what the event loop owns from another thread, by copies. Worst case: a scrape between two counts, which is
behind by one. Without TLS and without a login: names no session, no engine and no model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctxcache.errors import AddressUnusable, CorruptSegment, InvalidConfiguration, TierFailure
from ctxcache.observe.metric import Kind
from gpu_worker.direct.path import DirectPath, Live
from gpu_worker.sidecar.counts import Attached, Counts
from gpu_worker.sidecar.edge import Room
from gpu_worker.sidecar.metric_table import METRICS, TABLE


class _Value(NamedTuple):
    """One value of a metric, its name without `ctxcache_worker_`; labels in the table's order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Direct(Protocol):
    """What direct storage says of itself."""

    read_bytes: int
    failures: Counter[str]

    @property
    def live(self) -> Live:
        """The path that is used."""


class WorkerCollector(Collector):
    """What a worker has done, and what is under way."""

    def __init__(
        self,
        counts: Counts,
        rooms: Iterable[tuple[str, Room]],
        attached: Callable[[], Attached],
        direct: Direct,
    ) -> None:
        """`rooms`: by what is under way in them."""
        self._counts, self._rooms, self._attached, self._direct = counts, tuple(rooms), attached, direct

    def collect(self) -> Iterable[Metric]:
        """Every metric, as it is now."""
        families = {
            metric.name: (CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily)(
                metric.name, metric.meaning, labels=metric.labels
            )
            for metric in TABLE.metrics
        }
        for value in (*self._done(), *self._from_files(), *self._under_way()):
            name = f"ctxcache_worker_{value.name}"
            families[name if name in METRICS else f"{name}_total"].add_metric(value.labels, value.value)
        return families.values()

    def _done(self) -> Iterator[_Value]:
        counts = self._counts
        yield _Value("restores", counts.restored, ("restored", ""))
        for reason, count in dict(counts.missed).items():
            yield _Value("restores", count, ("missed", reason))
        yield _Value("restored_tokens", counts.restored_tokens)
        yield _Value("read_bytes", counts.read_bytes)
        yield _Value("saves", counts.saved, ("saved", ""))
        for reason, count in dict(counts.failed_saves).items():
            yield _Value("saves", count, ("failed", reason))
        yield _Value("saved_tokens", counts.saved_tokens)
        for of, seconds in (("predicted", counts.predicted_s), ("observed", counts.observed_s)):
            for stage, value in dict(seconds).items():
                yield _Value("stage_seconds", value, (stage, of))
        for how, count in dict(counts.ended_attachments).items():
            yield _Value("ended_attachments", count, (how,))

    def _from_files(self) -> Iterator[_Value]:
        for path in DirectPath:
            yield _Value("direct_path", path is self._direct.live.path, (path.value,))
        yield _Value("direct_read_bytes", self._direct.read_bytes)
        failures = dict.fromkeys((TierFailure.reason, CorruptSegment.reason), 0) | dict(self._direct.failures)
        for reason, count in failures.items():
            yield _Value("direct_failures", count, (reason,))

    def _under_way(self) -> Iterator[_Value]:
        for what, room in self._rooms:
            yield _Value("running", room.taken, (what,))
            yield _Value("limit", room.limit, (what,))
            for reason, count in dict(room.refused).items():
                yield _Value("refused", count, (what, reason))
        attached = self._attached()
        yield _Value("attached_bytes", attached.mapped_bytes)
        yield _Value("longest_idle_seconds", attached.longest_idle_s)


class MetricsServer:
    """Serves a collector at `host:port` until it is stopped."""

    def __init__(self, address: str, collector: Collector) -> None:
        """Listen. Raises InvalidConfiguration, AddressUnusable."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidConfiguration(source="metrics_listen", problem=f"{address!r} is not host:port")
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise AddressUnusable(address=address, problem=problem) from error
        self.address = f"{host}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
