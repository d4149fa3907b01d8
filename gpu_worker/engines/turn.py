"""Turns: what an engine says of one turn of a conversation. Worst case: none, it is numbers."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """What one turn did. Times in nanoseconds from its begin.

    `miss_reason` says why the store had less than it should: the reason of the error that a read
    met, that truncation met, or that stopped an earlier turn's saves. Empty for a hit.
    `history_token_count` tokens came before the turn, after `dropped_token_count` were truncated;
    `reused_token_count` of them were restored, and `prefilled_token_count` were computed. Prefill began after
    `restore_ns`; the last layer was usable `restored_ns` after the restore's begin, and a planner thought it would
    be after `predicted_ns` (0 where the plan was the caller's).
    """

    token_ids: list[int] = field(default_factory=list)
    history_token_count: int = 0
    dropped_token_count: int = 0
    reused_token_count: int = 0
    prefilled_token_count: int = 0
    restore_ns: int = 0
    restored_ns: int = 0
    predicted_ns: int = 0
    first_token_ns: int = 0
    miss_reason: str = ""
