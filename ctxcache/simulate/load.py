"""What a simulation is told: the machine, the model, the scheduler and the hints."""

import enum
import math
from dataclasses import dataclass

GIB = 1 << 30


class Hint(enum.Enum):
    """What a client says when a turn is over, taken from the trace itself."""

    ENDS = "ends"
    RETURNS = "returns"


@dataclass(frozen=True, slots=True)
class Load:
    """`slot_count` None: turns take no time and nothing waits. Rates are bytes or tokens per second.

    `token_bytes` is what the model's state takes; 819,200 is LLaMA-13B's KV at 16 bits. `wrong_hint_share`
    of the hints, and of the queue's places, are lies. `is_inclusive`: SSD has what DRAM has, as the server's
    does, and is as large as both together. The first `warm_up_count` turns are not counted.
    """

    token_bytes: int = 819_200
    dram_bytes: int = 128 * GIB
    ssd_bytes: int = 2048 * GIB
    is_inclusive: bool = False
    buffer_share: float = 0.1
    ttl_s: float = 86_400.0
    ssd_read_bytes_per_s: float = 5e9
    dram_bytes_per_s: float = 26e9
    prefill_tokens_per_s: float = 7_000.0
    decode_tokens_per_s: float = 30.0
    slot_count: int | None = None
    hints: frozenset[Hint] = frozenset()
    wrong_hint_share: float = 0.0
    warm_up_count: int = 0

    def prefill_s(self, token_count: int) -> float:
        """How long prompts of so many tokens keep a slot."""
        return token_count / self.prefill_tokens_per_s


NEVER_S = math.inf
