"""The models of lab/studies/restore.py and skew.py.

Real ones from directories, and shapes with random weights.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from lab.demo.machine import this_machine

MOST_TOKENS = 32768 + 1024
"""Positions of a shape: a history of 32k, and new tokens behind it."""


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocabulary: int = 32000
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
    }


# By importance: what there is no time for is left out from the end.
SHAPES: Mapping[str, tuple[type[PretrainedConfig], Mapping[str, Any]]] = {
    "llama-2-7b": (LlamaConfig, _llama(4096, 32, 32, 32, 11008)),
    "llama-3-8b": (LlamaConfig, _llama(4096, 32, 32, 8, 14336, 128256)),
    "opt-30b": (
        OPTConfig,
        {
            "hidden_size": 7168,
            "word_embed_proj_dim": 7168,
            "num_hidden_layers": 48,
            "num_attention_heads": 56,
            "ffn_dim": 28672,
            "vocab_size": 50272,
        },
    ),
    "llama-2-13b": (LlamaConfig, _llama(5120, 40, 40, 40, 13824)),
    "qwen2.5-7b": (Qwen2Config, _llama(3584, 28, 28, 4, 18944, 152064)),
    "smollm2-135m": (LlamaConfig, _llama(576, 30, 9, 3, 1536, 1024)),
    "tiny": (LlamaConfig, _llama(64, 4, 4, 4, 128, 256)),
    "tiny-opt": (
        OPTConfig,
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "vocab_size": 256,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure; `layers`: how many of all it has."""

    name: str
    model: PreTrainedModel
    layers: str
    is_random: bool
    token_ids: list[int]

    def facts(self, command: str) -> dict[str, Any]:
        """Facts of model, machine and run, for each row of its results."""
        is_cuda = self.model.device.type == "cuda"
        return {
            "model": self.name,
            "layers": self.layers,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if is_cuda else this_machine().title,
            "weights": "random" if self.is_random else "real",
            "command": command,
            "date": datetime.now(UTC).date().isoformat(),
        }


def subjects(
    shapes: str,
    model: Path | None,
    ids: Path | None,
    device: torch.device,
    *,
    twin: bool,
    layers: int,
    token_count: int,
) -> Iterator[Subject]:
    """One at a time in memory: each of `shapes`, or else a real one, SmolLM2-135M if none is named."""
    for name in filter(None, shapes.split(",")):
        yield random_model(name, device, layers=layers, token_count=token_count)
    if shapes:
        return
    # Its other requirements are not on every machine with a GPU.
    from lab.demo.models import mha_twin, smollm2  # noqa: PLC0415

    path = model or smollm2()
    yield real_model(mha_twin(path) if twin else path, device, ids=ids, token_count=token_count)


def random_model(name: str, device: torch.device, *, layers: int, token_count: int) -> Subject:
    """A shape with random weights, of `layers` layers at most (0: all). Raises KeyError."""
    make, sizes = SHAPES[name]
    whole = sizes["num_hidden_layers"]
    count = min(layers, whole) if layers else whole
    config = make(**{**sizes, "num_hidden_layers": count, "max_position_embeddings": MOST_TOKENS})
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, sizes["vocab_size"], (token_count,), generator=generator).tolist()
    return Subject(name, model.train(mode=False), f"{count} of {whole}", is_random=True, token_ids=ids)


def real_model(path: Path, device: torch.device, *, ids: Path | None, token_count: int) -> Subject:
    """A model on disk, and text that it can read: `ids`, a JSON list, else the Python language reference."""
    # Its other requirements are not on every machine with a GPU.
    from lab.demo.models import load_model  # noqa: PLC0415
    from lab.demo.text import passages  # noqa: PLC0415

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if ids is not None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).train(
            mode=False
        )
        token_ids = _read_ids(ids)
    else:
        model, tokenizer = load_model(path, dtype)
        text = "\n\n".join(paragraph for passage in passages() for paragraph in passage.paragraphs)
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    count = int(model.config.num_hidden_layers)
    return Subject(
        path.name, model.to(device), f"{count} of {count}", is_random=False, token_ids=token_ids[:token_count]
    )


def _read_ids(path: Path) -> list[int]:
    data = path.read_bytes()
    found: list[int] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found
