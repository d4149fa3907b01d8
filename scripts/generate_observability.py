#!/usr/bin/env python3
"""Write the files that follow from the tables of metrics, alerts and panels.

observability/alerts.yaml with its tests, the dashboards, and the list of a worker's metrics. The list of the
store's metrics and the entries of the runbook are the documentation site's: `site_hooks.py`.

`generate_observability.py` writes into the tree; `--check` fails when the tree differs from what would be
written.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alert_rules import rule_tests, rules  # noqa: E402
from dashboard_json import dashboard  # noqa: E402
from dashboard_table import STORE, WORKER  # noqa: E402
from site_hooks import rows  # noqa: E402

from gpu_worker.sidecar.metrics import TABLE as WORKERS  # noqa: E402
from gpu_worker.sidecar.metrics import UPKEEP  # noqa: E402

OBSERVABILITY = ROOT / "observability"
WORKERS_HEAD = """<!-- Made by scripts/generate_observability.py from gpu_worker/sidecar/metrics.py. -->
# A worker's metrics

`ctxcache worker serve --metrics-listen 127.0.0.1:7422` shows these to Prometheus.
"""
UPKEEP_HEAD = "`ctxcache worker age --every 600 --metrics-listen 127.0.0.1:7424` shows these."


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    wanted = {
        OBSERVABILITY / "alerts.yaml": rules(),
        OBSERVABILITY / "alerts_test.yaml": rule_tests("alerts.yaml"),
        OBSERVABILITY / "dashboard.json": dashboard(STORE),
        OBSERVABILITY / "worker_dashboard.json": dashboard(WORKER),
        OBSERVABILITY
        / "worker_metrics.md": f"{WORKERS_HEAD}\n{rows(WORKERS)}\n\n{UPKEEP_HEAD}\n\n{rows(UPKEEP)}\n",
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


if __name__ == "__main__":
    main()
