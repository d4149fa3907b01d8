"""Losses: what each packed kind costs in predictions, as measured, and which kinds a caller's bound allows.

Pure numbers. They are of small real models and the worst of them counts (docs/planner.md); a layout that packs
some layers only loses no more than one that packs all by the worst of its kinds. Worst case: a model that takes
rounding worse than those measured; `lab/studies/quantization.py` measures it.
"""

from collections.abc import Iterable, Mapping

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import StateKind

LOSSES_NATS: Mapping[StateKind, float] = {
    StateKind.HIDDEN_INT8: 7e-5,
    StateKind.KV_INT8: 7e-5,
    StateKind.HIDDEN_INT4: 2e-2,
    StateKind.KV_INT4: 2e-2,
}
"""KL divergence of predictions per token, all layers packed: measured, rounded up."""


def loss_nats(kinds: Iterable[StateKind]) -> float:
    """What saving by these kinds costs at most; 0 for kinds that are not packed."""
    return max((LOSSES_NATS.get(kind, 0.0) for kind in kinds), default=0.0)


def kinds_within(bound_nats: float) -> frozenset[StateKind]:
    """Packed kinds that cost no more than a bound on the KL divergence, in nats a token."""
    return frozenset(kind for kind, nats in LOSSES_NATS.items() if nats <= bound_nats)


def allowed_loss(text: str) -> frozenset[StateKind]:
    """Read `1e-3`, or `hidden_int8,kv_int8`. Empty: none. Raises InvalidArgument(field="loss")."""
    try:
        bound_nats = float(text or 0)
    except ValueError:
        return frozenset(_kind(name) for name in text.split(",") if name)
    if not 0 <= bound_nats < float("inf"):
        raise InvalidArgument(field="loss", problem=f"{text} nats are no bound")
    return kinds_within(bound_nats)


def _kind(name: str) -> StateKind:
    known = {kind.name.lower(): kind for kind in PACKINGS}
    if name not in known:
        raise InvalidArgument(field="loss", problem=f"{name!r} is neither nats nor one of {', '.join(known)}")
    return known[name]
