"""The ratchet: the committed figures of every story, and how a story is held to its own.

A figure above its bound is a regression. A figure far below its bound is progress that the bound must follow
in the same commit, or the progress could be lost again unseen.
"""

import tomllib
from dataclasses import asdict
from pathlib import Path

from tests.stories.tracer import Figures

PATH = Path(__file__).with_name("bounds.toml")
SLACK_SHARE, SLACK = 0.05, 2
"""How far below its bound a figure may be: the greater of a share of the bound and a number."""


def load() -> dict[str, Figures]:
    """The bounds by story."""
    return {story: Figures(**figures) for story, figures in tomllib.loads(PATH.read_text()).items()}


def complaints(story: str, figures: Figures, bound: Figures) -> list[str]:
    """A sentence for each figure that is above its bound, or further below than the slack."""
    found = []
    for name, limit in asdict(bound).items():
        figure = getattr(figures, name)
        if figure > limit:
            found.append(f"{story}: {figure} {name}, above the bound of {limit}")
        elif figure < limit - max(SLACK, SLACK_SHARE * limit):
            found.append(f"{story}: {figure} {name}: lower the bound to {figure} (it is {limit})")
    return found
