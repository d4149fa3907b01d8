"""The table of vLLM's versions is true of the installed one; a version outside of it is named at the start.

Run by `make engines`, and of each version by `make engines-versions`, in an environment that has vLLM.
"""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm.version

from gpu_worker.engines import tried
from gpu_worker.engines.vllm.versions import DIFFERENCES, has
from lab.engines.vllm_process import VllmEngine
from tests.engines.vllm_small import model, store
from tests.server_process import ServerProcess

__all__ = ["model", "store"]

UNTRIED = """
from gpu_worker.engines.tried import TRIED
TRIED["vLLM"] = ("0.1",)
class Nothing:
    pass
"""
"""A module that vLLM imports ahead of its connectors: the table has no installed version."""
IMPORT = """
import sys, vllm.version
vllm.version.__version__ = sys.argv[1]
import ctxcache.engines.vllm
getattr(ctxcache.engines.vllm, sys.argv[2])
"""


def is_there(part: str) -> bool:
    """Whether the installed vLLM has a part, by its name in the table."""
    module_name, _, path = part.partition(":")
    package, _, _ = module_name.rpartition(".")
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module_name) is None:
        return False
    found: object = importlib.import_module(module_name)
    for name in path.split("."):
        # Fields without a default are no attributes of their class.
        fields = getattr(found, "__dataclass_fields__", getattr(found, "__struct_fields__", ()))
        if name in fields:
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_vllm_has_a_part_from_the_version_on_that_its_row_says(name: str) -> None:
    """Not earlier and not later: what stands in for it is used where it must be."""
    assert is_there(DIFFERENCES[name].part) == has(name)


@pytest.mark.parametrize("name", ["CtxcacheConnector", "CtxcacheOffloadingConnector"])
def test_a_version_that_cannot_work_is_refused_with_those_that_do(name: str) -> None:
    """When vLLM imports its connector, by one sentence."""
    command = (sys.executable, "-c", IMPORT, "0.25.1", name)
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    names = ", ".join(tried.TRIED["vLLM"])
    said = (
        f"gpu_worker.engines.link.Refused: vLLM 0.25.1 is not served: 0.26 and later are, tried with {names}"
    )
    assert ran.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("is_tried", [True, False], ids=["tried", "untried"])
def test_a_version_that_was_not_tried_starts_with_one_warning(
    model: Path,
    store: ServerProcess,
    tmp_path: Path,
    *,
    is_tried: bool,
) -> None:
    """It serves, and the log says once that nobody has run it; of a version of the table it says nothing."""
    assert tried.is_tried("vLLM", vllm.version.__version__)
    (tmp_path / "untried.py").write_text(UNTRIED)
    options: dict[str, Any] = (
        {} if is_tried else {"worker_extension_cls": "untried.Nothing", "packages": str(tmp_path)}
    )
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        assert engine.turn(range(3, 100), "alice", 4).finish_reason == "length"
        assert engine.log.count(f"vLLM {vllm.version.__version__} was not tried") == (not is_tried)
