#!/usr/bin/env python3
"""Write the chart's README, its values' schema, what it packages and its renders; `--check` compares.

Renders are tests/helm/golden, one for each of tests/helm/cases, by the real helm.
Every key of helm/ctxcache/values.yaml has its meaning in the comment above it. A comment's `One of:` are
the only values; a mapping whose keys have no comments is passed on to Kubernetes as it is.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
# This tree's settings, whatever the environment has installed.
sys.path.insert(0, str(ROOT))

from ctxcache.settings.knobs import KNOBS, Knob, KnobKind  # noqa: E402

CHART = ROOT / "helm" / "ctxcache"
CASES = ROOT / "tests" / "helm" / "cases"
GOLDEN = ROOT / "tests" / "helm" / "golden"
HELM = Path(sys.executable).parent / "helm"
PACKAGED = {
    "alerts.yaml": ROOT / "observability" / "alerts.yaml",
    "dashboard.json": ROOT / "observability" / "dashboard.json",
    "worker_dashboard.json": ROOT / "observability" / "worker_dashboard.json",
}
SET_BY_CHART = {
    "data_directory",
    "listen",
    "bulk_listen",
    "metrics_listen",
    "unix_socket",
    "control_socket",
    "arena_directory",
    "arena_size_bytes",
    "arena_huge_pages",
    "ssd_size_bytes",
    "ssd_directories",
    "insecure_listen",
    "token_hashes",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "metrics_tls_certificate",
    "metrics_tls_key",
    "metrics_token_file",
    "fleet_bucket",
    "fleet_secret_file",
    "fleet_address",
    "fleet_server_name",
    "fleet_token_file",
}
NEVER_IN_A_CLUSTER = {"fault_injection"}
QUANTITY = r"^[0-9.]+([KMGTPE]i?)?$"
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = r"^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$"
SECONDS = {"type": "integer", "minimum": 60}
# Facts of values that a default does not tell.
RULES: Mapping[str, Mapping[str, Any]] = {
    "image.digest": {"pattern": "^(sha256:[0-9a-f]{64})?$"},
    "store.replicas": {"minimum": 1},
    "store.arena.sizeMiB": {"minimum": 64},
    "store.memoryOverheadMiB": {"minimum": 256},
    "store.startSeconds": SECONDS,
    "store.preStopSleepSeconds": {"minimum": 1},
    "store.cpu.request": {"type": ["string", "number"]},
    "store.cpu.limit": {"type": ["string", "number"]},
    "store.data.size": {"pattern": QUANTITY},
    "service.port": PORT,
    "service.bulkPort": PORT,
    "metrics.port": PORT,
    "service.loadBalancerSourceRanges": {"items": {"type": "string", "pattern": "/[0-9]+$"}},
    "service.externalTrafficPolicy": {"enum": ["", "Cluster", "Local"]},
    "networkPolicy.bucketEgress": {"items": {"type": "object"}},
    "store.fleet.endpoint": {"pattern": "^(https?://[^/@]+/?)?$"},
    "networkPolicy.extraFrom": {"items": {"type": "object"}},
    "networkPolicy.metricsFrom": {"items": {"type": "object"}},
    "tls.dnsNames": {"items": {"type": "string"}},
    "backup.schedule": {"minLength": 9},
    "backup.keep": {"minimum": 1},
    "backup.rateLimit": {"pattern": "^([0-9.]+([kKMGT]i?)?B?)?$"},
    "backup.timeoutSeconds": SECONDS,
    "backup.size": {"pattern": QUANTITY},
    "metrics.podMonitor.port": PORT,
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
    "store.ssd": {
        "items": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "pattern": NAME},
                "size": {"type": "string", "pattern": QUANTITY},
                "storageClass": {"type": "string"},
                "existingClaim": {"type": "string"},
                "hostPath": {"type": "string", "pattern": "^/"},
            },
        }
    },
}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass
class Value:
    """One key of values.yaml."""

    path: str
    text: str
    default: Any
    children: list["Value"] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The only values, where the comment names them."""
        found = re.search(r"One of: ([^.]+)\.", self.text)
        return found[1].split(", ") if found else []


def main() -> None:
    """Write everything, or compare it."""
    values = list(values_of(CHART / "values.yaml"))
    made = {
        CHART / "README.md": _readme(values),
        CHART / "values.schema.json": json.dumps(_schema(values), indent=2) + "\n",
    }
    made |= {
        CHART / "files" / name: source.read_text() for name, source in PACKAGED.items() if source.exists()
    }
    if sys.argv[1:] == ["--check"]:
        # Renders are of the files that are there: where those are stale, they are what is told.
        stale = _stale(made) or _stale(_renders())
        if stale:
            sys.exit(f"{', '.join(stale)}: not as values.yaml, knobs and observability say: run `make chart`")
        return
    shutil.rmtree(CHART / "files", ignore_errors=True)
    (CHART / "files").mkdir()
    for path, text in made.items():
        path.write_text(text)
    for path, text in _renders().items():
        path.write_text(text)


def _stale(made: Mapping[Path, str]) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path, text in made.items()
        if not path.exists() or path.read_text() != text
    ]


def _renders() -> dict[Path, str]:
    return {GOLDEN / f"{case.stem}.yaml": _render(case) for case in sorted(CASES.glob("*.yaml"))}


def _render(case: Path) -> str:
    command: list[str | Path] = [
        HELM,
        "template",
        "cache",
        CHART,
        "--namespace",
        "inference",
        "--values",
        case,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"{case.relative_to(ROOT)}: {done.stderr.strip()}")
    return without_chance(done.stdout)


def without_chance(render: str) -> str:
    """A render with a word in the place of the secret that each one draws anew."""
    return re.sub(r"^(  secret: )[A-Za-z0-9+/=]{80,}$", r"\1ZHJhd24=", render, flags=re.MULTILINE)


def values_of(path: Path) -> Iterator[Value]:
    """The keys of a chart's values. Raises TypeError where they are none."""
    text = path.read_text()
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError(path)
    yield from _children(root, "", text.splitlines(), yaml.safe_load(text))


def _children(node: yaml.MappingNode, prefix: str, lines: list[str], defaults: Any) -> Iterator[Value]:
    for key, item in node.value:
        path, default = f"{prefix}{key.value}", defaults[key.value]
        children = (
            list(_children(item, f"{path}.", lines, default)) if isinstance(item, yaml.MappingNode) else []
        )
        text = _comment_above(lines, key.start_mark.line)
        if not text and not any(child.text for child in children):
            # Somebody else's: passed on.
            yield Value(path, "", default)
        else:
            yield Value(path, text, default, [child for child in children if child.text or child.children])


def _comment_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(found)


def _schema(values: list[Value]) -> dict[str, Any]:
    properties = {value.path: _property(value) for value in values}
    # The values that Helm itself lays beside a chart's own.
    properties["global"] = {"type": "object"}
    return {
        "$schema": "https://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _property(value: Value) -> dict[str, Any]:
    found: dict[str, Any] = {"description": value.text} if value.text else {}
    found["type"] = TYPES[type(value.default)]
    if value.words:
        found["enum"] = value.words
    if value.path == "store.settings":
        found |= {
            "additionalProperties": False,
            "properties": {
                name: _setting(knob)
                for name, knob in KNOBS.items()
                if name not in SET_BY_CHART | NEVER_IN_A_CLUSTER
            },
        }
    if value.children:
        found["additionalProperties"] = False
        found["properties"] = {child.path.rpartition(".")[2]: _property(child) for child in value.children}
    return found | dict(RULES.get(value.path, {}))


def _setting(knob: Knob) -> dict[str, Any]:
    kinds: dict[KnobKind, Any] = {
        KnobKind.SIZE: ["integer", "string"],
        KnobKind.SHARE: "number",
        KnobKind.SECONDS: "number",
        KnobKind.COUNT: "integer",
        KnobKind.SWITCH: "boolean",
        KnobKind.SHARES: ["object", "string"],
        KnobKind.IDENTITIES: ["array", "string"],
        KnobKind.DIRECTORIES: "array",
    }
    found: dict[str, Any] = {"description": knob.help, "type": kinds.get(knob.kind, "string")}
    if knob.choices:
        found["enum"] = list(knob.choices)
    names = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
    return found | {names[name]: bound for name, bound in knob.bounds.items()}


def _readme(values: list[Value]) -> str:
    rows = "\n".join(_rows(values))
    head = (CHART / "README.template.md").read_text()
    return f"{head}\n## Values\n\n| key | default | meaning |\n|---|---|---|\n{rows}\n"


def _rows(values: list[Value]) -> Iterator[str]:
    for value in values:
        if value.children:
            yield from _rows(value.children)
        else:
            default = json.dumps(value.default)
            yield f"| `{value.path}` | `{default}` | {value.text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    main()
