"""No damage to bytes on disk passes for right, and every planted bug is found."""

import pytest

from tests.faults.controls import arguments
from tests.faults.corrupt import HARNESS


def test_no_damage_passes_for_right() -> None:
    """Some hundred damages of every kind: right bytes, DATA_LOSS or a refused start, and no silent loss."""
    report = HARNESS.execute([])

    assert report.findings == []
    assert report.figures["data_loss_count"]
    assert report.figures["refused_start_count"]
    assert report.figures["rebuilt_count"]


@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_a_bug_that_damage_shows_is_found(control: str) -> None:
    """Or the run above means nothing."""
    report = HARNESS.execute(arguments("corrupt", control))

    assert report.is_good, report
