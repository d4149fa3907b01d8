"""Counts of a replay, with histograms and the figures made of them. Knows no policy."""

import math
from collections import Counter
from dataclasses import dataclass, field, fields

from ctxcache.simulate.load import Load

# A duration up to this counts as 0; buckets grow by one per cent from here on.
LEAST_S = 1e-6
STEP = math.log(1.01)


class FineHistogram:
    """Counts by bucket. A quantile is off by half a per cent at most, and 0 is 0."""

    __slots__ = ("buckets", "count", "sum_s")

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        """How many durations, by number of the bucket."""
        self.count = 0
        self.sum_s = 0.0

    def add(self, value_s: float) -> int:
        """Count a duration of 0 or more; returns its bucket."""
        bucket = int(math.log(value_s / LEAST_S) / STEP) + 1 if value_s > LEAST_S else 0
        self.add_to(bucket, value_s)
        return bucket

    def add_to(self, bucket: int, value_s: float) -> None:
        """Count a duration whose bucket is known."""
        self.count += 1
        self.sum_s += value_s
        self.buckets[bucket] += 1

    def merge(self, other: "FineHistogram") -> None:
        """Count another's durations, too."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.buckets.update(other.buckets)

    def quantile_s(self, share: float) -> float:
        """The duration that so great a share does not exceed; 0 where nothing was counted."""
        left = math.ceil(share * self.count)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                # The middle of the bucket, which is half a per cent from its ends.
                return LEAST_S * math.exp((bucket - 0.5) * STEP) if bucket else 0.0
        return 0.0


DAY_S = 86_400.0


@dataclass(slots=True)
class HitTally:
    """Counts since the end of the warm-up. A later turn is one of a session that had one before.

    `dram_hits` were in DRAM when the turn started, `ssd_hits` had to be read from SSD then. Every other later
    turn is a miss: of state that had been given up (`regret`), that an overflow had made void, or that had
    outlived its TTL, or came before the trace (`expired`). `prompt_tokens` a machine without a store
    computes.
    """

    turns: int = 0
    later_turns: int = 0
    dram_hits: int = 0
    ssd_hits: int = 0
    later_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    overflows: int = 0
    regret_turns: int = 0
    regret_tokens: int = 0
    void_turns: int = 0
    expired_turns: int = 0
    promoted_bytes: int = 0
    ssd_written_bytes: int = 0
    """By a store that appends: what is on SSD of a session stays valid there while the session is kept."""
    ssd_rewritten_bytes: int = 0
    """By one that writes a session whole whenever it comes to lie on SSD, and its growth there."""
    evicted_sessions: int = 0
    refused: int = 0
    prefetches: int = 0
    prefetches_in_time: int = 0
    prefetches_late: int = 0
    prefetches_unused: int = 0
    """Left DRAM, or ended, before their turn."""
    prefetch_lead_s: float = 0.0
    """How long before their turns those in time were there, added up."""
    prefetch_late_s: float = 0.0
    most_late_s: float = 0.0
    ssd_wait_s: float = 0.0
    ssd_read_s: float = 0.0
    """How long SSD was busy with reads, without what writes held them up."""
    queue_wait_s: float = 0.0
    most_write_lag_s: float = 0.0
    """The farthest that writes lay behind."""
    begin_s: float = 0.0
    end_s: float = 0.0
    longest_queue: int = 0
    most_sessions: int = 0
    ttft: FineHistogram = field(default_factory=FineHistogram)
    """Seconds of every turn: its wait in the queue, for SSD, the copy from DRAM and prefill."""
    later_ttft: FineHistogram = field(default_factory=FineHistogram)
    """Seconds of later turns, without their wait in the queue."""

    def prefetch_met(self, ready_s: float, now_s: float) -> None:
        """Count a turn that finds its session prefetched, ready or not."""
        late_s = ready_s - now_s
        self.prefetches_in_time += late_s <= 0
        self.prefetches_late += late_s > 0
        self.prefetch_lead_s += max(-late_s, 0.0)
        self.prefetch_late_s += max(late_s, 0.0)
        self.most_late_s = max(self.most_late_s, late_s)

    @property
    def hit_rate(self) -> float:
        """Hits of both tiers over later turns."""
        return _share(self.dram_hits + self.ssd_hits, self.later_turns)

    def figures(self) -> dict[str, float]:
        """All counts, and the shares made of them; a share of nothing is 0."""
        days = max(self.end_s - self.begin_s, 1.0) / DAY_S
        counts = {
            each.name: getattr(self, each.name) for each in fields(self) if each.type is not FineHistogram
        }
        return counts | {
            "hit_rate": self.hit_rate,
            "dram_hit_rate": _share(self.dram_hits, self.later_turns),
            "ssd_hit_rate": _share(self.ssd_hits, self.later_turns),
            "token_hit_rate": _share(self.hit_tokens, self.later_tokens),
            "prompt_hit_rate": _share(self.prompt_tokens - self.computed_tokens, self.prompt_tokens),
            "dram_share_of_hits": _share(self.dram_hits, self.dram_hits + self.ssd_hits),
            "regret_rate": _share(self.regret_turns, self.later_turns),
            "prefetch_in_time_share": _share(self.prefetches_in_time, self.prefetches),
            "ssd_written_bytes_per_day": self.ssd_written_bytes / days,
            "ssd_rewritten_bytes_per_day": self.ssd_rewritten_bytes / days,
            "ttft_mean_s": _share(self.ttft.sum_s, self.ttft.count),
            "ttft_p50_s": self.ttft.quantile_s(0.5),
            "ttft_p95_s": self.ttft.quantile_s(0.95),
            "ssd_read_busy_share": _share(self.ssd_read_s, self.end_s - self.begin_s),
            "later_ttft_mean_s": _share(self.later_ttft.sum_s, self.later_ttft.count),
            "later_ttft_p95_s": self.later_ttft.quantile_s(0.95),
        }

    def costs(self, load: Load) -> dict[str, float]:
        """GPU seconds of prefill and US dollars, with the store and without; wear of the load's SSD.

        Without a store there is no storage and no wear to pay for, and each prompt is computed whole.
        Decoding is in neither.
        """
        gpu_s = load.prefill_s(self.computed_tokens) * load.gpu_count
        gpu_without_s = load.prefill_s(self.prompt_tokens) * load.gpu_count
        wear = load.prices.wear(self.ssd_written_bytes)
        storage = load.prices.storage(load.dram_bytes, load.device_bytes, self.end_s - self.begin_s)
        gpu, gpu_without = load.prices.gpu(gpu_s), load.prices.gpu(gpu_without_s)
        days = max(self.end_s - self.begin_s, 1.0) / DAY_S
        return {
            "gpu_s": gpu_s,
            "gpu_without_s": gpu_without_s,
            "gpu_saved_s": gpu_without_s - gpu_s,
            "storage_cost": storage,
            "wear_cost": wear,
            "cost": gpu + storage + wear,
            "cost_without": gpu_without,
            "cost_saved": gpu_without - gpu - storage - wear,
            "cost_saved_share": _share(gpu_without - gpu - storage - wear, gpu_without),
            "drive_writes_per_day": _share(self.ssd_written_bytes / days, load.device_bytes),
        }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
