"""No damage to bytes on disk passes for right."""

from tests.faults.corrupt import HARNESS


def test_no_damage_passes_for_right() -> None:
    """Some hundred damages of every kind: right bytes, DATA_LOSS or a refused start, and no silent loss."""
    report = HARNESS.execute([])

    assert report.findings == []
    assert report.figures["data_loss_count"]
    assert report.figures["refused_start_count"]
    assert report.figures["rebuilt_count"]
