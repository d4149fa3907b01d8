"""Bugs that the neighbour harness must find."""

from ctxcache.service.fairness import LoopSlice
from tests.faults.planted import plant


@plant
def never_rests(_: int) -> None:
    """What takes long is never put off for others."""
    setattr(LoopSlice, "is_over", property(lambda _: False))  # noqa: B010  # mypy would have it typed
