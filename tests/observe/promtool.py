"""Prometheus' own tool, where it is installed: it knows PromQL, which nothing else here does."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from scraped import Values

ROOT = Path(__file__).parent.parent.parent
TOOL = shutil.which("promtool") or next((str(p) for p in [ROOT / ".tools" / "promtool"] if p.exists()), None)
ALERT, TEST = "      - alert: ", "  - name: "
"""Before each entry of a file of rules, and of one of their tests."""
needs_promtool = pytest.mark.skipif(
    TOOL is None,
    reason="PROMTOOL IS NOT INSTALLED: no alert and no panel was tested; see scripts/get_promtool.sh",
)


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run it."""
    assert TOOL is not None
    return subprocess.run([TOOL, *arguments], cwd=directory, capture_output=True, text=True, check=False)


def rules_tested(rules: str, tests: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Prometheus' tests of alert rules, those of an alert beside its own rule only.

    Beside all rules, each test would evaluate all of them.
    """
    head, *alerts = rules.split(ALERT)
    begin, *every_test = tests.split(TEST)
    files = []
    for alert in alerts:
        name = alert.partition("\n")[0]
        own = [test for test in every_test if test.split(maxsplit=1)[0] == name]
        (directory / f"{name}.yaml").write_text(head + ALERT + alert)
        (directory / f"{name}_test.yaml").write_text(
            TEST.join([begin.replace('"alerts.yaml"', f'"{name}.yaml"'), *own])
        )
        files.append(f"{name}_test.yaml")
    return run("test", "rules", *files, directory=directory)


def series_of(before: Values, after: Values) -> list[tuple[str, str]]:
    """Two scrapes a minute apart, as promtool's input series."""
    found = []
    for name, samples in after.items():
        for labels, value in samples.items():
            first = before.get(name, {}).get(labels)
            text = {**dict(labels), "instance": "a", "job": "ctxcache"}
            inner = ",".join(f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in text.items())
            found.append((f"{name}{{{inner}}}", f"{'_' if first is None else first} {value}x5"))
    return found


def answered(queries: Mapping[str, str], series: Iterable[tuple[str, str]], directory: Path) -> set[str]:
    """Those queries, by name, that find something in these series after five minutes."""
    # JSON is YAML. One alert per query, which fires when there is any result.
    names = {f"query{i}": name for i, name in enumerate(queries)}
    rules = [{"alert": alert, "expr": f"count({queries[name]}) > 0"} for alert, name in names.items()]
    (directory / "rules.yaml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    asked = [{"eval_time": "5m", "alertname": alert, "exp_alerts": [{"exp_labels": {}}]} for alert in names]
    given = [{"series": name, "values": values} for name, values in series]
    tests = [{"interval": "1m", "input_series": given, "alert_rule_test": asked}]
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (directory / "tests.yaml").write_text(json.dumps(document))
    done = run("test", "rules", "tests.yaml", directory=directory)
    silent = {names[alert] for alert in failed_in(done)}
    assert silent or not done.returncode, done.stderr
    return set(queries) - silent


def failed_in(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The alerts that were not as expected."""
    return set(re.findall(r"alertname: *(\w+)", done.stdout + done.stderr))
