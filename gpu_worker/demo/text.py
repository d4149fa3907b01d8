"""Real English text that every machine has: the Python language reference, as CPython ships it.

`pydoc_data.topics` is what `help("NAMESPACES")` shows; the licence is Python's own and nothing is
copied into this project. Knows no tokens. Worst case: the wording differs between Python
versions, so a figure measured on it names the version.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

# Chapters that are mostly sentences; the rest is tables, grammar and listings.
_TOPICS = (
    "objects",
    "execmodel",
    "naming",
    "exceptions",
    "attribute-access",
    "import",
    "typesmethods",
    "customization",
    "id-classes",
    "identifiers",
    "class",
    "function",
    "assignment",
    "comparisons",
    "try",
    "with",
    "raise",
    "global",
    "calls",
    "strings",
    "types",
    "numeric-types",
    "sequence-types",
    "context-managers",
    "typesmapping",
    "formatstrings",
    "debugger",
)

_SHORTEST_PARAGRAPH_CHARS = 80
_EMPHASIS = re.compile(r"\*{1,2}(\S(?:[^*\n]*\S)?)\*{1,2}")
_SENTENCE_END = re.compile(r"(?<=[a-z)\"]\.)\s+(?=[A-Z\"])")


@dataclass(frozen=True, slots=True)
class Passage:
    """Some prose on one subject, as paragraphs of whole sentences without line breaks."""

    title: str
    paragraphs: tuple[str, ...]


def passages() -> list[Passage]:
    """Return every chapter used, in a fixed order; one that this Python does not have is left out."""
    found = (_passage(topics[topic]) for topic in _TOPICS if topic in topics)
    return [passage for passage in found if passage.paragraphs]


def sentences(passage: Passage) -> Iterator[str]:
    """Split a passage where a full stop is followed by a capital; close enough to grammar here."""
    for paragraph in passage.paragraphs:
        yield from _SENTENCE_END.split(paragraph)


def _passage(topic: str) -> Passage:
    title = topic.strip().partition("\n")[0]
    blocks = re.split(r"\n\s*\n", topic)
    return Passage(title, tuple(_unwrap(block) for block in blocks if _is_prose(block)))


def _is_prose(block: str) -> bool:
    # Listings and grammar are indented, headings and lists are short or begin with a mark.
    return (
        len(block) >= _SHORTEST_PARAGRAPH_CHARS
        and (block[0].isupper() or block[0] == '"')
        and block.rstrip().endswith(".")
        and "\n   " not in block
        and "::=" not in block
    )


def _unwrap(block: str) -> str:
    return re.sub(r"\s+", " ", _EMPHASIS.sub(r"\1", block)).strip()
