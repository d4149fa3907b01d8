"""An alert: a rule with what to do about it, and series of which some make it fire and some do not."""

from dataclasses import dataclass, field

Series = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    In tests `series` fire it at `fires_at`, in minutes, and `quiet`, which are close to them, do not.

    Both are what a process would show, a value per minute. `labels` are those of the alert that fires,
    besides its severity.
    """

    name: str
    severity: str
    expression: str
    for_minutes: int
    summary: str
    means: str
    look: str
    do: str
    series: Series
    fires_at: int
    labels: tuple[tuple[str, str], ...] = ()
    quiet: Series = field(kw_only=True)


CRITICAL, WARNING = "critical", "warning"
ON = (("instance", "a"), ("job", "ctxcache"))
X60 = "x60"


def series(name: str, values: str, **labels: str) -> tuple[str, str]:
    """One series of promtool's: name and labels, and values."""
    inner = ",".join(
        f'{key}="{value}"' for key, value in {"instance": "a", "job": "ctxcache", **labels}.items()
    )
    return f"{name}{{{inner}}}", values
