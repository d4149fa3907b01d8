#!/usr/bin/env python3
"""Write what is derived from the tables of metrics, alerts and panels.

The tables in docs/metrics.md and docs/sidecar.md, the entries of docs/runbook.md, observability/alerts.yaml
with its tests, and the dashboards beside them.

`generate_observability.py` writes into the tree; `--check` fails when the tree differs from what would be
written.
"""

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
    rows = "\n".join(map(_row, group.metrics))
    head = "| metric | type, unit | labels | meaning | when it is bad |\n|---|---|---|---|---|"
    return f"{head}\n{rows}"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    when_bad = "" if metric.when_bad == FOR_SCALE else metric.when_bad
    cells = (f"`{metric.name}`", f"{metric.kind.value}, {metric.unit}", labels, metric.meaning, when_bad)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
