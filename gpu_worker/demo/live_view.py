"""The conversation as it happens, redrawn on a terminal; a turn that is over stays above.

Knows rich, no models. Drawing runs in rich's own thread, twelve times a second. Worst case: a
terminal too narrow for it wraps.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gpu_worker.demo.view import one_line, shortened

_REDRAWS_PER_S = 12


@dataclass(slots=True)
class _Line:
    who: str
    text: str = ""
    facts: str = ""
    is_good: bool = True


class LiveView:
    """A View on a terminal. A context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._lines: list[_Line] = []
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=_REDRAWS_PER_S, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """See View."""
        self._console.print(Text(text))

    def doing(self, text: str) -> None:
        """See View."""
        self._spinner.update(text=Text(text, "dim"))

    def begin_turn(self, title: str, user_text: str) -> None:
        """See View."""
        self._title, self._lines = title, [_Line("user", shortened(user_text))]

    def begin_reply(self, who: str) -> None:
        """See View."""
        self._lines.append(_Line(who))

    def reply(self, text: str) -> None:
        """See View."""
        self._lines[-1].text = one_line(text)

    def end_reply(self, facts: str, *, is_good: bool) -> None:
        """See View."""
        self._lines[-1].facts, self._lines[-1].is_good = facts, is_good

    def end_turn(self) -> None:
        """See View."""
        self._console.print(self._turn())
        self._title, self._lines = "", []

    def _draw(self) -> RenderableType:
        return Group(self._turn(), self._spinner) if self._lines else self._spinner

    def _turn(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for line in self._lines:
            grid.add_row(line.who, Text(line.text))
            if line.facts:
                mark = Text("✓ ", "green") if line.is_good else Text("✗ ", "bold red")
                grid.add_row("", mark + Text(line.facts, "dim" if line.is_good else "bold red"))
        return Group(Text(f"\n{self._title}", "bold"), grid)
