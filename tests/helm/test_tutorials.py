"""The tutorials, run as they are written.

Each command against real processes, and what it is said to say.
"""

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from chart import ROOT

TUTORIALS = {"operator.md": (4, 11), "fleet.md": (3, 7)}
"""How many ports each names, and how many blocks of commands it has at least."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 280
"""Below the test's own: a shell that hangs ends with what it said."""
PORT = re.compile(r"(?<=:)74[2-4]\d\b")
PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to whoever connects, or listens on any port."""
MARK = "--- block"


def blocks(text: str) -> list[tuple[str, str]]:
    """Commands, and what they are said to print; empty where nothing is said."""
    found: list[tuple[str, str]] = []
    for kind, body in FENCE.findall(text):
        if kind == "sh":
            found.append((body, ""))
        elif kind == "text":
            commands, _ = found.pop()
            found.append((commands, body))
    return found


def page(name: str) -> Path:
    """A tutorial."""
    return ROOT / "docs" / "tutorials" / name


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_does_what_it_says(name: str, tmp_path: Path) -> None:
    """In order, in one shell, from an empty directory.

    Every line that is promised is printed by its own command.
    """
    (port_count, least_blocks), parts = TUTORIALS[name], blocks(page(name).read_text())
    script = "".join(f"echo '{MARK} {i}'\n{commands}" for i, (commands, _) in enumerate(parts))
    ports = dict(zip(sorted(set(PORT.findall(script))), _free_ports(), strict=False))
    assert len(ports) == port_count
    script = PORT.sub(lambda found: str(ports[found[0]]), script)
    (tmp_path / "helm").symlink_to(ROOT / "helm")
    (tmp_path / "observability").symlink_to(ROOT / "observability")

    done = _run(script, tmp_path)

    said = dict(re.findall(rf"^{MARK} (\d+)\n(.*?)(?=^{MARK}|\Z)", done.stdout, re.DOTALL | re.MULTILINE))
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert len(said) == len(parts) >= least_blocks
    for i, (commands, promised) in enumerate(parts):
        for line in promised.splitlines():
            assert line in said[str(i)], f"{commands}\nsaid {said[str(i)]!r}"


def test_every_tutorial_is_run() -> None:
    """A page that is new is run, too."""
    assert {path.name for path in page("").iterdir()} == set(TUTORIALS)


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_every_file_it_names_is_there(tutorial: str) -> None:
    """Links, and files of the repository in backquotes."""
    text = page(tutorial).read_text()
    names = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert names
    for name in names:
        assert (page(tutorial).parent / name).exists(), name
    for name in re.findall(r"`((?:observability|tests)/[^`]+)`", text):
        assert (ROOT / name).exists(), name


def _run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {key: text for key, text in os.environ.items() if not key.startswith("CTXCACHE_")}
    target = re.search(r"--listen (\S+)", script)
    assert target is not None
    environment |= {"PATH": search, "CTXCACHE_TARGET": target[1], "TERM": "dumb"}
    # Whatever fails, no store outlives the test.
    begin = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    return subprocess.run(
        ["bash", "-c", begin + script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _free_ports() -> Iterator[int]:
    """Ports, no two the same, that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as bound, suppress(OSError):
            bound.bind(("127.0.0.1", port))
            yield port
