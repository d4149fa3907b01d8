"""The bed of lab/studies/restore.py and skew.py: a model, a store, sessions, and checked restores.

Restores run through the engine's own parts: lease, schedule, pipeline, layer gate. Each is compared with the
cache that recomputation left and with its logits; a difference beyond the bounds is the case's `problem`.
Worst case: a model whose rows do not fit into the store, an error before anything is measured.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.client import Client
from ctxcache.client.types import Durability
from ctxcache.format.streams import TOKENS, StateKind, Stream, StreamSpec
from gpu_worker.engines.transformers_restoring import SessionRestorer
from gpu_worker.errors import IncompleteRestore
from gpu_worker.families.generation import PREFILL_PIECE_TOKENS, Capture, prefill
from gpu_worker.families.model_shape import model_shape
from gpu_worker.forms.rows import pack_rows
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.pipeline.planned import Choice, Chooser
from gpu_worker.planning.adaptive import AdaptivePlanner, stage_seconds
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import StatePlace
from lab.demo.embedded_store import EmbeddedStore
from lab.restoring.figures import FIRST, LEAD, VERIFIED, WIDE_KINDS

SAVED_KINDS = (*WIDE_KINDS, StateKind.HIDDEN_INT8)
_APPEND_TOKENS = 1024
"""A segment's, as a turn of a conversation or a prompt leaves them."""
RESTORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a restored cache may be off.

    Largest difference over largest value of a layer, and nats of a prediction.
    """

    cache_error: float
    kl_nats: float


def noise(recomputed: Iterable["Taken"]) -> Bounds:
    """How far recomputation is off, whose passes have other shapes than those of the rows that were saved."""
    known = list(recomputed)
    return Bounds(max(each.cache_error for each in known), max(each.kl_nats for each in known))


_FEW_BITS = Bounds(0.1, 4e-4)
"""Of 8 bits, by lab/notes/quantization.md."""


def bounds(case: "Case", dtype: torch.dtype, own: Bounds) -> Bounds:
    """How far a case may be off; `own`: see `noise`.

    Rows of K and V are the engine's bit for bit. Hidden states are within rounding, which in 16 bits is what
    recomputation itself shows, twice of it.
    """
    if case.is_verbatim:
        return Bounds(0.0, 0.0)
    if dtype is torch.float32:
        return Bounds(1e-4, 1e-5) if case.is_exact else _FEW_BITS
    twice = Bounds(2 * own.cache_error, 2 * own.kl_nats)
    if case.is_exact:
        return twice
    return Bounds(_FEW_BITS.cache_error, _FEW_BITS.kl_nats + twice.kl_nats)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to a first token. No `plan`: recomputation. `start`: when the engine begins, or `verified`."""

    plan: Plan | None
    place: StatePlace = StatePlace.DRAM
    start: str = LEAD

    @property
    def is_exact(self) -> bool:
        """Whether all rows are as wide as they were computed."""
        return all(method is None or method.is_exact for method in self._methods())

    @property
    def is_verbatim(self) -> bool:
        """Whether all rows are K and V."""
        return self.plan is not None and all(method is Method.KV for method in self._methods())

    def _methods(self) -> list[Method | None]:
        return [piece.method for pieces in (self.plan.layers if self.plan else ()) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Taken:
    """One restore and the first token behind it.

    Seconds from the call; `restore_s`: until the last layer was usable.
    """

    ttft_s: float
    restore_s: float
    lease_s: float
    cache_error: float
    kl_nats: float

    def problem(self, limits: Bounds) -> str:
        """The fault of this restore by these limits; empty without one. NaN is a fault."""
        if self.cache_error <= limits.cache_error and self.kl_nats <= limits.kl_nats:
            return ""
        return f"cache off by {self.cache_error:.2g}, {self.kl_nats:.2g} nats"


@dataclass
class Saved:
    """A context's sessions in the store, and what recomputation left: cache, token ids, the last logits.

    `stored` are its rows, needed for sessions of streams that were not asked for yet.
    """

    cache: DynamicCache
    token_ids: list[int]
    new_ids: list[int]
    logits: Tensor
    stored: dict[Stream, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    sessions: dict[frozenset[Stream], str] = field(default_factory=dict)


class Bed:
    """One model on one store. A context manager."""

    def __init__(self, model: PreTrainedModel, store: EmbeddedStore, *, is_random: bool) -> None:
        """`is_random`: the weights are nobody's, and are not hashed."""
        self.model, self.adapter = model, adapt(model)
        self.shape = model_shape(self.adapter, self.adapter.architecture)
        self._stack = ExitStack()
        self._client = store.client
        # One mapping for both: an arena that is mapped twice in a process is pinned once only.
        routes = copy.copy(self._client.routes)
        routes.is_verified = False
        self._unverified = Client(self._client.wire, routes)
        self._spec = model_spec(
            model,
            model_id="restore-bench",
            weights_digest="random" if is_random else None,
            packed_kinds=[StateKind.HIDDEN_INT8],
        )
        self._own = self._client.models.register(self._spec)
        # The plans are given; what a chooser would learn from them is the planner's here.
        chooser = Chooser(self.adapter, RestorePlan.uniform(Method.KV, len(self.adapter.layers)), None)
        self._restorer = SessionRestorer(
            self.adapter, chooser, timeout_s=RESTORE_TIMEOUT_S, settings=PipelineSettings()
        )
        self._stack.callback(self._restorer.close)
        self._saved: list[Saved] = []
        self._current: Saved | None = None
        # On a GPU one pass is causal attention without a mask, which is the fastest.
        self._piece_tokens = PREFILL_PIECE_TOKENS if model.device.type == "cpu" else 1 << 20

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    # -- sessions ----------------------------------------------------------------------------------

    def save(self, token_ids: Sequence[int], new_ids: Sequence[int]) -> None:
        """As `add`, with this context alone: sessions before are deleted."""
        for saved in self._saved:
            for name in saved.sessions.values():
                self._client.sessions.open(name).delete()
        self._saved = []
        self.add(token_ids, new_ids)

    def add(self, token_ids: Sequence[int], new_ids: Sequence[int]) -> Saved:
        """Run the history once, keep its cache, and save all kinds of rows of it.

        The context is in use then.
        """
        saved = Saved(DynamicCache(config=self.model.config), list(token_ids), list(new_ids), torch.empty(0))
        layers = range(len(self.adapter.layers))

        def put(layer: int, kind: StateKind, rows: Tensor) -> None:
            saved.stored[Stream(layer, kind)].append(rows)

        with Capture(self.adapter, [Stream(layer, kind) for layer in layers for kind in WIDE_KINDS], put):
            self._prefill(saved.cache, token_ids)
        saved.logits = self._prefill(saved.cache, new_ids)
        self._saved.append(saved)
        self.use(saved)
        self._session(frozenset(Stream(layer, kind) for layer in layers for kind in SAVED_KINDS))
        return saved

    def use(self, saved: Saved) -> None:
        """Runs from here on are of this context."""
        self._current = saved

    @property
    def _known(self) -> Saved:
        if self._current is None:
            raise RuntimeError("nothing was saved")
        return self._current

    def _session(self, streams: frozenset[Stream]) -> str:
        """The session of exactly these streams, durable."""
        sessions = self._known.sessions
        if streams in sessions:
            return sessions[streams]
        session = self._client.sessions.create(self._own, layout=[TOKENS, *sorted(streams)]).info
        sessions[streams] = session.name
        ids = np.array(self._known.token_ids, "<i4").view(np.uint8).reshape(-1, 4)
        rows = {TOKENS: ids} | {
            spec.stream: np.frombuffer(self._packed(spec), np.uint8).reshape(len(ids), -1)
            for spec in self._spec.resolve(streams)
            if spec.stream != TOKENS
        }
        for begin in range(0, len(ids), _APPEND_TOKENS):
            part = {stream: each[begin : begin + _APPEND_TOKENS] for stream, each in rows.items()}
            session = self._client.sessions.open(session, self._own).append(part, durability=Durability.DISK)
        return session.name

    def _packed(self, spec: StreamSpec) -> memoryview:
        kind = spec.stream.kind
        wide = kind if kind in WIDE_KINDS else StateKind.HIDDEN
        rows = torch.cat(self._known.stored[Stream(spec.stream.layer, wide)])
        return pack_rows(rows if kind in WIDE_KINDS else rows.to(self.model.device), spec)

    def _placed(self, choice: Choice, place: StatePlace) -> str:
        """A session that has what the choice reads, where the case wants it."""
        streams = frozenset(stream for stream in choice.streams() if stream != TOKENS)
        if place is StatePlace.SSD:
            # A session of these streams alone: the store brings whole segments back.
            name = self._session(streams)
            self._client.admin.demote_session(name)
            return name
        sessions = self._known.sessions
        return next(
            name
            for held, name in sessions.items()
            if streams <= held and len(held) == max(map(len, sessions))
        )

    # -- measuring ---------------------------------------------------------------------------------

    def run(self, case: Case, planner: AdaptivePlanner | None = None) -> Taken:
        """Restore and continue, once; `planner` learns what the stages took."""
        return self.restore(case, planner)[0]

    def restore(self, case: Case, planner: AdaptivePlanner | None = None) -> tuple[Taken, Cache]:
        """As `run`, and the cache: of the history and the new tokens."""
        return self._recompute() if case.plan is None else self._restore(case, case.plan, planner)

    def go_on(self, cache: Cache) -> tuple[Taken, Cache]:
        """Continue a history whose cache is still here, of whichever restore; nothing is read."""
        begin_s = self._now_s()
        logits = self._prefill(cache, self._known.new_ids)
        int(logits.argmax())
        return self._compared(cache, logits, time.perf_counter() - begin_s, 0.0, 0.0)

    def _recompute(self) -> tuple[Taken, Cache]:
        known, cache = self._known, DynamicCache(config=self.model.config)
        begin_s = self._now_s()
        logits = self._prefill(cache, [*known.token_ids, *known.new_ids])
        int(logits.argmax())
        return self._compared(cache, logits, time.perf_counter() - begin_s, 0.0, 0.0)

    def _restore(self, case: Case, plan: Plan, planner: AdaptivePlanner | None) -> tuple[Taken, Cache]:
        known, choice = self._known, Choice(None, plan)
        name = self._placed(choice, case.place)
        client = self._client if case.start == VERIFIED else self._unverified
        begin_s = self._now_s()
        rows = client.sessions.open(name, self._own).read(streams=choice.streams())
        restoring = self._restorer.begin(rows, choice, known.token_ids)
        lease_s = time.perf_counter() - begin_s
        with restoring:
            if case.start == LEAD:
                restoring.wait_for_lead()
            elif case.start == FIRST:
                restoring.restoration.wait(0)
            else:
                restoring.restoration.wait_all()
            logits = self._prefill(restoring.cache, known.new_ids)
            int(logits.argmax())
            ttft_s = time.perf_counter() - begin_s
        restoration = restoring.restoration
        if planner is not None:
            observed_s = restoration.observed_s()
            for stage, predicted_s in stage_seconds(plan).items():
                planner.observe(stage, predicted_s=predicted_s, observed_s=observed_s.get(stage, 0.0))
        return self._compared(restoring.cache, logits, ttft_s, lease_s + restoration.restored_s, lease_s)

    def _prefill(self, cache: Cache, token_ids: Sequence[int]) -> Tensor:
        return prefill(self.model, cache, token_ids, piece_tokens=self._piece_tokens)

    def _now_s(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _compared(
        self, cache: Cache, logits: Tensor, ttft_s: float, restore_s: float, lease_s: float
    ) -> tuple[Taken, Cache]:
        known = self._known
        errors = [
            _error(found, right)
            for layer in range(len(cache.layers))
            for found, right in zip(halves(cache, layer), halves(known.cache, layer), strict=True)
        ]
        found, right = logits.float().log_softmax(-1), known.logits.float().log_softmax(-1)
        kl_nats = float((right.exp() * (right - found)).sum().abs())
        return Taken(ttft_s, restore_s, lease_s, max(errors), kl_nats), cache


def halves(cache: Cache, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values. Raises IncompleteRestore."""
    held = cache.layers[layer]
    if not isinstance(held, CacheLayerMixin) or held.keys is None or held.values is None:
        raise IncompleteRestore(layer=layer, row_count=0, token_count=0)
    return held.keys, held.values


def _error(found: Tensor, right: Tensor) -> float:
    """Largest difference over largest value; infinite where shapes differ or a value is NaN."""
    if found.shape != right.shape:
        return float("inf")
    off = float((found - right).abs().amax() / right.abs().amax())
    return off if off == off else float("inf")  # noqa: PLR0124  # NaN
