"""Every case renders as it did, is what Kubernetes takes, and holds a configuration that the server takes."""

import difflib
import tomllib
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import pytest
import yaml
from chart import CASES, CHART, HERE, ROOT, helm, named, objects, only, render, store_pod
from generate_chart import without_chance

from ctxcache.settings.config import load

OLDEST, NEWEST = "1.30", "1.37"
# Not Kubernetes' own: their schemas are their operators'.
FOREIGN = {"Certificate", "PodMonitor", "PrometheusRule", "ServiceMonitor"}


@pytest.mark.parametrize("case", CASES)
def test_renders_as_before(case: str) -> None:
    """Each effect of a change of the chart is seen. `make chart` takes the new one."""
    golden, text = HERE / "golden" / f"{case}.yaml", without_chance(render(case))
    difference = list(difflib.unified_diff(golden.read_text().splitlines(), text.splitlines(), lineterm=""))
    assert not difference, "\n".join(difference)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", CASES)
def test_is_what_kubernetes_takes(case: str, version: str) -> None:
    """Every object is valid by Kubernetes' own schemas, unknown fields refused."""
    found = objects(render(case))
    own = [item for (kind, _), item in found.items() if kind not in FOREIGN]
    for item in own:
        kubernetes_validate.validate(item, version, strict=True)
    assert own


OF_VALUES = sorted((CHART / "examples").glob("*-values.yaml"))
OF_OBJECTS = sorted(set((CHART / "examples").iterdir()) - set(OF_VALUES))


@pytest.mark.parametrize("path", OF_VALUES, ids=lambda path: path.stem)
def test_examples_of_values_are_cases(path: Path) -> None:
    """They are rendered, and looked at, under the same name."""
    case = HERE / "cases" / f"{path.stem.removesuffix('-values')}.yaml"
    assert yaml.safe_load(path.read_text()) == yaml.safe_load(case.read_text())


@pytest.mark.parametrize("path", OF_OBJECTS, ids=lambda path: path.stem)
def test_examples_are_what_kubernetes_takes(path: Path) -> None:
    """The examples that people copy are valid, too."""
    for item in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(item, NEWEST, strict=True)


def test_what_kubernetes_refuses_is_noticed() -> None:
    """The check above can fail."""
    item = only(objects(render()), "StatefulSet")
    item["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, NEWEST, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_its_configuration(case: str, tmp_path: Path) -> None:
    """The file in the ConfigMap is one that `ctxcache serve` would start with, sizes and all."""
    found = objects(render(case))
    config_map = next(item for item in found.values() if "ctxcache.toml" in item.get("data", {}))
    file = tmp_path / "ctxcache.toml"
    file.write_text(config_map["data"]["ctxcache.toml"])
    settings = load({}, file=file)

    container = store_pod(found)["containers"][0]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    # Below them: what the server makes for itself, whatever mode the volume has.
    assert str(settings.data_directory.parent) in mounts
    assert {str(path.parent) for path in settings.ssd_directories} <= mounts
    assert str(settings.arena_directory) in mounts
    assert bool(settings.tls_certificate) != settings.insecure_listen
    own = (settings.metrics_token_file, settings.metrics_tls_key, settings.token_hashes)
    for path in (*own, settings.fleet_secret_file, settings.fleet_token_file):
        assert path is None or str(path.parent) in mounts
    port = named(container["ports"], "grpc")["containerPort"]
    assert tomllib.loads(file.read_text())["listen"].endswith(f":{port}")


def test_helm_has_nothing_to_say() -> None:
    """`helm lint --strict` finds nothing."""
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_version_is_the_projects() -> None:
    """Chart, application and package are one version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
