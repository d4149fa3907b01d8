"""The mutants as data: what one line is made of another, and which tests must notice.

    [[mutant]]
    name = "fork-leaves-tail-open"
    file = "ctxcache/cache/sessions.py"
    old = "segment.is_open = False"            # occurs once in the file
    new = "segment.is_open = True"
    why = "source and fork append to the same rows"
    tests = ["tests/cache/test_cache_forks.py"]

Anchored by text, so that a line that moved, or is there twice, is an error and no mutant that is silently
left out. Knows no tests' results. Worst case: a TableError with the mutant's name.
"""

import ast
import functools
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent / "tables"
ROOT = Path(__file__).parents[2]
WIDER = {
    "ctxcache/cache": ("tests/cache", "tests/core"),
    "ctxcache/core": ("tests/core", "tests/cache"),
    "ctxcache/storage": ("tests/metadata", "tests/tiers", "tests/cache"),
    "ctxcache/format": ("tests/format", "tests/core", "tests/cache"),
    "ctxcache/service": ("tests/service", "tests/client"),
    "ctxcache/client": ("tests/client", "tests/service"),
    "ctxcache": ("tests/metadata", "tests/cache", "tests/test_ssd_directories.py"),
    "gpu_worker/saving": ("tests/gpu_worker/saving",),
}
"""The tests that run when those that were named have not noticed.

The longest prefix of the file's name decides.
"""


class TableError(Exception):
    """A mutant that cannot be made as it is written."""

    def __init__(self, mutant: str, problem: str) -> None:
        super().__init__(f"{mutant}: {problem}")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line. `tests` are expected to notice it."""

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    @property
    def wider(self) -> tuple[str, ...]:
        """The tests that run when its own have not noticed: none where no room of tests has the file."""
        rooms = [prefix for prefix in WIDER if self.file.startswith(f"{prefix}/")]
        return WIDER[max(rooms, key=len)] if rooms else ()

    def apply(self, source: str) -> str:
        """Change the file's text. Raises TableError unless that makes another program that compiles."""
        count = source.count(self.old)
        if count != 1:
            raise TableError(
                self.name, f"no longer applies: {self.old!r} occurs {count} times in {self.file}"
            )
        mutated = source.replace(self.old, self.new)
        try:
            is_same = ast.dump(ast.parse(mutated)) == _program(source)
        except SyntaxError as error:
            raise TableError(self.name, f"does not compile: {error}") from error
        if is_same:
            raise TableError(self.name, "is the same program")
        return mutated


def load(tables: Iterable[Path] | None = None) -> list[Mutant]:
    """Read the tables, all of them by default. Raises TableError, OSError."""
    paths = sorted(TABLES.glob("*.toml")) if tables is None else list(tables)
    return [_mutant(entry) for path in paths for entry in tomllib.loads(path.read_text())["mutant"]]


def check(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """The problems of the tables: a sentence per mutant that cannot be made or tested."""
    problems = []
    names = [mutant.name for mutant in mutants]
    problems += [
        f"{name}: the name is there twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    for mutant in mutants:
        try:
            mutant.apply((root / mutant.file).read_text())
        except (TableError, OSError) as error:
            problems.append(str(error))
        problems += [f"{mutant.name}: {problem}" for problem in _missing(mutant.tests, root)]
        if not mutant.wider:
            problems.append(f"{mutant.name}: no room of tests has {mutant.file}")
    # A room that was renamed would have its mutants judged by other tests.
    problems += [f"{room} is no room, and has tests" for room in WIDER if not (root / room).is_dir()]
    return problems


@functools.lru_cache(maxsize=64)
def _program(source: str) -> str:
    """What a text means, the same for all mutants of a file."""
    return ast.dump(ast.parse(source))


def _mutant(entry: dict[str, object]) -> Mutant:
    try:
        tests = entry["tests"]
        if not isinstance(tests, list) or not tests:
            raise TableError(str(entry["name"]), "names no tests")
        name, file, old, new, why = (str(entry[field]) for field in ("name", "file", "old", "new", "why"))
        return Mutant(name, file, old, new, why, tuple(map(str, tests)))
    except KeyError as error:
        raise TableError(str(entry.get("name")), f"has no {error.args[0]}") from error


def _missing(tests: Iterable[str], root: Path) -> Iterable[str]:
    for test in tests:
        path, _, function = test.partition("::")
        if not (root / path).exists():
            yield f"there is no {path}"
        elif function and f"def {function.partition('[')[0]}(" not in (root / path).read_text():
            yield f"there is no {test}"
