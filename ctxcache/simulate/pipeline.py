"""When the first token comes where layers come back one behind another: SSD read, copy and prefill overlap. Pure.

Of a history's layers each takes the same time at each stage, and a stage does one at a time, in order. The new
tokens' prefill of a layer needs that layer's state and the layer before. Every time is in seconds.
"""

import math
from typing import NamedTuple


class Fetch(NamedTuple):
    """How a history comes to DRAM: what is prefetched of it after `ready_s`, the rest by a read from `begin_s` on."""

    ready_s: float = 0.0
    begin_s: float = 0.0
    read_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """When all of it is in DRAM."""
        return max(self.ready_s, self.begin_s + self.read_s)


class Layers(NamedTuple):
    """`layer_count` layers of a history, the first `resident_count` of which DRAM has. Copies and prefill are of all of them."""

    layer_count: int
    resident_count: int
    copy_s: float
    prefill_s: float

    def first_token_s(self, fetch: Fetch) -> float:
        """When the last layer's prefill ends: the longest way through the stages."""
        copy_s, prefill_s = self.copy_s / self.layer_count, self.prefill_s / self.layer_count
        slower_s = max(copy_s, prefill_s)
        last_s = fetch.ready_s + (self.layer_count - 1) * slower_s
        missing = self.layer_count - self.resident_count
        if missing:
            read_s = fetch.read_s / missing
            last_s = max(
                last_s, fetch.begin_s + read_s + (missing - 1) * slower_s, fetch.begin_s + fetch.read_s
            )
        return last_s + copy_s + prefill_s

    def hidden(self, read_all_s: float) -> int:
        """How many of the first layers DRAM needs for a first token as early as with all; reading all takes so long."""
        for resident in range(self.layer_count):
            read_s = read_all_s * (self.layer_count - resident) / self.layer_count
            layers = self._replace(resident_count=resident)
            if math.isclose(layers.first_token_s(Fetch(read_s=read_s)), self.at_once_s, rel_tol=1e-9):
                return resident
        return self.layer_count

    @property
    def at_once_s(self) -> float:
        """The first token where DRAM has all layers."""
        return self._replace(resident_count=self.layer_count).first_token_s(Fetch())
