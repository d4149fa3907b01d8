"""What a replay came to, laid out for people. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxcache.cli.plain import Plain

ASKED = (("lookups", "look-ups"), ("reads", "reads"))
RESULTS = (
    ("dram", "in DRAM"), ("ssd", "on SSD"), ("missed", "not there"), ("empty", "without tokens"), ("refused", "refused"),
)  # fmt: skip
COUNTS = (
    ("read_tokens", "tokens read"), ("dram_tokens", "of those in DRAM"), ("appended_tokens", "tokens appended"),
    ("evicted", "sessions evicted"), ("expired", "sessions expired"), ("cut", "sessions cut"), ("lost_calls", "calls lost"),
)  # fmt: skip
QUANTILES = ("p50_ms", "p95_ms", "p99_ms")


def comparison(figures: "Mapping[str, Plain]") -> str:
    """Both sides, and how long calls took."""
    recorded, replayed = _mapping(figures["recorded"]), _mapping(figures["replayed"])
    rows = [("", "recorded", "replayed"), *_hits(recorded, replayed)]
    rows += [(title, str(recorded[name]), str(replayed[name])) for name, title in COUNTS]
    rows.append(("seconds", str(recorded["elapsed_s"]), str(replayed["elapsed_s"])))
    took: list[Sequence[str]] = [("call", "count", "p50 ms", "p95 ms", "p99 ms")]
    for kind, one in _mapping(figures["latencies"]).items():
        took.append((kind, *(str(_mapping(one)[name]) for name in ("count", *QUANTILES))))
    for side, values in (("recorded", recorded), ("replayed", replayed)):
        inside = _mapping(values["read_in_store"])
        took.append((f"read, in the store, {side}", *(str(inside[name]) for name in ("count", *QUANTILES))))
    errors = [
        f"{kind}: {count} x {reason}"
        for kind, reasons in _mapping(figures["errors"]).items()
        for reason, count in _mapping(reasons).items()
    ]
    late = f"at most {figures['most_late_s']} s late; {figures['primed_sessions']} sessions were there before"
    cut = [] if figures["is_whole"] else ["the recording has no end: it was cut off"]
    return "\n".join([*_columns(rows), "", *_columns(took), "", late, *errors, *cut])


def _hits(
    recorded: "Mapping[str, Plain]", replayed: "Mapping[str, Plain]"
) -> "Iterator[tuple[str, str, str]]":
    for name, title in ASKED:
        for result, words in RESULTS:
            left, right = _mapping(recorded[name])[result], _mapping(replayed[name])[result]
            if left or right:
                yield f"{title} {words}", str(left), str(right)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def _mapping(value: "Plain") -> "dict[str, Plain]":
    if not isinstance(value, dict):
        raise TypeError("is no mapping")
    return value
