"""An upgrade of what is installed: what Kubernetes does not let change has not changed.

`released/` has renders of released versions, and of this one until it is released.
"""

from pathlib import Path
from typing import Any

import pytest
from chart import HERE, objects, render

RELEASED = sorted((HERE / "released").glob("*/*.yaml"))
# By the API's documentation: of a StatefulSet's spec all but these; of a DaemonSet's the selector; of a claim
# everything.
MUTABLE_OF_STATEFUL_SET = {
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
}


def immutable(item: Any) -> Any:
    """The parts of an object that may not change."""
    spec = item.get("spec", {})
    if item["kind"] == "StatefulSet":
        return {name: value for name, value in spec.items() if name not in MUTABLE_OF_STATEFUL_SET}
    if item["kind"] == "DaemonSet":
        return spec["selector"]
    if item["kind"] == "Service":
        return spec.get("clusterIP")
    return None


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_immutable_changes(path: Path) -> None:
    """Every object that both versions have keeps what Kubernetes would refuse to change."""
    old, new = objects(path.read_text()), objects(render(path.stem))
    both = old.keys() & new.keys()

    assert both
    assert {key: immutable(new[key]) for key in both} == {key: immutable(old[key]) for key in both}


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_claims_and_the_names_of_stores_stay(path: Path) -> None:
    """A renamed set would come up empty beside its old claims."""
    stateful = {key for key in objects(path.read_text()) if key[0] in ("StatefulSet", "DaemonSet", "Service")}
    assert stateful <= objects(render(path.stem)).keys()


def test_there_is_something_to_upgrade_from() -> None:
    """The tests above have cases."""
    assert RELEASED


def test_a_changed_selector_is_noticed() -> None:
    """The comparison can fail."""
    found = objects(render())
    (key,) = [key for key in found if key[0] == "StatefulSet"]
    before = immutable(found[key])
    found[key]["spec"]["serviceName"] = "other"
    assert immutable(found[key]) != before
