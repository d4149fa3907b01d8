"""The client harness finds nothing in the product."""

from tests.faults.clients import HARNESS
from tests.faults.sizes import sized


@sized(
    short=["--stalled", "20", "--cancels", "20", "--thaws", "1"],
    long=["--stalled", "60", "--cancels", "150", "--thaws", "2"],
)
def test_clients_that_misbehave_harm_nobody(size: list[str]) -> None:
    """Every scenario."""
    report = HARNESS.execute(size)

    assert report.findings == []
