"""A worker's metrics: TABLE has each of them once; an HTTP endpoint serves them, by TLS and token if given.

docs/sidecar.md and the worker's dashboard come from TABLE too. The endpoint reads what the event loop owns
from another thread, by copies. Worst case: a scrape between two counts, which is behind by one. Names no
session, no engine and no model.
"""

import logging
import socket
import ssl
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from ctxcache.errors import AddressUnusable, CorruptSegment, InvalidConfiguration, TierFailure
from ctxcache.observe.bearer import CHALLENGE, Bearer
from ctxcache.observe.metric import Group, MetricKind, counter, gauge
from ctxcache.runtime.files import check_secret, secret_refusal
from ctxcache.wire.address import Address
from gpu_worker.direct import DirectPath, Live
from gpu_worker.sidecar.edge import AdmissionLimit

if TYPE_CHECKING:
    # Tables and dashboards are made of METRICS where torch is not installed.
    from gpu_worker.pipeline.sources import ArenaPins

LEFT, LOST = "left", "lost"


class Attached(NamedTuple):
    """All attachments together, as they are now."""

    mapped_bytes: int
    """Bytes of engines' memory that are mapped."""
    longest_idle_s: float
    """The longest that an engine has asked for nothing; 0 where none is attached."""


@dataclass(slots=True)
class Counts:
    """Restores, saves and attachments, by how they ended."""

    restored: int = 0
    restored_tokens: int = 0
    read_bytes: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    """Restores that were misses, by reason."""
    predicted_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by stage, of restores that were whole: what their plans said."""
    observed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the same stages took."""
    saved: int = 0
    saved_tokens: int = 0
    failed_saves: Counter[str] = field(default_factory=Counter)
    """Saves that failed, by reason."""
    ended_attachments: Counter[str] = field(default_factory=lambda: Counter({LEFT: 0, LOST: 0}))
    """By how: LEFT, LOST, or the reason for which the worker ended it."""


# Counts cross from the event loop to the threads that answer scrapers:
#
#     event loop   adds to Counts, AdmissionLimit, Attachments
#     scraper      collect() ──► dict(...) copies, then numbers
#
# No lock: each number is read whole, and one that is a scrape old is right enough.
TABLE = Group(
    "Workers",
    (
        counter(
            "worker_restores",
            "restores",
            "Restores that ended: `restored`, or `missed` and why.",
            "`missed` is much of it: the reason says why; of `SESSION_NOT_FOUND` ask the "
            "store, `ctxcache why-miss`.",
            "result",
            "reason",
        ),
        counter(
            "worker_restored_tokens",
            "tokens",
            "Tokens that were restored.",
            "It stands still while engines work: they do not ask.",
        ),
        counter("worker_read_bytes", "bytes", "Bytes read from the store for them.", "For scale only."),
        gauge(
            "worker_direct_path",
            "paths",
            "1 for the path by which sessions are read that lie only on SSD: `gds`, "
            "`kvikio-compat`, `posix`, `off` (`worker.md`).",
            "Not the one that the machine should have: `ctxcache worker stats` says why.",
            "path",
        ),
        counter(
            "worker_direct_read_bytes", "bytes", "Bytes taken from the SSD tier's files.", "For scale only."
        ),
        counter(
            "worker_direct_failures",
            "restores",
            "Restores that gave the files up: the store read for them, or they were misses.",
            "It grows: of `TIER_FAILURE`, look at the disk and the driver; of "
            "`CORRUPT_SEGMENT`, `ctxcache verify`.",
            "reason",
        ),
        gauge(
            "worker_arena_pinned_bytes",
            "bytes",
            "Bytes of the store's arena that are pinned, so that the GPU copies from it by itself.",
            "0 beside a GPU: `ctxcache worker stats` says why.",
        ),
        counter(
            "worker_saves",
            "saves",
            "Saves that ended: `saved`, or `failed` and why.",
            "`failed` grows: the reason says why.",
            "result",
            "reason",
        ),
        counter(
            "worker_saved_tokens",
            "tokens",
            "Tokens that were saved.",
            "It stands still while engines work: they do not save.",
        ),
        counter(
            "worker_stage_seconds",
            "seconds",
            "Of whole restores, seconds by stage: `observed`, and `predicted` by the plans.",
            "The rates differ by more than a half for long: the profile is another machine's, "
            "or this one is busy; `ctxcache worker profile`.",
            "stage",
            "of",
        ),
        counter(
            "worker_refused",
            "calls",
            "Restores, saves and attachments refused at once: `TOO_MANY_REQUESTS`, `DRAINING`.",
            "It grows: raise the limit of that sort if the device has room, else another worker.",
            "what",
            "reason",
        ),
        counter(
            "worker_ended_attachments",
            "attachments",
            "Attachments that ended: `left`, with a farewell; `lost`, their "
            "connection broke; or the worker's reason.",
            "`lost` grows: engines crash or are killed; see their logs.",
            "how",
        ),
        gauge(
            "worker_running",
            "calls",
            "Restores, saves and attachments there are.",
            "At its limit for long: as above.",
            "what",
        ),
        gauge("worker_limit", "calls", "The most there may be.", "For scale only.", "what"),
        gauge(
            "worker_attached_bytes",
            "bytes",
            "Memory of engines that is mapped.",
            "Near `--max-attached-mib`: further engines are refused.",
        ),
        gauge(
            "worker_longest_idle_seconds",
            "seconds",
            "Of the engines attached, the longest that one has not asked for a restore or a "
            "save; 0 where none is attached.",
            "Hours while others work: that engine hangs, gets no requests, or does not use its attachment.",
        ),
    ),
)
METRICS = {metric.name: metric for metric in TABLE.metrics}
UPKEEP = Group(
    "Upkeep of idle sessions",
    (
        counter(
            "upkeep_sweeps",
            "sweeps",
            "Sweeps of `ctxcache worker age` that ended: `whole` or `failed`.",
            "`whole` stands still for longer than `--every`: see its log.",
            "result",
        ),
        counter(
            "upkeep_sessions",
            "sessions",
            "Sessions that sweeps looked at: `kept` as they were, `changed` to another form, or `left` "
            "though they were due, and why.",
            "`left` grows by one reason each sweep: the same sessions are looked at in vain.",
            "result",
            "reason",
        ),
        counter(
            "upkeep_freed_bytes", "bytes", "Bytes that smaller forms take less on SSD.", "For scale only."
        ),
        gauge(
            "upkeep_returning",
            "share",
            "How likely a session is taken to return, as learned or as `--returning` says.",
            "Near 0 while sessions do return: they are kept too small; set `--returning`.",
        ),
    ),
)


if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""How long a scraper may be silent."""


class _Value(NamedTuple):
    """One value of a metric, its name without `ctxcache_worker_`; labels in the table's order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Direct(Protocol):
    """Facts of direct storage that metrics show."""

    read_bytes: int
    failures: Counter[str]
    pins: "ArenaPins"

    @property
    def live(self) -> Live:
        """The path that is used."""


class WorkerCollector(Collector):
    """A worker's counts, and its work under way."""

    def __init__(
        self,
        counts: Counts,
        rooms: Iterable[tuple[str, AdmissionLimit]],
        attached: Callable[[], Attached],
        direct: Direct,
    ) -> None:
        """`rooms`: by what is under way in them."""
        self._counts, self._rooms, self._attached, self._direct = counts, tuple(rooms), attached, direct

    def collect(self) -> Iterable[Metric]:
        """Every metric, as it is now."""
        return _families(TABLE, "worker", (*self._done(), *self._from_files(), *self._under_way()))

    def _done(self) -> Iterator[_Value]:
        counts = self._counts
        yield _Value("restores", counts.restored, ("restored", ""))
        # A copy: the loop may add a reason while this is walked.
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
        yield _Value("arena_pinned_bytes", self._direct.pins.pinned_bytes)
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


def _families(table: Group, who: str, values: Iterable[_Value]) -> Iterable[Metric]:
    families = {
        metric.name: (CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily)(
            metric.name, metric.meaning, labels=metric.labels
        )
        for metric in table.metrics
    }
    for value in values:
        name = f"ctxcache_{who}_{value.name}"
        # Counters' names end in `_total` in the table; gauges' names do not.
        families[name if name in families else f"{name}_total"].add_metric(value.labels, value.value)
    return families.values()


@dataclass(slots=True, eq=False)
class UpkeepCounts(Collector):
    """All sweeps so far, and their metrics."""

    kept: int = 0
    changed: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Sessions that were due and left as they were, by reason."""
    freed_bytes: float = 0.0
    sweeps: Counter[str] = field(default_factory=lambda: Counter({"whole": 0, "failed": 0}))
    returning: float = 1.0

    def collect(self) -> Iterable[Metric]:
        """Every metric, as it is now."""
        values = [_Value("sweeps", count, (result,)) for result, count in dict(self.sweeps).items()]
        values += [
            _Value("sessions", self.kept, ("kept", "")),
            _Value("sessions", self.changed, ("changed", "")),
        ]
        values += [_Value("sessions", count, ("left", reason)) for reason, count in dict(self.left).items()]
        values += [_Value("freed_bytes", self.freed_bytes), _Value("returning", self.returning)]
        return _families(UPKEEP, "upkeep", values)


@dataclass(frozen=True, slots=True)
class MetricsGuard:
    """The guard of the metrics: TLS, and a token."""

    certificate: Path | None = None
    """The port's certificate with its chain, PEM; none: no TLS."""
    key: Path | None = None
    """Its key, PEM."""
    token: Path | None = None
    """The token that a scraper shows; none: every scraper is answered."""


class MetricsServer:
    """Serves a collector at `host:port` until it is stopped."""

    def __init__(
        self, address: str, collector: Collector, guard: MetricsGuard = MetricsGuard()
    ) -> None:  # it never changes
        """Listen. Raises InvalidConfiguration, AddressUnusable."""
        try:
            host, port = Address.of(address)
        except ValueError as error:
            raise InvalidConfiguration(source="metrics_listen", problem=str(error)) from error
        certificate = _Certificate.of(guard)
        bearer = None if guard.token is None else Bearer(guard.token, source="metrics_token_file")
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server = make_server(
                host,
                port,
                _guarded(make_wsgi_app(registry), bearer),
                _server_of(host, certificate),
                handler_class=_Silent,
            )
        except OSError as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise AddressUnusable(address=address, problem=problem) from error
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Certificate:
    """The certificate that holds now: its files are looked at for each connection."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._seen = self._stamps()
        self._context = self._load()

    @classmethod
    def of(cls, guard: MetricsGuard) -> "_Certificate | None":
        """None where the guard names no certificate. Raises InvalidConfiguration."""
        if guard.certificate is None and guard.key is None:
            return None
        if guard.certificate is None or guard.key is None:
            missing = "metrics_tls_key" if guard.certificate else "metrics_tls_certificate"
            raise InvalidConfiguration(source=missing, problem="TLS needs a certificate and its key")
        return cls(guard.certificate, guard.key)

    def context(self) -> ssl.SSLContext:
        """The context of the next handshake, by the files as they are now; unusable files change nothing."""
        stamps = self._stamps()
        if stamps != self._seen:
            try:
                self._context = self._load()
                self._seen = stamps
            except InvalidConfiguration as error:
                log.error("certificate_refused error=%s", error)  # noqa: TRY400  the sentence says all
        return self._context

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            check_secret(key, secret_refusal("metrics_tls_key", key))
            context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            problem = f"{certificate} and {key} are no certificate and its key: {error}"
            raise InvalidConfiguration(source="metrics_tls_certificate", problem=problem) from error
        return context

    def _stamps(self) -> list[tuple[int, int]]:
        stamps = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                continue
            stamps.append((status.st_mtime_ns, status.st_ino))
        return stamps


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the library's name
        """Log no request."""


def _server_of(host: str, certificate: _Certificate | None) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def finish_request(self, request: Any, client_address: Any) -> None:
            """In the connection's own thread: a handshake that does not end holds nobody else up."""
            request.settimeout(TIMEOUT_S)
            if certificate is None:
                super().finish_request(request, client_address)
                return
            try:
                with certificate.context().wrap_socket(request, server_side=True) as wrapped:
                    super().finish_request(wrapped, client_address)
            except OSError:
                # The scraper is gone.
                return

    return Server


def _guarded(application: "WSGIApplication", bearer: Bearer | None) -> "WSGIApplication":
    if bearer is None:
        return application

    def guarded(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if bearer.allows(environ.get("HTTP_AUTHORIZATION", "")):
            return application(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", CHALLENGE), ("Content-Type", "text/plain")])
        return [b"Unauthorized\n"]

    return guarded
