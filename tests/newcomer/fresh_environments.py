"""The lines by which README and other pages install ctxcache, each page's in a fresh environment.

`make newcomer` runs it: pip asks its index for what the wheel needs. Pages whose lines bring torch or an
engine are left to `make engines`.
"""

import re
import subprocess
from pathlib import Path

import pytest
from documents import ROOT, aimed_at, blocks
from newcomers_home import SAID, TIMEOUT_S, typed
from server_process import ServerProcess

from ctxcache import __version__

IN_ENGINES = ("vllm.md", "sglang.md", "lmcache.md")
"""Pages that install the wheel alone into an engine's environment."""


def _install_lines(page: str, extras: str) -> str:
    """A page's lines that install the wheel with these extras, as they stand."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = re.findall(r"^(?:\$ )?(pip install .*)$", text, re.MULTILINE)
    return "\n".join(line for line in lines if re.search(rf"whl{re.escape(extras)}(?:'|\s|$)", line))


def _environment(name: str) -> str:
    return f"python3 -m venv ~/{name} && . ~/{name}/bin/activate\n"


def test_the_readme_installs_a_store_that_its_example_uses(clone: Path, home: Path, tmp_path: Path) -> None:
    """By the environment that its lines made: what is served and what is run come from the wheel alone."""
    python = home / "ctxcache" / "bin" / "python"
    example = blocks(ROOT / "README.md", "python")[0]
    with ServerProcess(tmp_path / "data") as server:
        for _ in range(2):
            ran = subprocess.run(
                [python, "-I", "-c", aimed_at(example, server.target)],
                cwd="/",
                check=False,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout


def test_an_extra_can_be_added_later(clone: Path, home: Path) -> None:
    """README names an extra alone: it takes the ctxcache that is there, and asks no index for another."""
    [line] = re.findall(
        r"`(pip install 'ctxcache\[\w+\]')`", (ROOT / "README.md").read_text(encoding="utf-8")
    )

    said = typed(f". ~/ctxcache/bin/activate\n{line}\nctxcache --version", clone, home)

    assert said.endswith(SAID)


def test_the_tutorial_installs_a_command_line(clone: Path, tmp_path: Path) -> None:
    """Its lines, in a home that has nothing."""
    [install] = blocks(ROOT / "docs" / "tutorials" / "operator.md", "console")
    commands = re.sub(r"^\$ ", "", install, flags=re.MULTILINE)

    assert typed(f"{commands}\nctxcache --version", clone, tmp_path).endswith(SAID)


@pytest.mark.parametrize(
    ("page", "extras"),
    [("vllm.md", "[server]"), ("llamacpp.md", "[server,llamacpp]")],
    ids=["vllm", "llamacpp"],
)
def test_a_page_installs_a_store(page: str, extras: str, clone: Path, home: Path, tmp_path: Path) -> None:
    """The store's command says its version."""
    lines = _install_lines(page, extras)
    assert lines

    assert typed(f"{_environment('store')}{lines}\nctxcache --version", clone, tmp_path).endswith(SAID)


@pytest.mark.parametrize("page", IN_ENGINES)
def test_a_page_installs_the_client(page: str, clone: Path, home: Path, tmp_path: Path) -> None:
    """The wheel alone: the client imports, and the command says what it lacks, or its version."""
    lines = _install_lines(page, "")
    assert lines
    ask = (
        "python -c 'import ctxcache.client; from ctxcache.client import connect; print(ctxcache.__version__)'"
    )

    said = typed(f"{_environment('engine')}{lines}\n{ask}", clone, tmp_path)

    assert said.endswith(f"{__version__}\n")
