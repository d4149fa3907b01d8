"""Changes that the documentation site makes to the pages of docs/.

Three pages end in lists that only the site has, written from tables: all settings, all metrics, and an entry
per alert. `ctxcache config reference`, the exposition's HELP lines and the alerts' annotations say the same.
Each setting, metric and alert has an anchor, and an alert's name leads to its entry wherever it stands.

Some files outside docs/ are pages of the site too: BORROWED. Links to other files of the repository change:
the site is built without a known address of the repository. A link such as
`[notes](../lab/notes/truncation.md)` becomes its text and the path. mkdocs refuses the links that lead
nowhere.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# mkdocs runs in an environment without the project; the tables need nothing but Python.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from alert_rules import ALERTS, entries  # noqa: E402

from ctxcache import __version__  # noqa: E402
from ctxcache.observe.metric import Group, Metric  # noqa: E402
from ctxcache.observe.table import TABLE  # noqa: E402
from ctxcache.settings.knobs import reference  # noqa: E402

FOR_SCALE = "For scale only."
"""Text of a metric that is never bad by itself; the list leaves it out."""
DOCS = ROOT / "docs"
BORROWED = {
    "chart.md": "helm/ctxcache/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security_problems.md": "SECURITY.md",
    "licence.md": "LICENSE",
}
"""Files outside docs/ that are pages of the site, by page."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
FENCED = re.compile(r"^ {0,3}```.*?^ {0,3}```$", re.MULTILINE | re.DOTALL)
ALERT = re.compile(r"(?<![\w#/\[`])(`?)(Ctxcache[A-Z]\w+)\1(?![\w`\]])")
CHAPTER = re.compile(r"\b(?:docs/)?(\w+\.md)(?:, ([A-Z][a-z]+(?: [a-z]+)*))?")
"""How an alert names a document, and a heading of it."""


def on_config(config: Any) -> Any:
    """Each page shows the version that it describes."""
    config.site_name = f"ctxcache {__version__}"
    config.copyright = f"ctxcache {__version__}, under the Apache License 2.0"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    # Only mkdocs' own environment has it; tests read the tables of this module without.
    from mkdocs.structure.files import File  # type: ignore[import-not-found]  # noqa: PLC0415

    for page, source in BORROWED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if not source.endswith(".md"):
            text = f"# Licence\n\n```text\n{text}\n```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with its list, and each link out of docs/ as one that the site can follow."""
    uri = page.file.src_uri
    source = ROOT / BORROWED[uri] if uri in BORROWED else DOCS / uri
    page_of = {ROOT / path: name for name, path in BORROWED.items()}

    def link_of(link: re.Match[str]) -> str:
        name, _, anchor = link[2].partition("#")
        target = (source.parent / name).resolve()
        if target in page_of or target.is_relative_to(DOCS):
            inside = DOCS / page_of[target] if target in page_of else target
            relative = os.path.relpath(inside, (DOCS / uri).parent)
            return f"[{link[1]}]({relative}{'#' * bool(anchor)}{anchor})"
        path = target.relative_to(ROOT).as_posix()
        return f"{link[1]} (`{path}`)" if path not in link[1] else f"`{path}`"

    runbook = os.path.relpath(DOCS / "runbook.md", (DOCS / uri).parent)
    return _with_alerts(_with_lists(_in_prose(markdown, lambda text: LINK.sub(link_of, text))), runbook)


def _in_prose(markdown: str, change: Callable[[str], str]) -> str:
    """Change the page, but for its blocks of code."""
    parts, begin = [], 0
    for fenced in FENCED.finditer(markdown):
        parts += [change(markdown[begin : fenced.start()]), fenced[0]]
        begin = fenced.end()
    return "".join([*parts, change(markdown[begin:])])


def _with_alerts(markdown: str, runbook: str) -> str:
    """Have each alert's name lead to its entry, but in headings."""
    names = {alert.name for alert in ALERTS}

    def link_of(found: re.Match[str]) -> str:
        if found[2] not in names:
            return found[0]
        return f"[{found[1]}{found[2]}{found[1]}]({runbook}#{found[2].lower()})"

    def change(text: str) -> str:
        return "\n".join(
            line if line.startswith("#") else ALERT.sub(link_of, line) for line in text.split("\n")
        )

    return _in_prose(markdown, change)


def _entries() -> str:
    """The entries of all alerts; a document that one names is a link."""

    def link_of(found: re.Match[str]) -> str:
        heading = found[2] or ""
        anchor = "#" * bool(heading) + heading.lower().replace(" ", "-")
        return f"[{heading or found[1]}]({found[1]}{anchor})"

    return CHAPTER.sub(link_of, entries())


def _with_lists(markdown: str) -> str:
    """Put each list in the place of its mark."""
    lists: dict[str, Callable[[], str]] = {
        "settings": reference.markdown,
        "metrics": lambda: "\n\n".join(map(_table, TABLE)),
        "alerts": _entries,
    }
    return re.sub(r"<!-- site: (\w+) -->", lambda mark: lists[mark[1]](), markdown)


def _table(group: Group) -> str:
    # Each metric can be linked to.
    anchored = re.sub(r"^- `(\w+)`", r"- [`\1`](#\1){ #\1 }", rows(group), flags=re.MULTILINE)
    return f"**{group.title}**\n\n{anchored}"


def rows(group: Group) -> str:
    """Return the items of one group of metrics."""
    return "\n".join(map(_row, group.metrics))


def _row(metric: Metric) -> str:
    """One item. The unit is in the name, where it is one of the names' units."""
    facts = [metric.kind.value, *(f"`{label}`" for label in metric.labels)]
    if not re.search(rf"_{re.escape(metric.unit.split()[0])}(_total)?$", metric.name):
        facts.insert(1, metric.unit)
    bad = "" if metric.when_bad == FOR_SCALE else f" *Bad:* {metric.when_bad}"
    return f"- `{metric.name}` ({', '.join(facts)}): {metric.meaning}{bad}"
