"""How a person follows the demo: the seam, lines of text, a live picture on a terminal, and figures in words.

Knows no models. Lines serve where nothing can be redrawn. The live picture is drawn in a thread of rich's
own, twelve times a second, and a turn that is over stays above it. Worst case: a terminal too narrow for it
wraps.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gpu_worker.planning.plan import Method
from lab.demo.results import ReferenceTurn, RestoredTurn, Source, WindowTurn
from lab.demo.subject import METHOD_TITLES

USER_CHARS = 72


class View(Protocol):
    """The events, in the order in which they happen."""

    def say(self, text: str) -> None:
        """A sentence that stays."""

    def doing(self, text: str) -> None:
        """The step that begins now."""

    def begin_turn(self, title: str, user_text: str) -> None:
        """A turn of the conversation begins."""

    def begin_reply(self, who: str) -> None:
        """One of those who answer begins to."""

    def reply(self, text: str) -> None:
        """The reply as far as it goes."""

    def end_reply(self, facts: str, *, is_good: bool) -> None:
        """The reply is whole; `facts` are what came of it."""

    def end_turn(self) -> None:
        """Everybody has answered."""


class LineView:
    """A line per event on a stream that may be a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._who = ""
        self._reply = ""
        self._doing = ""
        self._is_in_turn = False

    def say(self, text: str) -> None:
        """See View."""
        self._write(text)

    def doing(self, text: str) -> None:
        """See View.

        Neither how far a step is, after its comma, nor a step of a turn makes a line of its own.
        """
        step = text.partition(", ")[0]
        if step != self._doing and not self._is_in_turn:
            self._doing = step
            self._write(f"... {step}")

    def begin_turn(self, title: str, user_text: str) -> None:
        """See View."""
        self._is_in_turn = True
        self._write(f"\n{title}\n  user            {shortened(user_text)}")

    def begin_reply(self, who: str) -> None:
        """See View."""
        self._who, self._reply = who, ""

    def reply(self, text: str) -> None:
        """See View."""
        self._reply = text

    def end_reply(self, facts: str, *, is_good: bool) -> None:
        """See View."""
        mark = "" if is_good else "DIFFERENT: "
        self._write(f"  {self._who:<15} {one_line(self._reply)}\n  {'':<15} {mark}{facts}")

    def end_turn(self) -> None:
        """See View."""
        self._is_in_turn = False

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


def shortened(text: str, size: int = USER_CHARS) -> str:
    """The begin and the end of a text, which is where the question is."""
    line = one_line(text)
    if len(line) <= 2 * size:
        return line
    return f"{line[:size]} [...] {line[-size:]}"


def one_line(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


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


def duration(ns: float) -> str:
    """`41 ms` below a second, else `1.32 s`."""
    return f"{ns / 1e6:.0f} ms" if ns < 1e9 else f"{ns / 1e9:.2f} s"


def source_words(source: Source) -> str:
    """The tier's name."""
    return {Source.DRAM: "DRAM", Source.SSD: "SSD", Source.MIXED: "DRAM and SSD"}.get(source, "nowhere")


def reference_facts(turn: ReferenceTurn) -> str:
    """One line about the run that never drops its state."""
    return (
        f"{turn.history_token_count:,} tokens kept in the engine; first token after"
        f" {duration(turn.first_token_ns)}"
    )


def restored_facts(turn: RestoredTurn) -> str:
    """One line: where the state came from, how fast, and whether the reply is the same."""
    if turn.problem:
        return turn.problem
    same = f"all {len(turn.token_ids)} tokens identical"
    return f"{_origin(turn)}; first token after {duration(turn.first_token_ns)}; {same}"


def window_facts(turn: WindowTurn) -> str:
    """One line about a turn that did not fit into the window."""
    return turn.problem or (
        f"dropped {turn.dropped_token_count:,} of {turn.history_token_count + turn.dropped_token_count:,}"
        f" tokens, restored {turn.reused_token_count:,} ({turn.sink_count} sinks among them) at new"
        f" positions, prefilled only the {turn.prefilled_token_count:,} new ones; first token after"
        f" {duration(turn.first_token_ns)}"
    )


def _origin(turn: RestoredTurn) -> str:
    count, took, source = turn.reused_token_count, duration(turn.restore_ns), source_words(turn.source)
    if turn.source is Source.NOWHERE:
        return f"{turn.prefilled_token_count:,} new tokens, nothing to restore"
    if turn.method is Method.TOKENS:
        return f"{count:,} tokens recomputed from token ids ({source}) in {took}"
    return f"{count:,} tokens restored from {source} ({METHOD_TITLES[turn.method]}) in {took}"
