"""What it costs to keep state in a bucket behind the store, and when that is worth it. Pure arithmetic.

    worth a PUT     chance of a return within T  x  (recomputation - GET)  >  PUT + storage for T
    kept for        until storage has cost as much as a recomputation saves

Prices are list prices in US dollars. Worst case: the chance is of another load; then as much is lost as PUT
and storage cost.
"""

import math
from dataclasses import dataclass

GB = 1e9
HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class BucketPrices:
    """S3's list prices by default: requests, storage by the GB and month. State lies in whole objects.

    `request_s` and `bytes_per_s` say how long a host waits for an object; several come at once, so that one
    wait is for all of them.
    """

    put: float = 5e-6
    get: float = 4e-7
    gb_month: float = 0.023
    object_bytes: int = 16 << 20
    request_s: float = 0.03
    bytes_per_s: float = 1e9

    def puts(self, size_bytes: int) -> float:
        """Of writing so much."""
        return self.put * self.object_count(size_bytes)

    def gets(self, size_bytes: int) -> float:
        """Of reading so much."""
        return self.get * self.object_count(size_bytes)

    def storage(self, size_bytes: int, held_s: float) -> float:
        """Of keeping so much for so long."""
        return self.gb_month * size_bytes / GB * held_s / MONTH_S

    def fetch_s(self, size_bytes: int) -> float:
        """How long it takes until so much is there."""
        return self.request_s + size_bytes / self.bytes_per_s

    def object_count(self, size_bytes: int) -> int:
        """Objects of so much."""
        return -(-size_bytes // self.object_bytes)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What prefill costs: that of `gpu_count` GPUs, at a price a GPU and hour, of tokens of so many bytes."""

    prefill_tokens_per_s: float
    token_bytes: float
    gpu_hour: float = 5.0
    gpu_count: int = 1

    def lasts_s(self, size_bytes: int) -> float:
        """How long it takes."""
        return size_bytes / self.token_bytes / self.prefill_tokens_per_s

    def cost(self, size_bytes: int) -> float:
        """In US dollars."""
        return self.lasts_s(size_bytes) * self.gpu_count * self.gpu_hour / HOUR_S


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, beside the engine that would compute anew."""

    prices: BucketPrices
    recomputation: Recomputation

    def saves(self, size_bytes: int) -> float:
        """What one return saves that finds so much in the bucket; less than 0 where computing is cheaper."""
        return self.recomputation.cost(size_bytes) - self.prices.gets(size_bytes)

    def is_worth_put(
        self, size_bytes: int, chance: float, within_s: float, new_bytes: int | None = None
    ) -> bool:
        """Whether to put what returns with that chance within a time for which it is then kept.

        `new_bytes` of it the bucket has not got; all of it by default.
        """
        cost = self.prices.puts(size_bytes if new_bytes is None else new_bytes)
        cost += self.prices.storage(size_bytes, within_s)
        return chance * self.saves(size_bytes) > cost

    def is_worth_get(self, size_bytes: int) -> bool:
        """Whether to fetch it in the place of computing it: cheaper, and no slower."""
        is_faster = self.prices.fetch_s(size_bytes) <= self.recomputation.lasts_s(size_bytes)
        return is_faster and self.saves(size_bytes) > 0

    def kept_for_s(self, size_bytes: int, chance: float = 1.0) -> float:
        """After so long storage has cost what a return of that chance saves; infinity where it is free."""
        a_second = self.prices.storage(size_bytes, 1.0)
        saved = max(chance * self.saves(size_bytes) - self.prices.puts(size_bytes), 0.0)
        return saved / a_second if a_second else math.inf

    def miss_cost(self, size_bytes: int, *, is_in_bucket: bool) -> float:
        """What it costs that the host has not got it: what the next source costs, not always computing."""
        if is_in_bucket and self.is_worth_get(size_bytes):
            return self.prices.gets(size_bytes)
        return self.recomputation.cost(size_bytes)
