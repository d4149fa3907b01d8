"""Models by name and by their `config.json`: the bytes, GPUs and rates that a simulation takes from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from ctxcache.errors import FileUnusable, InvalidArgument
from ctxcache.simulate.models import SHAPES, Shape, shape_named

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}
MIXTURE = LLAMA | {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
}
LATENT = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def shape_of(place: Path, config: dict[str, Any]) -> Shape:
    """The shape of a config in a directory."""
    (place / "config.json").write_text(json.dumps(config))
    return shape_named(str(place))


def test_a_config_is_the_model_of_its_name(tmp_path: Path) -> None:
    """Bytes are the same to the byte; parameters within a few per cent of what the card says."""
    for config, name in ((LLAMA, "llama-3-8b"), (MIXTURE, "qwen3-30b-a3b")):
        made, known = shape_of(tmp_path, config), SHAPES[name]
        assert made.token_bytes("kv") == known.token_bytes("kv")
        assert made.token_bytes("hidden") == known.token_bytes("hidden")
        assert made.parameters == pytest.approx(known.parameters, rel=0.05)
        assert made.active_parameters == pytest.approx(known.active_parameters, rel=0.05)
        assert made.gpu_count == known.gpu_count


def test_bytes_of_a_token() -> None:
    """Against numbers that others print: 128 KiB of Llama 3 8B, 320 of 70B, 68.6 of DeepSeek V3."""
    kib = {
        name: SHAPES[name].token_bytes("kv") / 1024 for name in ("llama-3-8b", "llama-3.1-70b", "deepseek-v3")
    }
    assert kib == {"llama-3-8b": 128, "llama-3.1-70b": 320, "deepseek-v3": 68.625}
    assert SHAPES["llama-3-8b"].token_bytes("hidden") == 32 * 4096 * 2


def test_parts_of_a_config(tmp_path: Path) -> None:
    """MLA keeps latents; layers without keys keep no rows; a text model lies within one of pictures."""
    assert shape_of(tmp_path, LATENT).token_bytes("kv") == 32 * 576 * 2
    sorts = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    assert shape_of(tmp_path, LLAMA | {"layer_types": sorts}).layers == 8
    assert shape_of(tmp_path, {"model_type": "x", "text_config": LLAMA}) == shape_of(tmp_path, LLAMA)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_that_lacks_a_number_is_refused(tmp_path: Path, name: str) -> None:
    """With its field."""
    for value in (None, "32", -1, 0, True):
        with pytest.raises(InvalidArgument, match=name):
            shape_of(tmp_path, LLAMA | {name: value})


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """A name that is not known tells those that are."""
    with pytest.raises(InvalidArgument, match=r"known are .*llama-3-8b.*phi-4"):
        shape_named("gpt-9")
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"config\.json"):
            shape_named(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(FileUnusable):
        shape_named(str(tmp_path))
