"""A worker's metrics: its counts as Prometheus reads them, over HTTP, by the Prometheus library's own server.

Reads what the event loop owns from another thread, by copies. Worst case: a scrape between two counts, which is
behind by one. Without TLS and without a login: names no session, no engine and no model.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctxcache.errors import AddressUnusable, InvalidConfiguration
from gpu_worker.sidecar.counts import Counts
from gpu_worker.sidecar.edge import Room


class WorkerCollector(Collector):
    """What a worker has done, and what is under way."""

    def __init__(
        self, counts: Counts, rooms: Iterable[tuple[str, Room]], attached: Callable[[], int]
    ) -> None:
        """`rooms`: by what is under way in them. `attached`: bytes of engines' memory that are mapped."""
        self._counts, self._rooms, self._attached = counts, tuple(rooms), attached

    def collect(self) -> Iterable[Metric]:
        """Every metric, as it is now."""
        counts = self._counts
        restores = _counter(
            "restores", "Restores that ended, by result and, of misses, reason.", "result", "reason"
        )
        restores.add_metric(("restored", ""), counts.restored)
        for reason, count in dict(counts.missed).items():
            restores.add_metric(("missed", reason), count)
        yield restores
        yield _one("restored_tokens", "Tokens that were restored.", counts.restored_tokens)
        yield _one("read_bytes", "Bytes read from the store for them.", counts.read_bytes)
        saves = _counter("saves", "Saves that ended, by result and, of failures, reason.", "result", "reason")
        saves.add_metric(("saved", ""), counts.saved)
        for reason, count in dict(counts.failed_saves).items():
            saves.add_metric(("failed", reason), count)
        yield saves
        yield _one("saved_tokens", "Tokens that were saved.", counts.saved_tokens)
        stages = _counter(
            "stage_seconds", "Of whole restores, what stages took, and what plans said.", "stage", "of"
        )
        for of, seconds in (("predicted", counts.predicted_s), ("observed", counts.observed_s)):
            for stage, value in dict(seconds).items():
                stages.add_metric((stage, of), value)
        yield stages
        yield from self._under_way()

    def _under_way(self) -> Iterable[Metric]:
        refused = _counter(
            "refused", "Calls that were refused at once, by what for and why.", "what", "reason"
        )
        running = GaugeMetricFamily("ctxcache_worker_running", "Under way now.", labels=("what",))
        limits = GaugeMetricFamily(
            "ctxcache_worker_limit", "The most that may be under way.", labels=("what",)
        )
        for what, room in self._rooms:
            running.add_metric((what,), room.taken)
            limits.add_metric((what,), room.limit)
            for reason, count in dict(room.refused).items():
                refused.add_metric((what, reason), count)
        yield refused
        yield running
        yield limits
        yield GaugeMetricFamily(
            "ctxcache_worker_attached_bytes", "Memory of engines that is mapped.", self._attached()
        )


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


def _counter(name: str, meaning: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"ctxcache_worker_{name}", meaning, labels=labels)


def _one(name: str, meaning: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"ctxcache_worker_{name}", meaning, value)
