"""The tracer: through how many files of this project a request runs, by how many calls, with how many hops.

A call is a Python function of the project that begins, or a coroutine of the project that goes on. A hop is a
call into another file than that of the call before it in the same thread. Generated code and foreign code are
invisible: a call through asyncio or gRPC counts as if it were direct. Only threads that start after the
tracer are traced, so the tracer is installed before the server starts.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = ("ctxcache", "gpu_worker")
GENERATED = "v1"


@dataclass(frozen=True, slots=True)
class Figures:
    """The size of a walk."""

    files: int
    calls: int
    hops: int

    @classmethod
    def least(cls, walks: Iterable["Walk"]) -> "Figures":
        """The least of each figure: a repetition beside a busy machine may wait, and go on, more often."""
        found = [walk.figures for walk in walks]
        return cls(*(min(getattr(each, name) for each in found) for name in ("files", "calls", "hops")))


@dataclass(slots=True)
class Walk:
    """The calls of one request: by thread, the file of each call in order."""

    threads: dict[int, list[str]] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """Files that ran, as paths from the root of the repository."""
        return {file for calls in self.threads.values() for file in calls}

    @property
    def stretches(self) -> list[list[tuple[str, int]]]:
        """By thread: each file in order, and how many calls followed one another in it."""
        return [_stretches(calls) for calls in self.threads.values()]

    @property
    def figures(self) -> Figures:
        """The figures of this walk."""
        calls = sum(map(len, self.threads.values()))
        return Figures(len(self.files), calls, sum(len(each) - 1 for each in self.stretches))


@dataclass(frozen=True, slots=True)
class Told:
    """A story that was told several times: the least figures, and the walk of the fewest calls."""

    figures: Figures
    walk: Walk

    @classmethod
    def of(cls, walks: Iterable[Walk]) -> "Told":
        """Sum up repetitions of one story."""
        kept = list(walks)
        return cls(Figures.least(kept), min(kept, key=lambda walk: walk.figures.calls))


class Tracer:
    """Sees calls into `packages` of this repository in all threads, and keeps the calls of an open walk."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._files: dict[CodeType, str | None] = {}
        self._walk: Walk | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace this thread and those that start meanwhile."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def walk(self) -> Iterator[Walk]:
        """Keep the calls within the block."""
        kept = Walk()
        self._walk = kept
        try:
            yield kept
        finally:
            self._walk = None

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        walk = self._walk
        if walk is None or event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            self._files[code] = self._file_of(code)
        file = self._files[code]
        if file is not None:
            walk.threads.setdefault(threading.get_ident(), []).append(file)

    def _file_of(self, code: CodeType) -> str | None:
        """The path from the root where the code is the project's own."""
        try:
            path = Path(code.co_filename).relative_to(ROOT)
        except ValueError:
            return None
        is_ours = path.parts[0] in self._packages and GENERATED not in path.parts
        return path.as_posix() if is_ours else None


def _stretches(calls: list[str]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for file in calls:
        if found and found[-1][0] == file:
            found[-1] = (file, found[-1][1] + 1)
        else:
            found.append((file, 1))
    return found
