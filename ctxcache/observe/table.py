"""TABLE: every metric, once. The exposition, docs/operations.md and the dashboard come from here. Pure."""

from ctxcache.observe.table_context import HITS, MOVES, STAY, TENANTS, TIERS
from ctxcache.observe.table_server import CALLS, HINTS, LEASES, METADATA, PROCESS, WELL

TABLE = (WELL, HITS, STAY, TIERS, MOVES, CALLS, LEASES, HINTS, TENANTS, METADATA, PROCESS)
METRICS = {metric.name: metric for group in TABLE for metric in group.metrics}
"""By name, in the order of the table."""
OWN = tuple(metric for metric in METRICS.values() if not metric.name.startswith("process_"))
"""Those that are not made by the library that reads /proc."""
