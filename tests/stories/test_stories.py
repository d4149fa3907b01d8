"""Each request of the store runs through no more files, calls and hops than its committed bound."""

from pathlib import Path

import pytest

from tests.stories import bounds
from tests.stories.store import STORIES, tell
from tests.stories.tracer import Figures


@pytest.mark.parametrize("story", STORIES)
def test_a_request_keeps_to_its_bound(story: str, tmp_path: Path) -> None:
    """A longer way is a regression; a much shorter one has its bound lowered with it."""
    told = tell(story, tmp_path)

    complaints = bounds.complaints(story, told.figures, bounds.load()[story])
    assert not complaints, "\n".join(complaints)


def test_a_request_is_as_long_each_time(tmp_path: Path) -> None:
    """Two stores give the same figures: a bound is of the code, not of the run."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (tell("append durable", tmp_path / name) for name in "ab")

    assert first.figures == second.figures


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (Figures(40, 200, 100), []),
        (Figures(38, 190, 95), []),
        (Figures(41, 200, 100), ["s: 41 files, above the bound of 40"]),
        (
            Figures(40, 201, 101),
            ["s: 201 calls, above the bound of 200", "s: 101 hops, above the bound of 100"],
        ),
        (Figures(37, 200, 100), ["s: 37 files: lower the bound to 37 (it is 40)"]),
        (
            Figures(40, 189, 94),
            [
                "s: 189 calls: lower the bound to 189 (it is 200)",
                "s: 94 hops: lower the bound to 94 (it is 100)",
            ],
        ),
    ],
)
def test_a_bound_is_kept_from_both_sides(figures: Figures, expected: list[str]) -> None:
    """Nothing above the bound passes, and nothing further below than 5 % and 2."""
    assert bounds.complaints("s", figures, Figures(40, 200, 100)) == expected
