"""Bugs that the overload harness must find."""

from ctxcache.service.admission import Admission, Refusal
from tests.faults.planted import plant


@plant
def admission_off(_: int) -> None:
    """There is no bound: everything that comes is begun."""
    setattr(Admission, "refusal", lambda _: None)  # noqa: B010  # mypy would have it typed


LEAKS, LEAK_BYTES = 64, 4 << 20


@plant
def refusal_leaks(_: int) -> None:
    """Each of the first refusals leaves 4 MiB behind."""
    kept: list[bytes] = []
    known = Admission.refusal

    def refusal(admission: Admission) -> Refusal | None:
        found = known(admission)
        if found and len(kept) < LEAKS:
            kept.append(b"\1" * LEAK_BYTES)
        return found

    setattr(Admission, "refusal", refusal)  # noqa: B010
