"""Charts: bars in SVG, stretched to their place; their words are tooltips. Pure."""

from collections.abc import Iterable, Sequence

from ctxcache.observe import words
from ctxcache.observe.html import Html, element, joined
from ctxcache.observe.moment import MINUTES
from ctxcache.observe.status import Hits

HEIGHT, SLOT, BAR = 100, 10, 8


def hit_chart(by_minute: Sequence[Hits]) -> Html:
    """Of each minute's accesses, those that hit, by tier; full height is all of them."""
    return _columns(
        by_minute,
        [((hits.dram_share, "dram"), (hits.hit_share - hits.dram_share, "ssd")) for hits in by_minute],
        [
            f"{words.share(hits.hit_share)} of {words.count(hits.access_count)} accesses"
            if hits.access_count
            else "no access"
            for hits in by_minute
        ],
        [hits.access_count > 0 for hits in by_minute],
        "Share of accesses that hit, by minute",
    )


def token_chart(by_minute: Sequence[Hits]) -> Html:
    """Tokens reused, by tier, and tokens appended above them; full height is the most of any minute."""
    most = max((_tokens(hits) for hits in by_minute), default=0) or 1
    return _columns(
        by_minute,
        [
            (
                (hits.dram_token_count / most, "dram"),
                (hits.ssd_token_count / most, "ssd"),
                (hits.appended_token_count / most, "new"),
            )
            for hits in by_minute
        ],
        [
            f"{words.count(hits.dram_token_count)} from DRAM, {words.count(hits.ssd_token_count)} from SSD, "
            f"{words.count(hits.appended_token_count)} new"
            for hits in by_minute
        ],
        [False] * len(by_minute),
        "Tokens reused and appended, by minute",
    )


def most_tokens(by_minute: Iterable[Hits]) -> int:
    """The full height of the tokens' chart."""
    return max(map(_tokens, by_minute), default=0)


def meter(parts: Iterable[tuple[float, str]], marks: Iterable[tuple[float, str]] = (), *, label: str) -> Html:
    """A bar: shares of its width one after the other, by class, and marks at shares, with words for each."""
    drawn, left = [], 0.0
    for part, class_ in parts:
        width = max(min(part, 1 - left), 0)
        drawn.append(
            element(
                "rect", x=f"{left * 1000:.1f}", y=0, width=f"{width * 1000:.1f}", height=10, class_=class_
            )
        )
        left += width
    ticks = [
        element("rect", element("title", text), x=f"{min(at, 1) * 1000 - 1.5:.1f}", y=0, width=3, height=10, class_="mark")
        for at, text in marks
    ]  # fmt: skip
    return element(
        "svg", *drawn, *ticks, class_="meter", view_box="0 0 1000 10", preserve_aspect_ratio="none", role="img",
        aria_label=label,
    )  # fmt: skip


def _tokens(hits: Hits) -> int:
    return hits.dram_token_count + hits.ssd_token_count + hits.appended_token_count


def _columns(
    by_minute: Sequence[Hits], stacks: Sequence[Sequence[tuple[float, str]]], texts: Sequence[str],
    is_whole: Sequence[bool], label: str,
) -> Html:  # fmt: skip
    count = len(by_minute)
    columns = []
    for i, (stack, text) in enumerate(zip(stacks, texts, strict=True)):
        x = (MINUTES - count + i) * SLOT
        ago = f"{count - i - 1} min ago" if i < count - 1 else "this minute"
        parts = [element("rect", x=x, y=0, width=BAR, height=HEIGHT, class_="slot")] if is_whole[i] else []
        top = float(HEIGHT)
        for part, class_ in stack:
            top -= part * HEIGHT
            if part > 0:
                parts.append(element("rect", x=x, y=f"{top:.1f}", width=BAR, height=f"{part * HEIGHT:.1f}", class_=class_))  # fmt: skip
        columns.append(element("g", element("title", f"{ago}: {text}"), joined(*parts)))
    base = element("rect", x=0, y=HEIGHT - 1, width=MINUTES * SLOT, height=1, class_="base")
    return element(
        "svg", base, *columns, class_="columns", view_box=f"0 0 {MINUTES * SLOT} {HEIGHT}",
        preserve_aspect_ratio="none", role="img", aria_label=label,
    )  # fmt: skip
