"""Writes alerts as Prometheus rules, as promtool's tests of them, and as entries of the runbook. Pure."""

import json
from collections.abc import Sequence

from alert_series import SERIES, Series
from alert_worker import WORKER_ALERTS

from ctxcache.observe.alerts import STORE_ALERTS, Alert

ALERTS = (*STORE_ALERTS, *WORKER_ALERTS)
MADE = (
    "Made by scripts/generate_observability.py from ctxcache/observe/alerts.py and scripts/alert_worker.py."
)
RUNBOOK = "docs/runbook.md"


def rules() -> str:
    """The rule file. YAML whose scalars are JSON strings."""
    return "\n".join([f"# {MADE}", "groups:", "  - name: ctxcache", "    rules:", *map(_rule, ALERTS), ""])


def _rule(alert: Alert) -> str:
    return "\n".join(
        (
            f"      - alert: {alert.name}",
            f"        expr: {_text(alert.expression)}",
            f"        for: {alert.for_minutes}m",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            *(f"          {name}: {_text(text)}" for name, text in _annotations(alert)),
        )
    )


def rule_tests(rule_file: str, alerts: Sequence[Alert] = ALERTS) -> str:
    """The tests that `promtool test rules` runs.

    Each alert silent at first and where it should be, and firing when it should.
    """
    return "\n".join(
        [
            f"# {MADE}",
            f"rule_files: [{_text(rule_file)}]",
            "evaluation_interval: 1m",
            "tests:",
            *map(_test, alerts),
            "",
        ]
    )


def _test(alert: Alert) -> str:
    fires = SERIES[alert.name]
    labels = ", ".join(
        f"{name}: {_text(value)}" for name, value in (*fires.labels, ("severity", alert.severity))
    )
    annotations = ", ".join(f"{name}: {_text(text)}" for name, text in _annotations(alert))
    return "\n".join(
        (
            f"  - name: {alert.name}",
            *_given(fires.series),
            # A minute before anything was seen.
            (
                f"      - {{eval_time: 0m, alertname: {alert.name}, exp_alerts: "
                f"{_at_once(alert, labels, annotations)}}}"
            ),
            f"      - eval_time: {fires.fires_at}m",
            f"        alertname: {alert.name}",
            f"        exp_alerts: [{{exp_labels: {{{labels}}}, exp_annotations: {{{annotations}}}}}]",
            f"  - name: {alert.name} stays silent",
            *_given(fires.quiet),
            *(
                f"      - {{eval_time: {minute}m, alertname: {alert.name}, exp_alerts: []}}"
                for minute in (fires.fires_at, 2 * fires.fires_at)
            ),
        )
    )


def _given(given: Series) -> list[str]:
    return [
        "    interval: 1m",
        "    input_series:",
        *(f"      - {{series: {_text(name)}, values: {_text(values)}}}" for name, values in given),
        "    alert_rule_test:",
    ]


def _at_once(alert: Alert, labels: str, annotations: str) -> str:
    """The alerts that are to fire in the first minute.

    Only what waits for nothing and looks back at nothing.
    """
    fires = alert.for_minutes == 0 and "[" not in alert.expression and "offset" not in alert.expression
    return f"[{{exp_labels: {{{labels}}}, exp_annotations: {{{annotations}}}}}]" if fires else "[]"


def _annotations(alert: Alert) -> tuple[tuple[str, str], ...]:
    return (
        ("summary", alert.summary),
        ("description", alert.means),
        ("look_at", alert.look),
        ("action", alert.do),
        ("runbook_url", f"{RUNBOOK}#{alert.name.lower()}"),
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def entries() -> str:
    """The entries of the runbook, one per alert, for the documentation site."""
    return "\n\n".join(map(_entry, ALERTS))


def _entry(alert: Alert) -> str:
    """Return an entry. The rule file has the condition, and what the alert means as its description."""
    return "\n".join(
        (
            f"## {alert.name}",
            "",
            f"*{alert.severity}*: {alert.summary}.",
            "",
            f"**Look at:** {alert.look}",
            "",
            f"**Do:** {alert.do}",
        )
    )
