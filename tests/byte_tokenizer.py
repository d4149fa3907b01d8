"""A tokenizer of bytes, for checkpoints of tiny models."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
