"""Nothing acknowledged as durable is lost by a power cut."""

import sys

import pytest

from tests.faults.harness import Report, Unsupported
from tests.faults.powercut import HARNESS
from tests.faults.sizes import sized


def execute(given: list[str]) -> Report:
    """Run the harness, or skip so that nobody overlooks it."""
    try:
        return HARNESS.execute(given)
    except Unsupported as reason:
        sys.__stderr__.write(f"\nNOTICE: power cuts are NOT tested here: {reason}\n")  # type: ignore[union-attr]
        pytest.skip(f"NOTICE: power cuts are not tested here: {reason}")


@sized(short=["--cuts", "6"], long=["--cuts", "60"])
def test_power_cuts_lose_nothing_that_was_acknowledged_as_durable(size: list[str]) -> None:
    """Cuts of one disk and of two."""
    report = execute(size)

    assert report.findings == []
    assert report.figures["verified_token_count"]
