"""The client harness finds nothing in the product."""

from tests.faults.clients import HARNESS


def test_clients_that_misbehave_harm_nobody() -> None:
    """Every scenario, in a short form."""
    report = HARNESS.execute(["--stalled", "30", "--cancels", "40", "--thaws", "1"])

    assert report.findings == []
