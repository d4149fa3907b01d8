"""Profiles: how fast one machine does each stage, from its datasheet or measured.

Pure numbers. Worst case: a datasheet's efficiency that is wrong for this model; measured curves take
precedence, and drift corrects either while running.
"""

import enum
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.plan import Method, Stage
from gpu_worker.planning.shape import LayerShape

NO_LIMIT = float("inf")


class StatePlace(enum.Enum):
    """Where rows lie before they are restored."""

    DRAM = "dram"
    SSD = "ssd"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes: `latency_s` once per transfer, then `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < NO_LIMIT):
            raise InvalidArgument(field="link", problem=f"{self.bytes_per_s} bytes/s, {self.latency_s} s")

    def seconds(self, size_bytes: float) -> float:
        """Seconds for one transfer of `size_bytes`; none for none."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by tokens, as measured: straight between points, level before the first.

    Beyond the last point it goes on as between the last two. Points ascend in tokens.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        ascends = all(one[0] < other[0] for one, other in pairwise(self.points))
        if not self.points or not ascends or not all(0 < seconds < NO_LIMIT for _, seconds in self.points):
            raise InvalidArgument(field="curve", problem=f"{self.points} are no ascending points")

    def seconds(self, tokens: int) -> float:
        """Seconds for so many tokens; none for none."""
        if tokens <= self.points[0][0] or len(self.points) == 1:
            # One point has no slope: in proportion from there on.
            return self.points[0][1] * max(1.0, tokens / self.points[0][0]) if tokens else 0.0
        # seconds
        #     │                      ●- - -     beyond the last: as between the last two
        #     │              ●──────'
        #     │ - - - ●─────'                   before the first: level, as a launch costs the same
        #     └─────────────────────── tokens
        after = min(bisect_right(self.points, (tokens, NO_LIMIT)), len(self.points) - 1)
        (left, left_s), (right, right_s) = self.points[after - 1], self.points[after]
        return max(left_s + (right_s - left_s) * (tokens - left) / (right - left), self.points[0][1])


Curves = Mapping[tuple[Stage, LayerShape], Curve]


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine.

    `copy` is DRAM to device, `ssd` and `remote` lead into DRAM. With `is_direct`, SSDs write into the
    device's memory, over the same bus. `gemm_flops_per_s` is what the projection reaches,
    `attention_flops_per_s` what attention does, `memory_bytes_per_s` the device's memory,
    `layer_overhead_s` what a layer's kernels cost besides. `factors` multiply what a stage takes.
    `rank_count` devices share the work (tensor parallel); rates are those of all of them, and `gather` is
    what one of them receives the others' rows by; none: at once.
    """

    name: str
    copy: Link
    ssd: Link
    remote: Link
    gemm_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float = NO_LIMIT
    layer_overhead_s: float = 0.0
    is_direct: bool = False
    is_measured: bool = False
    curves: Curves = field(default_factory=dict)
    factors: Mapping[Stage, float] = field(default_factory=dict)
    rank_count: int = 1
    gather: Link | None = None

    def __post_init__(self) -> None:
        rates = (self.gemm_flops_per_s, self.attention_flops_per_s, self.memory_bytes_per_s)
        if not all(rate > 0 for rate in rates) or not 0 <= self.layer_overhead_s < NO_LIMIT:
            raise InvalidArgument(field="profile", problem=f"{self.name} has a rate or overhead that is none")
        if not all(0 < factor < NO_LIMIT for factor in self.factors.values()):
            raise InvalidArgument(field="profile", problem=f"{self.name} has a factor that is none")

    def corrected(self, factors: Mapping[Stage, float]) -> "Profile":
        """The same machine with stages taking so many times as long as thought so far."""
        both = {stage: self.factor(stage) * factors.get(stage, 1.0) for stage in (*self.factors, *factors)}
        return replace(self, factors=both)

    def shared_by(self, count: int, gather: Link | None = None) -> "Profile":
        """`count` such devices that share the work, each with a bus of its own. SSDs are those of all."""
        if count == 1:
            return self
        # Rates of all ranks together, for n ranks:
        #
        #     read    the same SSDs                          unchanged
        #     copy    n buses                                n times
        #     work    n devices                              n times
        #     gather  (n - 1) / n of the bytes, by `gather`  one more stage
        return replace(
            self,
            name=f"{count}x {self.name}",
            copy=Link(self.copy.bytes_per_s * count, self.copy.latency_s),
            gemm_flops_per_s=self.gemm_flops_per_s * count,
            attention_flops_per_s=self.attention_flops_per_s * count,
            memory_bytes_per_s=self.memory_bytes_per_s * count,
            rank_count=count,
            gather=gather,
        )

    def gather_s(self, size_bytes: float) -> float:
        """Seconds until each rank has all of so many bytes, of which it read its part."""
        if self.gather is None:
            return 0.0
        others_bytes = size_bytes * (self.rank_count - 1) / self.rank_count
        return self.gather.seconds(others_bytes) * self.factor(Stage.GATHER)

    def factor(self, stage: Stage) -> float:
        """How many times as long as by datasheet or measurement the stage takes."""
        return self.factors.get(stage, 1.0)

    def transfer_s(self, size_bytes: Mapping[StatePlace, float]) -> tuple[float, float]:
        """Seconds of reading and of copying for one layer's rows, by where they lie."""
        ssd, remote = size_bytes.get(StatePlace.SSD, 0.0), size_bytes.get(StatePlace.REMOTE, 0.0)
        staged, read_s, copy_s = sum(size_bytes.values()), self.remote.seconds(remote), 0.0
        if self.is_direct and ssd:
            # Both in one: the bytes pass the SSD and the bus at the same time, and DRAM not at all.
            slower = min(self.ssd.bytes_per_s, self.copy.bytes_per_s)
            staged, copy_s = staged - ssd, Link(slower, self.ssd.latency_s).seconds(ssd)
        else:
            read_s += self.ssd.seconds(ssd)
        copy_s += self.copy.seconds(staged)
        return read_s * self.factor(Stage.READ), copy_s * self.factor(Stage.COPY)

    def project_s(self, layer: LayerShape, tokens: int, method: Method = Method.HIDDEN) -> float:
        """Seconds from hidden rows, packed ones too, to the engine's cache."""
        # A roofline per token: the larger of
        #
        #     FLOPs          2 D (K and V's width)        over gemm_flops_per_s
        #     bytes moved    row in, K and V out          over memory_bytes_per_s
        flops_s = tokens * layer.project_flops / self.gemm_flops_per_s
        moved_bytes = layer.row_bytes(method.kind) + layer.kv_row_bytes + _widened_bytes(layer, method)
        return self._seconds(
            Stage.of(method), layer, tokens, max(flops_s, tokens * moved_bytes / self.memory_bytes_per_s)
        )

    def embed_s(self, layer: LayerShape, tokens: int, method: Method = Method.KV) -> float:
        """Seconds from K/V or latent rows, packed ones too, to the engine's cache."""
        moved_bytes = layer.row_bytes(method.kind) + layer.kv_row_bytes + _widened_bytes(layer, method)
        return self._seconds(Stage.of(method), layer, tokens, tokens * moved_bytes / self.memory_bytes_per_s)

    def recompute_s(self, layer: LayerShape, begin: int, end: int) -> float:
        """Seconds to run a layer over tokens [begin, end), those before being in its cache."""
        curve = self.curves.get((Stage.RECOMPUTE, layer))
        if curve is not None:
            # Later tokens attend to more, hence the difference; noise
            # in the curve must not make them cheaper than first ones.
            seconds = max(curve.seconds(end) - curve.seconds(begin), curve.seconds(end - begin))
            return seconds / self.rank_count * self.factor(Stage.RECOMPUTE)
        flops_s = (end - begin) * layer.linear_flops / self.gemm_flops_per_s
        pairs_s = layer.pair_count(begin, end) * layer.attention_flops / self.attention_flops_per_s
        return self._seconds(Stage.RECOMPUTE, layer, end - begin, flops_s + pairs_s)

    def _seconds(self, stage: Stage, layer: LayerShape, tokens: int, work_s: float) -> float:
        if not tokens:
            return 0.0
        curve = self.curves.get((stage, layer))
        seconds = work_s + self.layer_overhead_s if curve is None else curve.seconds(tokens) / self.rank_count
        return seconds * self.factor(stage)


def _widened_bytes(layer: LayerShape, method: Method) -> int:
    """Bytes that are written and read again where rows are made wide first, as plain torch does."""
    return 0 if method.is_exact else 2 * layer.row_bytes(method.unpacked.kind)
