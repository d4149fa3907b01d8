"""The fuzzer finds nothing in the product."""

from tests.faults.fuzz import HARNESS


def test_no_request_gets_through_or_breaks_anything() -> None:
    """More than a thousand requests and a hundred garbage connections."""
    report = HARNESS.execute(["--requests", "1600", "--connections", "100"])

    assert report.findings == []
    assert {"answered OK", "answered INVALID_ARGUMENT", "answered NOT_FOUND", "answered ABORTED"} <= set(
        report.figures
    )
