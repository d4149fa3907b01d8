"""When rows of another store are late."""

from ctxcache.core.fleet.lateness import FIRST_S, LEAST_S, Lateness


def test_lateness_follows_what_stretches_took() -> None:
    """A guess at first, then what nearly all took; one that hung says nothing of the others."""
    lateness = Lateness()
    assert lateness.late_s == FIRST_S
    for _ in range(63):
        lateness.took(0.5)
    lateness.took(60.0)
    assert lateness.late_s == 0.5
    for _ in range(64):
        lateness.took(0.001)
    assert lateness.late_s == LEAST_S
