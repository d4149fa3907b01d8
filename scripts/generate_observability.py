#!/usr/bin/env python3
"""Write what is derived from the tables of metrics, alerts and panels.

The table in docs/sidecar.md, the entries of docs/runbook.md, observability/alerts.yaml with its tests, and
the dashboards beside them. The store's metrics are listed by the documentation site: `site_hooks.py`.

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
from site_hooks import rows  # noqa: E402

from gpu_worker.sidecar.metrics import TABLE as WORKERS  # noqa: E402

RUNBOOK = ROOT / "docs" / "runbook.md"
SIDECAR = ROOT / "docs" / "sidecar.md"
OBSERVABILITY = ROOT / "observability"
BEGIN, END = "<!-- metrics: begin, by scripts/generate_observability.py -->", "<!-- metrics: end -->"


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    head = RUNBOOK.read_text().partition("\n## ")[0].rstrip()
    wanted = {
        SIDECAR: _between(SIDECAR.read_text(), rows(WORKERS)),
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


if __name__ == "__main__":
    main()
