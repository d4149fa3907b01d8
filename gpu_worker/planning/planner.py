"""The planner: one session's restoration, decided.

Builds each layer's options, searches, and lays the result out in time. Compares with what the papers would
do on the same machine: `compare`. Worst case: state that is neither held nor can be recomputed, which is
refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import CHAIN_KINDS, DELTAS
from ctxcache.format.streams import StateKind
from gpu_worker.planning.assignment import PREFILL, Assignment, Pass, Timeline, pieces_of, timeline
from gpu_worker.planning.baselines import SplitAt, baselines, split_everywhere
from gpu_worker.planning.block import StreamBlock
from gpu_worker.planning.holding import EngineAbilities, Holding, LayerHolding
from gpu_worker.planning.option import (
    LayerOptions,
    LayerPiece,
    Option,
    layer_options,
    split_option,
    token_ids_block,
)
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.search import Choices, Solution, solve
from gpu_worker.planning.shape import ModelShape

LOSSLESS = "lossless"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A restore to plan: `history` tokens of a session, before `new_tokens` are prefilled."""

    model: ModelShape
    holding: Holding
    history: int
    profile: Profile
    new_tokens: int = 0
    engine: EngineAbilities = field(default_factory=EngineAbilities)

    def __post_init__(self) -> None:
        if not self.model.layers or len(self.holding.layers) != len(self.model.layers):
            problem = f"{len(self.holding.layers)} layers held, the model has {len(self.model.layers)}"
            raise InvalidArgument(field="holding", problem=problem)
        if self.history < 0 or self.new_tokens < 0:
            raise InvalidArgument(field="history", problem="token counts are not negative")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a session comes back.

    `layers` has each layer's pieces in token order, which is also the order of transfers and of
    computations: layer by layer, piece by piece. `timeline` says when, and no
    plan ends before `bound_s`. `is_exact`: none ends before this one.
    """

    request: PlanRequest
    layers: tuple[tuple[LayerPiece, ...], ...]
    timeline: Timeline
    bound_s: float
    is_exact: bool
    step_count: int

    @property
    def end_s(self) -> float:
        """Seconds to the end of the new tokens' prefill; to the restored cache where there are none."""
        return self.timeline.end_s

    @property
    def restored_s(self) -> float:
        """Seconds until every layer's cache is whole."""
        return max(self.timeline.restored_s(layer, besides=PREFILL) for layer in range(len(self.layers)))

    @property
    def methods(self) -> tuple[Method | None, ...]:
        """Each layer's method, that of most of its tokens where it is split; None: nothing to restore."""
        return tuple(max(pieces, key=lambda piece: piece.end - piece.begin).method for pieces in self.layers)

    @property
    def split_layers(self) -> tuple[int, ...]:
        """Layers whose tokens come back by two methods."""
        return tuple(layer for layer, pieces in enumerate(self.layers) if len(pieces) > 1)

    def restore_plan(self) -> RestorePlan:
        """The plan as an engine adapter takes it.

        Raises InvalidArgument for layers that are split or have nothing.
        """
        if self.split_layers:
            raise InvalidArgument(field="plan", problem=f"layer {self.split_layers[0]} is split")
        methods = [method for method in self.methods if method is not None]
        if len(methods) < len(self.layers):
            raise InvalidArgument(field="plan", problem="a layer has no state of its own")
        return RestorePlan(tuple(methods))


def plan(request: PlanRequest) -> Plan:
    """Plan a restore. Raises InvalidArgument(field="holding") for what has no way back.

    Chains of deltas come back whole, or no delta is used: `_with_chains`.
    """
    # Deltas make choices depend on the layer below, which the
    # search does not know: chains are fixed outside of it.
    deltas = _delta_kinds(request)
    if not deltas:
        return _plan(request, _Problem.of(_without_deltas(request)))
    plans = list(_with_chains(request, deltas))
    with suppress(InvalidArgument):
        plans.append(_plan(request, _Problem.of(_without_deltas(request))))
    if not plans:
        raise InvalidArgument(field="holding", problem="a layer is not held and cannot be recomputed")
    best = min(plans, key=lambda each: each.end_s)
    # Chains that are used in part are not looked at, nor layers of a chain that come back otherwise.
    return replace(best, bound_s=min(each.bound_s for each in plans), is_exact=False)


def _without_deltas(request: PlanRequest) -> PlanRequest:
    kinds = request.engine.lossy_kinds.difference(DELTAS)
    return replace(request, engine=replace(request.engine, lossy_kinds=kinds))


def _delta_kinds(request: PlanRequest) -> Mapping[int, StateKind]:
    """Layers that can come back as deltas, and by which kind: the smallest that is held and allowed."""
    allowed = {StateKind.HIDDEN, *request.engine.lossy_kinds}
    held = [allowed.intersection(kind for kind, _ in each.kinds) for each in request.holding.layers]
    by_layer: dict[int, StateKind] = {}
    if _is_on_tokens(request) and (kinds := held[1].intersection(DELTAS, request.model.layers[1].kinds)):
        by_layer[1] = min(kinds, key=request.model.layers[1].row_bytes)
    for number in range(1, len(held)):
        layer, below = request.model.layers[number], request.model.layers[number - 1]
        kinds = held[number].intersection(DELTAS, layer.kinds)
        bases = held[number - 1].intersection(CHAIN_KINDS, below.kinds)
        # A base that is a delta itself needs its own base in turn: chains are found from below.
        if kinds and len(bases) == 1 and (number - 1 in by_layer or not bases.intersection(DELTAS)):
            by_layer[number] = min(kinds, key=layer.row_bytes)
    return by_layer


def _is_on_tokens(request: PlanRequest) -> bool:
    """Whether token ids give the base of layer 1's deltas: of layer 0 nothing is held."""
    layers = request.holding.layers
    can_embed = request.model.has_token_inputs and request.engine.can_recompute and len(layers) > 1
    return can_embed and request.history > 0 and not layers[0].kinds


def _with_chains(request: PlanRequest, deltas: Mapping[int, StateKind]) -> Iterator[Plan]:
    """The best plan for each count of recomputed layers behind which every delta has its base."""
    layers = list(request.holding.layers)
    known: dict[object, LayerHolding] = {}
    chained = {*deltas, *(layer - 1 for layer in deltas)}
    for number, held in enumerate(layers):
        kinds = {kind for kind, _ in held.kinds}
        used: Collection[StateKind] = kinds.difference(DELTAS)
        if number in chained:
            # Nothing is held of a layer 0 that token ids give.
            used = ([deltas[number]] if number in deltas else [k for k in CHAIN_KINDS if k in kinds])[:1]
        kept = tuple(each for each in held.kinds if each[0] in used)
        layers[number] = known.setdefault((id(held), kept), replace(held, kinds=kept))
    bound = replace(request, holding=Holding(tuple(layers)))
    count = len(layers)
    # Recomputation may end where the next layer is no delta, for bases B at 0 and 4:
    #
    #     layer        0 1 2 3 4 5 6 7
    #     held         B d d d B d d d
    #     recomputed   0 ───── 4                between these, the layer behind would lack its base
    #
    # Behind the last chain no delta is left: plans without deltas have those counts.
    is_on_tokens = 1 in deltas and _is_on_tokens(request)
    for recomputed in range(count + 1 if request.engine.can_recompute and request.history else 1):
        is_embedded = is_on_tokens and recomputed == 1
        if recomputed not in deltas or is_embedded:
            problem = _Problem.of(bound).behind(recomputed, chained)
            with suppress(InvalidArgument):
                yield _plan(request, problem.embedded(request) if is_embedded else problem, is_bound=True)
        if recomputed >= max(deltas):
            # Behind the last chain the search itself finds how many layers to recompute.
            return


def _plan(request: PlanRequest, problem: "_Problem", *, is_bound: bool = False) -> Plan:
    solution = solve(_choices(problem), token_ids=problem.token_ids)
    if solution is None:
        raise InvalidArgument(field="holding", problem="a layer is not held and cannot be recomputed")
    # The search knows blocks; pieces and the timeline are
    # laid out from its picks again, and give the same end.
    best = _assignment(solution, problem.layers)
    at = problem.timeline(best)
    others = [] if is_bound else _not_searched(request, problem, is_exact=solution.is_exact)
    for other in others:
        if problem.least_s(other) < at.end_s and (other_at := problem.timeline(other)).end_s < at.end_s:
            best, at = other, other_at
    return Plan(
        request=request,
        layers=tuple(pieces_of(best, problem.layers)),
        timeline=at,
        bound_s=min(at.end_s, solution.bound_s + problem.after_s),
        is_exact=solution.is_exact,
        step_count=solution.step_count,
    )


def _not_searched(request: PlanRequest, problem: "_Problem", *, is_exact: bool) -> Iterable[Assignment]:
    """The papers' assignments that the search may have missed: all, or only those that split many layers."""
    splitter = _splitter(request)
    # A search that was cut short may have missed what the papers would do: none of them may be better.
    if not is_exact:
        return baselines(problem.layers, request.history, splitter).values()
    everywhere = split_everywhere(problem.layers, request.history, splitter)
    return [] if everywhere is None else [everywhere]


def compare(request: PlanRequest) -> Mapping[str, float]:
    """Return in how many seconds others would be through the same pipeline, by name, none with a loss.

    Where a loss is allowed, `lossless` is the best plan without.
    """
    seconds: dict[str, float] = {}
    if request.engine.lossy_kinds:
        request = replace(request, engine=replace(request.engine, lossy_kinds=frozenset()))
        with suppress(InvalidArgument):
            seconds[LOSSLESS] = plan(request).end_s
    return seconds | {name: other.end_s for name, other in alternatives(request).items()}


def alternatives(request: PlanRequest) -> Mapping[str, Plan]:
    """Return the plans of others by name, for a pipeline to carry out; see `baselines`.

    No search, hence no bound.
    """
    problem = _Problem.of(_without_deltas(request))
    others = baselines(problem.layers, request.history, _splitter(request))
    return {
        name: Plan(
            request=request,
            layers=tuple(pieces_of(assignment, problem.layers)),
            timeline=problem.timeline(assignment),
            bound_s=0.0,
            is_exact=False,
            step_count=0,
        )
        for name, assignment in others.items()
    }


@dataclass(frozen=True, slots=True)
class _Problem:
    """A request in seconds."""

    layers: list[LayerOptions]
    new_tokens: Pass
    token_ids: StreamBlock

    @classmethod
    def of(cls, request: PlanRequest) -> "_Problem":
        token_ids = token_ids_block(_token_place(request.holding), request.history, request.profile)
        return cls(_options(request), Pass(_prefill_s(request), request.engine.starts_by_layer), token_ids)

    def behind(self, recomputed: int, chained: Collection[int]) -> "_Problem":
        """The problem with so many layers recomputed, and no more of them up to the last chained layer."""
        last = max(chained, default=-1)
        known: dict[tuple[int, bool, bool], LayerOptions] = {}

        def bound(number: int, layer: LayerOptions) -> LayerOptions:
            # Layers of a problem with r recomputed ones and a chain that ends at `last`:
            #
            #     0 ........ r - 1   r ........ last        last + 1 ...
            #     recompute only     by rows only           as before
            is_before, is_open = number < recomputed, number > max(last, recomputed - 1)
            if is_open:
                return layer
            options = () if is_before else layer.options
            splits = () if is_before or number in chained else layer.splits
            recompute = layer.recompute if is_before else None
            made = LayerOptions(options, splits, (), recompute)
            return known.setdefault((id(layer), is_before, number in chained), made)

        layers = [bound(number, layer) for number, layer in enumerate(self.layers)]
        return replace(self, layers=layers)

    def embedded(self, request: PlanRequest) -> "_Problem":
        """The problem with layer 0's input from token ids: one projection, and no pass through the layer."""
        shape, history = request.model.layers[0], request.history
        compute_s = request.profile.project_s(shape, history, Method.HIDDEN)
        piece = LayerPiece(Method.TOKENS, 0, history, compute_s=compute_s)
        return replace(self, layers=[LayerOptions((), (), (), piece), *self.layers[1:]])

    @property
    def after_s(self) -> float:
        """Seconds of the new tokens' pass where it waits for all layers."""
        return 0.0 if self.new_tokens.is_by_layer else sum(self.new_tokens.seconds)

    def least_s(self, assignment: Assignment) -> float:
        """Seconds of the busiest stream: the timeline ends no earlier."""
        pieces = [piece for pieces in pieces_of(assignment, self.layers) for piece in pieces]
        return max(sum(piece.copy_s for piece in pieces), sum(piece.device_s for piece in pieces))

    def timeline(self, assignment: Assignment) -> Timeline:
        return timeline(assignment, self.layers, self.new_tokens, self.token_ids)


def _options(request: PlanRequest) -> list[LayerOptions]:
    # Layers of one kind that are held alike share their options, and their ways in the search.
    known: dict[tuple[int, int], LayerOptions] = {}
    options = []
    for layer, held in zip(request.model.layers, request.holding.layers, strict=True):
        key = (id(layer), id(held))
        if key not in known:
            known[key] = layer_options(layer, held, request.history, request.profile, request.engine)
        options.append(known[key])
    return options


def _prefill_s(request: PlanRequest) -> tuple[float, ...]:
    begin, end = request.history, request.history + request.new_tokens
    if begin == end:
        return (0.0,) * len(request.model.layers)
    kinds = {id(layer): layer for layer in request.model.layers}
    known = {key: request.profile.recompute_s(layer, begin, end) for key, layer in kinds.items()}
    return tuple(known[id(layer)] for layer in request.model.layers)


def _choices(problem: _Problem) -> list[Choices]:
    known: dict[tuple[int, float], Choices] = {}
    choices = []
    for i, layer in enumerate(problem.layers):
        behind_s = problem.new_tokens.behind(i)
        key = (id(layer), behind_s)
        if key not in known:
            known[key] = Choices(
                options=tuple(option.block(behind_s) for option in layer.options),
                splits=tuple(option.block(behind_s) for option in layer.splits),
                recompute=None if layer.recompute is None else layer.recompute.block(behind_s),
                frontier=tuple(option.block(behind_s) for option in layer.frontier),
            )
        choices.append(known[key])
    return choices


def _assignment(solution: Solution, layers: Sequence[LayerOptions]) -> Assignment:
    open_layers = layers[solution.recomputed_count :]
    return Assignment(
        solution.recomputed_count,
        tuple(
            (*layer.options, *layer.splits, *layer.frontier)[pick]
            for layer, pick in zip(open_layers, solution.picks, strict=True)
        ),
    )


def _token_place(holding: Holding) -> StatePlace:
    spans = (span for layer in holding.layers for _, spans in layer.kinds for span in spans)
    return next((span.place for span in spans), StatePlace.DRAM)


def _splitter(request: PlanRequest) -> SplitAt | None:
    if not request.engine.can_split or not request.history:
        return None

    known: dict[tuple[int, int, int], Option | None] = {}

    def split_at(layer: int, cut: int) -> Option | None:
        shape, held = request.model.layers[layer], request.holding.layers[layer]
        key = (id(shape), id(held), cut)
        if key not in known:
            known[key] = split_option(shape, held, request.history, request.profile, request.engine, cut)
        return known[key]

    return split_at
