"""Numbers as people read them. Pure."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(value: float) -> str:
    """Bytes: `1.5 GiB`."""
    i = 0
    while value >= 1024 and i < len(UNITS) - 1:
        value, i = value / 1024, i + 1
    return f"{value:.0f} {UNITS[i]}" if i == 0 or value >= 100 else f"{value:.1f} {UNITS[i]}"


def count(value: float) -> str:
    """A number of things: `950`, `12.3k`, `4.0M`."""
    for bound, end in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= bound:
            return f"{value / min(bound, 1e3 if end == 'k' else bound):.1f}{end}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def span(seconds: float) -> str:
    """A time: `3.2 ms`, `45 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def share(value: float) -> str:
    """Of one: `97 %`; what is not all is never 100 %."""
    percent = min(value * 100, 99.9 if value < 1 else 100)
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"
