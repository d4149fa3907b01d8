"""Requests of the planner, with everything held unless a test says otherwise."""

from collections.abc import Sequence

from ctxcache.format.streams import StateKind
from gpu_worker.planning.datasheets import known_model, known_profile
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding
from gpu_worker.planning.planner import PlanRequest
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import LayerKind, ModelShape

ALL_KINDS = (StateKind.HIDDEN, StateKind.KV, StateKind.LATENT)


def request(
    model: str | ModelShape,
    history: int,
    *,
    profile: str | Profile = "a100-40gb",
    kinds: Sequence[StateKind] = (StateKind.HIDDEN, StateKind.KV),
    place: StatePlace = StatePlace.SSD,
    new_tokens: int = 0,
    engine: EngineAbilities | None = None,
) -> PlanRequest:
    """A request for a session of which every layer is held in `kinds`, all in one place."""
    shape = known_model(model) if isinstance(model, str) else model
    if any(layer.kind is LayerKind.LATENT for layer in shape.layers):
        kinds = tuple(StateKind.LATENT if kind is StateKind.KV else kind for kind in kinds)
    return PlanRequest(
        model=shape,
        holding=Holding.alike(len(shape.layers), kinds, [HeldSpan(place, 0, history)]),
        history=history,
        profile=known_profile(profile) if isinstance(profile, str) else profile,
        new_tokens=new_tokens,
        engine=engine or EngineAbilities(),
    )
