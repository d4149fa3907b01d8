#!/usr/bin/env python3
"""Write what is derived from the table of metrics: the tables in docs/operations.md.

`generate_observability.py` writes into the tree; `--check` fails when the tree differs from what would be written.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ctxcache.observe.metric import Group, Metric  # noqa: E402
from ctxcache.observe.table import TABLE  # noqa: E402

OPERATIONS = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- metrics: begin, by scripts/generate_observability.py -->", "<!-- metrics: end -->"


def main() -> None:
    """Write or check; exits 1 with the names of the files that differ."""
    wanted = {OPERATIONS: operations(OPERATIONS.read_text())}
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if differing:
            names = ", ".join(str(path.relative_to(ROOT)) for path in differing)
            sys.exit(f"out of date, run scripts/generate_observability.py: {names}")
        return
    for path in differing:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path])


def operations(text: str) -> str:
    """The document with the tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n\n".join(_table(group) for group in TABLE)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _table(group: Group) -> str:
    rows = "\n".join(map(_row, group.metrics))
    head = "| metric | type | labels | unit | meaning | when it is bad |\n|---|---|---|---|---|---|"
    return f"**{group.title}**\n\n{head}\n{rows}"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    cells = (f"`{metric.name}`", metric.kind.value, labels, metric.unit, metric.meaning, metric.when_bad)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
