"""A knob: one setting of the server, as every place that speaks of settings needs it.

Leaf, and without pydantic, which takes longer to import than all of --help. `config.Settings` takes
defaults and bounds from here, `serve` its options, the site's list, the TOML reference and the
chart their texts.
"""

import enum
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
# Decimal and binary units, in any case: KB is 1000, KiB 1024.
_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{u}{i}B": (1024 if i else 1000) ** n for n, u in enumerate("KMGT", 1) for i in ("I", "")
}

_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d|w|)")


class KnobKind(enum.Enum):
    """The type of a knob's text; the value is how `--help` shows it."""

    DIRECTORY = "DIR"
    # With a blank: members of an enumeration that have the same value would be one.
    DIRECTORIES = "DIR "
    FILE = "FILE"
    PATH = "PATH"
    ADDRESS = "HOST:PORT"
    URL = "URL"
    SIZE = "SIZE"
    SHARE = "SHARE"
    SECONDS = "TIME"
    COUNT = "COUNT"
    SWITCH = "BOOL"
    WORD = "WORD"
    NAME = "NAME"
    SHARES = "NAME=SHARE,..."
    IDENTITIES = "SUBJECT=TENANT,..."

    @property
    def metavar(self) -> str:
        """The placeholder of an option's value."""
        return self.value.strip()

    @property
    def unit(self) -> str:
        """The unit of a value; a knob may say it better."""
        return _UNITS.get(self, "")


_UNITS = {
    KnobKind.DIRECTORY: "path",
    KnobKind.DIRECTORIES: "paths",
    KnobKind.FILE: "path",
    KnobKind.PATH: "path",
    KnobKind.ADDRESS: "`host:port`",
    KnobKind.URL: "URL",
    KnobKind.SIZE: "bytes",
    KnobKind.SHARE: "share",
    KnobKind.SECONDS: "seconds",
    KnobKind.SWITCH: "true or false",
    KnobKind.WORD: "word",
    KnobKind.NAME: "name",
    KnobKind.SHARES: "shares by tenant",
    KnobKind.IDENTITIES: "rules",
}


def parse_size_bytes(text: str) -> int:
    """Bytes in `512MiB`, `8 GiB`, `1.5GB` or `4096`. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    # Decimal: `1.1GB` is 1,100,000,000 bytes, which a float misses.
    return int(Decimal(match[1]) * _SIZE_UNITS[(match[2] or "").upper()])


def parse_duration_s(text: str) -> float:
    """Seconds in `90`, `90s`, `500ms`, `15min`, `1h30m` or `7d`. Raises ValueError."""
    parts = _DURATION.findall(text)
    # `findall` leaves out what it does not know, so that the parts must make up the text.
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a time such as 90s, 15min, 2h or 7d")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_seconds(text: str) -> float:
    """Seconds in a number, or as `parse_duration_s` has it. Raises ValueError."""
    try:
        # As other numbers are read: `1e3` is one, and `-1` is out of bounds.
        return float(text)
    except ValueError:
        return parse_duration_s(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting.

    `default` None: none, or made at the start as `shown` says. `help` is one line; `more` is what the
    reference says besides. `advice`: the recommended value, and when another one is right. `watch`:
    the metric that tells. `least` and `most` are within, `above` and `below` are not.
    """

    name: str
    kind: KnobKind
    default: Any = None
    shown: str = ""
    help: str
    more: str = ""
    unit: str = ""
    advice: str = ""
    watch: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    can_reload: bool = False

    @property
    def option(self) -> str:
        """The option of `serve`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"CTXCACHE_{self.name.upper()}"

    @property
    def default_text(self) -> str:
        """The default as people read it."""
        if self.shown or self.default is None:
            return self.shown or "none"
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}" or "none"

    @property
    def unit_text(self) -> str:
        """The unit of a value."""
        return self.unit or self.kind.unit

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds there are, by pydantic's names."""
        named = {"ge": self.least, "le": self.most, "gt": self.above, "lt": self.below}
        return {name: bound for name, bound in named.items() if bound is not None}


@dataclass(frozen=True, slots=True)
class Section:
    """Knobs that one looks for together."""

    title: str
    text: str
    knobs: tuple[Knob, ...] = field(default=())
