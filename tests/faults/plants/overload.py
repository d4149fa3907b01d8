"""Bugs that the overload harness must find."""

from ctxcache.service.edge import Admission, Refusal
from tests.faults.planted import plant


@plant
def admission_off(_: int) -> None:
    """There is no bound: everything that comes is begun."""
    setattr(Admission, "refusal", lambda _: None)  # noqa: B010  # mypy would have it typed


@plant
def refusal_leaks(_: int) -> None:
    """Each refusal leaves something behind."""
    kept: list[bytes] = []
    known = Admission.refusal

    def refusal(admission: Admission) -> Refusal | None:
        found = known(admission)
        if found:
            kept.append(b"\1" * (1 << 20))
        return found

    setattr(Admission, "refusal", refusal)  # noqa: B010
