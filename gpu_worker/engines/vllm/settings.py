"""The connector's settings, which engines are served, and the link to the store that both sides make."""

import enum
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from huggingface_hub import snapshot_download
from pydantic import BeforeValidator, Field
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ctxcache.client import CallerModel, Client
from ctxcache.format.ids import MODEL_ID, Labels, checked_labels
from ctxcache.format.model import ModelSpec, id_of_version, with_version
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from gpu_worker.engines.link import Level, ModelId, Refused, Seconds, StoreLink, StoreSettings
from gpu_worker.engines.renderings import KEPT, MOST_KEPT
from gpu_worker.engines.vllm.plan import BlockLayout
from gpu_worker.forms.rows import row_dtype
from gpu_worker.model.spec import DescribedModel, describe_directory, digest_checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


WHERE = "kv_connector_extra_config"
"""The field of vLLM's `--kv-transfer-config` that has the settings."""
POPULATE_S = 2.0
"""How long an engine's first prompts go without the store, at most, while a thread populates its arena."""
TAG, TAG_DIGITS = ".vllm-{}", 8
"""The end of the id of a model whose blocks are saved: a digest of what their bytes depend on."""


class SavedState(enum.Enum):
    """The kind of state that is saved of a token."""

    BLOCKS = "blocks"
    """The engine's own blocks of K/V, whole, as they lie in its memory: for the same engine alone."""
    KV = "kv"
    """K before positions and V, by hooks in eager mode: the same rows that other engines save."""
    HIDDEN = "hidden"
    """The input of each layer, by hooks in eager mode: the same rows that other engines save."""

    @property
    def kind(self) -> StateKind:
        """The kind of its streams."""
        return _KINDS[self]

    @property
    def is_portable(self) -> bool:
        """Whether other engines save and restore the same rows."""
        return self is not SavedState.BLOCKS


_KINDS = {
    SavedState.BLOCKS: StateKind.ENGINE_BLOCK,
    SavedState.KV: StateKind.KV,
    SavedState.HIDDEN: StateKind.HIDDEN,
}


def labels_of(given: object) -> Labels:
    """Labels of a mapping as JSON brings it. Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f"labels: a {type(given).__name__} is no mapping")  # noqa: TRY004  pydantic's
    pairs = []
    for key, value in given.items():
        # A user's number is no text in JSON.
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"labels: {str(key)[:80]!r} has no text")  # noqa: TRY004
        pairs.append((key, text))
    return checked_labels(pairs)


SessionLabels = Annotated[Labels, BeforeValidator(lambda given: given if given == () else labels_of(given))]


@dataclass(frozen=True, slots=True)
class ConnectorSettings(StoreSettings):
    """The fields of `kv_connector_extra_config`."""

    durability: Level | Literal["shared"] = "disk"  # type: ignore[assignment]  # more than plugins of blocks
    """`shared`: a session is in the fleet's bucket, too, once its turn is saved, and outlives this host."""
    model_id: ModelId | None = None
    state: Literal["blocks", "kv", "hidden"] = "blocks"
    prefixes: bool = True
    """Whether a request may begin with what other sessions have, and one that names no session is saved."""
    labels: SessionLabels = ()
    """Of each session that the connector makes, beside those that its request says."""
    renderings: Annotated[int, Field(ge=0, le=MOST_KEPT)] = KEPT
    """How many former renderings of an edited conversation stay."""
    restore_timeout_s: Seconds = 5.0
    """How long a request may wait for its rows, while the store answers.

    `timeout_s` bounds the waits for a look-up and for a store that does not answer, together.
    """

    @property
    def saved(self) -> SavedState:
        """The enum of `state`."""
        return SavedState(self.state)


# Engines that are served, by connector:
#
#     CtxcacheConnector            blocks: tensor parallelism; attention, full or with windows
#                                  kv, hidden: one rank, eager mode, one position a token
#     CtxcacheOffloadingConnector  whatever vLLM's own offloading serves
def check_engine(config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: ConnectorSettings) -> None:
    """Raise Refused for an engine whose state would not be right, or would not be seen."""
    saved = settings.saved
    # Check the name alone: the link says where a repository's files are missing.
    model_id_of(Path(config.model_config.model), settings)
    parallel = config.parallel_config
    if parallel.world_size > (parallel.tensor_parallel_size if saved is SavedState.BLOCKS else 1):
        problem = f"{parallel.world_size} ranks: one worker has to have all rows of a session"
        raise Refused(
            f"{problem}; of ranks of tensor parallelism state=blocks saves each one's part, and "
            '"kv_connector":"CtxcacheOffloadingConnector" of all'
        )
    if config.speculative_config is not None:
        raise Refused("speculative decoding is not supported: rows of refused drafts would be saved")
    if config.lora_config is not None and current_platform.is_cpu():
        _check_adapters(config)
    if saved.is_portable:
        if len(kv_cache_config.kv_cache_groups) > 1:
            problem = f"state={saved.value}: layers keep different tokens"
            raise Refused(f"{problem}: add --disable-hybrid-kv-cache-manager, or save state=blocks")
        _check_passes(config, saved)
    else:
        _check_blocks(config, kv_cache_config)


def _check_adapters(config: "VllmConfig") -> None:
    # Its index of "no adapter" is -1, by which its CPU kernels take the last adapter's weights. Where a batch
    # has no adapter at all they are not called.
    if config.scheduler_config.max_num_seqs > 1:
        problem = "vLLM for CPUs computes the model's own requests by an adapter, where a batch has both"
        raise Refused(f"{problem}: their rows would be saved as the model's; add --max-num-seqs 1")


def _check_passes(config: "VllmConfig", saved: SavedState) -> None:
    if not config.model_config.enforce_eager:
        problem = f"state={saved.value} is seen in eager mode only"
        raise Refused(f"{problem}: add --enforce-eager, or save state=blocks")
    if config.lora_config is not None:
        # Outside of a batch, as in the proof, layers that take adapters have no index of one.
        problem = f"state={saved.value} cannot be proved on layers that take LoRA adapters"
        raise Refused(f"{problem}: leave --enable-lora out, or save state=blocks")
    if config.model_config.uses_mrope:
        raise Refused(f"state={saved.value}: tokens of this model have several positions each")


def _check_blocks(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Refused("scales that vLLM computes at its start are not saved: leave --calculate-kv-scales out")
    for name, (spec, _) in layer_caches(kv_cache_config).items():
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
            problem = f"layer {name} keeps no K/V of its tokens: {type(spec).__name__}"
            raise Refused(f'{problem}; "kv_connector":"CtxcacheOffloadingConnector" saves what vLLM offloads')
        if spec.page_size_bytes % spec.block_size:
            raise Refused(f"layer {name}: {spec.page_size_bytes} bytes of a block are no rows of its tokens")


class LayerCache(NamedTuple):
    """The specification of a layer's cache, and the number of the group of caches that it is in."""

    spec: KVCacheSpec
    group: int


def layer_caches(kv_cache_config: "KVCacheConfig") -> dict[str, LayerCache]:
    """Each layer's cache, in the same order whatever groups the engine has made of them."""
    caches = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        by_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            caches[name] = LayerCache(by_layer.get(name, spec), number)
    # Sort by the numbers in names: layer 10 comes behind layer 9.
    return dict(sorted(caches.items(), key=lambda item: ([*map(int, re.findall(r"\d+", item[0]))], item[0])))


def unit_tokens(kv_cache_config: "KVCacheConfig") -> int:
    """The least run of tokens that is whole blocks in each group."""
    return math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))


@functools.lru_cache(maxsize=1)
def _described(directory: Path, model_id: str, dtype: torch.dtype) -> DescribedModel:
    return describe_directory(directory, model_id=model_id, dtype=dtype)


@functools.lru_cache(maxsize=1)
def weights_digest(directory: Path) -> str:
    """The digest of a model's files; made once in a process."""
    return digest_checkpoint(directory)


def link_for(
    config: "VllmConfig",
    settings: ConnectorSettings,
    layouts: "Future[Mapping[int, BlockLayout]]",
    version: Callable[[], str | None],
    parts: "list[CallerModel] | None" = None,
) -> StoreLink[CallerModel]:
    """A link to the store, for the model of the first of these ranks.

    `layouts` come once the engine has its blocks. `parts`: a list that gets the models of all ranks, for a
    link that saves nothing. `version`: that of the weights, see `WeightsName`.
    """
    # Only the first link waits for the arena: after a store's restart there are conversations to restore.
    patience = iter([POPULATE_S])
    # `reload_weights` changes this in a worker's configuration, and not in the scheduler's.
    model = str(config.model_config.model)

    def register(client: Client) -> CallerModel:
        # Map the arena while the engine starts, not in the step that first needs it.
        client.map_arena(is_written=parts is None)
        named = version() or ""
        directory = directory_of(config, model)
        model_id = model_id_of(directory, settings)
        if settings.saved is SavedState.BLOCKS:
            specs = [
                _block_spec(config, directory, model_id, layout, rank)
                for rank, layout in sorted(layouts.result().items())
            ]
            # Each rank has a model of its own, since its blocks hold other heads.
            models = [client.models.register(with_version(spec, named)) for spec in specs]
        else:
            described = _described(directory, model_id, config.model_config.dtype)
            # The files' probe says nothing of weights that were changed.
            probe = None if named else described.probe
            models = [client.models.register(with_version(described.spec, named), probe)]
        if parts is not None:
            parts[:] = models
        client.map_arena(is_written=parts is None, timeout_s=next(patience, 0))
        return models[0]

    link = StoreLink(settings.connect, register, lambda client, model: client.models.get(model.name))
    if version() is None:
        link.renew(is_wanted=False)
    return link


def streams_of(model: CallerModel, saved: SavedState) -> list[Stream]:
    """The streams that this engine saves, in layer order."""
    return [spec.stream for spec in model.spec.streams if spec.stream.kind is saved.kind]


def model_id_of(directory: Path, settings: ConnectorSettings) -> str:
    """The model's id in the store. Raises Refused."""
    model_id = settings.model_id or directory.resolve().name
    # The id gets two more ends: one for the configuration of blocks, one for the version of weights.
    longest = id_of_version(model_id + TAG.format("0" * TAG_DIGITS), "any")
    if not MODEL_ID.fullmatch(longest):
        problem = f"{model_id!r} does not match {MODEL_ID.pattern} with {len(longest) - len(model_id)}"
        raise Refused(f"{WHERE}.model_id: {problem} characters behind it: say one that does")
    return model_id


def directory_of(config: "VllmConfig", model: str) -> Path:
    """Where a model's files lie: a directory, or what vLLM downloaded of a repository."""
    if Path(model).is_dir():
        return Path(model)
    cache, revision = config.load_config.download_dir, config.model_config.revision
    return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))


def engine_facts(config: "VllmConfig") -> str:
    """Everything of an engine's settings that the bytes of its blocks depend on."""
    model = config.model_config
    return json.dumps(
        {
            # Rotary embeddings of long contexts depend on it.
            "max_model_len": model.max_model_len,
            "quantization": str(model.quantization),
            "dtypes": f"{model.dtype} {config.cache_config.cache_dtype}",
            "config": model.hf_config.to_dict() | {"_name_or_path": None, "transformers_version": None},
        },
        sort_keys=True,
        default=str,
    )


def _block_spec(
    config: "VllmConfig", directory: Path, model_id: str, layout: BlockLayout, rank: int
) -> ModelSpec:
    """The store's description of a rank's blocks, by everything that their bytes depend on."""
    model = config.model_config
    facts = f"{engine_facts(config)} {layout.description}"
    if config.parallel_config.world_size > 1:
        facts += f" rank {rank} of {config.parallel_config.world_size}"
    tag = hashlib.sha256(facts.encode()).hexdigest()
    return ModelSpec(
        model_id=model_id + TAG.format(tag[:TAG_DIGITS]),
        architecture=",".join(model.hf_config.architectures or ()),
        revision="",
        weights_digest=weights_digest(directory),
        tokenizer_digest="",
        dtype=row_dtype(model.dtype),
        layer_count=len(layout.row_bytes),
        hidden_size=model.get_hidden_size(),
        kv_head_count=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        rope="",
        norm="",
        is_relocatable=False,
        streams=tuple(
            StreamSpec(Stream(layer, StateKind.ENGINE_BLOCK), row_bytes, DType.PACKED)
            for layer, row_bytes in enumerate(layout.row_bytes)
        ),
        settings=f"vllm blocks {tag}",
    )
