"""The store's description of a model: its identity and every stream it can save, and digests of its files.

Knows adapters, checkpoints and tokenizers, and the store's ModelSpec; `executed.py` has models in memory. A
digest does not depend on the process that computes it, and names its scheme, so that two schemes never agree
by accident. Two engines that load the same files have the same fingerprint, however they hold the weights.
Worst case: hashing all weights, about 1 GB/s per core, once per process; pass `weights_digest` where it is
known. `describe_directory` loads the whole model once on the host, and frees it again.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelProbe, ModelSpec, mismatch, with_version
from ctxcache.format.packing import DELTAS, LOSSY_KINDS, packing_of
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import UnsupportedDtype
from gpu_worker.families import Adapter
from gpu_worker.families.generation import prefill
from gpu_worker.forms.rows import row_dtype
from gpu_worker.model.executed import (
    TENSORS_SCHEME,
    Read,
    digest_execution,
    digest_weights,
    has_merged_adapters,
)
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt, check_whole

FILES_SCHEME = "files:"
_READ_BYTES = 1 << 20
_TRANSIENT_TOKENIZER_KEYS = ("truncation", "padding")
"""State that a call with `padding=True` leaves in a tokenizer; it changes no token's meaning."""


def digest_checkpoint(directory: Path) -> str:
    """`files:` and the SHA-256 over the names and bytes of the directory's safetensors files.

    True of a model only while it is as loaded. Raises InvalidArgument(field="directory") where
    there are no such files.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise InvalidArgument(field="directory", problem=f"{directory} holds no safetensors file")
    digest = hashlib.sha256()
    for path in paths:
        # Sizes keep apart bytes that move from the end of one file to the begin of the next.
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return f"{FILES_SCHEME}{digest.hexdigest()}"


def digest_again(
    described: str, directory: Path, model: PreTrainedModel, read: Read | None = None, *, field: str
) -> str:
    """The digest of a directory's weights, by the scheme of a digest that was described.

    `read`: see `digest_weights`. Raises InvalidArgument with that field for a scheme that cannot be checked.
    """
    if described.startswith(FILES_SCHEME):
        return digest_checkpoint(directory)
    if described.startswith(TENSORS_SCHEME):
        return digest_weights(model, read)
    problem = f"{described!r} is of no scheme that can be checked: {TENSORS_SCHEME}, {FILES_SCHEME}"
    raise InvalidArgument(field=field, problem=problem)


def check_same(model: PreTrainedModel, described: ModelSpec, weights_digest: str, place: str) -> None:
    """Raise ModelFingerprintMismatch unless the model that lies in a place is what was described."""
    kinds = {each.stream.kind for each in described.streams}
    loaded = model_spec(
        model,
        model_id=described.model_id,
        weights_digest=weights_digest,
        revision=described.revision,
        packed_kinds=[kind for kind in LOSSY_KINDS if kind in kinds],
    )
    # Only the engine that saved knows the tokenizer.
    expected = replace(loaded, tokenizer_digest=described.tokenizer_digest)
    if expected.fingerprint() != described.fingerprint():
        raise mismatch(described, expected, f"models/{described.model_id} is not what {place}")


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """The SHA-256 of what maps text to token ids: the whole fast tokenizer, or a slow one's vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content, scheme = dict(tokenizer.get_vocab()), "vocabulary"
    else:
        content, scheme = json.loads(backend.to_str()), "tokenizer"
        for key in _TRANSIENT_TOKENIZER_KEYS:
            content.pop(key, None)
    return f"{scheme}:{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}"


def model_spec(
    hf_model: PreTrainedModel,
    *,
    model_id: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    weights_digest: str | None = None,
    weights_version: str = "",
    revision: str = "",
    packed_kinds: Iterable[StateKind] = (),
) -> ModelSpec:
    """Describe `hf_model` with the streams that it proves, of every layer, and `packed_kinds` of each.

    With packed kinds it is another model to the store, with another fingerprint: what is saved of one is
    never restored for the other.

    The same executed model has the same fingerprint in any process and on any device: weights, buffers,
    settings of every module, active adapters. Describe the model again after any change of it.
    `weights_digest` defaults to `digest_weights`; `digest_checkpoint` is cheaper but a different string, so
    a deployment chooses one of them and keeps to it. It stands for parameters only, as the files have them.
    `weights_version` is the caller's name for the weights. A mark of it is put behind their digest and behind
    the model's id, so that one id serves a model that is trained.
    Raises UnsupportedArchitecture, UnsupportedDtype, WeightsNotVisible,
    InvalidArgument(field="packed_kinds"), InvalidArgument(field="weights_digest") where adapters are merged
    into the weights that it is given for.
    """
    check_whole(hf_model)
    _check_dtype(hf_model)
    # Look into the model before it runs to prove itself: a refusal here has the better reason.
    settings = digest_execution(hf_model)
    adapter = adapt(hf_model)
    if weights_digest is not None and has_merged_adapters(hf_model):
        problem = "adapters are merged into the weights: they are not those of a checkpoint"
        raise InvalidArgument(field="weights_digest", problem=problem)
    spec = ModelSpec(
        model_id=model_id,
        architecture=adapter.architecture,
        revision=revision,
        weights_digest=digest_weights(hf_model) if weights_digest is None else weights_digest,
        tokenizer_digest="" if tokenizer is None else digest_tokenizer(tokenizer),
        dtype=row_dtype(hf_model.dtype),
        layer_count=len(adapter.layers),
        hidden_size=adapter.hidden_size,
        kv_head_count=adapter.key.head_count,
        head_size=adapter.key.head_size,
        rope=_position_name(adapter),
        norm=adapter.norm_name,
        # The store refuses to drop a session's first tokens where positions cannot be moved.
        is_relocatable=adapter.is_relocatable,
        streams=(*_streams(adapter), *_packed_streams(adapter, packed_kinds)),
        settings=settings,
    )
    return with_version(spec, weights_version)


def _position_name(adapter: Adapter) -> str:
    # Which positions a layer sees shapes the state after it as much as their angles do.
    windows = [layer.window for layer in adapter.layers]
    if not any(windows):
        return adapter.rope_name
    # Windows are in the name, which enters the fingerprint: another window is another model.
    return f"{adapter.rope_name} windows {','.join(str(window or 'all') for window in windows)}"


def _streams(adapter: Adapter) -> tuple[StreamSpec, ...]:
    dtype = row_dtype(adapter.model.dtype)
    return tuple(
        StreamSpec(Stream(layer, kind), size * dtype.size_bytes, dtype)
        for layer in range(len(adapter.layers))
        for kind in adapter.kinds_of(layer)
        if (size := adapter.element_count(kind, layer))
    )


def _packed_streams(adapter: Adapter, kinds: Iterable[StateKind]) -> Iterator[StreamSpec]:
    # Each kind once, in the caller's order: streams enter the fingerprint.
    for kind in dict.fromkeys(kinds):
        sizes = {layer: adapter.element_count(kind, layer) for layer in range(len(adapter.layers))}
        if kind not in LOSSY_KINDS or not any(sizes.values()):
            problem = f"{adapter.architecture} has no rows of {kind.name.lower()} to pack"
            raise InvalidArgument(field="packed_kinds", problem=problem)
        if adapter.is_recurrent:
            problem = f"{adapter.architecture} keeps states, in which what packing loses would add up"
            raise InvalidArgument(field="packed_kinds", problem=problem)
        if kind in DELTAS and any(layer.window or not layer.has_rows for layer in adapter.layers):
            problem = f"{adapter.architecture} slides, or keeps no rows, in a layer: a delta needs them"
            raise InvalidArgument(field="packed_kinds", problem=problem)
        for layer, size in sizes.items():
            try:
                row_bytes = size and packing_of(kind).row_bytes(size)
            except ValueError as error:
                raise InvalidArgument(field="packed_kinds", problem=str(error)) from error
            if row_bytes:
                yield StreamSpec(Stream(layer, kind), row_bytes, DType.PACKED)


def _check_dtype(model: PreTrainedModel) -> None:
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        expected = "float32, float16 or bfloat16"
        raise UnsupportedDtype(what=type(model).__name__, expected=expected, actual=str(model.dtype))


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model as the store knows it, and its output for a few tokens."""

    spec: ModelSpec
    probe: ModelProbe


def describe_directory(
    directory: str | Path, *, model_id: str = "", dtype: torch.dtype | None = None
) -> DescribedModel:
    """Describe the model whose configuration and weights lie in `directory`.

    `model_id` defaults to the directory's name, `dtype` to that of the weights. Raises
    InvalidArgument(field="directory"), UnsupportedArchitecture, UnsupportedDtype, WeightsNotVisible, and what
    transformers does for files that it cannot read.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise InvalidArgument(field="directory", problem=f"{path} holds no model: there is no config.json")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", local_files_only=True
    )
    model.train(mode=False)
    spec = model_spec(model, model_id=model_id or path.resolve().name)
    probe = probe_of(adapt(model), spec, lambda ids: prefill(model, DynamicCache(config=model.config), ids))
    return DescribedModel(spec, probe)


def spec_from_directory(
    directory: str | Path, *, model_id: str = "", dtype: torch.dtype | None = None
) -> ModelSpec:
    """The store's description of the model in `directory`: see `describe_directory`."""
    return describe_directory(directory, model_id=model_id, dtype=dtype).spec
