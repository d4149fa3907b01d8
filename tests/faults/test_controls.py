"""Harnesses find a bug that is planted: a quick one of each here, all of them by `make controls`."""

import pytest

from tests.faults.controls import QUICK, arguments, harnesses
from tests.faults.harness import Harness, Unsupported


@pytest.mark.parametrize(
    "harness", [each for each in harnesses() if each.name in QUICK], ids=lambda each: each.name
)
def test_a_planted_bug_is_found(harness: Harness) -> None:
    """Or the other runs of the harness mean nothing."""
    try:
        report = harness.execute(arguments(harness.name, QUICK[harness.name]))
    except Unsupported as reason:
        pytest.skip(f"NOTICE: planted bugs of {harness.name} are not tested here: {reason}")

    assert report.is_good, report
