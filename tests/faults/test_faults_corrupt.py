"""No damage to bytes on disk passes for right."""

from tests.faults.corrupt import HARNESS
from tests.faults.sizes import sized


@sized(
    short=["--flips", "100", "--misplacements", "40", "--metadata-faults", "20", "--refusals", "20"],
    long=["--flips", "1000", "--misplacements", "400", "--metadata-faults", "200", "--refusals", "200"],
)
def test_no_damage_passes_for_right(size: list[str]) -> None:
    """Damages of every kind: right bytes, DATA_LOSS or a refused start, and no silent loss."""
    report = HARNESS.execute(size)

    assert report.findings == []
    assert report.figures["data_loss_count"]
    assert report.figures["refused_start_count"]
    assert report.figures["rebuilt_count"]
