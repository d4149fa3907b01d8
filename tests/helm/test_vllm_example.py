"""The example of vLLM beside a node's store fits what the chart renders: one socket, user, set of nodes."""

import ast
import json
import re
import tomllib
from typing import Any

import pytest
import yaml
from chart import CHART, HERE, ROOT, named, objects, render, store_pod

PAGE = ROOT / "docs" / "vllm_kubernetes.md"


@pytest.fixture
def example() -> dict[str, Any]:
    """The example's pod."""
    found = objects((CHART / "examples" / "vllm.yaml").read_text())
    pod: dict[str, Any] = found["Deployment", "vllm"]["spec"]["template"]["spec"]
    return pod


@pytest.fixture
def store() -> dict[str, Any]:
    """The store's pod."""
    pod: dict[str, Any] = store_pod(objects(render("vllm")))
    return pod


def transfer(example: dict[str, Any]) -> dict[str, Any]:
    """The settings behind the one flag."""
    arguments = example["containers"][0]["args"]
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def test_the_page_has_the_values_that_are_tested() -> None:
    """The page's values are the case that is rendered here."""
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)

    assert yaml.safe_load(shown) == yaml.safe_load((HERE / "cases" / "vllm.yaml").read_text())


def test_the_sums_of_a_node_are_the_pods(example: dict[str, Any], store: dict[str, Any]) -> None:
    """GiB of the page's table: of the rendered store, of the example, and added up for eight engines."""
    cells = re.findall(r"^\| ([^|]+) \| \**(\d+)\** \| \**(\d+)\** \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(cells) == 7
    for column in (1, 2):
        arena, process, pod, messages, offloaded, pods, node = (int(cell[column]) for cell in cells)
        assert pods == 8 * (pod + messages + offloaded)
        assert node == arena + process + pods
        if not offloaded:
            limit = store["containers"][0]["resources"]["limits"]["memory"]
            assert limit == f"{(arena + process) << 10}Mi"
            assert example["containers"][0]["resources"]["limits"]["memory"] == f"{pod + messages}Gi"
            assert named(example["volumes"], "shared-memory")["emptyDir"]["sizeLimit"] == f"{messages}Gi"


def test_the_flag_names_the_socket_that_the_store_listens_at(example: dict[str, Any]) -> None:
    """The store's own configuration says where it is, and where it hands out the arena."""
    found = objects(render("vllm"))
    text = next(item for item in found.values() if "ctxcache.toml" in item.get("data", {}))["data"]
    settings = tomllib.loads(text["ctxcache.toml"])

    assert transfer(example)["kv_connector_extra_config"]["target"] == f"unix:{settings['unix_socket']}"
    mounts = example["containers"][0]["volumeMounts"]
    directory = named(mounts, "ctxcache")["mountPath"]
    assert settings["unix_socket"].startswith(f"{directory}/")
    assert settings["control_socket"].startswith(f"{directory}/")


def test_both_pods_have_one_directory_of_the_node(example: dict[str, Any], store: dict[str, Any]) -> None:
    """At the same path: the store tells its clients paths of its own."""
    theirs, ours = named(store["volumes"], "sockets"), named(example["volumes"], "ctxcache")
    assert ours["hostPath"]["path"] == theirs["hostPath"]["path"]
    mounts = example["containers"][0]["volumeMounts"], store["containers"][0]["volumeMounts"]
    assert named(mounts[0], "ctxcache")["mountPath"] == named(mounts[1], "sockets")["mountPath"]


def test_both_pods_have_one_user_and_the_same_nodes(example: dict[str, Any], store: dict[str, Any]) -> None:
    """Another user could not write to the arena; another node has another store, or none."""
    for name in ("runAsUser", "runAsGroup"):
        assert example["securityContext"][name] == store["securityContext"][name]
    assert example["nodeSelector"] == store["nodeSelector"]
    assert example["tolerations"] == store["tolerations"]


def test_the_flag_is_one_that_the_connector_takes(example: dict[str, Any]) -> None:
    """Ctxcache registers the connector, which knows each setting."""
    config = transfer(example)
    engine = ROOT / "gpu_worker" / "engines" / "vllm"
    assert f'"{config["kv_connector"]}"' in (engine / "plugin.py").read_text()
    sources = (engine / "settings.py").read_text(), (engine.parent / "link.py").read_text()
    known = {
        field.target.id
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("ConnectorSettings", "StoreSettings")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert config["kv_connector_extra_config"].keys() <= known
