"""The fuzzer finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.controls import arguments
from tests.faults.fuzz import HARNESS


def test_no_request_gets_through_or_breaks_anything() -> None:
    """More than a thousand requests and a hundred garbage connections."""
    report = HARNESS.execute(["--requests", "1600", "--connections", "100"])

    assert report.findings == []
    assert {"answered OK", "answered INVALID_ARGUMENT", "answered NOT_FOUND", "answered ABORTED"} <= set(
        report.figures
    )


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(arguments("fuzz", control))

    assert report.is_good, report
