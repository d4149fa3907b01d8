"""Overload finds nothing in the product, however busy the machine."""

from tests.faults.overload import HARNESS

SHORT = ["--rounds", "1", "--seconds", "1", "--untimed"]


def test_what_is_too_much_is_refused_and_the_rest_served() -> None:
    """Calls are served or refused with a delay, memory stays in its budget, afterwards all is as before."""
    report = HARNESS.execute(SHORT)

    assert report.findings == []
