"""The soak finds nothing in the product, and everything that is planted."""

import pytest

from tests.faults.soak import HARNESS


def test_nothing_is_left_of_what_clients_did() -> None:
    """Some thousand operations by clients that come and go."""
    report = HARNESS.execute(["--operations", "1600", "--rounds", "4"])

    assert report.findings == []


@pytest.mark.parametrize("control", HARNESS.controls)
def test_a_planted_leak_is_found(control: str) -> None:
    """Or the run above means nothing."""
    operations = {"lease_kept_on_cancel": "400", "reads_remembered": "1200"}[control]
    report = HARNESS.execute(
        ["--operations", operations, "--rounds", "2", "--settle-s", "2", "--control", control]
    )

    assert report.is_good, report
