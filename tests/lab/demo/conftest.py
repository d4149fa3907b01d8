"""Tiny random models with a tokenizer of bytes, as directories on disk, and the demo's command."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from byte_tokenizer import TOKEN_COUNT, save, save_llama
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from typer.testing import CliRunner, Result

from lab.demo.command import demo

_CONTEXT_TOKENS = 2048


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama whose four heads share two KV heads."""
    return save_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random OPT, which learns absolute positions."""
    torch.manual_seed(1)
    config = OPTConfig(
        vocab_size=TOKEN_COUNT,
        hidden_size=64,
        ffn_dim=96,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_CONTEXT_TOKENS,
        init_std=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return save(OPTForCausalLM(config), tmp_path_factory.mktemp("models") / "tiny-opt")


@pytest.fixture(scope="session")
def tiny_bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of a family that is not supported."""
    config = BloomConfig(vocab_size=TOKEN_COUNT, hidden_size=32, n_layer=1, n_head=2)
    return save(BloomForCausalLM(config), tmp_path_factory.mktemp("models") / "tiny-bloom")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins are made for the test alone; the machine's own models are found by those who ask before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def run_demo() -> Callable[..., Result]:
    """Run the command within this process; small unless the options say otherwise."""
    app = typer.Typer()
    app.command()(demo)
    small = ("--threads", "1", "--reply-tokens", "8", "--opening-tokens", "200")

    def run(*options: str) -> Result:
        return CliRunner().invoke(app, [*small, *options])

    return run
