"""How large a store a day of users needs, and what that is worth: the capacities worth a look, in money.

Pure. A sample of the day is replayed at multiples of its live footprint, by the policy that serves; sizes and
money of the sample are those of the day by its share. A month has 30 days.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ctxcache.simulate.crowd import HOUR_S, Crowd
from ctxcache.simulate.load import GB, Load
from ctxcache.simulate.study import Capacity, Step, study

MULTIPLES = (0.1, 0.25, 0.5, 0.75, 1.0)
SAMPLE_CONVERSATIONS = 1500
MONTH_DAYS = 30
BUCKET_GB_MONTH = 0.023
"""US dollars a GB and month of an object store, at its list price."""


@dataclass(frozen=True, slots=True)
class Sized:
    """One size of the store. Money is US dollars a month, of the day's load on each day."""

    dram_bytes: int
    ssd_bytes: int
    prompt_hit_rate: float
    """The part of prompt tokens that is not computed."""
    turn_hit_rate: float
    """The part of later turns that find their conversation."""
    gpu_hours_saved_per_day: float
    written_bytes_per_day: float
    storage_cost: float
    gpu_saved: float

    @property
    def net_saved(self) -> float:
        """Money that is left of what GPUs save when the store is paid for."""
        return self.gpu_saved - self.storage_cost


def sizes_of(crowd: Crowd, load: Load, policy: str, *, step: Step) -> Iterator[Sized]:
    """Each capacity, the smallest first."""
    turns, share = crowd.sample(SAMPLE_CONVERSATIONS)
    capacities = [Capacity(multiple) for multiple in MULTIPLES]
    for outcome in study(turns, load, [policy], capacities, step=step):
        figures, costs = outcome.tally.figures(), outcome.tally.costs(outcome.load)
        whole = replace(
            outcome.load,
            dram_bytes=round(outcome.load.dram_bytes / share),
            ssd_bytes=round(outcome.load.ssd_bytes / share),
        )
        month_s = MONTH_DAYS * 24 * HOUR_S
        saved_s = costs["gpu_saved_s"] / share
        yield Sized(
            whole.dram_bytes,
            whole.device_bytes,
            figures["prompt_hit_rate"],
            figures["hit_rate"],
            saved_s / HOUR_S,
            figures["ssd_written_bytes"] / share,
            load.prices.storage(whole.dram_bytes, whole.device_bytes, month_s),
            load.prices.gpu(saved_s) * MONTH_DAYS,
        )


def all_bytes(crowd: Crowd, load: Load) -> int:
    """Bytes of all conversations that begin within one TTL."""
    return round(crowd.conversation_count * load.ttl_s / 86_400 * crowd.token_count * load.token_bytes)


def bucket_cost(size_bytes: int) -> float:
    """US dollars a month of so much in an object store."""
    return size_bytes / GB * BUCKET_GB_MONTH
