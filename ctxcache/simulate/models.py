"""Models by name or by their `config.json`: bytes of state a token, window, GPUs and speed of prefill.

Pure but for `read_config`. A model's state is its rows at 16 bits in every attention layer. Layers that
attend to a window are counted whole, for the store keeps their rows too. Layers without keys (Mamba and its
like) are not counted.

    K and V          2 x layers x KV heads x head size x 2 bytes
    MLA latents      layers x (rank + rotary part) x 2
    hidden states    layers x hidden size x 2

Prefill is counted at 2 operations a token and active parameter, and at the part of an A100's peak that
CachedAttention (ATC'24, section 2.3) has: LLaMA-65B, 2,048 tokens in 360 ms on four. A measured rate is
better.
Worst case: a config without one of the numbers; InvalidArgument names the field.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ctxcache.errors import FileUnusable, InvalidArgument
from ctxcache.simulate.load import MODELS, Model

State = Literal["kv", "hidden"]
ELEMENT_BYTES = 2
A100_OPERATIONS_PER_S = 312e12
A100_BYTES = 80e9
PREFILL_USE = 5_690 * 2 * 65e9 / (4 * A100_OPERATIONS_PER_S)
WEIGHTS_SHARE = 0.75
"""The part of a GPU's memory that weights may take."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model that its state and its speed depend on. `latent_size` 0: K and V are kept."""

    layers: int
    hidden_size: int
    kv_heads: int
    head_size: int
    context_tokens: int
    parameters: float
    active_parameters: float
    latent_size: int = 0

    def token_bytes(self, state: State) -> int:
        """Bytes of a token's state."""
        if state == "hidden":
            return self.layers * self.hidden_size * ELEMENT_BYTES
        if self.latent_size:
            return self.layers * self.latent_size * ELEMENT_BYTES
        return 2 * self.layers * self.kv_heads * self.head_size * ELEMENT_BYTES

    @property
    def gpu_count(self) -> int:
        """GPUs of 80 GB that hold the weights at 16 bits: a power of two."""
        weights = self.parameters * ELEMENT_BYTES / (WEIGHTS_SHARE * A100_BYTES)
        return 1 << max(0, math.ceil(math.log2(weights)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens a second that all GPUs of the model prefill together."""
        return self.gpu_count * A100_OPERATIONS_PER_S * PREFILL_USE / (2 * self.active_parameters)

    def model(self, state: State = "kv") -> Model:
        """The model of a simulation, whose state is of that kind."""
        rate = self.prefill_tokens_per_s
        return Model(self.token_bytes(state), self.context_tokens, self.gpu_count, rate)


def _dense(layers: int, hidden: int, heads: int, size: int, window: int, billions: float) -> Shape:
    return Shape(layers, hidden, heads, size, window, billions * 1e9, billions * 1e9)


def _mixture(
    layers: int, hidden: int, heads: int, size: int, window: int, billions: float, active_billions: float
) -> Shape:
    return Shape(layers, hidden, heads, size, window, billions * 1e9, active_billions * 1e9)


def _latent(
    layers: int, hidden: int, latent: int, window: int, billions: float, active_billions: float
) -> Shape:
    return Shape(layers, hidden, 1, latent, window, billions * 1e9, active_billions * 1e9, latent)


SHAPES = {
    "llama-3-8b": _dense(32, 4096, 8, 128, 8_192, 8.03),
    "llama-3.1-8b": _dense(32, 4096, 8, 128, 131_072, 8.03),
    "llama-3.1-70b": _dense(80, 8192, 8, 128, 131_072, 70.6),
    "llama-3.1-405b": _dense(126, 16_384, 8, 128, 131_072, 405.9),
    "llama-3.2-1b": _dense(16, 2048, 8, 64, 131_072, 1.24),
    "llama-3.2-3b": _dense(28, 3072, 8, 128, 131_072, 3.21),
    "llama-3.3-70b": _dense(80, 8192, 8, 128, 131_072, 70.6),
    "qwen2.5-7b": _dense(28, 3584, 4, 128, 32_768, 7.62),
    "qwen2.5-72b": _dense(80, 8192, 8, 128, 32_768, 72.7),
    "qwen3-8b": _dense(36, 4096, 8, 128, 40_960, 8.19),
    "qwen3-32b": _dense(64, 5120, 8, 128, 40_960, 32.8),
    "qwen3-30b-a3b": _mixture(48, 2048, 4, 128, 40_960, 30.5, 3.3),
    "qwen3-235b-a22b": _mixture(94, 4096, 4, 128, 40_960, 235, 22),
    "deepseek-v3": _latent(61, 7168, 512 + 64, 163_840, 671, 37),
    "kimi-k2": _latent(61, 7168, 512 + 64, 131_072, 1_026, 32),
    "gpt-oss-20b": _mixture(24, 2880, 8, 64, 131_072, 20.9, 3.6),
    "gpt-oss-120b": _mixture(36, 2880, 8, 64, 131_072, 116.8, 5.1),
    "gemma-3-4b": _dense(34, 2560, 4, 256, 131_072, 4.3),
    "gemma-3-12b": _dense(48, 3840, 8, 256, 131_072, 12.2),
    "gemma-3-27b": _dense(62, 5376, 16, 128, 131_072, 27.4),
    "mistral-small-24b": _dense(40, 5120, 8, 128, 131_072, 23.6),
    "mixtral-8x7b": _mixture(32, 4096, 8, 128, 32_768, 46.7, 12.9),
    "glm-4.5": _mixture(92, 5120, 8, 128, 131_072, 355, 32),
    "glm-4.5-air": _mixture(46, 4096, 8, 128, 131_072, 106, 12),
    "phi-4": _dense(40, 5120, 10, 128, 16_384, 14.7),
}
"""By the names that people use, from the `config.json` and the card of each."""
_KEYLESS = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
"""Sorts of layers in `layer_types` that keep no row for each token."""


def shape_named(name: str) -> Shape:
    """The shape of a name, or of a `config.json` or its directory. Raises InvalidArgument, FileUnusable."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        problem = f"{name!r} is no config.json and no known name; known are {', '.join((*MODELS, *SHAPES))}"
        raise InvalidArgument(field="model", problem=problem)
    return read_config(path)


def read_config(path: Path) -> Shape:
    """The shape that a `config.json` of transformers states. Raises InvalidArgument, FileUnusable."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise FileUnusable(path=str(path), problem=error.strerror or str(error)) from error
    except ValueError as error:
        raise InvalidArgument(field=str(path), problem=f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(field=str(path), problem="is not a JSON object")
    text = config.get("text_config")
    return _Config(path, text if isinstance(text, dict) else config).shape()


@dataclass(frozen=True, slots=True)
class _Config:
    """The text part of a config."""

    path: Path
    values: Mapping[str, Any]

    def shape(self) -> Shape:
        hidden, heads = self._number("hidden_size", "n_embd"), self._number("num_attention_heads", "n_head")
        size = self._optional("head_dim") or hidden // heads
        kv_heads = self._optional("num_key_value_heads") or heads
        rank = self._optional("kv_lora_rank")
        latent = rank + self._optional("qk_rope_head_dim") if rank else 0
        sorts = self.values.get("layer_types")
        total = self._number("num_hidden_layers", "n_layer")
        keyed = sum(sort not in _KEYLESS for sort in sorts) if isinstance(sorts, list) else total
        attention = hidden * size * (2 * heads + 2 * kv_heads)
        embedding = self._number("vocab_size") * hidden
        embeddings = embedding if self.values.get("tie_word_embeddings", True) else 2 * embedding
        every, active = self._feed_forward(hidden)
        return Shape(
            keyed,
            hidden,
            kv_heads,
            size,
            self._number("max_position_embeddings", "n_positions", "seq_length"),
            float(embeddings + total * (attention + every)),
            float(embeddings + total * (attention + active)),
            latent,
        )

    def _feed_forward(self, hidden: int) -> tuple[int, int]:
        """Parameters of a layer's feed-forward part: all, and those that a token passes through."""
        experts = self._optional("num_experts", "n_routed_experts", "num_local_experts")
        width = self._optional("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
        if not experts:
            return 3 * hidden * width, 3 * hidden * width
        width = self._optional("moe_intermediate_size") or width
        shared = self._optional("n_shared_experts")
        chosen = self._number("num_experts_per_tok", "experts_per_token")
        return 3 * hidden * width * (experts + shared), 3 * hidden * width * (chosen + shared)

    def _number(self, *names: str) -> int:
        value = self._optional(*names)
        if not value:
            problem = f"states no {' or '.join(names)}, which has to be a whole number above 0"
            raise InvalidArgument(field=str(self.path), problem=problem)
        return value

    def _optional(self, *names: str) -> int:
        """The first of these that is a whole number above 0; 0 where none is."""
        values = (self.values.get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), 0)
