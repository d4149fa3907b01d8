"""The fuzzer finds nothing in the product."""

from tests.faults.fuzz import HARNESS
from tests.faults.sizes import sized


@sized(
    short=["--requests", "600", "--connections", "40"], long=["--requests", "5000", "--connections", "400"]
)
def test_no_request_gets_through_or_breaks_anything(size: list[str]) -> None:
    """Hundreds of requests, or thousands, and garbage connections."""
    report = HARNESS.execute(size)

    assert report.findings == []
    assert {"answered OK", "answered INVALID_ARGUMENT", "answered NOT_FOUND", "answered ABORTED"} <= set(
        report.figures
    )
