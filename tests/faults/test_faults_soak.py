"""The soak finds nothing in the product."""

from tests.faults.sizes import sized
from tests.faults.soak import HARNESS


@sized(short=["--operations", "1000", "--rounds", "3"], long=["--operations", "8000", "--rounds", "5"])
def test_nothing_is_left_of_what_clients_did(size: list[str]) -> None:
    """Operations by clients that come and go."""
    report = HARNESS.execute(size)

    assert report.findings == []
