"""What GPUs and storage cost, and what the store saves. Knows neither policies nor replays."""

from dataclasses import dataclass

HOUR_S = 3600.0
GB = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars an hour: of a GPU, and of a GB (10^9 bytes) of each tier.

    The defaults are on-demand prices of AWS EC2 as CachedAttention, ATC'24, section 4.2 (Figure 17) has them.
    """

    gpu_hour: float = 5.0
    dram_gb_hour: float = 0.0088
    ssd_gb_hour: float = 0.000082

    def gpu(self, gpu_s: float) -> float:
        """Cost of so many seconds of one GPU."""
        return self.gpu_hour * gpu_s / HOUR_S

    def storage(self, dram_bytes: int, ssd_bytes: int, held_s: float) -> float:
        """Cost of both tiers, used or not, for so long."""
        hourly = (self.dram_gb_hour * dram_bytes + self.ssd_gb_hour * ssd_bytes) / GB
        return hourly * held_s / HOUR_S
