"""The client harness finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.clients import HARNESS
from tests.faults.controls import arguments


def test_clients_that_misbehave_harm_nobody() -> None:
    """Every scenario, in a short form."""
    report = HARNESS.execute(["--stalled", "30", "--cancels", "40", "--thaws", "1"])

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(arguments("clients", control))

    assert report.is_good, report
