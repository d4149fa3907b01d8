"""The documents tell one way to install, with one file, one range of Pythons and extras that exist."""

import re
import tomllib
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, blocks

from ctxcache import __version__
from ctxcache.settings.knobs import KNOBS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = f"ctxcache-{__version__}-py3-none-any.whl"
EXAMPLES = sorted((ROOT / "helm").glob("*/examples/*.yaml"))
INSTALL = re.compile(r"pip install (?:-\S+ )*(['\"]?)([^\s'\"`]+)\1")
SUPPORTED = "CPython 3.11 to 3.13"


def _installed(path: Path) -> list[str]:
    """What the commands of a page install."""
    return [target for _, target in INSTALL.findall(path.read_text(encoding="utf-8"))]


def _wheel_extras(target: str) -> set[str] | None:
    """The extras with which the wheel is installed; None for something else."""
    found = re.fullmatch(rf"(?:dist/|/tmp/)?{re.escape(WHEEL)}(?:\[([a-z,]+)\])?", target)
    return None if found is None else set((found[1] or "").split(",")) - {""}


def test_the_wheel_is_what_pages_install() -> None:
    """An index has no ctxcache: by that name an extra is added to the one that is installed, at most."""
    targets = {
        (path.name, target)
        for path in [*DOCUMENTS, *EXAMPLES]
        for target in _installed(path)
        if "ctxcache" in target
    }

    extras = PROJECT["optional-dependencies"]
    assert len(targets) > 6
    for page, target in sorted(targets):
        added = re.fullmatch(r"ctxcache\[([a-z]+)\]", target)
        named = {added[1]} if added else _wheel_extras(target)
        assert named is not None, f"{page} installs {target}"
        assert named <= set(extras), f"{page} installs {target}"


@pytest.mark.parametrize(
    "page",
    [
        "vllm.md",
        "sglang.md",
        "lmcache.md",
        "llamacpp.md",
        "vllm_kubernetes.md",
        "python.md",
        "coming_from.md",
    ],
)
def test_a_page_that_installs_the_wheel_says_where_it_comes_from(page: str) -> None:
    """By a link to the one place that tells it."""
    assert "](../README.md#install)" in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_readme_makes_the_wheel_before_it_installs_it() -> None:
    """In one block, which the other pages rely on."""
    [install] = [block for block in blocks(ROOT / "README.md", "sh") if "pip install" in block]

    assert install.index("make wheel") < install.index(WHEEL)
    assert install.splitlines()[-1] == "ctxcache --version"


def test_pythons_are_told_in_one_way() -> None:
    """README, tutorials, set-up and image name the range that the package asks for."""
    setup = ROOT / "scripts" / "setup.py"
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
        setup,
        ROOT / "Dockerfile",
    ]

    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert SUPPORTED in text, page
        assert not re.search(r"3\.\d+ or (newer|later)", text), page


def test_the_readme_says_how_long_a_session_lives() -> None:
    """The default, and the option that changes it, are those of the settings."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert KNOBS["default_ttl_s"].default == 3600
    assert "A session lives for an hour after its last use" in text
    assert "`ctxcache serve --default-ttl-s " in text
