"""`python -m tests.stories`: files, calls and hops of the five stories.

`--walk STORY` prints the way of one story instead: by thread, each file in order with the calls in it. The
restored turn needs torch; without torch the store's four stories are told.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tests.stories.store import STORIES
from tests.stories.store import tell as tell_store
from tests.stories.tracer import Told

TURN = "restored turn"


def main() -> None:
    """Tell the stories and print them."""
    known = [*STORIES, *([TURN] if find_spec("torch") else [])]
    parser = argparse.ArgumentParser(prog="python -m tests.stories", description=__doc__)
    parser.add_argument("--walk", choices=known, metavar="STORY", help=f"one of: {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    print_ = _print_walk if options.walk else _print_figures
    print_(
        {story: _tell(story) for story in ([options.walk] if options.walk else known)}, as_json=options.json
    )


def _tell(story: str) -> Told:
    with tempfile.TemporaryDirectory() as directory:
        if story != TURN:
            return tell_store(story, Path(directory))
        from tests.stories.turn import tell as tell_turn  # noqa: PLC0415  # torch may not be installed

        return tell_turn(Path(directory))


def _print_figures(told: dict[str, Told], *, as_json: bool) -> None:
    if as_json:
        found = {story: asdict(each.figures) for story, each in told.items()}
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
        return
    sys.stdout.write(f"{'story':<16}{'files':>8}{'calls':>8}{'hops':>8}\n")
    for story, each in told.items():
        figures = each.figures
        sys.stdout.write(f"{story:<16}{figures.files:>8}{figures.calls:>8}{figures.hops:>8}\n")


def _print_walk(told: dict[str, Told], *, as_json: bool) -> None:
    (each,) = told.values()
    if as_json:
        sys.stdout.write(f"{json.dumps(each.walk.stretches, indent=1)}\n")
        return
    for number, stretches in enumerate(each.walk.stretches):
        sys.stdout.write(f"thread {number}\n")
        for file, call_count in stretches:
            sys.stdout.write(f"  {file:<60}{call_count:>5}\n")


if __name__ == "__main__":
    main()
