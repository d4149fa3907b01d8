"""A load made here: sessions that come once, return soon or late, and grow. The same for the same seed.

Sizes are multiples of 64 tokens, so that what a session takes in the store is what its tokens add up to.
"""

import random
from dataclasses import dataclass

from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.simulate.trace import TraceTurn


@dataclass(frozen=True, slots=True)
class Shape:
    """`session_count` sessions, one every `spacing_s` seconds on average; `once_share` of them have one turn.

    Others have up to `most_turns`, each with `most_segments` of new tokens at most; gaps between them are
    log-normal around `gap_s`, the session's own, so that who returned soon returns soon again.
    """

    session_count: int = 120
    once_share: float = 0.4
    most_turns: int = 9
    most_segments: int = 6
    spacing_s: float = 4.0
    gap_s: float = 60.0
    spread: float = 1.0
    seed: int = 1


def make_turns(shape: Shape) -> list[TraceTurn]:
    """Every turn, in order of arrival; arrivals are whole milliseconds, no two the same."""
    draw = random.Random(shape.seed)
    found: list[tuple[int, int, int]] = []
    begin_s = 0.0
    for number in range(shape.session_count):
        begin_s += draw.expovariate(1 / shape.spacing_s)
        turn_count = 1 if draw.random() < shape.once_share else draw.randint(2, shape.most_turns)
        gap_s, at_s = shape.gap_s * draw.lognormvariate(0, shape.spread), begin_s
        for _ in range(turn_count):
            found.append((int(at_s * 1000), number, draw.randint(1, shape.most_segments)))
            at_s += 0.5 + gap_s * draw.lognormvariate(0, 0.3)
    turns, latest_ms = [], -1
    for at_ms, number, segment_count in sorted(found):
        latest_ms = max(at_ms, latest_ms + 1)
        input_tokens = draw.randint(0, segment_count) * SEGMENT_TOKENS
        output_tokens = segment_count * SEGMENT_TOKENS - input_tokens
        turns.append(TraceTurn(b"s%d" % number, latest_ms / 1000, input_tokens, output_tokens, None, None))
    return turns
