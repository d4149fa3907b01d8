"""The runbook as the store itself shows it, an entry per alert, and the advice of an alert. Pure."""

import re
from collections.abc import Iterable

from ctxcache.observe.alerts import STORE_ALERTS, Alert, HeldAlert
from ctxcache.observe.status_page_markup import Html, document, element, joined, void

RUNBOOK = "/runbook"
_ALERT = re.compile(r"\b(Ctxcache[A-Z]\w+)")


def runbook() -> Html:
    """A page with the entry of each alert of a store."""
    head = joined(
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        element("title", "ctxcache: runbook"),
        void("link", rel="icon", href="data:,"),
        void("link", rel="stylesheet", href="/status.css"),
    )
    entries = [
        element(
            "section",
            element("h2", alert.summary, element("code", alert.name)),
            *advice(alert),
            class_="card wide",
            id=alert.name.lower(),
        )
        for alert in STORE_ALERTS
    ]
    body = element(
        "body",
        element("header", element("h1", "Runbook"), element("a", "Status", href="/")),
        element("main", *entries),
    )
    return document(head, body)


def advice(alert: Alert | HeldAlert) -> Iterable[Html]:
    """What it means, where to look and what to do."""
    return (
        element("p", *_prose(alert.means)),
        element("p", element("b", "Look at: "), *_prose(alert.look)),
        element("p", element("b", "Do: "), *_prose(alert.do)),
    )


def entry_link(name: str) -> Html:
    """A link to an alert's entry."""
    return element("a", name, href=f"{RUNBOOK}#{name.lower()}")


def _prose(text: str) -> list[Html | str]:
    # What stands between backquotes is code; an alert's name leads to its entry.
    parts: list[Html | str] = []
    for i, part in enumerate(text.split("`")):
        if i % 2:
            parts.append(element("code", part))
        else:
            parts += [entry_link(word) if j % 2 else word for j, word in enumerate(_ALERT.split(part))]
    return parts
