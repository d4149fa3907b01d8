"""A Llama model in a GGUF file, as a transformers configuration, fp32 weights and a byte-level BPE tokenizer.

The GGUF names and the row order of q and k are llama.cpp's (convert_hf_to_gguf.py). transformers can read
such a tokenizer too, but loses the rule that each digit is a token of its own, on which the model was
trained. Worst case: the whole model in fp32 in memory, 4 B a weight; a tokenizer of another kind is refused,
never guessed.
"""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ctxcache.errors import InvalidArgument
from lab.demo.building import Progress, silent

Weights = dict[str, npt.NDArray[np.float32]]

_STEP = "convert"

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_config(reader: gguf.GGUFReader) -> LlamaConfig:
    """Build the configuration from the file's metadata.

    Raises InvalidArgument for what is not a plain Llama.
    """
    architecture = read_field(reader, "general.architecture")
    if architecture != "llama" or "llama.rope.scaling.type" in reader.fields:
        raise InvalidArgument(field="gguf", problem=f"{architecture} with its RoPE is not a plain Llama")
    head_count = read_field(reader, "llama.attention.head_count")
    hidden_size = read_field(reader, "llama.embedding_length")
    eps = read_field(reader, "llama.attention.layer_norm_rms_epsilon")
    return LlamaConfig(
        vocab_size=len(read_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=read_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=read_field(reader, "llama.block_count"),
        num_attention_heads=head_count,
        num_key_value_heads=read_field(reader, "llama.attention.head_count_kv"),
        head_dim=read_field(reader, "llama.rope.dimension_count"),
        max_position_embeddings=read_field(reader, "llama.context_length"),
        # GGUF keeps fp32: seven digits give back the decimal number that was meant.
        rms_norm_eps=float(f"{eps:.7g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(read_field(reader, "llama.rope.freq_base")),
        },
        bos_token_id=read_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=read_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=read_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def llama_weights(reader: gguf.GGUFReader, config: LlamaConfig, *, progress: Progress = silent) -> Weights:
    """Dequantise every tensor under its transformers name. Raises InvalidArgument for an unknown tensor."""
    total_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    done_bytes = 0
    weights: Weights = {}
    for tensor in reader.tensors:
        name = transformers_name(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[name] = _in_half_split_order(name, weight, config)
        done_bytes += weight.nbytes
        progress(_STEP, done_bytes, total_bytes)
    return weights


def transformers_name(gguf_name: str) -> str:
    """Translate `blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`. Raises InvalidArgument."""
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case [part, kind] if part in _MODEL_NAMES:
            return f"{_MODEL_NAMES[part]}.{kind}"
    raise InvalidArgument(field="gguf", problem=f"tensor {gguf_name} is not one of a Llama's")


def read_field(reader: gguf.GGUFReader, key: str) -> Any:
    """Return a metadata value as a Python number, string, boolean or list. Raises InvalidArgument."""
    field = reader.get_field(key)
    if field is None:
        raise InvalidArgument(field=key, problem="the GGUF file does not say")
    return field.contents()


def _in_half_split_order(
    name: str, weight: npt.NDArray[np.float32], config: LlamaConfig
) -> npt.NDArray[np.float32]:
    if "q_proj" in name:
        return unpermute(weight, config.num_attention_heads or 1)
    if "k_proj" in name:
        return unpermute(weight, config.num_key_value_heads or 1)
    return np.ascontiguousarray(weight)


def unpermute(weight: npt.NDArray[np.float32], head_count: int) -> npt.NDArray[np.float32]:
    """Turn GGUF's order of a head's rows into that of transformers.

    Shape: [head_count * head_dim, ...]. GGUF interleaves the rows that RoPE turns together
    (0, 1), (2, 3)...; transformers pairs row i with row i + head_dim / 2.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(head_count, rows // head_count // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


# GGUF's word for a token that never comes from text.
_CONTROL = 3


def bpe_tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """Build the tokenizer with its special tokens and chat template. Raises InvalidArgument."""
    kind = (read_field(reader, "tokenizer.ggml.model"), read_field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise InvalidArgument(field="tokenizer.ggml.pre", problem=f"{kind} is not a tokenizer known here")
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # its __init__ has no types
        tokenizer_object=_backend(reader, tokens),
        bos_token=tokens[read_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[read_field(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[read_field(reader, "tokenizer.ggml.padding_token_id")],
        unk_token=tokens[read_field(reader, "tokenizer.ggml.unknown_token_id")],
        model_max_length=read_field(reader, "llama.context_length"),
    )
    tokenizer.chat_template = read_field(reader, "tokenizer.chat_template")
    return tokenizer


def _backend(reader: gguf.GGUFReader, tokens: list[str]) -> Tokenizer:
    merges: list[str] = read_field(reader, "tokenizer.ggml.merges")
    kinds: list[int] = read_field(reader, "tokenizer.ggml.token_type")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    return backend
