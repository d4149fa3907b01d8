"""Documents for scripts: JSON on one line, or YAML.

The YAML is block style with every string in JSON's quotes, which every YAML reader takes for what they are: no name turns
into a date, a number or a boolean. That little needs no library.
"""

import json
from collections.abc import Iterator, Mapping

from ctxcache.cli.plain import Plain

INDENT = "  "


def as_json(document: Mapping[str, Plain]) -> str:
    """One line, without its end."""
    return json.dumps(document, separators=(",", ":"))


def as_yaml(document: Mapping[str, Plain]) -> str:
    """One document, begun by `---`, so that several may follow each other; without its last line's end."""
    return "\n".join(["---", *(_mapping(document) if document else ["{}"])])


def _mapping(document: Mapping[str, Plain]) -> Iterator[str]:
    for name, value in document.items():
        yield from _entry(f"{json.dumps(name) if not name.isidentifier() else name}:", value)


def _entry(head: str, value: Plain) -> Iterator[str]:
    """What stands behind `name:` or `-`."""
    match value:
        case dict() if value:
            first, *rest = _mapping(value)
        case list() if value:
            first, *rest = (line for item in value for line in _entry("-", item))
        case _:
            yield f"{head} {json.dumps(value)}"
            return
    if head == "-":
        yield f"- {first}"
    else:
        yield head
        yield f"{INDENT}{first}"
    yield from (f"{INDENT}{line}" for line in rest)
