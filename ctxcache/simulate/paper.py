"""CachedAttention's settings and results (USENIX ATC'24, section 4), to draw beside ours. Facts, no code.

Its hit rates seem to be of all turns after the warm-up, first ones too: every model ends just short of the share
of later turns, the smallest like the others. Where its text gives only a difference, the sum stands here.
"""

from ctxcache.simulate.load import GIB, Load
from ctxcache.simulate.models import MODELS

TB = 10**12
SMALL_SSD_BYTES, LARGE_SSD_BYTES = 2 * TB, 10 * TB
HBM_BYTES = 10 * 10**9
WARM_UP_TURNS = 10_000

LOAD = MODELS["llama-13b"].served(
    Load(
        dram_bytes=128 * GIB,
        ssd_bytes=LARGE_SSD_BYTES,
        slot_count=24,
        decode_tokens_per_s=50.0,
        warm_up_count=WARM_UP_TURNS,
    )
)
"""24 turns at once, as its batch of 24; 50 tokens a second each make the 42K turns last the hours of its Figure 25d."""

POLICIES: dict[tuple[int, str], dict[str, float]] = {
    (SMALL_SSD_BYTES, "lru"): {"all_hit_rate": 0.129, "all_dram_hit_rate": 0.005},
    (SMALL_SSD_BYTES, "fifo"): {"all_hit_rate": 0.095, "all_dram_hit_rate": 0.005},
    (SMALL_SSD_BYTES, "look-ahead"): {"all_hit_rate": 0.40},
    (LARGE_SSD_BYTES, "lru"): {"all_hit_rate": 0.58, "all_dram_hit_rate": 0.006},
    (LARGE_SSD_BYTES, "fifo"): {"all_hit_rate": 0.48, "all_dram_hit_rate": 0.005},
    (LARGE_SSD_BYTES, "look-ahead"): {"all_hit_rate": 0.86, "all_dram_hit_rate": 0.8566},
}
"""Figure 21. Its look-ahead is 27 points above LRU and 31 above FIFO at 2 TB."""

MODEL_HITS = {"llama-13b": 0.86, "llama-65b": 0.71, "llama-70b": 0.89, "falcon-40b": 0.90}
"""Figure 13: 128 GB and 10 TB."""
LOST_BY_INVALIDATION = {"llama-13b": 0.176, "llama-65b": 0.415, "llama-70b": 0.181, "falcon-40b": 0.184}
"""Figure 22: points of hit rate."""
HBM_AND_DRAM = {"llama-13b": 0.034, "llama-65b": 0.017, "llama-70b": 0.077, "falcon-40b": 0.191}
"""Figure 24; HBM alone is nearly 0, and with SSD it is Figure 13."""
CAPACITY = {0.1: 0.51, 0.25: 0.98}
"""Figure 23: by RCC/CCpUT."""
ARRIVALS = {0.5: 0.82, 2.0: 0.77}
"""Figure 25: by sessions a second."""
