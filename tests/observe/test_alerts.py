"""Alerts and panels: each alert fires when it should, and every query finds something on a live server."""

import json
import re
from pathlib import Path

import pytest
from alert_rules import ALERTS, entries
from alert_series import SERIES
from dashboard_json import names_in, queries
from dashboard_table import STORE, WORKER, Board
from observed import fleet_of_one, load, observed, values_of
from promtool import ROOT, TEST, answered, failed_in, needs_promtool, rules_tested, run, series_of
from scraped import Values

from ctxcache.observe.alerts import STORE_ALERTS
from ctxcache.observe.table import METRICS

OBSERVABILITY = ROOT / "observability"


@needs_promtool
def test_every_alert_fires_and_is_silent_before(tmp_path: Path) -> None:
    """Prometheus' own tests of the rules, one per alert."""
    text = (OBSERVABILITY / "alerts_test.yaml").read_text()
    rules = (OBSERVABILITY / "alerts.yaml").read_text()

    checked = run("check", "rules", "alerts.yaml", directory=OBSERVABILITY)
    done = rules_tested(rules, text, tmp_path)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^      - alert: (\w+)$", rules, re.MULTILINE) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        assert f"        alertname: {alert.name}\n        exp_alerts: [{{exp_labels" in text
        assert SERIES[alert.name].quiet, alert.name


@needs_promtool
@pytest.mark.parametrize("never_or_always", ["vector(1) < 0", "vector(1)"])
def test_a_rule_that_is_wrong_would_be_noticed(never_or_always: str, tmp_path: Path) -> None:
    """The tests of the rules can fail.

    Each does where its rule never fires, and its other half where it always does.
    """
    text = (OBSERVABILITY / "alerts.yaml").read_text()
    rules = re.sub(r"( expr: )[^\n]*", rf'\1"{never_or_always}"', text)
    begin, *tests = (OBSERVABILITY / "alerts_test.yaml").read_text().split(TEST)
    is_silent = never_or_always == "vector(1)"
    kept = [test for test in tests if (" stays silent\n" in test) == is_silent]

    done = rules_tested(rules, TEST.join([begin, *kept]), tmp_path)

    assert done.returncode != 0
    assert failed_in(done) == {alert.name for alert in ALERTS}


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    """The site's page has a heading where the annotation points; the alert itself says what to do."""
    runbook = entries()
    rules = (OBSERVABILITY / "alerts.yaml").read_text()

    assert "<!-- site: alerts -->" in (ROOT / "docs" / "runbook.md").read_text()
    for alert in ALERTS:
        assert f"## {alert.name}\n" in runbook
        assert f'runbook_url: "docs/runbook.md#{alert.name.lower()}"' in rules
        assert json.dumps(alert.do, ensure_ascii=False) in rules


async def test_every_metric_of_an_alert_is_exposed(tmp_path: Path) -> None:
    """Names, and labels that the rules choose by; what only a failure brings is in the table."""
    values = (await _scrapes(tmp_path))[1]

    for alert in STORE_ALERTS:
        for name in names_in(alert.expression):
            assert name in METRICS
            if name != "ctxcache_upkeep_failures_total":
                assert any(name in (sample, sample.removesuffix("_count")) for sample in values), alert.name
            asked = re.findall(rf"{name}(?:_bucket|_count)?{{([^}}]*)}}", alert.expression)
            labels = {label for selector in asked for label in re.findall(r"(\w+)=", selector)}
            assert labels <= set(METRICS[name].labels), alert.name


@needs_promtool
async def test_no_panel_of_the_dashboard_is_empty(tmp_path: Path) -> None:
    """Every query, as Prometheus evaluates it over what a live server has shown in two scrapes."""
    before, after = await _scrapes(tmp_path)
    asked = {f"{i} {title}": query for i, (title, query) in enumerate(queries(STORE))}

    found = answered({**asked, "nothing": "ctxcache_sessions > 1e9"}, series_of(before, after), tmp_path)

    assert set(asked) - found == set()
    assert "nothing" not in found


@pytest.mark.parametrize(("made", "file"), [(STORE, "dashboard.json"), (WORKER, "worker_dashboard.json")])
def test_a_dashboard_is_what_grafana_takes(made: Board, file: str) -> None:
    """Ids once, nothing over anything else, a source and a legend for every query, a text for every panel."""
    board = json.loads((OBSERVABILITY / file).read_text())
    panels = board["panels"]
    places = [panel["gridPos"] for panel in panels]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [row.title for row in made.rows]
    for i, a in enumerate(places):
        assert a["x"] + a["w"] <= 24
        for b in places[:i]:
            is_apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert is_apart or a["y"] >= b["y"] + b["h"] or b["y"] >= a["y"] + a["h"]
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            for target in panel["targets"]:
                assert target["legendFormat"]
                assert 'instance=~"$instance"' in target["expr"]


async def _scrapes(directory: Path) -> tuple[Values, Values]:
    """Before a load, and after it."""
    fleet = fleet_of_one(directory)
    async with observed(directory, tenant_shares="default=0.5:0.9", **fleet) as (server, client, clock):
        before = await values_of(server)
        await load(client, clock)
        await client.get("s23")
        await values_of(server)
        return before, await values_of(server)
