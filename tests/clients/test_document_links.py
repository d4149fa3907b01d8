"""Documents: links lead somewhere, named files are there, and what must be listed is listed."""

import re
import runpy
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from documents import DOCUMENTS, ROOT, anchors, links, prose

from ctxcache import __version__
from ctxcache.cli.main import app
from ctxcache.observe.table import METRICS
from ctxcache.settings.knobs import KNOBS

NAMED = re.compile(r"`((?:ctxcache|gpu_worker|lab|tests|scripts|proto|helm|observability)/[\w./-]+)`")
"""A file or a folder of the repository in backquotes."""
SOURCES = ("ctxcache", "gpu_worker", "lab", "proto", "helm", "scripts", "observability")
ENDS = (".py", ".proto", ".yaml", ".sh")
OF_THE_LAB = {"bench", "demo", "worker"}
"""Groups of commands that other distributions or packages bring: their own documents list them."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """A reader who follows it arrives."""
    lost = [
        link.text
        for link in links(document)
        if not link.path.exists() or (link.anchor and link.anchor not in anchors(link.path))
    ]

    assert lost == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_file_is_there(document: Path) -> None:
    """A file that moved takes its name in the documents with it. The changelog speaks of the past."""
    if document.name == "CHANGELOG.md" or "results" in document.parts:
        pytest.skip("it speaks of what was")
    missing = [name for name in NAMED.findall(prose(document)) if not (ROOT / name).exists()]

    assert [name for name in missing if "DATE" not in name] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    """The check can fail: for a file, for a heading, and not for code."""
    (tmp_path / "other.md").write_text("# Top\n\n## A heading: of two!\n")
    document = tmp_path / "one.md"
    document.write_text(
        "[a](other.md#a-heading-of-two) [b](gone.md) [c](other.md#gone) [d](https://elsewhere.example)\n"
        "```\n[e](gone.md)\n```\n"
    )

    found = {link.text: link.path.exists() and link.anchor in anchors(link.path) for link in links(document)}
    assert found == {"other.md#a-heading-of-two": True, "gone.md": False, "other.md#gone": False}


def test_every_document_that_sources_name_is_there() -> None:
    """Docstrings, comments, settings' advice and the contract send readers to pages that exist."""
    sources = [path for folder in SOURCES for end in ENDS for path in (ROOT / folder).rglob(f"*{end}")]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in sources
        for name in re.findall(r"\b(docs/[\w/]+\.md|lab/notes/\w+\.md)\b", path.read_text(errors="replace"))
    }

    assert len(named) > 30
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


BORROWED: Mapping[str, str] = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["BORROWED"]
"""Files outside docs/ that are pages of the site, by page."""


def test_every_page_is_in_the_sites_navigation() -> None:
    """Once, and nothing else is; the chart's, the changelog and the licence are pages as well."""
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))]

    assert {"helm/ctxcache/README.md", "CHANGELOG.md", "LICENSE"} <= set(BORROWED.values())
    assert sorted(named) == sorted([*pages, *BORROWED])


def test_the_first_page_says_in_a_screen_what_it_is_for() -> None:
    """For whom, with which engines, and three numbers, each with the page that it is from."""
    text = (ROOT / "docs" / "index.md").read_text()
    numbers = [row for row in text.splitlines() if re.match(r"\| .*\d.* \| .*\[.+\]\(.+\) \|$", row)]

    assert len(text.split()) <= 250
    for engine in ("vllm.md", "llamacpp.md", "lmcache.md", "sglang.md", "engines.md", "sidecar.md"):
        assert f"({engine}" in text
    assert "For whom" in text
    assert len(numbers) == 3
    source = re.sub(r"\s+", " ", (ROOT / "docs" / "performance.md").read_text())
    assert [figure for figure in ("298 ms", " 71 ", "19.3 times", "6.4 s") if figure not in source] == []


def test_the_readme_is_short() -> None:
    """One page: 800 words, with its commands and code."""
    assert len((ROOT / "README.md").read_text().split()) <= 800


def test_every_command_is_listed() -> None:
    """docs/commands.md has an item for each verb of the command line, by its whole name."""
    rows = "\n".join(
        line for line in (ROOT / "docs" / "commands.md").read_text().splitlines() if line.startswith("- `")
    )
    unlisted = [name for name in _verbs(typer.main.get_command(app)) if not re.search(rf"`{name}[ `]", rows)]

    assert unlisted == []


def _verbs(command: object, prefix: str = "") -> list[str]:
    """Names of all commands of a group; those of a group within it have that group's name before."""
    commands: Mapping[str, Any] = getattr(command, "commands", {})
    found: list[str] = []
    for name, each in commands.items():
        if each.hidden or (not prefix and name in OF_THE_LAB):
            continue
        whole = f"{prefix}{name}"
        found += _verbs(each, f"{whole} ") if hasattr(each, "commands") else [whole]
    return found


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    """Strictly, where `make docs` has set mkdocs up.

    No page names a font, style or script of another host. Pages list all settings, metrics and alerts, each
    with an anchor. Runbook, operations and what lies outside docs/ are linked, and every page shows the
    version and a switch of its theme.
    """
    mkdocs = ROOT / ".venv-docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("THE SITE IS NOT BUILT: `make docs` sets mkdocs up; its links are tested all the same")

    command = [str(mkdocs), "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert built.returncode == 0, built.stderr
    assert [name for name in KNOBS if name not in (tmp_path / "settings.html").read_text()] == []
    assert [name for name in METRICS if name not in (tmp_path / "metrics.html").read_text()] == []
    rules = (ROOT / "observability" / "alerts.yaml").read_text()
    anchors = re.findall(r"docs/runbook\.md#(\w+)", rules)
    assert anchors
    assert [name for name in anchors if f'id="{name}"' not in (tmp_path / "runbook.html").read_text()] == []
    _look_at_anchors(tmp_path)
    _look_at_links(tmp_path)
    for page in tmp_path.rglob("*.html"):
        assert re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(?:https?:)?//", page.read_text()) == []


def _look_at_anchors(site: Path) -> None:
    settings, metrics = (site / "settings.html").read_text(), (site / "metrics.html").read_text()
    assert [name for name in KNOBS if f'<a href="#{name}" id="{name}">' not in settings] == []
    own = [name for name in METRICS if f'<a href="#{name}" id="{name}">' in metrics]
    assert len(own) > 50
    assert 'href="#ctxcache_path_state"' in metrics


def _look_at_links(site: Path) -> None:
    runbook, operations = (site / "runbook.html").read_text(), (site / "operations.html").read_text()
    assert "operations.html#when-something-is-full-or-broken" in runbook
    assert 'href="#ctxcacheeventloopstalls"' in runbook
    assert "runbook.html#ctxcachepathlost" in operations
    assert 'href="chart.html"' in operations
    assert 'href="blocks.html"' in (site / "changelog.html").read_text()
    assert "Apache License" in (site / "licence.html").read_text()
    assert 'href="chart.html"' in (site / "index.html").read_text()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert f"ctxcache {__version__}" in text
        assert text.count('name="__palette"') == 3
