"""Planned restores: what a session's layout holds, the plan for it, and what its stages really took.

The lead says how much must be restored before the engine starts, so that no pass waits for a layer:
CachedAttention's S = B (T_load L_hist - T_pref L_new), section 3.2.1 of arXiv:2403.19708, layer by layer and
for layers that are not alike. Owned by an engine; one restore at a time. Worst case: a profile that is wrong,
which drift corrects from one restore to the next; until then passes wait at their layers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.model_shape import model_shape
from gpu_worker.pipeline.pipeline import Restoration
from gpu_worker.pipeline.target import Target
from gpu_worker.planning.adaptive import AdaptivePlanner, stage_seconds
from gpu_worker.planning.assignment import Step, Timeline, simulate
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.layout import Return, choose_layout, snapshot_every, snapshot_every_by_bytes
from gpu_worker.planning.plan import Method, RestorePlan, RestoreSchedule
from gpu_worker.planning.planner import Plan, alternatives
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import LayerKind


@dataclass(frozen=True, slots=True)
class Lead:
    """The engine starts `start_s` after the restore.

    By then `layer_count` layers, of `size_bytes`, are usable.
    """

    start_s: float
    layer_count: int
    size_bytes: float


# The engine's pass takes p0, p1, ... through its layers; layer i is usable at t_i:
#
#     restore   0 ──── t0 ── t1 ─────── t2 ── t3
#     pass                start [ p0 ][ p1 ][ p2 ][ p3 ]
#
#     start + p0 + ... + p(i - 1) >= t_i for every i, so start = max over i of (t_i - sum of p before i)
#
# S of CachedAttention is the same for like layers: bytes that are there when the pass begins.
def lead(plan: Plan) -> Lead:
    """The earliest start after which no layer is late, if all goes as planned; one layer at least."""
    timeline, pass_s = alone(plan), pass_seconds(plan)
    restored_s = [timeline.restored_s(layer) for layer in range(len(plan.layers))]
    before_s = accumulate(pass_s[:-1], initial=0.0)
    start_s = max(there_s - spent_s for there_s, spent_s in zip(restored_s, before_s, strict=True))
    start_s = max(start_s, restored_s[0])
    # Layers become usable in their order, so that a count names them.
    count = sum(there_s <= start_s for there_s in restored_s)
    size_bytes = sum(piece.size_bytes for pieces in plan.layers[:count] for piece in pieces)
    return Lead(start_s, count, size_bytes)


def alone(plan: Plan) -> Timeline:
    """When each layer is usable while no new tokens pass."""
    return simulate(
        Step(layer, "restore", piece.read_s, piece.copy_s, piece.device_s)
        for layer, pieces in enumerate(plan.layers)
        for piece in pieces
    )


def pass_seconds(plan: Plan) -> list[float]:
    """The new tokens' seconds in each layer."""
    request = plan.request
    begin, end = request.history, request.history + request.new_tokens
    return [request.profile.recompute_s(layer, begin, end) for layer in request.model.layers]


def schedule_of(plan: Plan, first_tokens: Sequence[int]) -> RestoreSchedule:
    """Carry out a planner's plan; each layer from the first token that the target needs of it.

    Raises InvalidArgument(field="plan").
    """
    layers = [
        [(piece.method, piece.begin, piece.end) for piece in pieces if piece.method] for pieces in plan.layers
    ]
    return RestoreSchedule.of_pieces(layers, plan.request.history, first_tokens)


# Methods that stand in for a missing one, in this order: rows that need no projection first.
_EXACT = (Method.KV, Method.LATENT, Method.KV_AS_CACHED, Method.HIDDEN)


@dataclass(frozen=True, slots=True)
class Choice:
    """How one session comes back. `plan`: as the planner decided; None where the caller did."""

    methods: RestorePlan | None
    plan: Plan | None
    snapshot_tokens: int = 0
    """Tokens behind which a snapshot of states is held, from which `snapshot_layers` go on."""
    snapshot_layers: tuple[int, ...] = ()

    def schedule(self, target: Target) -> RestoreSchedule:
        """The pipeline's schedule. Raises InvalidArgument(field="plan")."""
        first_tokens = [target.first_token(layer) for layer in range(target.layer_count)]
        if self.plan is not None:
            return schedule_of(self.plan, first_tokens)
        methods = self.methods or RestorePlan(())
        return RestoreSchedule.of_methods(methods, target.token_count, first_tokens)

    def streams(self) -> frozenset[Stream]:
        """The streams to read, token ids always: they tell what is common."""
        if self.plan is None:
            return frozenset({TOKENS, *(self.methods or RestorePlan(())).streams()})
        rows = (
            Stream(layer, piece.method.kind)
            for layer, pieces in enumerate(self.plan.layers)
            for piece in pieces
            if piece.method is not None and piece.method.kind is not StateKind.TOKENS
        )
        return frozenset({TOKENS, *rows})

    @property
    def lead(self) -> Lead | None:
        """How far the restore must be when the engine starts; None: whole."""
        return None if self.plan is None else lead(self.plan)

    @property
    def predicted_s(self) -> float:
        """Seconds until the last layer is usable, as planned; 0 where nobody planned."""
        return 0.0 if self.plan is None else self.plan.restored_s


@dataclass(frozen=True, slots=True)
class Wanted:
    """`history` tokens of a session of which the streams `held` are there, before `new_tokens`."""

    held: frozenset[Stream]
    history: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class ReturnCost:
    """The cost of bringing a session back now, by the machine's measured rates.

    `size_bytes` are read, `dram_token_count` of the `token_count` tokens' rows from DRAM. The last layer is
    usable after `restored_s`, of which the device computes for `device_s`. States go on from a snapshot of
    `snapshot_token_count` tokens where that is no slower; 0: from none. `others_s`: the seconds of other
    ways, each used in all layers, as far as stored rows allow (`recompute`: nothing but token ids).
    """

    token_count: int
    dram_token_count: int
    size_bytes: float
    restored_s: float
    device_s: float
    others_s: Mapping[str, float]
    snapshot_token_count: int = 0


class Chooser:
    """A caller's plan for all sessions, or a planner's for each."""

    def __init__(
        self,
        adapter: Adapter,
        fixed: RestorePlan | None,
        profile: Profile | None,
        *,
        lossy_kinds: frozenset[StateKind] = frozenset(),
    ) -> None:
        """`fixed` wins over `profile`; one of them is given.

        `lossy_kinds`: packed kinds that a planner may use.
        """
        self._fixed, self._lossy_kinds = fixed, lossy_kinds
        self._shape = model_shape(adapter, adapter.architecture)
        self._planner: AdaptivePlanner | None = None
        # The library's engine runs the model in this process:
        # it can recompute, and begin at the first layers.
        if fixed is None and profile is not None:
            engine = EngineAbilities(
                can_recompute=True, starts_by_layer=True, can_split=True, lossy_kinds=lossy_kinds
            )
            self._planner = AdaptivePlanner(self._shape, profile, engine=engine)

    @property
    def profile(self) -> Profile | None:
        """The machine as the planner knows it by now."""
        return None if self._planner is None else self._planner.profile

    def layout(self, expected: Iterable[Return]) -> tuple[Stream, ...]:
        """The streams to save of a new session, token ids first."""
        if self._planner is None:
            return (
                TOKENS,
                *(stream for stream in (self._fixed or RestorePlan(())).streams() if stream != TOKENS),
            )
        engine = EngineAbilities(lossy_kinds=self._lossy_kinds)
        return choose_layout(self._shape, self._planner.profile, tuple(expected), engine=engine).streams()

    def snapshot_every(self, expected: Iterable[Return]) -> int:
        """Every how many tokens to take a snapshot of states; 0 for never."""
        if self._planner is None:
            return snapshot_every_by_bytes(self._shape)
        return snapshot_every(self._shape, self._planner.profile, tuple(expected))

    def choose(
        self,
        held: Collection[Stream],
        history: int,
        new_tokens: int,
        *,
        place: StatePlace = StatePlace.DRAM,
        snapshot_tokens: int = 0,
    ) -> Choice:
        """How `history` tokens of a session come back of which the streams `held` lie in `place`.

        `snapshot_tokens`: behind so many tokens, a snapshot of states is held. Where the plan is the
        caller's, a layer goes on from there if that is no more bytes than the rows before. Raises
        InvalidArgument(field="holding").
        """
        layers = self._shape.layers
        if self._planner is None:
            methods = _held_of(self._fixed or RestorePlan(()), held)
            if not snapshot_tokens:
                return Choice(methods, None)
            smaller = tuple(
                number
                for number, layer in enumerate(layers)
                if layer.kind is LayerKind.LINEAR
                and methods.methods[number] is Method.HIDDEN
                # Without measured rates bytes decide, which both ways have to read.
                and layer.state_bytes <= snapshot_tokens * layer.hidden_row_bytes
            )
            return Choice(methods, None, snapshot_tokens, smaller)
        holding = _holding(held, len(layers), [HeldSpan(place, 0, history)], snapshot_tokens)
        plan = self._planner.plan(holding, history, new_tokens)
        going_on = (
            number
            for number, pieces in enumerate(plan.layers)
            if any(piece.snapshot_tokens for piece in pieces)
        )
        return Choice(None, plan, snapshot_tokens, tuple(going_on))

    def choose_together(
        self, sessions: Sequence[Wanted], *, place: StatePlace = StatePlace.DRAM
    ) -> list[tuple[int, Choice]]:
        """Sessions that are restored from now on, as indexes in the order in which they should come.

        Where the plan is the caller's, those with least to do come first. Raises
        InvalidArgument(field="holding").
        """
        if self._planner is None:
            plan = self._fixed or RestorePlan(())
            # Shortest first: the order that brings the least mean wait when nothing else is known.
            order = sorted(range(len(sessions)), key=lambda i: sessions[i].history + sessions[i].new_tokens)
            return [(index, Choice(_held_of(plan, sessions[index].held), None)) for index in order]
        layer_count = len(self._shape.layers)
        planned = self._planner.together(
            [
                (
                    _holding(wanted.held, layer_count, [HeldSpan(place, 0, wanted.history)]),
                    wanted.history,
                    wanted.new_tokens,
                )
                for wanted in sessions
            ]
        )
        return [(index, Choice(None, planned.plans[index])) for index in planned.order]

    def cost(
        self, held: Collection[Stream], history: int, dram_count: int, *, snapshot_tokens: int = 0
    ) -> ReturnCost:
        """The cost of `history` tokens whose streams `held` are there, the rows of `dram_count` in DRAM.

        `snapshot_tokens`: behind so many tokens, a snapshot of states is held. Raises
        InvalidArgument(field="profile") where nobody said what the machine does.
        """
        if self._planner is None:
            raise InvalidArgument(field="profile", problem="none is known: the plan is the caller's")
        # The store tells a count of tokens, not which: they are reckoned to be the first ones.
        spans = [HeldSpan(StatePlace.DRAM, 0, dram_count), HeldSpan(StatePlace.SSD, dram_count, history)]
        holding = _holding(held, len(self._shape.layers), spans, snapshot_tokens)
        chosen = self._planner.plan(holding, history)
        others = alternatives(chosen.request) if history else {}
        return ReturnCost(
            token_count=history,
            dram_token_count=dram_count,
            size_bytes=sum(piece.size_bytes for pieces in chosen.layers for piece in pieces),
            restored_s=chosen.restored_s,
            device_s=chosen.timeline.busy_s["compute"],
            others_s={name: other.restored_s for name, other in others.items()},
            snapshot_token_count=max(
                (piece.snapshot_tokens for pieces in chosen.layers for piece in pieces), default=0
            ),
        )

    def observe(self, choice: Choice, restoration: Restoration) -> None:
        """Learn from a restore that is whole and drained."""
        # A restore that failed has stages that were cut short, and would teach rates that are too good.
        if self._planner is None or choice.plan is None or not restoration.is_whole:
            return
        if choice.snapshot_layers:
            # States come before the pipeline begins: its stages take less than the plan says.
            return
        observed_s = restoration.observed_s()
        for stage, predicted_s in stage_seconds(choice.plan).items():
            self._planner.observe(stage, predicted_s=predicted_s, observed_s=observed_s.get(stage, 0.0))


def _holding(
    held: Iterable[Stream], layer_count: int, spans: Sequence[HeldSpan], snapshot_tokens: int = 0
) -> Holding:
    kinds: list[list[StateKind]] = [[] for _ in range(layer_count)]
    for stream in sorted(held):
        if stream != TOKENS:
            kinds[stream.layer].append(stream.kind)
    # Like layers share one object, by which the planner knows them.
    known = {
        of: LayerHolding(tuple((kind, tuple(spans)) for kind in of), snapshot_tokens)
        for of in map(tuple, kinds)
    }
    return Holding(tuple(known[tuple(of)] for of in kinds))


def _held_of(plan: RestorePlan, held: Collection[Stream]) -> RestorePlan:
    """A caller's plan, adapted to what the session holds.

    A layer whose rows are missing takes others that are exact. Where there are none, all is recomputed.
    """

    def method(layer: int, wanted: Method) -> Method:
        if wanted in (Method.TOKENS, Method.NOTHING):
            return wanted
        # Only exact methods stand in for the wanted one: a caller's plan says which loss it accepts.
        there = (way for way in (wanted, *_EXACT) if Stream(layer, way.kind) in held)
        return next(there, Method.TOKENS)

    methods = tuple(method(layer, wanted) for layer, wanted in enumerate(plan.methods))
    try:
        return RestorePlan(methods)
    except InvalidArgument:
        # A layer that has to be recomputed is behind one that need not be.
        return RestorePlan.uniform(Method.TOKENS, plan.layer_count)
