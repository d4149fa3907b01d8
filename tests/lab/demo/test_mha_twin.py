"""The multi-head twin computes the same function."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lab.demo.models import mha_twin, repeat_kv_heads


@pytest.fixture
def gqa_dir(tmp_path: Path) -> Path:
    """Return a directory with a random Llama of 6 heads that share 2 KV heads, with biases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "gqa")
    return tmp_path / "gqa"


def test_logits_are_those_of_the_original(gqa_dir: Path, tmp_path: Path) -> None:
    """Every query head reads the K and V it read before, so the difference is exactly 0."""
    twin_dir = mha_twin(gqa_dir, tmp_path / "cache")

    original = AutoModelForCausalLM.from_pretrained(gqa_dir, local_files_only=True)
    twin = AutoModelForCausalLM.from_pretrained(twin_dir, local_files_only=True)
    ids = torch.arange(50)[None]
    with torch.inference_mode():
        difference = (twin(ids).logits - original(ids).logits).abs().max().item()
    assert twin.config.num_key_value_heads == 6
    assert difference == 0.0


def test_a_model_that_changed_gets_a_new_twin(gqa_dir: Path, tmp_path: Path) -> None:
    """The cache is keyed by what the model directory holds, not by its name."""
    first = mha_twin(gqa_dir, tmp_path / "cache")
    unchanged = mha_twin(gqa_dir, tmp_path / "cache")
    config = gqa_dir / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 97', '"vocab_size": 97 '))

    assert unchanged == first
    assert mha_twin(gqa_dir, tmp_path / "cache") != first


def test_each_kv_head_is_repeated_in_place() -> None:
    """Heads 0 1 become 0 0 0 1 1 1, as query heads are grouped."""
    weight = torch.tensor([[0.0], [0.5], [1.0], [1.5]])

    repeated = repeat_kv_heads(weight, kv_head_count=2, head_count=6)

    assert repeated[:, 0].tolist() == [0.0, 0.5] * 3 + [1.0, 1.5] * 3
