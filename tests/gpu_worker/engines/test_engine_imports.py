"""The names that users import of engines: what they are, and what importing them costs."""

import importlib
import subprocess
import sys

import pytest

import ctxcache.engines.transformers as names
from tests.engines.engine_names import check_names

HEAVY = ("torch", "transformers", "vllm", "sglang", "lmcache", "gpu_worker", "grpc", "numpy")


def test_every_name_is_the_adapters_own() -> None:
    """Those of transformers; engines' own tests have theirs."""
    check_names("transformers")
    assert (
        names.TransformersEngine
        is importlib.import_module("gpu_worker.engines.transformers").TransformersEngine
    )


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang", "lmcache"])
def test_a_module_of_names_imports_no_engine(engine: str) -> None:
    """In any environment: a name is imported when it is first used."""
    code = (
        f"import sys, ctxcache.engines.{engine} as names\n"
        f"print(*(set(names.__all__) & set(vars(names))), *(set(sys.modules) & {set(HEAVY)}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == []


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(
        AttributeError, match=r"module 'ctxcache.engines.transformers' has no attribute 'Turns'"
    ):
        names.Turns  # noqa: B018
