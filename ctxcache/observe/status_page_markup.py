"""Markup of the status page, and numbers written for people. Pure.

Text never becomes markup: everything that is not Html is escaped.
"""

from html import escape


class Html(str):
    """Markup. Only this module makes some."""

    __slots__ = ()


# Everything that is shown goes through here: a child that is not Html is escaped, and only this module makes
# Html. A session's name is a caller's text.
def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; `class_` is class, `view_box` viewBox, `aria_label` aria-label.

    An attribute of None or False is left out.
    """
    inner = "".join(child if isinstance(child, Html) else escape(str(child)) for child in children)
    given = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{given}>{inner}</{name}>")


def void(name: str, /, **attributes: object) -> Html:
    """An element that has no end, such as meta."""
    return Html(element(name, **attributes).removesuffix(f"</{name}>"))


def joined(*parts: Html) -> Html:
    """One after the other."""
    return Html("".join(parts))


def document(head: Html, body: Html) -> Html:
    """A page in English."""
    return Html("<!doctype html>" + element("html", element("head", head), body, lang="en"))


def _name(key: str) -> str:
    return {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio"}.get(
        key, key.rstrip("_").replace("_", "-")
    )


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(value: float) -> str:
    """Bytes: `1.5 GiB`."""
    i = 0
    while value >= 1024 and i < len(UNITS) - 1:
        value, i = value / 1024, i + 1
    return f"{value:.0f} {UNITS[i]}" if i == 0 or value >= 100 else f"{value:.1f} {UNITS[i]}"


def count_text(value: float) -> str:
    """A number of things: `950`, `12.3k`, `4.0M`."""
    for bound, end in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= bound:
            return f"{value / min(bound, 1e3 if end == 'k' else bound):.1f}{end}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def time_text(seconds: float) -> str:
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


def share_text(value: float) -> str:
    """A share of one as text: `97 %`; only all is 100 %."""
    percent = min(value * 100, 99.9 if value < 1 else 100)
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"
