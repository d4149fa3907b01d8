#!/usr/bin/env python3
"""Write what is derived from the tables of metrics, alerts and panels.

The tables in docs/metrics.md and docs/sidecar.md, the entries of docs/runbook.md, observability/alerts.yaml
with its tests, and the dashboards beside them.

`generate_observability.py` writes into the tree; `--check` fails when the tree differs from what would be
written.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alert_rules import rule_tests, rules, runbook  # noqa: E402
from dashboard_json import dashboard  # noqa: E402
from dashboard_table import STORE, WORKER  # noqa: E402

from ctxcache.observe.metric import Group, Metric  # noqa: E402
from ctxcache.observe.table import TABLE  # noqa: E402
from gpu_worker.sidecar.metrics import TABLE as WORKERS  # noqa: E402

METRICS = ROOT / "docs" / "metrics.md"
RUNBOOK = ROOT / "docs" / "runbook.md"
SIDECAR = ROOT / "docs" / "sidecar.md"
OBSERVABILITY = ROOT / "observability"
FOR_SCALE = "For scale only."
"""Of a metric that is never bad by itself: its cell stays empty."""
BEGIN, END = "<!-- metrics: begin, by scripts/generate_observability.py -->", "<!-- metrics: end -->"


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    head = RUNBOOK.read_text().partition("\n## ")[0].rstrip()
    wanted = {
        METRICS: _between(METRICS.read_text(), "\n\n".join(map(_table, TABLE))),
        SIDECAR: _between(SIDECAR.read_text(), _rows(WORKERS)),
        RUNBOOK: runbook(head),
        OBSERVABILITY / "alerts.yaml": rules(),
        OBSERVABILITY / "alerts_test.yaml": rule_tests("alerts.yaml"),
        OBSERVABILITY / "dashboard.json": dashboard(STORE),
        OBSERVABILITY / "worker_dashboard.json": dashboard(WORKER),
    }
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if differing:
            names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
            sys.exit(f"out of date, run scripts/generate_observability.py: {names}")
        return
    for path in differing:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path])


def _between(text: str, tables: str) -> str:
    """A document with tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _table(group: Group) -> str:
    return f"**{group.title}**\n\n{_rows(group)}"


def _rows(group: Group) -> str:
    return "\n".join(map(_row, group.metrics))


def _row(metric: Metric) -> str:
    """One item. The unit is in the name, where it is one of the names' units."""
    facts = [metric.kind.value, *(f"`{label}`" for label in metric.labels)]
    if not re.search(rf"_{re.escape(metric.unit.split()[0])}(_total)?$", metric.name):
        facts.insert(1, metric.unit)
    bad = "" if metric.when_bad == FOR_SCALE else f" *Bad:* {metric.when_bad}"
    return f"- `{metric.name}` ({', '.join(facts)}): {metric.meaning}{bad}"


if __name__ == "__main__":
    main()
