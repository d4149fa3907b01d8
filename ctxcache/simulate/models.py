"""Models by name: bytes of state a token, context window, GPUs and speed of prefill, as CachedAttention ran them.

Sources: windows and GPUs from CachedAttention, ATC'24, sections 2.3 and 4.1 (Falcon's window, which it does not
say, from the model's card). Bytes: 2 x layers x KV heads x head size x 2. Prefill: the paper's 2,048 tokens in
360 ms for LLaMA-65B on four A100s, for the others by parameters and GPUs at the same use of the GPU.
"""

from dataclasses import dataclass, replace

from ctxcache.simulate.load import Load


@dataclass(frozen=True, slots=True)
class Model:
    """`prefill_tokens_per_s` is that of all its `gpu_count` GPUs together."""

    token_bytes: int
    context_tokens: int
    gpu_count: int
    prefill_tokens_per_s: float

    def served(self, load: Load) -> Load:
        """The load, with this model."""
        return replace(
            load, token_bytes=self.token_bytes, context_tokens=self.context_tokens,
            gpu_count=self.gpu_count, prefill_tokens_per_s=self.prefill_tokens_per_s,
        )  # fmt: skip


MODELS = {
    "llama-13b": Model(2 * 40 * 5120 * 2, 4096, 2, 14_200.0),
    "llama-65b": Model(2 * 80 * 8192 * 2, 2048, 4, 5_690.0),
    "llama-70b": Model(2 * 80 * 1024 * 2, 4096, 4, 5_280.0),
    "falcon-40b": Model(2 * 60 * 512 * 2, 2048, 4, 9_240.0),
    "mistral-7b": Model(2 * 32 * 1024 * 2, 32_768, 1, 12_800.0),
}
