"""Attached models: weights, what can be restored of a model, and the planner that decides how.

The model is built without memory and described by its family's adapter. Norms and projections, which the
adapter names, get their weights out of safetensors files when a layer is first needed. The fingerprint is
computed from what lies in the directory, and must be the engine's.

Shared by the engines of one model, and gone with the last of them. Thread-safe. Worst case: reading all
weights once for their digest; and a model that was not measured on this machine, planned for by a
datasheet.
"""

import logging
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ctxcache.client import CallerModel
from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import DType, StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.adapter import DecoderLayer
from gpu_worker.families.model_shape import model_shape
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import check_same, digest_again
from gpu_worker.parallel.sharded import cached_heads, shard
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.compute import Compute, KernelWeights, compute_for
from gpu_worker.planning.adaptive import AdaptivePlanner, stage_seconds
from gpu_worker.planning.datasheets import HOST_GATHER, NVLINK, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import Link, Profile, StatePlace
from gpu_worker.planning.shape import ModelShape
from gpu_worker.profiling.measure import hardware_name
from gpu_worker.profiling.profile_file import profile_path, read_profile
from gpu_worker.sidecar.cache_layout import HeadShape

FIELD = "weights.safetensors_directory"
_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


# The parts of a model that a worker holds, and when:
#
#     attach          config.json ──► modules without memory (meta) ──► adapter, fingerprint
#                     files ────────► buffers; weights pass through for their digest, and are not kept
#     first restore   norm, K and V projections of the layers that are projected
#     never           queries, attention's output, feed-forward parts, embeddings
class LazyWeights:
    """One model's adapter, whose layers are loaded one by one."""

    def __init__(self, directory: Path, spec: ModelSpec, device: torch.device) -> None:
        """Build what `spec` says from `directory`.

        Raises InvalidArgument, UnsupportedArchitecture, ModelFingerprintMismatch.
        """
        self.device = device
        # Names of tensors only: files are opened anew for each tensor, and none is held open.
        self._files = _index(directory)
        model = _without_memory(directory, _torch_dtype(spec))
        # Buffers come before the adapter, which turns positions by them. The fingerprint has all of them.
        _fill_buffers(model, self._files, device)
        described = adapt(model)
        self.shape = model_shape(described, spec.model_id)
        self.adapter: Adapter = replace(described, layers=tuple(_anchored(described.layers, device)))
        """Layers' weights are there once `load` has returned."""
        self._names = {id(module): name for name, module in model.named_modules()}
        digest = digest_again(
            spec.weights_digest,
            directory,
            model,
            lambda names, tensor: _stored(self._files, names, tensor),
            field="model.weights_digest",
        )
        check_same(model, spec, digest, f"{FIELD} has")
        self.spec = spec
        self._lock = threading.Lock()
        self._loaded: set[int] = set()
        self.loaded_bytes = 0
        """Bytes of weights that are loaded by now."""

    @property
    def cached(self) -> HeadShape:
        """Heads that the engine caches per token and layer."""
        adapter = self.adapter
        empty = [
            torch.empty(1, half.head_count, 0, half.head_size, dtype=adapter.model.dtype)
            for half in (adapter.key, adapter.value)
        ]
        # As the engine caches them: some families repeat heads.
        keys, values = adapter.embed_halves(empty[0], empty[1], None)
        return HeadShape(keys.shape[1], keys.shape[3], values.shape[3])

    def load(self, layer: int) -> None:
        """Have a layer's weights on the device. Raises InvalidArgument for files that changed meanwhile."""
        with self._lock:
            if layer in self._loaded:
                return
            for module in self._modules(layer):
                self._fill(module)
            self._loaded.add(layer)

    def _modules(self, layer: int) -> Iterator[nn.Module]:
        decoder = self.adapter.layers[layer]
        if decoder.norm is not None:
            yield decoder.norm
        projection = decoder.projection
        # All modules of the projection, whichever sort it is: fused, apart, latent.
        names = getattr(type(projection), "__dataclass_fields__", {})
        for value in (getattr(projection, name) for name in names):
            if isinstance(value, nn.Module):
                yield value

    def _fill(self, module: nn.Module) -> None:
        prefix = self._names[id(module)]
        for name, parameter in list(module.named_parameters()):
            tensor = _read(self._files, f"{prefix}.{name}", parameter)
            # A copy: safetensors gives a view of the mapped file, which the engine's owner may replace.
            tensor = tensor.to(device=self.device, dtype=parameter.dtype, copy=True)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
            self.loaded_bytes += tensor.nbytes


def _anchored(layers: Iterable[DecoderLayer], device: torch.device) -> Iterator[DecoderLayer]:
    """Layers that are on `device`, whatever of them is loaded."""
    for layer in layers:
        # An empty block with a device stands in for the real one, which is on `meta` and says so.
        block = nn.Module()
        block.anchor = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
        yield replace(layer, block=block)


def _without_memory(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        # Code of the directory's own is never run.
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        problem = f"config.json describes no model: {' '.join(str(error).split())[:200]}"
        raise InvalidArgument(field=FIELD, problem=problem) from error
    model.train(mode=False)
    return model


def _fill_buffers(model: PreTrainedModel, files: Mapping[str, Path], device: torch.device) -> None:
    """Have all buffers: those that are stored from the files, the others computed as transformers does."""
    stored = dict(model.named_buffers()).keys() - dict(model.named_non_persistent_buffers()).keys()
    kept = sorted(model._keep_in_fp32_modules_strict or ())  # noqa: SLF001
    # Buffers that transformers keeps in float32 whatever the model's type; "(?!)" matches none.
    exact = re.compile("|".join(map(re.escape, kept)) or "(?!)")
    for name, buffer in list(model.named_buffers()):
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if name in stored:
            dtype = torch.float32 if exact.search(name) else buffer.dtype
            # Not by setattr, which would register the buffer anew.
            owner._buffers[leaf] = _read(files, name, buffer).to(dtype)  # noqa: SLF001
        else:
            owner._buffers[leaf] = torch.empty_like(buffer, device="cpu")  # noqa: SLF001
    for tensor in (*model.parameters(), *(model.get_buffer(name) for name in stored)):
        # transformers leaves a tensor with this mark as it is.
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
    for module in model.modules():
        # So that `initialize_weights` computes the buffers that are not stored, in the way that loading does.
        module._is_hf_initialized = False  # type: ignore[assignment]  # noqa: SLF001
    model.initialize_weights()  # type: ignore[no-untyped-call]
    for module in model.modules():
        for leaf, held in module._buffers.items():  # noqa: SLF001
            module._buffers[leaf] = None if held is None else held.to(device)  # noqa: SLF001


def _index(directory: Path) -> Mapping[str, Path]:
    """The file of each tensor, by the tensor's name."""
    if not directory.is_absolute() or not directory.is_dir():
        raise InvalidArgument(field=FIELD, problem=f"{directory} is no directory by an absolute path")
    file_of: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                file_of.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(field=FIELD, problem=f"{path.name}: {error}") from error
    if not file_of:
        raise InvalidArgument(field=FIELD, problem=f"{directory} holds no safetensors file")
    return file_of


def _stored(files: Mapping[str, Path], names: Sequence[str], tensor: Tensor) -> Tensor:
    """A tensor's contents, by the first of its names that a file has."""
    # Tied weights are stored once, under whichever of their names the checkpoint chose.
    name = next((name for name in names if name in files), names[0])
    return _read(files, name, tensor).to(tensor.dtype)


def _read(files: Mapping[str, Path], name: str, parameter: Tensor) -> Tensor:
    path = files.get(name)
    if path is None:
        raise InvalidArgument(field=FIELD, problem=f"no file has the tensor {name}")
    try:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InvalidArgument(field=FIELD, problem=f"{path.name}: {name}: {error}") from error
    if tensor.shape != parameter.shape:
        problem = f"{name} has shape {list(tensor.shape)}, the configuration says {list(parameter.shape)}"
        raise InvalidArgument(field=FIELD, problem=problem)
    return tensor


def _torch_dtype(spec: ModelSpec) -> torch.dtype:
    if spec.dtype not in _DTYPES:
        known = ", ".join(dtype.name for dtype in _DTYPES)
        raise InvalidArgument(field="model.dtype", problem=f"{spec.dtype.name} is not one of {known}")
    return _DTYPES[spec.dtype]


log = logging.getLogger(__name__)


class AttachedModel:
    """One model, or a rank's share of it, on one device."""

    def __init__(
        self,
        weights: LazyWeights,
        profile: Profile,
        share: ModelShare | None = None,
        gather: Link = HOST_GATHER,
    ) -> None:
        """`share`: all of the model by default.

        Raises InvalidArgument for a share that the model cannot have.
        """
        layer_count = weights.spec.layer_count
        self.own = CallerModel(weights.spec)
        self.weights, self.share = weights, share or ModelShare(0, layer_count)
        if self.share.end_layer > layer_count:
            problem = f"layers end at {self.share.end_layer}, the model has {layer_count}"
            raise InvalidArgument(field="rank.layer_count", problem=problem)
        self.adapter: Adapter = shard(weights.adapter, self.share)
        self._kernel_weights = KernelWeights(self.adapter)
        own = slice(self.share.first_layer, self.share.end_layer)
        self._shape, self._gather = ModelShape(weights.shape.name, weights.shape.layers[own]), gather
        # Recomputing needs the whole model, of which only projections are here. An engine whose model has
        # packed kinds takes them.
        lossy = frozenset(kind for kind in self.kinds if kind in LOSSY_KINDS)
        self._engine = EngineAbilities(can_recompute=False, starts_by_layer=True, lossy_kinds=lossy)
        # One planner for all engines of the model: what one restore teaches is of use to all.
        self._planner = self._made(profile)
        self._lock = threading.Lock()

    @property
    def spec(self) -> ModelSpec:
        """The model as the engine described it."""
        return self.weights.spec

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """State kinds that can be restored."""
        return tuple(dict.fromkeys(each.stream.kind for each in sorted(self.spec.streams)))

    @property
    def profile(self) -> Profile:
        """The profile that plans are made from by now."""
        with self._lock:
            return self._planner.profile

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer attends to; None: all."""
        own = self.adapter.layers[self.share.first_layer : self.share.end_layer]
        return tuple(layer.window for layer in own)

    @property
    def cached(self) -> HeadShape:
        """Heads that the engine caches here per token and layer."""
        return replace(self.weights.cached, head_count=cached_heads(self.weights.adapter, self.share))

    def measured(self, profile: Profile) -> None:
        """Plan by a new profile from here on."""
        with self._lock:
            self._planner = self._made(profile)

    def plan(self, held: Iterable[Stream], token_count: int, new_tokens: int) -> Plan:
        """Decide how a session that holds these streams comes back.

        Raises InvalidArgument(field="holding").
        """
        with self._lock:
            return self._planner.plan(self._holding(frozenset(held), token_count), token_count, new_tokens)

    def observe(self, plan: Plan, observed: Mapping[Stage, float]) -> None:
        """Take how long the stages of a restore took."""
        predicted = stage_seconds(plan)
        with self._lock:
            for stage, observed_s in observed.items():
                if predicted[stage] > 0 and observed_s > 0:
                    self._planner.observe(stage, predicted_s=predicted[stage], observed_s=observed_s)

    def load(self, layer: int) -> None:
        """Have what projecting a layer needs on the device, before the restore that needs it begins.

        Raises InvalidArgument.
        """
        self.weights.load(layer)
        with self._lock:
            # Kernels take the weights that are made here, by one thread at a time, on the stream that
            # restores wait for.
            if self.weights.device.type == "cuda":
                self._kernel_weights.of(layer)

    def compute(self, positions: Tensor) -> Compute:
        """How rows of tokens at these positions become keys and values: by kernels on a GPU.

        `load` its layers first.
        """
        return compute_for(self.adapter, self._kernel_weights, positions)

    def streams(self, kinds: Iterable[StateKind] = ()) -> frozenset[Stream]:
        """Streams of the kinds, all that can be restored by default.

        Raises InvalidArgument(field="kinds").
        """
        wanted = tuple(kinds) or self.kinds
        unknown = [kind for kind in wanted if kind not in self.kinds]
        if unknown:
            raise InvalidArgument(field="kinds", problem=f"{unknown[0].name} cannot be restored")
        return frozenset(Stream(layer, kind) for layer in range(self.spec.layer_count) for kind in wanted)

    def _made(self, profile: Profile) -> AdaptivePlanner:
        shared = profile.shared_by(self.share.tensor_ranks, self._gather)
        return AdaptivePlanner(self._shape, shared, engine=self._engine)

    def _holding(self, held: frozenset[Stream], token_count: int) -> Holding:
        spans = (HeldSpan(StatePlace.DRAM, 0, token_count),)
        known: dict[tuple[StateKind, ...], LayerHolding] = {}
        layers = []
        for layer in range(self.share.first_layer, self.share.end_layer):
            kinds = tuple(kind for kind in self.kinds if Stream(layer, kind) in held)
            # Like layers share one object, by which the planner knows them.
            layers.append(known.setdefault(kinds, LayerHolding(tuple((kind, spans) for kind in kinds))))
        return Holding(tuple(layers))


class AttachedModels:
    """The models of the engines that are attached."""

    def __init__(self, device: torch.device, profile_directory: Path | None) -> None:
        self._device, self._profile_directory = device, profile_directory
        # Weak: the last engine of a model takes its weights with it.
        self._models: weakref.WeakValueDictionary[tuple[Path, bytes, ModelShare | None], AttachedModel] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self._reading: dict[tuple[Path, bytes, ModelShare | None], threading.Lock] = {}
        """Held while a model is read: two engines of one model read it once, and hold up no others."""

    def get(self, directory: Path, spec: ModelSpec, share: ModelShare | None = None) -> AttachedModel:
        """The model, or a share of it, read if no engine has it attached.

        Raises as LazyWeights and AttachedModel do.
        """
        key = (directory, spec.fingerprint(), share)
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            try:
                with self._lock:
                    model = self._models.get(key)
                if model is None:
                    model = self._read(directory, spec, share)
                    with self._lock:
                        self._models[key] = model
                return model
            finally:
                with self._lock:
                    # Another engine may still wait for this lock, and finds the model then.
                    if self._reading.get(key) is reading:
                        del self._reading[key]

    def _read(self, directory: Path, spec: ModelSpec, share: ModelShare | None) -> AttachedModel:
        weights = LazyWeights(directory, spec, self._device)
        link = NVLINK if self._device.type == "cuda" else HOST_GATHER
        return AttachedModel(weights, self._profile(weights), share, link)

    def _profile(self, weights: LazyWeights) -> Profile:
        kept = None if self._profile_directory is None else self._kept(weights, self._profile_directory)
        return kept or known_profile("h100" if self._device.type == "cuda" else "cpu")

    def _kept(self, weights: LazyWeights, directory: Path) -> Profile | None:
        """The model's profile as it was measured on this machine."""
        path = profile_path(directory, hardware=hardware_name(self._device), model=weights.spec.model_id)
        try:
            measured = read_profile(path)
        except FileNotFoundError:
            return None
        except InvalidArgument as error:
            log.warning("profile_damaged path=%s error=%s", path, error)
            return None
        # A profile of a model of the same name and other sizes would predict another model's times.
        return measured.profile if measured.model.layers == weights.shape.layers else None
