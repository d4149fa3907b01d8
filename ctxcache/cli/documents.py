"""How commands print for scripts, JSON on one line or YAML, and how their help shows examples.

`call` makes answers plain. The YAML is block style with every string in JSON's quotes, so no name turns into
a date, a number or a boolean. That little needs no library. A test runs each example against a server.
"""

import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""The values that JSON has."""

INDENT = "  "
NO_NAMES = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""Words that some YAML readers take for a boolean or null, in any case."""
_PAIR = re.compile(r"\\u(d[89ab]..)\\u(d[c-f]..)")


class Output(enum.StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def as_json(document: Mapping[str, Plain]) -> str:
    """One line, without its end."""
    return json.dumps(document, separators=(",", ":"))


def as_yaml(document: Mapping[str, Plain]) -> str:
    """One document, begun by `---`, so that several may follow each other; without its last line's end."""
    return "\n".join(["---", *(_mapping(document) if document else ["{}"])])


def _mapping(document: Mapping[str, Plain]) -> Iterator[str]:
    for name, value in document.items():
        yield from _entry(f"{_name(name)}:", value)


def _entry(head: str, value: Plain) -> Iterator[str]:
    """The text behind `name:` or `-`."""
    # A dash takes the first line of its value beside it; a name has all of them below it, one step in.
    match value:
        case dict() if value:
            first, *rest = _mapping(value)
        case list() if value:
            first, *rest = (line for item in value for line in _entry("-", item))
        case _:
            yield f"{head} {_scalar(value)}"
            return
    if head == "-":
        yield f"- {first}"
    else:
        yield head
        yield f"{INDENT}{first}"
    yield from (f"{INDENT}{line}" for line in rest)


def _name(name: str) -> str:
    is_plain = name.isascii() and name.isidentifier() and name.lower() not in NO_NAMES
    return name if is_plain else _scalar(name)


def _scalar(value: Plain) -> str:
    """As JSON has it; but YAML knows no pairs of surrogates."""
    return _PAIR.sub(_character, json.dumps(value))


def _character(pair: re.Match[str]) -> str:
    high, low = (int(part, 16) for part in pair.groups())
    return f"\\U{0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF):08x}"


TITLE = "EXAMPLES"


def examples(*lines: str) -> str:
    """The end of a command's help; each line is one of the command line."""
    # An empty line between two: help runs the others together.
    return "\n\n".join((TITLE, *lines))
