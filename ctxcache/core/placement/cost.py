"""What a miss costs, in seconds: a share that every miss has, and computing what was there anew. Pure."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MissCost:
    """Seconds by GiB of state; the defaults are LLaMA-13B's at 16 bits, which has 1,311 tokens a GiB.

    `per_gib_s`: 7,000 tokens of prefill a second. `per_miss_s`, what is lost whatever the length, is a choice: a
    larger one favours turns, a smaller one tokens. `per_gib2_s` is attention's: 0.187 / 48 by FLOPs of 2 x width
    x layers x tokens squared against 2 x parameters x tokens; 0 by default, since it made no more tokens hit.
    """

    per_miss_s: float = 0.75
    per_gib_s: float = 0.187
    per_gib2_s: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        """What a miss of so much state costs."""
        size_gib = size_bytes / GIB
        return self.per_miss_s + size_gib * (self.per_gib_s + size_gib * self.per_gib2_s)
