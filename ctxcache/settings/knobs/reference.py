"""The reference of all knobs, as a document and as a TOML file to start from. Pure."""

import json
from collections.abc import Iterator

from ctxcache.settings.knobs import SECTIONS, Knob, KnobKind

_LINE = 100


def markdown() -> str:
    """Return the list of all settings that the documentation site has under docs/settings.md.

    Advice and metrics are left to the TOML reference: `ctxcache config reference`.
    """
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", section.text, ""]
        lines += [_item(knob) for knob in section.knobs]
    return "\n".join(lines) + "\n"


def toml() -> str:
    """Return a TOML file with every setting commented out at its default."""
    lines = [
        "# Settings of `ctxcache serve`, each at its default. Take away the # in front of what you change."
    ]
    tables: list[str] = []
    for section in SECTIONS:
        lines += ["", f"# ---- {section.title}: {section.text}"]
        for knob in section.knobs:
            text = [*_comment(knob), f"# {_toml_line(knob)}"]
            # A table ends the settings of the file itself.
            (tables if knob.kind is KnobKind.SHARES else lines).extend(["", *text])
    return "\n".join([*lines, *tables]) + "\n"


def _item(knob: Knob) -> str:
    unit = "" if knob.kind is KnobKind.SWITCH else knob.unit_text
    facts = [*filter(None, [unit]), f"`{knob.default_text}`"]
    live = ", *live*" if knob.can_reload else ""
    words = f" One of: {', '.join(f'`{word}`' for word in knob.choices)}." if knob.choices else ""
    meaning = " ".join(filter(None, (knob.help, knob.more))) + words + _range(knob)
    # Each setting can be linked to.
    return f"- [`{knob.name}`](#{knob.name}){{ #{knob.name} }} ({', '.join(facts)}{live}): {meaning}"


def _range(knob: Knob) -> str:
    parts = [
        f"{word} {bound:g}"
        for word, bound in (
            ("at least", knob.least),
            ("more than", knob.above),
            ("at most", knob.most),
            ("less than", knob.below),
        )
        # A bound that only keeps sums finite tells nobody anything.
        if bound is not None and bound < 1 << 40
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _comment(knob: Knob) -> Iterator[str]:
    texts = [knob.help, knob.more, f"Recommended: {knob.advice}." if knob.advice else ""]
    if knob.choices:
        texts.append(f"One of: {', '.join(knob.choices)}.")
    if knob.shown:
        texts.append(f"Default: {knob.shown}.")
    if knob.watch:
        texts.append(f"Watch: {knob.watch}.")
    words = " ".join(filter(None, texts)).split()
    line = "#"
    for word in words:
        if len(line) + len(word) > _LINE:
            yield line
            line = "#"
        line += f" {word}"
    yield line
    if knob.unit_text:
        yield f"# ({knob.unit_text})"


def _toml_line(knob: Knob) -> str:
    if knob.kind is KnobKind.SHARES:
        return f"[{knob.name}]"
    if knob.kind is KnobKind.DIRECTORIES:
        return f"{knob.name} = []"
    if knob.default is None:
        return f'{knob.name} = "..."'
    return f"{knob.name} = {json.dumps(knob.default)}"
