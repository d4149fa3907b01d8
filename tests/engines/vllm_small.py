"""What tests of a real vLLM begin with: a small model, an engine without a store, and a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.engines.families import SHAPE
from lab.engines.vllm_process import VllmEngine
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, in files."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine that has no store and keeps nothing between requests."""
    with VllmEngine(model, None, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data") as server:
        yield server
