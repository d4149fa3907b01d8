"""Bugs that the neighbour harness must find."""

import os

from ctxcache.service.fairness import LoopSlice, Usage
from tests.faults.planted import plant


@plant
def never_rests(_: int) -> None:
    """Long work is never put off for other calls."""
    setattr(LoopSlice, "is_over", property(lambda _: False))  # noqa: B010  # mypy would have it typed


@plant
def greedy_tenants_never_wait(_: int) -> None:
    """Every call begins at once, and gRPC's threads wait for the loop's."""
    setattr(Usage, "is_greedy", lambda _, __: False)  # noqa: B010  # as above
    setattr(os, "sched_yield", lambda: None)  # noqa: B010  # as above
