"""The soak finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.controls import arguments
from tests.faults.soak import HARNESS


def test_nothing_is_left_of_what_clients_did() -> None:
    """Some thousand operations by clients that come and go."""
    report = HARNESS.execute(["--operations", "1600", "--rounds", "4"])

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_leak_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(arguments("soak", control))

    assert report.is_good, report
