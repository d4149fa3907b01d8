"""Changes that the documentation site makes to the pages of docs/.

Three pages end in lists that only the site has, written from tables: all settings, all metrics, and an entry
per alert. `ctxcache config reference`, the exposition's HELP lines and the alerts' annotations say the same.

Links to files of the repository that are not pages change too: the site is built without a known address of
the repository. A link such as `[notes](../lab/notes/truncation.md)` becomes its text and the path. mkdocs
refuses the links that lead nowhere.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# mkdocs runs in an environment without the project; the tables need nothing but Python.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from alert_rules import entries  # noqa: E402

from ctxcache.observe.metric import Group, Metric  # noqa: E402
from ctxcache.observe.table import TABLE  # noqa: E402
from ctxcache.settings.knobs import reference  # noqa: E402

FOR_SCALE = "For scale only."
"""Text of a metric that is never bad by itself; the list leaves it out."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with its list, and each link out of docs/ as its text and a path of the repository."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def path_of(link: re.Match[str]) -> str:
        target = (folder / link[2].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        path = target.relative_to(ROOT).as_posix()
        return f"{link[1]} (`{path}`)" if path not in link[1] else f"`{path}`"

    return _with_lists(LINK.sub(path_of, markdown))


def _with_lists(markdown: str) -> str:
    """Put each list in the place of its mark."""
    lists: dict[str, Callable[[], str]] = {
        "settings": reference.markdown,
        "metrics": lambda: "\n\n".join(map(_table, TABLE)),
        "alerts": entries,
    }
    return re.sub(r"<!-- site: (\w+) -->", lambda mark: lists[mark[1]](), markdown)


def _table(group: Group) -> str:
    return f"**{group.title}**\n\n{rows(group)}"


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
