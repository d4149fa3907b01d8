"""The report of the stories tells the same each time."""

from pathlib import Path

from tests.stories.store import tell


def test_a_request_is_as_long_each_time(tmp_path: Path) -> None:
    """Two stores give the same figures: they are of the code, not of the run."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (tell("append durable", tmp_path / name) for name in "ab")

    assert first.figures == second.figures
