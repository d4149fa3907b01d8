"""The adaptive planner: plans with a profile that follows what stages turn out to take.

Owned by whoever restores; one thread at a time. Plans are kept per request until a stage drifts. Pure.
Worst case: `PLAN_LIMIT` different requests between two that are equal, each planned anew.
"""

from collections import OrderedDict
from collections.abc import Mapping

from gpu_worker.planning.drift import Drift, DriftBounds, DriftDetector
from gpu_worker.planning.engine import Engine
from gpu_worker.planning.holding import Holding
from gpu_worker.planning.planner import Plan, Request, plan
from gpu_worker.planning.profile import Profile, Stage
from gpu_worker.planning.shape import ModelShape

PLAN_LIMIT = 256


class AdaptivePlanner:
    """Plans for one model on one engine."""

    def __init__(
        self,
        model: ModelShape,
        profile: Profile,
        *,
        engine: Engine | None = None,
        bounds: DriftBounds | None = None,
    ) -> None:
        """Start from `profile`, measured or by datasheet."""
        self._model, self._engine, self.profile = model, engine or Engine(), profile
        self._detector = DriftDetector(bounds)
        self._plans: OrderedDict[tuple[Holding, int, int], Plan] = OrderedDict()

    def plan(self, holding: Holding, history: int, new_tokens: int = 0) -> Plan:
        """Plan with what is known of the machine by now. Raises what `plan` raises."""
        key = (holding, history, new_tokens)
        if key not in self._plans:
            self._plans[key] = plan(
                Request(self._model, holding, history, self.profile, new_tokens, self._engine)
            )
        self._plans.move_to_end(key)
        while len(self._plans) > PLAN_LIMIT:
            self._plans.popitem(last=False)
        return self._plans[key]

    def observe(self, stage: Stage, *, predicted_s: float, observed_s: float) -> Drift | None:
        """Take what a stage of a plan took. A drift is already in the profile; plans made before it are stale."""
        drift = self._detector.observe(stage, predicted_s=predicted_s, observed_s=observed_s)
        if drift is not None:
            self.profile = self.profile.corrected({drift.stage: drift.factor})
            self._detector.rebase(drift.stage)
            self._plans.clear()
        return drift


def stage_seconds(chosen: Plan) -> Mapping[Stage, float]:
    """Return what a plan predicts for each stage, over all layers: to be compared with what they take."""
    seconds = dict.fromkeys(Stage, 0.0)
    for piece in (piece for pieces in chosen.layers for piece in pieces):
        seconds[Stage.READ] += piece.read_s
        seconds[Stage.COPY] += piece.copy_s
        seconds[Stage.GATHER] += piece.gather_s
        if piece.method is not None:
            seconds[Stage.of(piece.method)] += piece.compute_s
    return seconds
