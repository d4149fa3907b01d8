"""`ctxcache serve` with bugs planted and failpoints set: what harnesses start instead of the real one.

    python -m tests.faults.planted BUG[,BUG...] serve ...

Patches the product from outside before its command line runs, so that no fault code ships. A name
may have a number behind it, `kill_before_commit:7`: the patch's argument.
"""

import importlib
import sys
from collections.abc import Callable, Sequence

from ctxcache.cli.main import main
from tests.nursery import STORE, Entry

MODULES = (*STORE, "tests.faults.plants")
"""Imported by a nursery that forks `forked` ones."""
Plant = Callable[[int], None]
PLANTS: dict[str, Plant] = {}
"""Every bug and failpoint by name. Harnesses' modules add theirs with `plant`."""


def plant(function: Plant) -> Plant:
    """Register a patch under its function's name; its argument is the number given, or 1."""
    PLANTS[function.__name__] = function
    return function


def command(plants: Sequence[str]) -> tuple[str, ...]:
    """The program for `ServerProcess(..., program=...)` that plants these."""
    return (sys.executable, "-m", "tests.faults.planted", ",".join(plants))


def forked(plants: Sequence[str]) -> Entry:
    """The same for a nursery, which forks it."""
    return Entry("tests.faults.planted:run", (",".join(plants),))


def run() -> None:
    """Plant what the first argument names, and run the command line on the others."""
    # Every module with plants registers them when it is imported.
    importlib.import_module("tests.faults.plants")
    plant_all(sys.argv.pop(1))
    main()


def plant_all(names: str) -> None:
    """Plant what is named, `,` between one and the next."""
    for name in filter(None, names.split(",")):
        word, _, number = name.partition(":")
        PLANTS[word](int(number or 1))


if __name__ == "__main__":
    # The registry of the importable module, not of this __main__.
    from tests.faults import planted

    planted.run()
