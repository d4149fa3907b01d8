"""What a replay counts, and the figures made of it. Knows no policy."""

from dataclasses import asdict, dataclass

from ctxcache.core.placement.ledger import Act, Move
from ctxcache.core.placement.policy import Tier

DAY_S = 86_400.0


@dataclass(slots=True)
class Tally:
    """Counts since the end of the warm-up. A later turn is one of a session that had one before.

    `dram_hits` were in DRAM when the turn started, `ssd_hits` had to be read from SSD then.
    """

    turns: int = 0
    later_turns: int = 0
    dram_hits: int = 0
    ssd_hits: int = 0
    later_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    promoted_bytes: int = 0
    ssd_written_bytes: int = 0
    evicted_sessions: int = 0
    refused: int = 0
    prefetches: int = 0
    prefetches_in_time: int = 0
    prefetches_late: int = 0
    ssd_wait_s: float = 0.0
    queue_wait_s: float = 0.0
    begin_s: float = 0.0
    end_s: float = 0.0
    longest_queue: int = 0
    most_sessions: int = 0

    def moved(self, moves: list[Move]) -> None:
        """Count what the ledger did."""
        for move in moves:
            if move.act is Act.PROMOTE:
                self.promoted_bytes += move.size_bytes
            elif move.act is Act.DEMOTE or (move.act in (Act.ADMIT, Act.GROW) and move.tier is Tier.SSD):
                self.ssd_written_bytes += move.size_bytes
            elif move.act is Act.EVICT:
                self.evicted_sessions += 1
            elif move.act is Act.REFUSE:
                self.refused += 1

    @property
    def hit_rate(self) -> float:
        """Hits of both tiers over later turns."""
        return _share(self.dram_hits + self.ssd_hits, self.later_turns)

    def figures(self) -> dict[str, float]:
        """All counts, and the shares made of them; a share of nothing is 0."""
        days = max(self.end_s - self.begin_s, 1.0) / DAY_S
        return asdict(self) | {
            "hit_rate": self.hit_rate,
            "dram_hit_rate": _share(self.dram_hits, self.later_turns),
            "ssd_hit_rate": _share(self.ssd_hits, self.later_turns),
            "token_hit_rate": _share(self.hit_tokens, self.later_tokens),
            "dram_share_of_hits": _share(self.dram_hits, self.dram_hits + self.ssd_hits),
            "prefetch_in_time_share": _share(self.prefetches_in_time, self.prefetches),
            "ssd_written_bytes_per_day": self.ssd_written_bytes / days,
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
