"""Every value of the chart is in a case whose golden shows what it does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CASES, CHART, HERE, RenderError, helm
from generate_chart import Value, values_of, without_chance

Values = dict[str, Any]


def _leaves(values: list[Value]) -> list[Value]:
    return [leaf for one in values for leaf in (_leaves(one.children) if one.children else [one])]


LEAVES = _leaves(list(values_of(CHART / "values.yaml")))
GIVEN: Mapping[str, Values] = {
    case: yaml.safe_load((HERE / "cases" / f"{case}.yaml").read_text()) or {} for case in CASES
}


def _has_other(case: str, leaf: Value) -> bool:
    """Whether a case gives a value another one than its default."""
    found: Any = GIVEN[case]
    for part in leaf.path.split("."):
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return bool(found != leaf.default)


def _without(values: Values, path: str) -> Values:
    name, _, rest = path.partition(".")
    if not rest:
        return {key: value for key, value in values.items() if key != name}
    return values | {name: _without(values[name], rest)}


def _shows(case: str, leaf: Value, directory: Path) -> bool:
    """Whether a case's golden would be another one, or none at all, without the value."""
    file = directory / f"{case}.yaml"
    file.write_text(yaml.safe_dump(_without(GIVEN[case], leaf.path)))
    try:
        text = helm("template", "cache", str(CHART), "--namespace", "inference", "--values", str(file))
    except RenderError:
        return True
    return without_chance(text) != (HERE / "golden" / f"{case}.yaml").read_text()


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_every_switch_has_a_golden(leaf: Value, tmp_path: Path) -> None:
    """Some case turns it, and that shows."""
    cases = [case for case in CASES if _has_other(case, leaf)]

    assert cases, f"no case of tests/helm/cases gives {leaf.path}"
    assert any(_shows(case, leaf, tmp_path) for case in cases), f"{leaf.path} changes no golden of {cases}"


def test_all_values_are_looked_at() -> None:
    """Those of values.yaml, by name."""
    assert {"store.kind", "worker.enabled", "metrics.podMonitor.port", "nameOverride"} <= {
        leaf.path for leaf in LEAVES
    }
