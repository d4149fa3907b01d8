"""The adaptive planner: plans with a profile that follows what stages turn out to take.

Every observation beside its prediction moves a stage's smoothed ratio. A stage that is off for long enough is
reported once, with the factor that puts its predictions right. It must come back near 1, or be corrected,
before it is reported again: noise around the border asks for one new plan, not many. Plans are kept per
request until a stage drifts. Used by one thread at a time. Pure, no clock. Worst case: a stage that
alternates quickly between two speeds is reported as their mean; or `PLAN_LIMIT` different requests between
two that are equal, each planned anew.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.holding import EngineAbilities, Holding
from gpu_worker.planning.plan import Stage
from gpu_worker.planning.planner import Plan, PlanRequest, plan
from gpu_worker.planning.profile import NO_LIMIT, Profile
from gpu_worker.planning.shape import ModelShape
from gpu_worker.planning.together import PlannedTogether, plan_together

# Ratios are kept as logarithms: twice as long and half as long are as far from 0, and average to it.
#
#     log 1.25 ─ ─ ─ ─ ─ ─ ─ ─ ─┬──────●    enter, eight in a row: reported, the profile is corrected
#     log 1.10 ─ ─ ─ ─ ─ ─ ─ ─ /│─ ─ ─ ─    leave: a report is over only within this
#         0    ───●────●────●─'
#    -log 1.10 ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
#    -log 1.25 ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─    the same for a stage that is faster than thought
_MOST = math.log(4.0)
"""The most that one observation counts, so that a single stall is not a trend."""


@dataclass(frozen=True, slots=True)
class DriftBounds:
    """When a stage counts as off.

    A stage is reported when its smoothed ratio of observed to predicted seconds is above `enter` or below its
    inverse for `least_count` observations in a row. The report is over when the ratio is within `leave`.
    `weight`: that of the newest observation.
    """

    enter: float = 1.25
    leave: float = 1.10
    least_count: int = 8
    weight: float = 0.1

    def __post_init__(self) -> None:
        if not (1 < self.leave < self.enter < NO_LIMIT and self.least_count >= 1 and 0 < self.weight <= 1):
            raise InvalidArgument(field="drift", problem="need 1 < leave < enter, a count and a weight")


@dataclass(frozen=True, slots=True)
class Drift:
    """A stage that is off, and by which factor its predictions are to be corrected."""

    stage: Stage
    factor: float


@dataclass(slots=True)
class _Trend:
    smoothed: float = 0.0
    count: int = 0
    off_count: int = 0
    is_off: bool = False


class DriftDetector:
    """Watches all stages of one profile. Used by one thread at a time."""

    def __init__(self, bounds: DriftBounds | None = None) -> None:
        """`bounds` default to a quarter off, for eight observations in a row."""
        self._bounds = bounds or DriftBounds()
        self._trends = {stage: _Trend() for stage in Stage}

    def observe(self, stage: Stage, *, predicted_s: float, observed_s: float) -> Drift | None:
        """Take one observation. Returns a drift where the stage just turned out to be off.

        Predictions are those of the profile in use, corrections included. Times that say nothing (0 or
        less, not finite) are passed over.
        """
        # A stage that a plan does not use is predicted as 0, and has no logarithm.
        if not (0 < predicted_s < NO_LIMIT and 0 < observed_s < NO_LIMIT):
            return None
        trend = self._trends[stage]
        ratio = max(-_MOST, min(_MOST, math.log(observed_s / predicted_s)))
        trend.count += 1
        # First observations weigh as in a mean: the smoothed ratio starts where the stage is, not at 1.
        trend.smoothed += max(self._bounds.weight, 1 / trend.count) * (ratio - trend.smoothed)
        return self._judge(stage, trend)

    def rebase(self, stage: Stage) -> None:
        """Forget a stage whose profile was corrected: its ratios were to another profile's predictions."""
        self._trends[stage] = _Trend()

    @property
    def factors(self) -> Mapping[Stage, float]:
        """The smoothed ratio of observed to predicted, of each stage that was observed."""
        return {stage: math.exp(trend.smoothed) for stage, trend in self._trends.items() if trend.count}

    def _judge(self, stage: Stage, trend: _Trend) -> Drift | None:
        off = abs(trend.smoothed)
        # An observation within the border begins the count anew.
        trend.off_count = trend.off_count + 1 if off > math.log(self._bounds.enter) else 0
        if trend.is_off:
            trend.is_off = off > math.log(self._bounds.leave)
            return None
        trend.is_off = trend.off_count >= self._bounds.least_count
        return Drift(stage, math.exp(trend.smoothed)) if trend.is_off else None


PLAN_LIMIT = 256


class AdaptivePlanner:
    """Plans for one model on one engine."""

    def __init__(
        self,
        model: ModelShape,
        profile: Profile,
        *,
        engine: EngineAbilities | None = None,
        bounds: DriftBounds | None = None,
    ) -> None:
        """Start from `profile`, measured or by datasheet."""
        self._model, self._engine, self.profile = model, engine or EngineAbilities(), profile
        self._detector = DriftDetector(bounds)
        self._plans: OrderedDict[tuple[Holding, int, int], Plan] = OrderedDict()

    def plan(self, holding: Holding, history: int, new_tokens: int = 0) -> Plan:
        """Plan with what is known of the machine by now. Raises what `plan` raises."""
        key = (holding, history, new_tokens)
        if key not in self._plans:
            self._plans[key] = plan(
                PlanRequest(self._model, holding, history, self.profile, new_tokens, self._engine)
            )
        self._plans.move_to_end(key)
        while len(self._plans) > PLAN_LIMIT:
            self._plans.popitem(last=False)
        return self._plans[key]

    def together(self, sessions: Sequence[tuple[Holding, int, int]]) -> PlannedTogether:
        """Plan restores of (holding, history, new tokens) that begin now; each is computed when it is whole.

        Raises what `plan_together` raises.
        """
        # Passes of several sessions share the device: each begins when its session is whole.
        engine = replace(self._engine, starts_by_layer=False)
        return plan_together(
            [
                PlanRequest(self._model, holding, history, self.profile, new_tokens, engine)
                for holding, history, new_tokens in sessions
            ]
        )

    def observe(self, stage: Stage, *, predicted_s: float, observed_s: float) -> Drift | None:
        """Take how long a stage of a plan took.

        A drift is already in the profile; plans made before it are stale.
        """
        drift = self._detector.observe(stage, predicted_s=predicted_s, observed_s=observed_s)
        if drift is not None:
            self.profile = self.profile.corrected({drift.stage: drift.factor})
            self._detector.rebase(drift.stage)
            # The plans were made by the old profile, and any of them may use the stage.
            self._plans.clear()
        return drift


def stage_seconds(chosen: Plan) -> Mapping[Stage, float]:
    """Return the seconds that a plan predicts for each stage, over all layers."""
    seconds = dict.fromkeys(Stage, 0.0)
    for piece in (piece for pieces in chosen.layers for piece in pieces):
        seconds[Stage.READ] += piece.read_s
        seconds[Stage.COPY] += piece.copy_s
        seconds[Stage.GATHER] += piece.gather_s
        if piece.method is not None:
            seconds[Stage.of(piece.method)] += piece.compute_s
    return seconds
