"""A GGUF file becomes the model it was made from."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxcache.errors import InvalidArgument
from lab.demo.gguf_model import transformers_name, unpermute
from lab.demo.models import convert_gguf, load_model

# Sizes that spell the shape; rows are multiples of 32, the block of Q4_1 and Q8_0.
_D, _FFN, _H, _KV, _C = 64, 96, 4, 2, 16
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] +"
    " '<|im_end|>\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """Return the 256 characters that byte-level BPE writes for bytes."""
    printable = [*range(ord("!"), 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in [*printable, *range(256, 256 + 256 - len(printable))]]


_TOKENS = [*_SPECIAL, *_byte_alphabet(), "12", "ab"]


def _tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_TOKENS),
        hidden_size=_D,
        intermediate_size=_FFN,
        num_hidden_layers=2,
        num_attention_heads=_H,
        num_key_value_heads=_KV,
        head_dim=_C,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _interleave(weight: np.ndarray, head_count: int) -> np.ndarray:
    """Order rows as llama.cpp's converter does."""
    halves = weight.reshape(head_count, 2, weight.shape[0] // head_count // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight, short = value.numpy(), name
        for long, gguf_part in _GGUF_NAMES.items():
            short = short.replace(long, gguf_part)
        if "attn_q" in short or "attn_k" in short:
            weight = _interleave(weight, _H if "attn_q" in short else _KV)
        tensors[short] = weight
    return tensors


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(_D)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_H)
    writer.add_head_count_kv(_KV)
    writer.add_rope_dimension_count(_C)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3 if token in _SPECIAL else 1 for token in _TOKENS])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(_CHATML)


def _write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    quantization: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer)
    for name, weight in tensors.items():
        if quantization is None or weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quantize(weight, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _convert(source: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert_gguf(source, directory)
    return directory


def test_a_converted_model_gives_the_same_logits(tmp_path: Path) -> None:
    """Without quantisation nothing is lost: names, row order, RoPE and sizes are right."""
    original = _tiny_llama()
    source = _write_gguf(tmp_path / "tiny.gguf", _gguf_tensors(original))

    converted, _ = load_model(_convert(source, tmp_path))

    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.config.rms_norm_eps == 1e-5


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_weights_are_those_of_the_reference(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    """Each row is what gguf dequantises it to, back in its place."""
    original = _tiny_llama()
    source = _write_gguf(tmp_path / "tiny.gguf", _gguf_tensors(original), kind)

    converted, _ = load_model(_convert(source, tmp_path))

    for name, value in converted.state_dict().items():
        expected = original.state_dict()[name].numpy()
        if value.ndim == 2:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        np.testing.assert_array_equal(value.numpy(), expected, err_msg=name)


def test_unpermute_undoes_the_interleaving() -> None:
    """Row i of a head goes next to row i + C / 2 in GGUF, and comes back."""
    weight = np.arange(_H * _C * 3, dtype=np.float32).reshape(_H * _C, 3)

    assert np.array_equal(unpermute(_interleave(weight, _H), _H), weight)
    assert not np.array_equal(_interleave(weight, _H), weight)


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(tmp_path: Path) -> None:
    """A merge of two digits is never used; special tokens are one id; text comes back."""
    source = _write_gguf(tmp_path / "tiny.gguf", _gguf_tensors(_tiny_llama()))
    _, tokenizer = load_model(_convert(source, tmp_path))

    ids = tokenizer.encode("<|im_start|>ab 12\n")

    assert ids[:2] == [1, _TOKENS.index("ab")]
    assert _TOKENS.index("12") not in ids
    assert tokenizer.decode(ids) == "<|im_start|>ab 12\n"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == _CHATML


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    """Only a plain Llama is converted; nothing is guessed."""
    source = _write_gguf(tmp_path / "tiny.gguf", {}, architecture="qwen2")

    with pytest.raises(InvalidArgument, match="qwen2"):
        _convert(source, tmp_path)


def test_an_unknown_tensor_is_refused() -> None:
    """A tensor with no place in the model is an error, not a warning."""
    with pytest.raises(InvalidArgument, match="rope_freqs"):
        transformers_name("rope_freqs.weight")
