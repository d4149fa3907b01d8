"""The worth of tokens that were read and not computed: engine seconds of prefill, and money. Leaf, pure.

A token counts each time that it is read: an engine that leases rows twice for one turn saves their prefill
once.
"""

from dataclasses import dataclass

HOUR_S = 3600.0
CENTS = 100


@dataclass(frozen=True, slots=True)
class Savings:
    """Both are of an engine with all of its GPUs; a price of 0 is none."""

    prefill_tokens_per_s: int
    engine_cents_per_hour: int = 0

    def prefill_s(self, token_count: int) -> float:
        """Engine seconds that computing so many tokens would have taken."""
        return token_count / self.prefill_tokens_per_s

    def dollars(self, token_count: int) -> float | None:
        """US dollars of these seconds; None where no price is set."""
        if not self.engine_cents_per_hour:
            return None
        return self.prefill_s(token_count) / HOUR_S * self.engine_cents_per_hour / CENTS
