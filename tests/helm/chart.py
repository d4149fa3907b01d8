"""The chart through the real helm."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "ctxcache"
HERE = Path(__file__).parent
CASES = sorted(path.stem for path in (HERE / "cases").glob("*.yaml"))
HELM = Path(sys.executable).parent / "helm"
TIMEOUT_S = 60


class RenderError(Exception):
    """The refusal of helm."""


def helm(*arguments: str) -> str:
    """Run helm; return what it printed. Raises RenderError."""
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


def render(case: str = "default", *sets: str) -> str:
    """Render one case as an installation named `cache` in the namespace `inference`."""
    values = str(HERE / "cases" / f"{case}.yaml")
    options = [part for text in sets for part in ("--set-json", text)]
    return helm("template", "cache", str(CHART), "--namespace", "inference", "--values", values, *options)


def objects(text: str) -> dict[tuple[str, str], Any]:
    """The rendered objects, by kind and name."""
    found = (item for item in yaml.safe_load_all(text) if item)
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def only(found: dict[tuple[str, str], Any], kind: str) -> Any:
    """The one object of a kind."""
    (item,) = [item for (its_kind, _), item in found.items() if its_kind == kind]
    return item


def kinds(found: dict[tuple[str, str], Any]) -> list[str]:
    """The kinds of what was rendered, in order."""
    return sorted(kind for kind, _ in found)


def store_pod(found: dict[tuple[str, str], Any]) -> Any:
    """The pod's spec of the store."""
    return next(
        item["spec"]["template"]["spec"]
        for (kind, _), item in found.items()
        if kind in ("StatefulSet", "DaemonSet")
        and item["metadata"]["labels"]["app.kubernetes.io/component"] == "store"
    )


def named(items: Iterable[Any], name: str) -> Any:
    """The one of a list's items that has a name."""
    return next(item for item in items if item["name"] == name)
