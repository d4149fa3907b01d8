"""A model under test: what it is, how its state can be kept, and what that costs per token.

Knows adapters and plans, no store. Worst case: one model in memory, its weights hashed once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ctxcache.errors import InvalidArgument, Unavailable
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture, UnsupportedDtype
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from lab.demo.building import Progress
from lab.demo.models import load_model, mha_twin, smollm2
from lab.demo.text import ChatFormat, chat_format

METHOD_TITLES = {
    Method.TOKENS: "recomputation",
    Method.KV: "pre-RoPE KV",
    Method.LATENT: "latent KV",
    Method.HIDDEN: "hidden states",
}
_WEIGHTS = "model.safetensors"
_KV_PROJECTION = re.compile(r"\.self_attn\.k_proj\.weight$")
_NOT_ID = re.compile(r"[^a-zA-Z0-9._-]+")


class ModelUnavailable(Unavailable):
    """The demo's model is not on this machine and cannot be had; `problem` says what to do."""

    template = "{target}: {problem}"


@dataclass(frozen=True)
class Subject:
    """A loaded model. `title` is for people, `model_id` for the store."""

    title: str
    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def spec(self) -> ModelSpec:
        """The store's description. Raises UnsupportedArchitecture, UnsupportedDtype."""
        return model_spec(self.model, model_id=self.model_id, tokenizer=self.tokenizer)

    @property
    def model_id(self) -> str:
        """The directory's name, as far as the store takes it."""
        return _NOT_ID.sub("-", self.path.resolve().name).strip("-._")[:100] or "model"

    @cached_property
    def chat(self) -> ChatFormat:
        """The template around a user's text."""
        return chat_format(self.tokenizer)

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """Recomputation, the model's own saved state, hidden states."""
        return Method.TOKENS, Method[adapt(self.model).kind.name], Method.HIDDEN

    @property
    def context_tokens(self) -> int:
        """Most tokens the model was made for."""
        return int(self.model.config.max_position_embeddings)

    @property
    def head_count(self) -> int:
        """Query heads."""
        return int(self.model.config.num_attention_heads)

    def plan(self, method: Method) -> RestorePlan:
        """Every layer by one method."""
        return RestorePlan.uniform(method, self.spec.layer_count)

    def bytes_per_token(self, method: Method) -> int:
        """Bytes that restoring one token reads; only the token's id for recomputation."""
        return self.plan(method).bytes_per_token(self.spec)

    def size_bytes(self, token_count: int, methods: tuple[Method, ...]) -> int:
        """Bytes of a store that keeps `token_count` tokens of each method, padding and room to spare."""
        whole_count = token_count + 8 * SEGMENT_TOKENS
        rows = sum(self.bytes_per_token(method) for method in methods) * whole_count
        return int(rows * 1.5) // 4096 * 4096 + (128 << 20)


def subjects(path: Path | None, *, with_twin: bool, progress: Progress) -> Iterator[Subject]:
    """Yield the model at `path`, SmolLM2 by default, and its multi-head twin where it can have one.

    One after the other, so that one is in memory at a time. Raises ModelUnavailable, InvalidArgument.
    """
    directory = _smollm2(progress) if path is None else path
    name = "SmolLM2-135M-Instruct" if path is None else directory.resolve().name
    progress(f"loading {name}", 0, 0)
    first = _subject(name, directory)
    has_twin = with_twin and _can_have_twin(first)
    yield first
    del first
    if has_twin:
        progress("loading its multi-head twin", 0, 0)
        yield _subject(f"{name} MHA twin", mha_twin(directory, progress=progress))


def _smollm2(progress: Progress) -> Path:
    try:
        return smollm2(progress=progress)
    except Unavailable as error:
        raise ModelUnavailable(str(error), **error.facts) from error


def _subject(title: str, directory: Path) -> Subject:
    if not (directory / "config.json").is_file():
        raise InvalidArgument(
            field="--model", problem=f"{directory} has no config.json: not a model directory"
        )
    try:
        subject = Subject(title, directory, *load_model(directory))
        _check_kinds(subject)
    except (UnsupportedArchitecture, UnsupportedDtype, OSError, ValueError, KeyError) as error:
        problem = f"{directory} cannot be used: {' '.join(str(error).split())}"
        raise InvalidArgument(field="--model", problem=problem) from error
    return subject


def _check_kinds(subject: Subject) -> None:
    """Raise UnsupportedArchitecture for a model without the layer inputs that the demo restores from."""
    if not any(item.stream.kind is StateKind.HIDDEN for item in subject.spec.streams):
        name = type(subject.model).__name__
        raise UnsupportedArchitecture(architecture=name, problem="the inputs of its layers cannot be saved")


def _can_have_twin(subject: Subject) -> bool:
    """Whether KV heads are shared, and K is projected by itself from weights in one file."""
    if subject.spec.kv_head_count >= subject.head_count or not (subject.path / _WEIGHTS).is_file():
        return False
    with safe_open(subject.path / _WEIGHTS, framework="pt") as weights:
        return any(map(_KV_PROJECTION.search, weights.keys()))
