"""Exposition: all metrics of a server as text. Reads on the event loop, writes the text in a thread.

Bounded: one at a time; whoever asks meanwhile waits for its turn. Worst case: a file system that hangs under
`statvfs` keeps a thread, and further scrapes wait.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ctxcache.cache import Cache
from ctxcache.core.observations import QUICK_S, Histogram
from ctxcache.observe.reading import read_cache
from ctxcache.observe.samples import Sample, families, taken
from ctxcache.observe.table import OWN
from ctxcache.service.admission import Admissions, Connections, RpcTimes
from ctxcache.wire.status import code_name


@dataclass(slots=True)
class Sources:
    """Where metrics come from, beside the cache."""

    cache: Cache
    admissions: Admissions
    rpc_times: RpcTimes
    version: str
    placement_policy: str
    start_time_s: float
    connections: Callable[[], Connections]
    bulk_connection_count: Callable[[], int]
    arena_prefaulted_bytes: Callable[[], int]
    metadata_commit_count: Callable[[], int]
    metadata_problem: Callable[[], str]
    """Why it takes no changes; empty while it does."""
    metadata_reopened_count: Callable[[], int]
    metadata_properties: Callable[[], Mapping[str, int]]
    """Called in a thread."""
    data_directory: str
    loop_lag_s: Histogram
    settings: Callable[[], Mapping[str, str]]
    """Those that differ from their default, as people may see them."""
    shows_names: Callable[[], bool]
    """Whether sessions and engines may be named to whoever reaches the endpoint."""
    scrape_s: Histogram = field(default_factory=lambda: Histogram(QUICK_S))

    @property
    def is_ready(self) -> bool:
        """Whether the server takes work: it does not drain."""
        return not self.admissions.calls.is_draining

    @property
    def why_not_ready(self) -> str:
        """Why it does not take all work; empty when it does."""
        if not self.is_ready:
            return "draining"
        problem = self.metadata_problem()
        return problem and f"writes are refused, reads go on: metadata {problem}"


class Exposition:
    """Writes the metrics of one server."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._process = ProcessCollector(registry=None)
        self._turn = asyncio.Lock()

    async def text(self, accepted: str) -> tuple[bytes, str]:
        """All metrics, in the format that is asked for, and its content type."""
        async with self._turn:
            begun_s = perf_counter()
            samples = list(read(self._sources))
            self._sources.scrape_s.observe(perf_counter() - begun_s)
            return await asyncio.to_thread(self._written, samples, accepted)

    def _written(self, samples: list[Sample], accepted: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accepted)
        samples += _slow(self._sources)
        return encode(_Made([*families(OWN, samples), *self._process.collect()])), content_type


def read(sources: Sources) -> Iterator[Sample]:
    """All samples but those that ask the system, or RocksDB."""
    yield from read_cache(sources.cache)
    yield from _server(sources)
    yield from _calls(sources)


class _Made(Collector):
    """Families that are there already."""

    def __init__(self, made: Iterable[Family]) -> None:
        self._made = made

    def collect(self) -> Iterable[Family]:
        return self._made


def _server(sources: Sources) -> Iterator[Sample]:
    yield Sample("ctxcache_info", 1, (sources.version, sources.placement_policy))
    yield Sample("ctxcache_start_time_seconds", sources.start_time_s)
    yield Sample("ctxcache_ready", sources.is_ready)
    yield Sample("ctxcache_event_loop_lag_seconds", taken(sources.loop_lag_s))
    yield Sample("ctxcache_scrape_seconds", taken(sources.scrape_s))
    yield Sample("ctxcache_arena_prefaulted_bytes", sources.arena_prefaulted_bytes())
    yield Sample("ctxcache_metadata_fenced", bool(sources.metadata_problem()))
    yield Sample("ctxcache_metadata_reopened_total", sources.metadata_reopened_count())
    yield Sample("ctxcache_metadata_commits_total", sources.metadata_commit_count())


def _calls(sources: Sources) -> Iterator[Sample]:
    for method, timer in sources.rpc_times:
        for end, histogram in timer.by_end.items():
            code, reason = code_name(end)
            yield Sample("ctxcache_rpc_seconds", taken(histogram), (method, code, reason))
    for sort, admission in sources.admissions.by_sort().items():
        yield Sample("ctxcache_rpcs", admission.running_count, (sort,))
        yield Sample("ctxcache_rpc_limit", admission.limit, (sort,))
        for reason, refusal in (
            ("TOO_MANY_REQUESTS", admission.when_full),
            ("DRAINING", admission.when_draining),
        ):
            yield Sample("ctxcache_refused_rpcs_total", refusal.count, (sort, reason))
    connections = sources.connections()
    yield Sample("ctxcache_connections", connections.count)
    yield Sample("ctxcache_connection_limit", connections.limit)
    yield Sample("ctxcache_ended_connections_total", connections.ended_count)
    yield Sample("ctxcache_bulk_connections", sources.bulk_connection_count())


def _slow(sources: Sources) -> Iterator[Sample]:
    """What asks the system, or RocksDB: in a thread."""
    for name, value in sources.metadata_properties().items():
        yield Sample(f"ctxcache_rocksdb_{name}", value)
    for of, path in (("data", sources.data_directory), *(("ssd", path) for path in sources.cache.ssd.paths)):
        # Of a path that is gone there is no room to tell; its state is told besides.
        with suppress(OSError):
            space = os.statvfs(path)
            yield Sample("ctxcache_filesystem_free_bytes", space.f_bavail * space.f_frsize, (of, path))
