"""The dashboards as Grafana's own models take them, where these are installed."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from chart import ROOT

pytest.importorskip(
    "grafana_foundation_sdk",
    reason=(
        "GRAFANA'S MODELS ARE NOT INSTALLED (pip install grafana-foundation-sdk): no dashboard was read by"
        " them"
    ),
)
FILES = ("dashboard.json", "worker_dashboard.json")


def _read_by_grafana(board: Any) -> Any:
    """A dashboard as Grafana's models have read and written it again."""
    sdk = "grafana_foundation_sdk"
    import_module(f"{sdk}.cog.plugins").register_default_plugins()
    model = import_module(f"{sdk}.models.dashboard").Dashboard.from_json(board)
    return json.loads(json.dumps(model, cls=import_module(f"{sdk}.cog.encoder").JSONEncoder))


def _lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Where something of `given` is not in `kept`, or is another thing there."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            found
            for key, value in given.items()
            for found in (_lost(value, kept[key], f"{path}/{key}") if key in kept else [f"{path}/{key}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            found
            for i, (one, other) in enumerate(zip(given, kept, strict=True))
            for found in _lost(one, other, f"{path}/{i}")
        ]
    return [] if given == kept else [path]


@pytest.mark.parametrize("file", FILES)
def test_grafana_knows_all_of_a_dashboard(file: str) -> None:
    """No field that it does not know, no value that it takes for another one.

    Of a panel's options none is left to it.
    """
    board = json.loads((Path(ROOT) / "observability" / file).read_text())
    kept = _read_by_grafana(board)

    assert _lost(board, kept) == []
    for given, known in zip(board["panels"], kept["panels"], strict=True):
        assert _lost(known.get("options", {}), given.get("options", {})) == []


def test_what_grafana_does_not_know_is_noticed() -> None:
    """A misspelt field, and a panel's option that there is not."""
    board = json.loads((Path(ROOT) / "observability" / FILES[0]).read_text())
    board["graphToolTip"] = 1
    panel = next(one for one in board["panels"] if one["type"] == "timeseries")
    panel["options"]["legend"]["isShown"] = True
    number = board["panels"].index(panel)

    assert _lost(board, _read_by_grafana(board)) == [
        f"/panels/{number}/options/legend/isShown",
        "/graphToolTip",
    ]
