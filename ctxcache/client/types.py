"""The plain types of the client: all that a caller passes to it and gets from it.

Frozen facts and enumerations. Nothing here knows the wire, and no message of the wire leaves the client. A
time is nanoseconds since 1970 in UTC (`create_time_ns`), a span is nanoseconds (`ttl_ns`). None says that the
server told none. Sizes are bytes.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ctxcache.client.answers import *  # noqa: F403  # what the server answers is imported from here
from ctxcache.client.answers import LookupState, ModelFields, SessionFields
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import loss_nats
from ctxcache.format.streams import DType, StateKind, Stream, StreamRange, StreamSpec

SPEC_FIELDS = (
    "architecture",
    "revision",
    "weights_digest",
    "tokenizer_digest",
    "dtype",
    "layer_count",
    "hidden_size",
    "kv_head_count",
    "head_size",
    "rope",
    "norm",
    "settings",
    "is_relocatable",
)
"""Fields that a ModelSpec, a ModelInfo and the message of a model have under one name."""


def hidden(layer: int) -> Stream:
    """The stream of a decoder layer's input hidden states, before the layer's norm: rows of [D] elements."""
    return Stream(layer, StateKind.HIDDEN)


def kv(layer: int) -> Stream:
    """The stream of a layer's K and V before positional encoding: rows of [H*C] + [H*C_v] elements."""
    return Stream(layer, StateKind.KV)


def latent(layer: int) -> Stream:
    """The stream of a layer's compressed state (MLA), not rotated: [kv_lora_rank] + [rope_dim] elements."""
    return Stream(layer, StateKind.LATENT)


def seconds(count: float) -> timedelta:
    """A span of `count` seconds. Raises InvalidArgument for a number that is no span of time."""
    try:
        return timedelta(seconds=count)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(field="ttl", problem=f"{count} s is no duration") from error


def minutes(count: float) -> timedelta:
    """A span of `count` minutes. Raises InvalidArgument for a number that is no span of time."""
    return seconds(60 * count)


def hours(count: float) -> timedelta:
    """A span of `count` hours. Raises InvalidArgument for a number that is no span of time."""
    return seconds(3600 * count)


def days(count: float) -> timedelta:
    """A span of `count` days. Raises InvalidArgument for a number that is no span of time."""
    return seconds(86400 * count)


def instant(time_ns: int) -> datetime:
    """A time of the server's in UTC, cut to microseconds. `time_ns`: nanoseconds since 1970."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_ns // 1000)


def streams_of(ranges: Iterable[StreamRange]) -> list[Stream]:
    """The streams of ranges, in storage order.

    Raises InvalidArgument for a state kind that this version does not know.
    """
    ranges = list(ranges)
    for item in ranges:
        # A newer server's kind is a bare number here.
        if not isinstance(item.kind, StateKind):
            raise InvalidArgument(field="streams.kind", problem=f"{item.kind} is not known")
    return sorted(stream for item in ranges for stream in item.streams())


@dataclass(frozen=True, slots=True)
class SessionInfo(SessionFields):
    """One conversation's cached state."""

    @property
    def create_time(self) -> datetime:
        """When the session was created, in UTC, to the microsecond."""
        return instant(self.create_time_ns or 0)

    @property
    def access_time(self) -> datetime:
        """When the session was last accessed, in UTC, to the microsecond."""
        return instant(self.access_time_ns or 0)

    @property
    def expire_time(self) -> datetime:
        """When the session expires unless it is accessed before, in UTC, to the microsecond."""
        return instant(self.expire_time_ns or 0)

    @property
    def ttl(self) -> timedelta | None:
        """Time the session lives on after an access; None when its expiry is absolute."""
        return None if self.ttl_ns is None else timedelta(microseconds=self.ttl_ns / 1000)

    @property
    def loss_nats(self) -> float:
        """How far predictions from the session's rows may be from those of exact ones.

        KL divergence in nats, the mean of a passage's tokens; 0 where no kind is packed.
        """
        return loss_nats(stream.kind for stream in self.streams())

    def streams(self) -> list[Stream]:
        """Every stream that the session stores, in storage order.

        Raises InvalidArgument for a state kind that this version does not know.
        """
        return streams_of(self.layout)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Which part of a block's bytes: layers `[layer_begin, layer_end)` of one rank."""

    layer_begin: int = 0
    layer_end: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True)
class BlockSpace:
    """Within which keys of blocks are looked for: two are the same only if all of this is."""

    model_fingerprint: bytes = b""
    """The model's fingerprint, 32 bytes. The model need not be registered."""
    layout_tag: str = ""
    """The layout of the bytes, in the engine's words; at most 1024 bytes."""
    salt: bytes = b""
    """Keeps apart what else is equal: an adapter, a policy's version; at most 64 bytes."""
    parts: tuple[BlockPart, ...] = (BlockPart(),)
    """The parts of each block: every rank from 0 on has every layer from 0 on in exactly one."""


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """The answer of a look-up for one key."""

    state: LookupState = LookupState.UNSPECIFIED
    """HIT, MISS, or PENDING: somebody writes it."""
    size_bytes: int = 0
    """Bytes of all its parts; 0 for a miss."""
    is_in_dram: bool = False
    """Whether it lies in DRAM; one that does not comes from SSD."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A block as it is after something happened to it."""

    key: bytes
    state: LookupState
    """HIT or MISS."""
    size_bytes: int
    """Bytes of all its parts; 0 for a miss."""
    is_in_dram: bool
    """Whether it lies in DRAM; one that does not comes from SSD."""
    parent_key: bytes
    """Key of the block that it continues; empty for none, and for a miss."""


@dataclass(frozen=True, slots=True)
class BlockNews:
    """Blocks to which something happened."""

    changes: tuple[BlockChange, ...]
    is_current: bool
    """Whether this was the last of the first news: from then on all blocks are known."""


class CallerModel:
    """The model with which a caller computes rows, or for which it restores them.

    Made once, from a spec or by `ModelCalls.register`, since the fingerprint is a hash of the whole spec.
    Every call that moves rows takes one: the fingerprint of the session is compared with it and never stands
    in for it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.name = f"models/{spec.model_id}"
        """Resource name of the model, as the server knows it."""
        self.fingerprint = spec.fingerprint()
        """32 bytes."""

    def __repr__(self) -> str:
        return f"CallerModel({self.name}, {self.fingerprint.hex()[:12]})"

    def check(self, session: SessionInfo) -> None:
        """Raise ModelFingerprintMismatch for a session of another model."""
        if session.model_fingerprint != self.fingerprint:
            is_same_name = session.model == self.name
            raise ModelFingerprintMismatch(
                subject=session.name,
                model=session.model,
                wanted=f"{self.name} as this caller describes it" if is_same_name else self.name,
                actual=session.model_fingerprint.hex(),
                expected=self.fingerprint.hex(),
            )

    def specs(self, layout: Iterable[Stream]) -> dict[Stream, StreamSpec]:
        """Row size and element type of every stream of `layout`, in storage order. Raises InvalidArgument."""
        try:
            return {one.stream: one for one in self.spec.resolve(layout)}
        except KeyError as error:
            raise InvalidArgument(field="layout", problem=f"{self.name} has no {error.args[0]}") from error


@dataclass(frozen=True, slots=True)
class ModelInfo(ModelFields):
    """A registered model.

    Everything but `name`, `create_time_ns` and `probe` goes into the fingerprint: state saved under one
    fingerprint is never returned for another.
    """

    @property
    def spec(self) -> ModelSpec:
        """The model as `models.register` takes it.

        Raises InvalidArgument for an element type or a state kind that this version does not know.
        """
        dtypes = [self.dtype, *(group.dtype for group in self.streams)]
        if unknown := [dtype for dtype in dtypes if not isinstance(dtype, DType)]:
            raise InvalidArgument(field="dtype", problem=f"{unknown[0]} is not known")
        streams = [
            StreamSpec(stream, group.row_bytes, group.dtype)
            for group in self.streams
            for stream in streams_of([group.streams])
        ]
        return ModelSpec(
            model_id=self.name.removeprefix("models/"),
            streams=tuple(sorted(streams)),
            **{name: getattr(self, name) for name in SPEC_FIELDS},
        )


class HintKind(enum.Enum):
    """The request of a hint. The value is the name of its field on the wire."""

    SHARE = "share"
    """Make a session durable and closed: a fork of it has nothing to wait for."""
    PREFETCH = "prefetch"
    """Bring a session to DRAM; without room, as soon as there is within the hint's ttl."""
    DEMOTE = "demote"
    """Give a session's room in DRAM to others."""
    PIN = "pin"
    """Keep a session in DRAM, softly, for the hint's ttl."""
    RETAIN = "retain"
    """Keep a session in the store, softly, for the hint's ttl."""
    EXPECT = "expect"
    """An idle session returns after `return_in`, or never."""
    RELEASE = "release"
    """End what PIN, RETAIN and a deferred PREFETCH began."""
    AHEAD = "ahead"
    """Count what an engine computed ahead of a session's turns."""


@dataclass(frozen=True, slots=True)
class HintAction:
    """One hint about one session."""

    kind: HintKind
    """The hint's request."""
    session: str
    """Resource name of the session."""
    token_count: int | None = None
    """SHARE and PREFETCH: only the first tokens; None for all of them."""
    ttl: timedelta | None = None
    """How long it holds. PIN and RETAIN need one."""
    priority: int = 0
    """0 to 100; a higher one is served first."""
    budget_bytes: int | None = None
    """Most bytes that it may move or keep; None for the server's limit."""
    return_in: timedelta | None = None
    """EXPECT: when the session returns; None: it does not."""
    action_id: str = ""
    """The caller's name for it, which its result carries."""
    computed_token_count: int = 0
    """AHEAD: tokens computed ahead of turns since the last such hint."""
    used_token_count: int = 0
    """AHEAD: those of them that turns have begun with."""
    wasted_token_count: int = 0
    """AHEAD: those that no turn will begin with."""
