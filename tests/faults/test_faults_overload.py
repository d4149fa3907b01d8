"""Overload finds nothing in the product, however busy the machine."""

from tests.faults.overload import HARNESS
from tests.faults.sizes import sized


@sized(
    short=["--rounds", "1", "--seconds", "1", "--untimed"],
    long=["--rounds", "2", "--seconds", "5", "--untimed"],
)
def test_what_is_too_much_is_refused_and_the_rest_served(size: list[str]) -> None:
    """Calls are served or refused with a delay, memory stays in its budget, afterwards all is as before."""
    report = HARNESS.execute(size)

    assert report.findings == []
