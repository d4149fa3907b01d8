"""How long steps tell a person that they move; knows nothing of what the steps do.

Worst case: a terminal that cannot redraw gets no bar, and the step runs in silence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Is called as a step moves; must return at once and never raise."""

    def __call__(self, step: str, done_bytes: int, total_bytes: int, /) -> None:
        """`step` names the work; a total of 0 means that the end is not known."""


def silent(_step: str, _done_bytes: int, _total_bytes: int, /) -> None:
    """Show nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Draw one bar per step until the block ends; on stderr unless a console is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    task_by_step: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console or Console(stderr=True)) as bars:

        def show(step: str, done_bytes: int, total_bytes: int, /) -> None:
            if step not in task_by_step:
                task_by_step[step] = bars.add_task(step)
            bars.update(task_by_step[step], completed=done_bytes, total=total_bytes or None)

        yield show
