"""What a seed chooses: places in functions, each kind as often as another, the same ones every time."""

import ast
import json
from collections import Counter
from pathlib import Path

from tests.mutants.chosen import table_of
from tests.mutants.places import changes, choose
from tests.mutants.reached import Reached
from tests.mutants.table import ROOT

KINDS = ("arithmetic", "boolean", "comparison", "constant", "dropped", "swapped")
"""Those that the room `wire` has: nothing awaits there."""
SOURCE = '''"""A module."""
LIMIT = 5


async def put(self, name: str | None, size: int = 3) -> None:
    """A function."""
    if size < 1 or not name:
        raise ValueError(f"{size + 1} is wrong")
    await self.room(size)
    self.check(name)
    self.count += size
    self.names.append(name)
    log.info("put %d", size - 1)
'''


def told(source: str = SOURCE) -> set[tuple[str, str, str]]:
    """Each change as its kind, what was there and what is there now."""
    return {(c.kind, source[c.begin : c.end], c.new) for c in changes("a.py", source)}


def test_places_are_those_that_a_test_is_to_notice() -> None:
    """Operators, constants and statements of functions; no words of errors, logs, types and limits."""
    assert told() == {
        ("comparison", "<", "<="),
        ("constant", "1", "2"),
        ("boolean", "or", "and"),
        ("boolean", "not ", ""),
        ("dropped", "await self.room(size)", "pass"),
        ("dropped", "self.check(name)", "pass"),
        ("second check", "self.check(name)", "pass"),
        ("dropped", "self.count += size", "pass"),
        ("arithmetic", "+=", "-="),
        ("dropped", "self.names.append(name)", "pass"),
        ("dropped", SOURCE[SOURCE.index("if size") : SOURCE.index("\n    await")], "pass\n"),
        (
            "swapped",
            "await self.room(size)\n    self.check(name)",
            "self.check(name)\n    await self.room(size)",
        ),
        (
            "swapped",
            "self.check(name)\n    self.count += size",
            "self.count += size\n    self.check(name)",
        ),
        (
            "swapped",
            "self.count += size\n    self.names.append(name)",
            "self.names.append(name)\n    self.count += size",
        ),
    }


def test_a_seed_chooses_the_same_again_and_of_every_kind() -> None:
    """Each makes another program of as many lines."""
    chosen = choose(7, "wire", 12)
    assert chosen == choose(7, "wire", 12) != choose(8, "wire", 12)
    assert Counter(change.kind for change in chosen) == dict.fromkeys(KINDS, 2)
    for change in chosen:
        source = (ROOT / change.file).read_text()
        changed = change.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert changed.count("\n") == source.count("\n")


def test_the_shortest_tests_that_run_a_line_are_taken(tmp_path: Path) -> None:
    """As many as take so long together, and one at least."""
    path = tmp_path / "map.json"
    told = {"tests": ["a", "b", "c"], "seconds": [3, 1, 2], "lines": {"x.py": {"5": [0, 1], "6": [2]}}}
    path.write_text(json.dumps(told))
    reached = Reached()
    reached.add(path)

    assert reached.of("x.py", [5, 6], 60) == ["b", "c", "a"]
    assert reached.of("x.py", [5, 6], 3) == ["b", "c"]
    assert reached.of("x.py", [5], 0.1) == ["b"]
    assert reached.of("x.py", [7], 60) == []


def test_the_table_counts_by_room() -> None:
    """How many of how many were noticed; a time-out notices too."""
    outcomes = {"one": "first", "two": "survived", "three": "time-out", "four": "unreached"}
    judged: dict[str, dict[str, object]] = {
        name: {"room": "wire", "outcome": outcome} for name, outcome in outcomes.items()
    }
    assert "| wire | 2 of 4 | 1 | 1 |" in table_of(judged).splitlines()
