"""The parts that `export` and `import` share: a bar of progress, and the report of each session.

Worst case: some sessions failed. Each is reported, and the first gives the sentence and the exit code.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ctxcache.archive.outcomes import Outcome, Status
from ctxcache.cli.call import Call
from ctxcache.cli.units import human_size
from ctxcache.errors import CacheError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ctxcache.cli.plain import Plain
PIPE = "-"


class Bar:
    """A bar of one task after the other; draws nothing where standard error is no terminal."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._size_bytes = 0

    def begin(self, what: str, total: int | None) -> None:
        """Begin a task of so many steps; None where that is not known."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task, self._size_bytes = self._bars.add_task(what, total=total, size=""), 0

    def step(self, name: str, count: int, size_bytes: int) -> None:
        """So many steps more, which moved so many bytes."""
        self._size_bytes += size_bytes
        if self._task is not None:
            self._bars.update(self._task, description=name, advance=count, size=human_size(self._size_bytes))

    def at(self, what: str, done: int, total: int) -> None:
        """So much of a task is done, of so much in all."""
        if self._task is not None:
            self._bars.update(self._task, description=what, completed=min(done, total), total=total)


@contextmanager
def bar() -> Iterator[Bar]:
    """Draw on standard error, if that is a terminal, until the block ends."""
    from rich.console import Console  # noqa: PLC0415  --help draws no bars
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bars:
        yield Bar(bars)


def show_outcomes(call: Call, path: str, outcomes: Sequence[Outcome], *, to_stderr: bool = False) -> None:
    """Print what became of each session."""
    sessions: list[Plain] = [_plain(one) for one in outcomes if one.session]
    text = "\n".join([*(_line(one) for one in outcomes if one.session), _sum(path, outcomes)])
    call.show_facts({"file": path, "sessions": sessions}, text, to_stderr=to_stderr)


def raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the first failure, as one of so many."""
    failed = [one for one in outcomes if one.status is Status.FAILED]
    if not failed:
        return
    # The file's own failure, if there is one: no session's line reports it.
    first = next((one for one in failed if not one.session), failed[0])
    error = first.error
    if error is None or len(outcomes) == 1 or not first.session:
        raise error or CacheError()
    untried = sum(one.status is Status.UNTRIED for one in outcomes)
    rest = f", {untried} were not tried" if untried else ""
    told = f"{len(failed)} of {len(outcomes)} sessions failed{rest}; {first.session}"
    raise type(error)(f"{told}: {error}")


def counted(session_count: int, token_count: int, segment_count: int) -> str:
    """How much a backup is of, for people."""
    sessions = f"{session_count} session{'s' * (session_count != 1)}"
    return f"{sessions} with {token_count} tokens in {segment_count} segments"


def no_terminal(stream_name: str) -> typer.BadParameter:
    """The error for a terminal in the place of a pipe."""
    return typer.BadParameter(f"{stream_name} is a terminal: give a file, or a pipe")


def _plain(one: "Outcome") -> "Plain":
    return {
        "session": one.session,
        "target": one.target,
        "status": one.status,
        "token_count": one.token_count,
        "size_bytes": one.size_bytes,
        "reason": one.error.reason if one.error else "",
        "problem": " ".join(str(one.error).split()) if one.error else "",
    }


def _line(one: "Outcome") -> str:
    name = one.session if one.target == one.session else f"{one.session} as {one.target}"
    if one.error:
        return f"{one.status:9} {name}: {' '.join(str(one.error).split())} ({one.error.reason})"
    return f"{one.status:9} {name}: {one.token_count} tokens, {human_size(one.size_bytes)}"


def _sum(path: str, outcomes: Sequence[Outcome]) -> str:
    counts: dict[str, int] = {}
    for one in outcomes:
        if one.session:
            counts[one.status] = counts.get(one.status, 0) + 1
    size = human_size(sum(one.size_bytes for one in outcomes))
    told = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no sessions"
    return f"{path}: {told}, {size}"
