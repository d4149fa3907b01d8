"""The byte-level BPE tokenizer in a GGUF file, as a transformers tokenizer.

Knows no weights. transformers can read these too, but loses the rule that each digit is a token
of its own, on which the model was trained. Worst case: a tokenizer kind other than those named
here is refused, never guessed.
"""

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ctxcache.errors import InvalidArgument
from gpu_worker.demo.gguf_llama import read_field

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
