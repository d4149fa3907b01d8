"""Which ids sessions and models have, and which labels sessions."""

import re
from collections.abc import Iterable

# No slash: ids of blocks have one, and a resource name is `sessions/` and the id.
SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}")
MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
LABELS_LIMIT = 8
"""Labels that a request, a record and an archive have at most: records are read by it as well."""
LABEL_KEY = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?")
LABEL_VALUE = re.compile(r"([a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?)?")
Labels = tuple[tuple[str, str], ...]
"""Keys and values, ascending by key, each key once."""


def checked_labels(pairs: Iterable[tuple[str, str]]) -> Labels:
    """Labels in their order. Raises ValueError: too many, a key twice, or one that is not allowed."""
    labels = tuple(sorted(pairs))
    if len(labels) > LABELS_LIMIT:
        raise ValueError(f"{len(labels)} labels, and {LABELS_LIMIT} are the most")
    for key, value in labels:
        if not LABEL_KEY.fullmatch(key):
            raise ValueError(f"the key {_short(key)} does not match {LABEL_KEY.pattern}")
        if not LABEL_VALUE.fullmatch(value):
            raise ValueError(f"the value {_short(value)} of {key} does not match {LABEL_VALUE.pattern}")
    if len(dict(labels)) < len(labels):
        raise ValueError("a key is there twice")
    return labels


def pack_labels(labels: Labels) -> bytes:
    """Labels as records and archives have them: `key=value` in lines. Empty for none."""
    return "\n".join([f"{key}={value}" for key, value in labels]).encode()


def parse_labels(packed: bytes) -> Labels:
    """Read them back. Raises ValueError."""
    lines = packed.decode("ascii").split("\n") if packed else []
    pairs = [line.partition("=") for line in lines]
    labels = checked_labels((key, value) for key, _, value in pairs)
    # The same labels are written in one way only.
    if pack_labels(labels) != packed:
        raise ValueError("its labels are not in order")
    return labels


def _short(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:80]}…")
