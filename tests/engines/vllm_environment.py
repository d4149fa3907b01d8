"""The effect of `pip install ctxcache` on an environment that has vLLM: it adds what is missing, no more.

Run by `make engines`. The environment is a new one, with vLLM alone.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.setup import ROOT, find_uv, group_requirements, uv_settings

MODULES_THAT_BREAK_VLLM = ["cffi", "_cffi_backend", "cryptography"]
ADDED = {"ctxcache", "grpcio-health-checking", "xxhash"}
"""Requirements of the base wheel that vLLM 0.32.0 does not have."""


def uv(*words: str | Path) -> str:
    """Run uv with the settings that made this environment; its standard output."""
    command: Sequence[str | Path] = [find_uv(), *words]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | uv_settings())
    return ran.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's Python, with vLLM."""
    directory = tmp_path_factory.mktemp("environment") / "venv"
    uv("venv", "--seed", directory)
    requirement = next(item for item in group_requirements(("vllm",)) if item.startswith("vllm"))
    uv("pip", "install", "--python", directory, requirement)
    return directory / "bin" / "python"


def versions(python: Path) -> dict[str, str]:
    """The packages of an environment."""
    listed = json.loads(uv("pip", "list", "--format", "json", "--python", python))
    return {item["name"]: item["version"] for item in listed}


def test_an_installation_changes_no_package_and_imports_none_that_breaks_vllm(python: Path) -> None:
    """The base wheel brings little, and nothing that it imports is a library that vLLM does not bear."""
    before = versions(python)
    uv("pip", "install", "--python", python, ROOT)
    after = versions(python)
    assert {name: after.get(name) for name in before} == before
    assert after.keys() - before.keys() == ADDED

    asked = (
        f"import sys, ctxcache; ctxcache.connect; print({{*{MODULES_THAT_BREAK_VLLM}}} & {{*sys.modules}})"
    )
    ran = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True, cwd=python.parent)
    assert ran.stdout.strip() == "set()"
