"""Attached models: weights, what can be restored of a model, and the planner that decides how.

Shared by the engines of one model and gone with the last of them. Thread-safe. Worst case: a model that nobody
has measured here, planned for by a datasheet.
"""

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ctxcache.client import CallerModel
from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.parallel.sharded import cached_heads, shard
from gpu_worker.parallel.share import Share
from gpu_worker.pipeline.compute import Compute
from gpu_worker.pipeline.kernel_weights import KernelWeights
from gpu_worker.pipeline.kernels import compute_for
from gpu_worker.planning.adaptive import AdaptivePlanner, stage_seconds
from gpu_worker.planning.engine import Engine
from gpu_worker.planning.holding import Holding, LayerHolding, Span
from gpu_worker.planning.known_profiles import HOST_GATHER, NVLINK, known_profile
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import Link, Place, Profile, Stage
from gpu_worker.planning.shape import ModelShape
from gpu_worker.profiling.hardware import hardware_name
from gpu_worker.profiling.profile_file import profile_path, read_profile
from gpu_worker.sidecar.cache_layout import HeadShape
from gpu_worker.sidecar.weights import LazyWeights

log = logging.getLogger(__name__)


class AttachedModel:
    """One model, or a rank's share of it, on one device."""

    def __init__(
        self, weights: LazyWeights, profile: Profile, share: Share | None = None, gather: Link = HOST_GATHER
    ) -> None:
        """`share`: all of the model by default. Raises InvalidArgument for one that the model cannot be shared out by."""
        layer_count = weights.spec.layer_count
        self.own = CallerModel(weights.spec)
        self.weights, self.share = weights, share or Share(0, layer_count)
        if self.share.end_layer > layer_count:
            problem = f"layers end at {self.share.end_layer}, the model has {layer_count}"
            raise InvalidArgument(field="rank.layer_count", problem=problem)
        self.adapter: Adapter = shard(weights.adapter, self.share)
        self._kernel_weights = KernelWeights(self.adapter)
        own = slice(self.share.first_layer, self.share.end_layer)
        self._shape, self._gather = ModelShape(weights.shape.name, weights.shape.layers[own]), gather
        # Recomputing needs the whole model, of which only projections are here. An engine whose model has packed
        # kinds takes them.
        lossy = frozenset(kind for kind in self.kinds if kind in PACKINGS)
        self._engine = Engine(can_recompute=False, starts_by_layer=True, lossy_kinds=lossy)
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
        """What plans are made from by now."""
        with self._lock:
            return self._planner.profile

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer attends to; None: all."""
        own = self.adapter.layers[self.share.first_layer : self.share.end_layer]
        return tuple(layer.window for layer in own)

    @property
    def cached(self) -> HeadShape:
        """What the engine caches here per token and layer."""
        return replace(self.weights.cached, head_count=cached_heads(self.weights.adapter, self.share))

    def measured(self, profile: Profile) -> None:
        """Plan by a new profile from here on."""
        with self._lock:
            self._planner = self._made(profile)

    def plan(self, held: Iterable[Stream], token_count: int, new_tokens: int) -> Plan:
        """Decide how a session that holds these streams comes back. Raises InvalidArgument(field="holding")."""
        with self._lock:
            return self._planner.plan(self._holding(frozenset(held), token_count), token_count, new_tokens)

    def observe(self, plan: Plan, observed: Mapping[Stage, float]) -> None:
        """Take what the stages of a restore took."""
        predicted = stage_seconds(plan)
        with self._lock:
            for stage, observed_s in observed.items():
                if predicted[stage] > 0 and observed_s > 0:
                    self._planner.observe(stage, predicted_s=predicted[stage], observed_s=observed_s)

    def load(self, layer: int) -> None:
        """Have what projecting a layer needs on the device, before the restore that needs it begins. Raises InvalidArgument."""
        self.weights.load(layer)
        with self._lock:
            # Where kernels compute, they take what is made here: by one thread at a time, on the stream that restores wait for.
            if self.weights.device.type == "cuda":
                self._kernel_weights.of(layer)

    def compute(self, positions: Tensor) -> Compute:
        """How rows of tokens at these positions become keys and values: by kernels on a GPU. `load` its layers first."""
        return compute_for(self.adapter, self._kernel_weights, positions)

    def streams(self, kinds: Iterable[StateKind] = ()) -> frozenset[Stream]:
        """Streams of the kinds, all that can be restored by default. Raises InvalidArgument(field="kinds")."""
        wanted = tuple(kinds) or self.kinds
        unknown = [kind for kind in wanted if kind not in self.kinds]
        if unknown:
            raise InvalidArgument(field="kinds", problem=f"{unknown[0].name} cannot be restored")
        return frozenset(Stream(layer, kind) for layer in range(self.spec.layer_count) for kind in wanted)

    def _made(self, profile: Profile) -> AdaptivePlanner:
        shared = profile.shared_by(self.share.tensor_ranks, self._gather)
        return AdaptivePlanner(self._shape, shared, engine=self._engine)

    def _holding(self, held: frozenset[Stream], token_count: int) -> Holding:
        spans = (Span(Place.DRAM, 0, token_count),)
        known: dict[tuple[StateKind, ...], LayerHolding] = {}
        layers = []
        for layer in range(self.share.first_layer, self.share.end_layer):
            kinds = tuple(kind for kind in self.kinds if Stream(layer, kind) in held)
            # One object for like layers: the planner then sees at once that they are.
            layers.append(known.setdefault(kinds, LayerHolding(tuple((kind, spans) for kind in kinds))))
        return Holding(tuple(layers))


class Models:
    """The models of the engines that are attached."""

    def __init__(self, device: torch.device, profile_directory: Path | None) -> None:
        self._device, self._profile_directory = device, profile_directory
        self._models: weakref.WeakValueDictionary[tuple[Path, bytes, Share | None], AttachedModel] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def get(self, directory: Path, spec: ModelSpec, share: Share | None = None) -> AttachedModel:
        """The model, or a share of it, read if no engine has it attached. Raises as LazyWeights and AttachedModel do."""
        key = (directory, spec.fingerprint(), share)
        with self._lock:
            found = self._models.get(key)
            if found is None:
                weights = LazyWeights(directory, spec, self._device)
                found = self._models[key] = AttachedModel(
                    weights, self._profile(weights), share, NVLINK if self._device.type == "cuda" else HOST_GATHER
                )  # fmt: skip
            return found

    def _profile(self, weights: LazyWeights) -> Profile:
        found = None if self._profile_directory is None else self._kept(weights, self._profile_directory)
        return found or known_profile("h100" if self._device.type == "cuda" else "cpu")

    def _kept(self, weights: LazyWeights, directory: Path) -> Profile | None:
        """What was measured of the model on this machine."""
        path = profile_path(directory, hardware=hardware_name(self._device), model=weights.spec.model_id)
        try:
            measured = read_profile(path)
        except FileNotFoundError:
            return None
        except InvalidArgument as error:
            log.warning("profile_damaged path=%s error=%s", path, error)
            return None
        return measured.profile if measured.model.layers == weights.shape.layers else None
