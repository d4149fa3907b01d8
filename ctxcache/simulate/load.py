"""A simulation's load: the machine, its price, the model, the scheduler, the hints, and who lies about them.

Pure.

Schedulers and clients lie for a stated share of what they say, the same in each replay. Models by name have
bytes of state a token, context window, GPUs and speed of prefill as CachedAttention ran them.

Sources: windows and GPUs from CachedAttention, ATC'24, sections 2.3 and 4.1; Falcon's window, which the paper
does not say, from the model's card. Bytes: 2 x layers x KV heads x head size x 2. Prefill: the paper's 2,048
tokens in 360 ms for LLaMA-65B on four A100s, for the others by parameters and GPUs at the same use of the
GPU.
"""

import enum
import math
import zlib
from dataclasses import dataclass, field, replace

from ctxcache.core.placement.value import MissCost, Objective
from ctxcache.simulate.trace import TraceTurn


class Lie(enum.Enum):
    """A sort of false hint: a job's place, a job that never comes, one that is not told, a client's hint."""

    ORDER = "order"
    PHANTOM = "phantom"
    MISSING = "missing"
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Liar:
    """Lies of these kinds about a share of the turns."""

    share: float
    kinds: frozenset[Lie]

    def tells(self, kind: Lie, turn: TraceTurn) -> bool:
        """Whether it lies in this way at this turn."""
        if not self.share or kind not in self.kinds:
            return False
        # By a checksum of session and time: no state, and the same lies whatever policy is replayed.
        return zlib.crc32(b"%s at %d" % (turn.session, int(turn.arrival_s * 1000))) < self.share * 2**32

    def order(self, turn: TraceTurn, order: int) -> float | None:
        """The place that a job of that place is given; None where nothing is said of it."""
        if self.tells(Lie.MISSING, turn):
            return None
        if self.tells(Lie.ORDER, turn):
            return float(zlib.crc32(b"place " + turn.session) % (2 * order))
        return float(order)

    def return_s(self, turn: TraceTurn, now_s: float, next_s: float) -> float:
        """When a session is said to return: ten times too late or too early."""
        if not self.tells(Lie.HINT, turn):
            return next_s
        return now_s + max(next_s - now_s, 0.0) * (10.0 if zlib.crc32(b"late " + turn.session) % 2 else 0.1)


HOUR_S = 3600.0
GB = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars an hour: of a GPU, and of a GB (10^9 bytes) of each tier; of a TB that is written to SSD.

    The defaults are on-demand prices of AWS EC2 as CachedAttention, ATC'24, section 4.2 (Figure 17) has them.
    A TB written is that of a drive of 0.13 dollars a GB that endures a write of itself a day for 5 years.
    """

    gpu_hour: float = 5.0
    dram_gb_hour: float = 0.0088
    ssd_gb_hour: float = 0.000082
    written_tb: float = 0.07

    def gpu(self, gpu_s: float) -> float:
        """Cost of so many seconds of one GPU."""
        return self.gpu_hour * gpu_s / HOUR_S

    def storage(self, dram_bytes: int, ssd_bytes: int, held_s: float) -> float:
        """Cost of both tiers, used or not, for so long."""
        hourly = (self.dram_gb_hour * dram_bytes + self.ssd_gb_hour * ssd_bytes) / GB
        return hourly * held_s / HOUR_S

    def wear(self, written_bytes: int) -> float:
        """Cost of what an SSD was written."""
        return self.written_tb * written_bytes / TB


TB = 1e12
GIB = 1 << 30

__all__ = [
    "MODELS",
    "NEVER_S",
    "Liar",
    "Lie",
    "Load",
    "Model",
    "Objective",
    "Overflow",
    "Prices",
    "TraceHint",
    "objective_named",
]


class TraceHint(enum.Enum):
    """The hint of a client when a turn is over, taken from the trace itself."""

    ENDS = "ends"
    RETURNS = "returns"


class Overflow(enum.Enum):
    """The fate of state when its context window overflows and the earliest half is dropped."""

    DECOUPLED = "decoupled"
    """The rest stays valid: positions are put in when it is read."""
    INVALIDATE = "invalidate"
    """All of it is void: positions are in it, and they are others now."""


@dataclass(frozen=True, slots=True)
class Load:
    """`slot_count` None: nothing waits, and turns take no time unless `is_timed`. Rates are a second's.

    `token_bytes` is what the model's state takes; 819,200 is LLaMA-13B's KV at 16 bits.
    `prefill_tokens_per_s` is that of all `gpu_count` GPUs. State is kept in whole segments of
    `segment_tokens`. `is_inclusive`: SSD has what DRAM has, as the server's does, is as large as both
    together, and each turn is written when it ends; else a session lies in one tier, and is written when it
    leaves DRAM, as far as SSD does not have it yet. Without `ssd_write_bytes_per_s` writes take no time. With
    `layer_count` a history's layers come one behind another, SSD read, copy and prefill at once (`pipeline`);
    of the sessions in DRAM it then has the first `resident_layer_count`, if that is said, and more sessions
    for it: `is_inclusive` only. `wrong_hint_share` of what is said is false in each of the ways of `lies`.
    `is_closed`: a session's next turn comes when the think time after its last answer is over, whenever the
    trace had it come. The first `warm_up_count` turns served are not counted. `objective` is what `value`
    saves most of. `spares_wear`: what is not worth its wear is not written, by the `prices`.
    """

    token_bytes: int = 819_200
    context_tokens: int | None = None
    overflow: Overflow = Overflow.DECOUPLED
    segment_tokens: int = 1
    dram_bytes: int = 128 * GIB
    ssd_bytes: int = 2048 * GIB
    is_inclusive: bool = False
    buffer_share: float = 0.1
    ttl_s: float = 86_400.0
    ssd_read_bytes_per_s: float = 5e9
    ssd_write_bytes_per_s: float | None = None
    dram_bytes_per_s: float = 26e9
    prefill_tokens_per_s: float = 7_000.0
    decode_tokens_per_s: float = 30.0
    gpu_count: int = 1
    slot_count: int | None = None
    is_timed: bool = False
    is_closed: bool = False
    layer_count: int | None = None
    resident_layer_count: int | None = None
    hints: frozenset[TraceHint] = frozenset()
    wrong_hint_share: float = 0.0
    lies: frozenset[Lie] = frozenset({Lie.ORDER, Lie.HINT})
    warm_up_count: int = 0
    objective: Objective = Objective.SECONDS
    prices: Prices = field(default_factory=Prices)
    spares_wear: bool = False

    @property
    def miss_cost(self) -> MissCost:
        """What a policy is told that weighs misses."""
        gpu_s = self.prices.gpu(1.0) * self.gpu_count
        write_s = self.prices.wear(1) / gpu_s if self.spares_wear and gpu_s else 0.0
        return MissCost(self.objective, self.prefill_tokens_per_s, write_s_per_byte=write_s)

    def prefill_s(self, token_count: int) -> float:
        """How long prompts of so many tokens keep a slot."""
        return token_count / self.prefill_tokens_per_s

    def answer_s(self, turn: TraceTurn) -> float:
        """How long a turn takes that waits for nothing and finds its history in memory."""
        return self.prefill_s(turn.input_tokens) + turn.output_tokens / self.decode_tokens_per_s

    def stored_bytes(self, token_count: int) -> int:
        """The bytes of so many tokens' state, the last segment whole."""
        return -(-token_count // self.segment_tokens) * self.segment_tokens * self.token_bytes

    def whole_bytes(self, token_count: int) -> int:
        """The bytes of so many tokens in full segments.

        One that is not full is written again when it has grown.
        """
        return token_count // self.segment_tokens * self.segment_tokens * self.token_bytes

    @property
    def resident_share(self) -> float:
        """The share that DRAM has of the sessions in it."""
        if self.layer_count is None or self.resident_layer_count is None:
            return 1.0
        return self.resident_layer_count / self.layer_count

    @property
    def device_bytes(self) -> int:
        """The size of the SSD itself."""
        return self.ssd_bytes + self.dram_bytes * self.is_inclusive


NEVER_S = math.inf


def objective_named(text: str) -> Objective:
    """Turns, tokens or seconds. Raises ValueError."""
    try:
        return Objective(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is none of {', '.join(each.value for each in Objective)}") from error


@dataclass(frozen=True, slots=True)
class Model:
    """`prefill_tokens_per_s` is that of all its `gpu_count` GPUs together."""

    token_bytes: int
    context_tokens: int
    gpu_count: int
    prefill_tokens_per_s: float

    def served(self, load: Load) -> Load:
        """The load, with this model."""
        return replace(
            load,
            token_bytes=self.token_bytes,
            context_tokens=self.context_tokens,
            gpu_count=self.gpu_count,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )


MODELS = {
    "llama-13b": Model(2 * 40 * 5120 * 2, 4096, 2, 14_200.0),
    "llama-65b": Model(2 * 80 * 8192 * 2, 2048, 4, 5_690.0),
    "llama-70b": Model(2 * 80 * 1024 * 2, 4096, 4, 5_280.0),
    "falcon-40b": Model(2 * 60 * 512 * 2, 2048, 4, 9_240.0),
    "mistral-7b": Model(2 * 32 * 1024 * 2, 32_768, 1, 12_800.0),
}
