"""The client harness finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.clients import HARNESS

WHERE = {
    "lease_outlives_stream": "dead_clients",
    "lease_believed": "thawed_clients",
    "append_outlives_stream": "cancelled_appends",
    "rows_before_commit": "out_of_turn",
    "readers_unbounded": "stalled_readers",
}


def test_clients_that_misbehave_harm_nobody() -> None:
    """Every scenario, in a short form."""
    report = HARNESS.execute(["--stalled", "30", "--cancels", "100"])

    assert report.findings == []


def test_every_control_is_tried() -> None:
    """The table above names each."""
    assert set(WHERE) == set(HARNESS.controls)


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_bug_is_found(control: str) -> None:
    """Or the run above means nothing."""
    arguments = ["--control", control, "--scenarios", WHERE[control], "--stalled", "20", "--cancels", "40"]
    report = HARNESS.execute(arguments)

    assert report.is_good, report
