"""Writes the dashboards as Grafana's JSON, and every panel's query as Prometheus takes it. Pure."""

import json
import re
from collections.abc import Iterator
from typing import Any

from dashboard_table import LINES, STAT, Board, Panel

from ctxcache.observe.table import METRICS as STORES
from gpu_worker.sidecar.metrics import METRICS as WORKERS

PANEL_HEIGHT, STAT_HEIGHT, GRID_WIDTH = 8, 4, 24
SOURCE = {"type": "prometheus", "uid": "${source}"}
NAME = re.compile(r"\b(?:ctxcache|process)_[a-z_]+")
ENDS = ("_bucket", "_sum", "_count")
Json = dict[str, Any]
# All of them: what is left out is another thing in another version of Grafana.
OPTIONS: dict[str, Json] = {
    STAT: {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "graphMode": "area",
        "colorMode": "value",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
    },
    LINES: {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}
METRICS = STORES | WORKERS


def names_in(expression: str) -> set[str]:
    """The metrics that a query asks for, histograms by their own name.

    Raises KeyError for one that is in no table.
    """
    found = set()
    for name in NAME.findall(expression):
        base = next(
            (name.removesuffix(end) for end in ENDS if name.endswith(end) and name not in METRICS), name
        )
        found.add(METRICS[base].name)
    return found


def queries(board: Board) -> Iterator[tuple[str, str]]:
    """Every panel's title and query, over all that there are and five minutes."""
    for row in board.rows:
        for panel in row.panels:
            for query, _ in panel.queries:
                text = query.replace("{$on}", "").replace(",$on}", "}").replace("$rate", "5m")
                yield f"{row.title}: {panel.title}", text


def dashboard(board: Board) -> str:
    """One dashboard."""
    panels: list[Json] = []
    top = 0
    for row in board.rows:
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1},
                "id": len(panels) + 1,
            }
        )
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                top, left, height = top + height, 0, 0
            own_height = STAT_HEIGHT if panel.kind == STAT else PANEL_HEIGHT
            place = {"x": left, "y": top, "w": panel.width, "h": own_height}
            panels.append(_panel(panel, place, len(panels) + 1))
            left, height = left + panel.width, max(height, own_height)
        top += height
    return json.dumps(_around(board, panels), indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel, place: Json, number: int) -> Json:
    names = sorted({name for query, _ in panel.queries for name in names_in(query)})
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "gridPos": place,
        "datasource": SOURCE,
        "description": "\n\n".join(
            f"{name}: {METRICS[name].meaning} {METRICS[name].when_bad}" for name in names
        ),
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "legendFormat": legend,
                "expr": query.replace("$on", 'job=~"$job",instance=~"$instance"').replace(
                    "$rate", "$__rate_interval"
                ),
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _around(board: Board, panels: list[Json]) -> Json:
    return {
        "title": board.title,
        "uid": board.uid,
        "tags": ["ctxcache"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
        "templating": {
            "list": [
                {
                    "name": "source",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                    "hide": 0,
                },
                _variable("job", f"label_values({board.chosen_by}, job)"),
                _variable("instance", f'label_values({board.chosen_by}{{job=~"$job"}}, instance)'),
            ]
        },
    }


def _variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "label": name,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }
