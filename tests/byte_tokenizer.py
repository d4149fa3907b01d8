"""A tokenizer of bytes, and a checkpoint of a tiny model that has it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

_SPECIAL = ["<|begin|>", "<|end|>"]
TOKEN_COUNT = 258


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and two special ones before them."""
    alphabet = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Write a model of TOKEN_COUNT tokens with the tokenizer; returns its directory."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_llama(directory: Path) -> Path:
    """Write a random Llama whose four heads share two KV heads; returns its directory."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=TOKEN_COUNT,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return save(LlamaForCausalLM(config), directory)
