"""HTML and SVG, made so that no text becomes markup: whatever is not Html is escaped. Pure."""

from html import escape


class Html(str):
    """Markup. Only this module makes some."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; `class_` is class, `view_box` viewBox, `aria_label` aria-label. An attribute of None or False is left out."""
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
