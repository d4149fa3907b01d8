"""Plain types of what the server answers.

Made by scripts/generate_client_types.py from proto/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ctxcache.client.open_enum import OpenEnum
from ctxcache.format.model import ModelProbe
from ctxcache.format.streams import TOKENS_RANGE, Content, DType, StateKind, StreamRange


class Durability(OpenEnum):
    """How safe state is when it is acknowledged."""

    MEMORY = 1
    """In this process's memory: survives nothing."""
    DISK = 2
    """On this node's disk and synced: survives a crash of the process and of the machine."""
    SHARED = 3
    """As DISK, and in the bucket of the fleet: survives the loss of the host. Of sessions alone, not of
    blocks. NOT_FOUND (FLEET_NOT_FOUND) in a store without a fleet; UNAVAILABLE (UNAVAILABLE) when the bucket
    has not answered: then the tokens are durable as by DISK.
    """


class LookupState(OpenEnum):
    """The state that a look-up found."""

    UNSPECIFIED = 0
    """Never returned."""
    HIT = 1
    """State is there."""
    MISS = 2
    """State is not there; `reason` says why."""
    PENDING = 3
    """State is being written; ask again."""


class StorageTier(OpenEnum):
    """Where bytes lie."""

    UNSPECIFIED = 0
    """Never returned."""
    DRAM = 1
    """Shared memory of this node."""
    SSD = 2
    """Files on this node's disks."""


class HintOutcome(OpenEnum):
    """Outcomes of a hint."""

    UNSPECIFIED = 0
    """Never sent."""
    ACCEPTED = 1
    """Done, or begun, in full."""
    CLIPPED = 2
    """In part, as far as a budget or a limit allows."""
    DEFERRED = 3
    """Not now; it is done when there is room, until its ttl is over."""
    REJECTED = 4
    """Not at all."""
    MISSING = 5
    """The session is not there."""


class SessionChange(OpenEnum):
    """Changes of a session."""

    UNSPECIFIED = 0
    """Never sent."""
    PROMOTED = 1
    """All of it is in DRAM."""
    DEMOTED = 2
    """Some of it left DRAM."""
    EVICTED = 3
    """It was given up for others."""
    EXPIRED = 4
    """It expired or was deleted."""


class LayerPlace(OpenEnum):
    """Where a layer's state is. All layers that a session stores are moved together."""

    UNSPECIFIED = 0
    """Never sent."""
    DRAM = 1
    """All in DRAM."""
    SSD = 2
    """Some or all only on SSD."""
    MISSING = 3
    """The session does not store it."""


class PathState(OpenEnum):
    """Whether a place where bytes lie takes writes. It is read in every state."""

    UNSPECIFIED = 0
    """Not set; never sent."""
    OPEN = 1
    """It takes writes."""
    RESTING = 2
    """It lacked room or memory for a write, and takes none for some seconds; or an operator said so."""
    FENCED = 3
    """Its device refused a write or a sync, or several reads in a row: it takes no writes until a restart."""
    LOST = 4
    """Nothing can be read from its device, or its directory was missing at the start: sessions show what is
    left of them. It is taken again when it is back.
    """


class MissEvent(OpenEnum):
    """Events after which less of a session is found than was stored."""

    UNSPECIFIED = 0
    """Not set. As a reason: nothing is remembered."""
    EVICTED = 1
    """It was given up for others' room on SSD. It is not there after that."""
    EXPIRED = 2
    """Its time was over. It is not there after that."""
    DELETED = 3
    """Somebody deleted it. It is not there after that."""
    TRUNCATED = 4
    """Somebody dropped tokens of it."""
    CORRUPT = 5
    """Bytes of it failed verification; it ends before them."""
    FINGERPRINT_MISMATCH = 6
    """Somebody asked for it with another model's fingerprint, and was refused."""
    QUOTA = 7
    """A reader or writer of it was refused for want of room, or because of a bound."""
    TIMEOUT = 8
    """A reader of it took longer than it may."""
    DEVICE = 9
    """A device refused what a reader or writer of it needed."""
    DEVICE_LOST = 10
    """An SSD path was lost, and with it tokens of which DRAM has no copy. They are shown again when the path
    is back, unless a writer went on before them meanwhile. The detail says which file.
    """
    MENDED = 11
    """Bytes of it in memory were not what was written; those that SSD has took their place, and no token was
    lost.
    """
    MOVED = 12
    """Another host of the fleet took it over. It is not there after that."""
    OWNER_LOST = 13
    """Another host of the fleet had it, and did not answer. The detail names the host."""
    COMPUTED_IN_VAIN = 14
    """An engine computed tokens of it ahead of a turn that had other tokens, or that did not come."""


class InjectedFaultKind(OpenEnum):
    """Failures that can be injected."""

    UNSPECIFIED = 0
    """Not set; never sent."""
    SSD_READ_DELAY = 1
    """A read of a segment's rows from SSD takes `delay` longer."""
    SSD_WRITE_DELAY = 2
    """A write of a segment to SSD takes `delay` longer."""
    SSD_READ_ERROR = 3
    """A read of a segment's rows from SSD is refused, with `error_number`."""
    SSD_WRITE_ERROR = 4
    """A write of a segment to SSD is refused, with `error_number`."""
    SSD_READ_BIT_FLIP = 5
    """A read of a segment's rows from SSD gives back one bit that was not written. The bytes on SSD stay as
    they are.
    """
    COMMIT_DELAY = 6
    """A change to the metadata that somebody waits to be on disk takes `delay` longer."""


class RecordedKind(OpenEnum):
    """Kinds of calls, and of the store's own deeds."""

    UNSPECIFIED = 0
    """Not set; never sent."""
    OPEN = 1
    """A session was created."""
    APPEND = 2
    """Tokens were committed, or refused."""
    LOOKUP = 3
    """Somebody asked what could be restored."""
    GET = 4
    """Somebody asked for a session's facts."""
    READ = 5
    """Tokens were leased or streamed, or refused."""
    RELEASE = 6
    """A lease or stream ended."""
    TRUNCATE = 7
    """Tokens were dropped by request."""
    FORK = 8
    """A session was forked."""
    TOUCH = 9
    """Expiry or pin was changed, or neither."""
    FLUSH = 10
    """All that was committed was to be made durable."""
    DEMOTE = 11
    """A session was to leave DRAM."""
    DELETE = 12
    """A session was deleted."""
    HINT = 13
    """A hint was given."""
    RESERVE = 17
    """A writer was given room for tokens behind the session's."""
    FINISH = 18
    """A writer is over; what it has not committed is nobody's."""
    EXPIRE = 14
    """By itself: the time of a session was over."""
    EVICT = 15
    """By itself, or on an operator's request: a session was given up for others' room."""
    CUT = 16
    """By itself: a session was cut before bytes that failed verification."""


@dataclass(frozen=True, slots=True)
class SessionFields:
    """One conversation's cached state."""

    name: str = ""
    """Resource name, `sessions/{session_id}`; the id matches [a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}."""
    uid: str = ""
    """Unique for ever, 32 hexadecimal digits: a session created again under the same name has another one."""
    tenant: str = ""
    """Tenant it belongs to, derived from the caller's credentials."""
    model: str = ""
    """Its model, `models/{model_id}`."""
    model_fingerprint: bytes = b""
    """Fingerprint of its model, 32 bytes."""
    layout: tuple[StreamRange, ...] = ()
    """Streams it stores, token ids included."""
    generation: int = 0
    """Grows by one with every committed change of its tokens, from a number of the session's own. After a
    crash it is far ahead, so that a generation whose tokens were lost never comes again.
    """
    token_count: int = 0
    """Committed tokens that are live."""
    durable_token_count: int = 0
    """How many of those, counted from the first, are on this node's disk and synced."""
    create_time_ns: int | None = None
    """When it was created."""
    access_time_ns: int | None = None
    """When it was last created, updated, appended to, read or leased. An append is an access when it begins
    and at each commit; rows that are on their way are none.
    """
    expire_time_ns: int | None = None
    """When it expires if nobody accesses it before."""
    ttl_ns: int | None = None
    """Time it lives on after an access; unset when its expiry is absolute."""
    is_pinned: bool = False
    """Whether it is held against eviction. A pin does not stop expiry."""
    dram_bytes: int = 0
    """Bytes it occupies in the arena, segments shared with forks included."""
    ssd_bytes: int = 0
    """Bytes it occupies on SSD, segments shared with forks and second copies included."""
    salt: bytes = b""
    """The salt in the keys of its tokens, see CreateSessionRequest.salt."""
    contents: tuple[Content, ...] = ()
    """Contents behind its tokens, in order, up to the first dropped token. Only GetSession answers with it.
    """
    whole_token_count: int = 0
    """How many of its first tokens were computed with all tokens before them: those up to the first that was
    dropped. Only GetSession answers with it.
    """
    copies: int = 0
    """On how many SSD directories each of its segments shall be, 1 or 2. Where one has no room, or is lost, a
    segment has one copy until there is another place.
    """
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What its creator says of it, see CreateSessionRequest.labels. They never change."""
    is_being_appended: bool = False
    """Whether a reservation or a stream of rows is open behind its tokens: more may be committed within
    moments. Only GetSession answers with it.
    """


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers that follow one another, end exclusive."""

    begin: int = 0
    """First layer; -1 for token ids."""
    end: int = 0
    """One past the last layer."""


@dataclass(frozen=True, slots=True)
class KindAvailability:
    """A session's rows of one state kind."""

    kind: StateKind = StateKind.TOKENS
    """The kind."""
    layers: tuple[LayerRange, ...] = ()
    """Layers for which the session stores it, ascending."""
    size_bytes: int = 0
    """Bytes of all its rows."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The answer of a look-up for one session."""

    name: str = ""
    """Resource name, as asked."""
    state: LookupState = LookupState.UNSPECIFIED
    """Hit, miss or pending."""
    reason: str = ""
    """Why it is a miss: the reason an error would carry (SESSION_NOT_FOUND, MODEL_FINGERPRINT_MISMATCH),
    EMPTY for a session without tokens, or DEVICE_LOST for one whose tokens lie on an SSD path that is lost.
    Empty otherwise.
    """
    generation: int = 0
    """Its generation; 0 on a miss."""
    token_count: int = 0
    """Tokens that could be restored."""
    dram_token_count: int = 0
    """How many of those lie in DRAM; the others come from SSD."""
    kinds: tuple[KindAvailability, ...] = ()
    """The rows that are there, by kind."""
    expire_time_ns: int | None = None
    """When it expires if nobody accesses it before."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of several sessions: segments that all of them list."""

    session: str = ""
    """A session that begins so, `sessions/{session_id}`."""
    key: bytes = b""
    """Key of its last whole 64 tokens, 32 bytes; empty where it has none."""
    token_count: int = 0
    """How many tokens it has."""
    session_count: int = 0
    """How many sessions list it."""
    saved_bytes: int = 0
    """Slots that they would take besides, in one tier, if each had its own."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Response of MatchPrefix: the longest prefix of a prompt that was found."""

    state: LookupState = LookupState.UNSPECIFIED
    """HIT where it can be adopted at once. PENDING where memory alone has some of it: an adoption writes it
    to disk first. MISS where no session has the first 64 tokens.
    """
    token_count: int = 0
    """How many of the tokens are there, from the first one on: a multiple of 64."""
    dram_token_count: int = 0
    """How many of those lie in DRAM; the others come from SSD."""
    reason: str = ""
    """Why no more was found: NOT_STORED where no session of the model and layout has the next 64 tokens; CUT
    where one has them and lost tokens before them; SHORT where fewer than 64 tokens are left. Empty where all
    were found.
    """
    lease_token: bytes = b""
    """The lease's token, 16 bytes; empty where none was asked for, nothing was found, or what was found went
    before it could be held. Any connection of the tenant may use it until it ends: AcquireLease with it is a
    lease of the rows, ReleaseBlocks ends it. It does not end with the connection.
    """
    lease_expire_time_ns: int | None = None
    """When the lease ends by itself. Unset without one."""
    ready_in_ns: int | None = None
    """Time until the tokens that were found are in DRAM, at the speed of late promotions: an estimate, 0 when
    all are there. Unset for a MISS.
    """


@dataclass(frozen=True, slots=True)
class StoredStreams:
    """Streams that a model can save, alike in all but the layer."""

    streams: StreamRange = TOKENS_RANGE
    """Which streams. Required. Token ids need not be listed: every model has them."""
    row_bytes: int = 0
    """Bytes of one token's row, 1 to 2097152, so that a row fits into one message. Required."""
    dtype: DType = DType.PACKED
    """Type of the row's elements. Required."""


@dataclass(frozen=True, slots=True)
class ModelFields:
    """A registered model.

    Everything but `name`, `create_time` and `probe` goes into the fingerprint: state saved under one
    fingerprint is never returned for another.
    """

    name: str = ""
    """Resource name, `models/{model_id}`; the id matches [a-zA-Z0-9][a-zA-Z0-9._-]{0,127}."""
    fingerprint: bytes = b""
    """Output only. SHA-256 over all fields below, 32 bytes; ctxcache/format/model.py is its definition."""
    architecture: str = ""
    """Architecture as the engine calls it, for example `LlamaForCausalLM`. Required, up to 256 bytes."""
    revision: str = ""
    """Revision of the weights as the caller names it. Up to 256 bytes, default empty."""
    weights_digest: str = ""
    """Digest of the weights, any text that differs when they do. Up to 256 bytes, default empty."""
    tokenizer_digest: str = ""
    """Digest of the tokenizer, likewise. Up to 256 bytes, default empty."""
    dtype: DType = DType.PACKED
    """Type the model computes in. Required."""
    layer_count: int = 0
    """Number of decoder layers, 1 to 4096. Required."""
    hidden_size: int = 0
    """Elements of a hidden state (D). Required, at least 1."""
    kv_head_count: int = 0
    """Number of K/V heads (H); 0 where no layer keeps keys and values."""
    head_size: int = 0
    """Elements of one K head (C); 0 likewise."""
    rope: str = ""
    """Settings of the rotary embedding as canonical text; empty where the model has none. Up to 4096 bytes.
    """
    norm: str = ""
    """Norm in front of the K/V projection, as canonical text. Up to 256 bytes, default empty."""
    is_relocatable: bool = False
    """Whether kept state stays usable when earlier tokens are dropped. False for learned absolute positions:
    then only the newest tokens can be dropped. Default false.
    """
    streams: tuple[StoredStreams, ...] = ()
    """Streams the model can save, 1 to 4096 in 1 to 4096 ranges; a session stores a subset of them."""
    create_time_ns: int | None = None
    """Output only. When the model was registered."""
    settings: str = ""
    """Every other setting that changes what the layers compute (attention scaling, soft caps, experts per
    token), as canonical text or its digest. Up to 4096 bytes, default empty.
    """
    probe: ModelProbe | None = None
    """Its output for a few tokens, by the engine that sent it first. Unset: nobody did. Not in ListModels."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Response of ForgetModel: what was forgotten of a version of a model's weights."""

    models: tuple[str, ...] = ()
    """Resource names of the models, in order."""
    session_count: int = 0
    """Sessions, without blocks."""
    token_count: int = 0
    """Tokens of the sessions."""
    block_count: int = 0
    """Blocks of engines."""


@dataclass(frozen=True, slots=True)
class HintResult:
    """The outcome of one hint."""

    action_id: str = ""
    """The hint's own id."""
    outcome: HintOutcome = HintOutcome.UNSPECIFIED
    """The outcome."""
    reason: str = ""
    """Why it is not accepted: the reason that an error would carry, or BUDGET_EXHAUSTED, TTL_LIMIT, NO_ROOM,
    IN_USE or RANGE_NOT_SUPPORTED. Empty when it is.
    """
    granted_bytes: int = 0
    """Bytes that it moves or keeps."""
    valid_until_ns: int | None = None
    """When what was granted ends; unset for what does not last."""


@dataclass(frozen=True, slots=True)
class LayerReadiness:
    """A run of layers whose state lies in the same places."""

    layer_begin: int = 0
    """First layer."""
    layer_end: int = 0
    """One past the last layer."""
    state: LayerPlace = LayerPlace.UNSPECIFIED
    """Where."""


@dataclass(frozen=True, slots=True)
class SessionReadiness:
    """Where a session's state is."""

    token_count: int = 0
    """Committed tokens; 0 for a session that is not there."""
    layers: tuple[LayerReadiness, ...] = ()
    """Layers of its model, ascending, without a gap. Empty for a session that is not there."""
    missing_bytes: int = 0
    """Bytes that are on SSD alone and have to come to DRAM."""
    ready_in_ns: int | None = None
    """Time until they have come, at the speed of late promotions: an estimate, 0 when all is there. Unset for
    a session that is not there.
    """


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """The changes of one session since its last event, and its state now."""

    session: str = ""
    """Resource name."""
    changes: tuple[SessionChange, ...] = ()
    """The changes; empty for a job that was put."""
    readiness: SessionReadiness | None = None
    """Where its state is."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Use of one place where bytes lie."""

    tier: StorageTier = StorageTier.UNSPECIFIED
    """Which tier."""
    path: str = ""
    """File."""
    capacity_bytes: int = 0
    """Most bytes it holds."""
    used_bytes: int = 0
    """Bytes taken by segments and reservations."""
    segment_count: int = 0
    """Segments and reservations' segments in it, those on the way included."""
    state: PathState = PathState.UNSPECIFIED
    """Whether it takes writes."""
    problem: str = ""
    """Why it takes none, in words; empty while it does."""
    largest_free_bytes: int = 0
    """The largest run of free bytes: nothing larger than that could be put there, however much is free."""
    written_bytes: int = 0
    """Bytes written to the file since the server started; 0 for DRAM."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The server's contents, and its counts since it started."""

    version: str = ""
    """Version of the server."""
    start_time_ns: int | None = None
    """When it started."""
    data_directory: str = ""
    """Where its data lies."""
    listen_addresses: tuple[str, ...] = ()
    """Addresses it listens on, as gRPC targets."""
    session_count: int = 0
    """Sessions of all tenants."""
    model_count: int = 0
    """Registered models."""
    segment_count: int = 0
    """Segments, shared ones counted once."""
    lease_count: int = 0
    """Leases held now."""
    reservation_count: int = 0
    """Reservations open now."""
    tiers: tuple[TierStats, ...] = ()
    """Use of each place where bytes lie."""
    appended_token_count: int = 0
    """Tokens committed."""
    read_token_count: int = 0
    """Tokens read or leased."""
    dram_hit_token_count: int = 0
    """Tokens read that were in DRAM already."""
    expired_session_count: int = 0
    """Sessions ended by expiry."""
    evicted_session_count: int = 0
    """Sessions ended to make room."""
    corrupt_segment_count: int = 0
    """Segments whose bytes failed verification."""
    flushed_segment_count: int = 0
    """Segments written to SSD."""
    promoted_segment_count: int = 0
    """Segments brought from SSD into DRAM."""
    arena_prefaulted_bytes: int = 0
    """Bytes of the arena that were touched ahead of use, in the background; its capacity when that is done.
    """
    quarantined_slot_count: int = 0
    """Places on SSD that are kept from use, because other bytes came back than were written."""
    quarantined_bytes: int = 0
    """Bytes that they take."""
    dirty_bytes: int = 0
    """Bytes of segments with tokens that SSD has not and is to have: what a crash would lose some of."""
    delayed_write_count: int = 0
    """Times that a writer had to wait, or was refused, because too much was not on SSD yet."""
    prefetched_segment_count: int = 0
    """Segments brought from SSD into DRAM ahead of need, because a hint or the placement policy asked for it.
    """
    prefetch_used_segment_count: int = 0
    """Prefetched segments that were read afterwards."""
    prefetch_unused_segment_count: int = 0
    """Prefetched segments that left DRAM unread."""
    prefetch_late_segment_count: int = 0
    """Prefetched segments that were still on their way when they were asked for."""
    unadmitted_session_count: int = 0
    """Sessions ended to make room that were never written to SSD, because they were not worth it."""
    spared_bytes: int = 0
    """Bytes of sessions that only DRAM has and that are not to be written for now: what a crash would lose
    all of.
    """
    mended_segment_count: int = 0
    """Segments whose bytes in memory were not what was written, and that have what SSD has again."""
    mended_copy_count: int = 0
    """Copies on SSD that were bad or unreadable; the other one was served, and a new one made."""
    uncopied_segment_count: int = 0
    """Segments that were made durable with one copy where two are asked for."""
    single_copy_segment_count: int = 0
    """Segments that shall have two copies on SSD now, and have one that can be had."""
    joined_segment_count: int = 0
    """Short segments of long sessions that were made one with others."""
    saved_prefill_seconds: float = 0.0
    """Engine seconds that computing the tokens that were read would have taken, by the setting
    `prefill_tokens_per_s`.
    """
    saved_dollars: float | None = None
    """US dollars of these seconds, by the setting `engine_cents_per_hour`. Unset: no price is set."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant's sessions and bytes. A segment counts once, however many forks share it."""

    tenant: str = ""
    """The tenant."""
    session_count: int = 0
    """Its sessions."""
    dram_bytes: int = 0
    """Bytes of its segments in DRAM, reserved ones too."""
    ssd_bytes: int = 0
    """Bytes of its segments on SSD, those on the way included."""
    kept_bytes: int = 0
    """Bytes of its segments, those in both places counted once and those of two copies twice: what its limit
    bounds.
    """
    guaranteed_dram_bytes: int = 0
    """Bytes of DRAM that no other tenant takes from it. 0: it has no share."""
    guaranteed_ssd_bytes: int = 0
    """Bytes of SSD that no other tenant takes from it. 0: it has no share."""
    limit_bytes: int | None = None
    """Most bytes that it may keep. Unset: what SSD has."""
    retained_bytes: int = 0
    """Bytes that are retained on SSD on request. For a tenant without a share: of all such tenants together.
    """
    pinned_bytes: int = 0
    """Bytes that hints keep in DRAM, whatever sessions are pinned. For a tenant without a share: of all such
    tenants together.
    """
    read_token_count: int = 0
    """Tokens read or leased since the start."""
    appended_token_count: int = 0
    """Tokens committed since the start."""


@dataclass(frozen=True, slots=True)
class SessionHappening:
    """An event, as often as it was repeated without another one in between."""

    event: MissEvent = MissEvent.UNSPECIFIED
    """The sort of event."""
    first_time_ns: int | None = None
    """When it happened first."""
    last_time_ns: int | None = None
    """When it happened last."""
    count: int = 0
    """How often. At least 1."""
    detail: str = ""
    """By whom, or with what, in words. Not stable."""
    token_count: int = 0
    """Tokens that went with the last of them."""
    trace_id: str = ""
    """Trace of the request that did the last of them. Empty: it named none, or nobody asked for it."""


@dataclass(frozen=True, slots=True)
class RequestMiss:
    """One miss of a request."""

    session: str = ""
    """Resource name of the session."""
    access: str = ""
    """How it asked: `lookup`, `read` or `write`."""
    result: str = ""
    """The result, in the words of the metric `ctxcache_accesses_total`."""
    time_ns: int | None = None
    """When, the last time."""
    count: int = 0
    """How often without another miss in between. At least 1."""


@dataclass(frozen=True, slots=True)
class MissReport:
    """Why a session is not there, or has less than was stored; or what a request missed."""

    name: str = ""
    """Resource name. Empty where a trace was asked for of which no miss is remembered."""
    tenant: str = ""
    """Its tenant."""
    is_there: bool = False
    """Whether a session of that name is there now."""
    token_count: int = 0
    """Tokens that it has. 0 where it is not there."""
    durable_token_count: int = 0
    """Tokens of those that SSD has too."""
    reason: MissEvent = MissEvent.UNSPECIFIED
    """How it ended, where it is not there; what happened to it last, where it is. Unset: nothing is
    remembered, so that it was never stored, or ended before `remembered_since`, or so long ago that others
    took its place.
    """
    happenings: tuple[SessionHappening, ...] = ()
    """The latest events, the oldest first, at most 8."""
    remembered_since_ns: int | None = None
    """When the server began to remember."""
    trace_id: str = ""
    """The trace that was asked for."""
    misses: tuple[RequestMiss, ...] = ()
    """The misses of its request, the oldest first, at most 8. The latest 4096 requests that named their trace
    and missed are remembered.
    """
    withheld_token_count: int = 0
    """Tokens besides `token_count` that lie on an SSD path that is lost, or behind one that does."""
    lost_paths: tuple[str, ...] = ()
    """The files of the lost paths. Empty where nothing is withheld."""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """One setting."""

    name: str = ""
    """Its name, as in the TOML file."""
    value_json: str = ""
    """Its value as JSON: sizes in bytes, times in seconds."""
    can_reload: bool = False
    """Whether it changes while the server runs."""


@dataclass(frozen=True, slots=True)
class SettingsReload:
    """The outcome of a reload of the settings."""

    changed: tuple[str, ...] = ()
    """Names of the settings that have another value now."""
    pending: tuple[str, ...] = ()
    """Names of those that will have another value after a restart."""


@dataclass(frozen=True, slots=True)
class BadSegment:
    """A segment that is not what was written."""

    segment_id: int = 0
    """Its number."""
    tenant: str = ""
    """Tenant of its sessions."""
    sessions: tuple[str, ...] = ()
    """Resource names of its sessions; unless it was mended, they end before it now."""
    position_begin: int = 0
    """First position that it holds, in the log of the session that wrote it."""
    position_end: int = 0
    """One past the last."""
    path: str = ""
    """File; of a copy in memory, the arena's."""
    offset_bytes: int = 0
    """Where in it the segment begins, in bytes."""
    problem: str = ""
    """The problem and its layer, in words."""
    tier: StorageTier = StorageTier.UNSPECIFIED
    """Which copy."""
    is_mended: bool = False
    """Nothing is lost: it was a copy in memory, and what SSD has took its place; or another SSD directory has
    a good copy.
    """


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far a pass is."""

    segment_count: int = 0
    """Segments to be verified, as many as there were when the pass began."""
    checked_segment_count: int = 0
    """Those done."""
    checked_bytes: int = 0
    """Bytes that they take on SSD and in memory."""
    record_count: int = 0
    """Records read and verified, all of them before the first segment."""
    bad: tuple[BadSegment, ...] = ()
    """Bad segments found since the response before."""
    released_slot_count: int = 0
    """Places that may be used again, with `release`."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that is held: bytes that leave DRAM for nobody until it ends."""

    lease_id: int = 0
    """Its number. Never used again while the server runs."""
    tenant: str = ""
    """Tenant of the session and of the reader."""
    session: str = ""
    """Resource name of the session, or of the first of several blocks. It need not exist any more."""
    token_begin: int = 0
    """First token that it holds."""
    token_end: int = 0
    """One past the last."""
    pinned_bytes: int = 0
    """Bytes that the lease keeps in DRAM while it lasts. Leases that share segments name them each."""
    client: int | None = None
    """The reader: the number of a local client, the same in all of its leases. Unset: a stream."""
    age_ns: int | None = None
    """How long it is held."""
    expire_time_ns: int | None = None
    """When it ends, unless it is renewed or released. Unset while its rows are brought."""


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far a drain is."""

    running_rpc_count: int = 0
    """Calls and streams of clients that run yet."""
    local_client_count: int = 0
    """Local clients that are connected; each goes as soon as it holds nothing."""
    lease_count: int = 0
    """Leases held yet."""
    reservation_count: int = 0
    """Reservations open yet."""
    dirty_bytes: int = 0
    """Bytes that SSD has not and is to have."""
    spared_bytes: int = 0
    """Bytes that only DRAM has and that are not worth their place on SSD; the server's end writes what there
    is room for.
    """
    problem: str = ""
    """Why writing failed last, in words; empty while it does not."""
    is_done: bool = False
    """Whether nothing of the above but `spared_bytes` is left."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """An engine that publishes its waiting queue."""

    tenant: str = ""
    """Its tenant."""
    engine: str = ""
    """Its name."""
    waiting_count: int = 0
    """Jobs that wait."""
    session_count: int = 0
    """Sessions that they name."""
    is_connected: bool = False
    """Whether a stream has the queue now; else it is forgotten after a while."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A store of a fleet, by what it has said of itself."""

    node: str = ""
    """Id of its data directory."""
    address: str = ""
    """Where other stores reach it."""
    beat: int = 0
    """How often it has said so since its data directory was made."""
    is_self: bool = False
    """Whether it is the store that was asked."""
    taken_session_count: int = 0
    """Sessions that others took over while it did not answer, and of which it has not heard yet."""
    is_answering: bool = False
    """Whether it answers now."""
    problem: str = ""
    """Why it does not answer, or why its record cannot be read. Empty for none."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A fleet of stores, as one of them sees it."""

    node: str = ""
    """This store, by the id of its data directory."""
    bucket: str = ""
    """Bucket in which its stores agree."""
    is_sure: bool = False
    """Whether the bucket was heard lately. Else heads are read before sessions are used."""
    problem: str = ""
    """Why the bucket was not heard at the last beat. Empty where it was."""
    private_session_count: int = 0
    """Sessions with names that are continued here and have no head yet."""
    owned_session_count: int = 0
    """Sessions that this store owns."""
    unsure_session_count: int = 0
    """Sessions whose heads are read before they are used."""
    guest_count: int = 0
    """Copies of sessions that went on elsewhere."""
    arrived_session_count: int = 0
    """Sessions that came here since the start."""
    arrived_token_count: int = 0
    """Tokens that came here since the start."""
    arrived_bytes: int = 0
    """Bytes of rows that came here since the start."""
    yielded_session_count: int = 0
    """Sessions that others took over since the start, and asked for."""
    superseded_session_count: int = 0
    """Sessions that went on elsewhere since the start though nobody had asked for them."""
    owner_lost_count: int = 0
    """Sessions begun anew since the start because their owner did not answer."""
    head_read_count: int = 0
    """Reads of heads since the start."""
    head_change_count: int = 0
    """Changes of heads since the start."""
    no_answer_count: int = 0
    """Questions to the bucket without an answer in time, since the start."""
    nodes: tuple[FleetNode, ...] = ()
    """The stores of the fleet, by node."""
    restored_session_count: int = 0
    """Of the sessions that came here, how many came from the bucket."""
    shared_object_count: int = 0
    """Objects that were put into the bucket since the start."""
    shared_bytes: int = 0
    """Bytes that were put into the bucket since the start."""
    unshared_session_count: int = 0
    """Sessions whose rows are yet to be put into the bucket."""
    share_failure_count: int = 0
    """Sessions that could not be shared when that was tried, since the start."""
    removed_object_count: int = 0
    """Objects that were removed from the bucket since the start."""
    borrowed_prefix_count: int = 0
    """Prefixes that came here from other stores since the start."""
    borrowed_token_count: int = 0
    """Tokens that came with them."""
    lent_prefix_count: int = 0
    """Prefixes that other stores were let read here since the start."""
    told_prefix_count: int = 0
    """Prefixes here that the bucket was made to know since the start."""


@dataclass(frozen=True, slots=True)
class CollectedFleet:
    """Response of CollectFleet."""

    shared_session_count: int = 0
    """Sessions of which the bucket has something."""
    object_count: int = 0
    """Objects that it has of them."""
    size_bytes: int = 0
    """Their size."""
    garbage_object_count: int = 0
    """Objects that no head names, and that are older than the grace."""
    garbage_bytes: int = 0
    """Their size."""
    expired_session_count: int = 0
    """Sessions that have expired, and whose host is lost."""
    busy_session_count: int = 0
    """Sessions whose heads changed meanwhile. They are left for the next time."""
    problems: tuple[str, ...] = ()
    """What could not be read, a sentence each. It is left as it is."""
    done_percent: int = 0
    """How much of the bucket was looked through, in hundredths."""
    dead_head_count: int = 0
    """Heads that name no session, and were not changed for 30 days."""
    away_store_count: int = 0
    """Stores that were not heard of for 30 days: their records go."""


@dataclass(frozen=True, slots=True)
class PublishedSessions:
    """Response of PublishSessions."""

    session_count: int = 0
    """Sessions that this store had when the call began, of all tenants."""
    done_count: int = 0
    """Sessions that were looked at so far."""
    published_count: int = 0
    """Of them, those of which the bucket knows now."""
    elsewhere_count: int = 0
    """Of them, those that go on at another store, or have ended."""
    failed_count: int = 0
    """Of them, those that could not be published or put into the bucket."""
    problem: str = ""
    """Why the last of these was not. Empty for none."""


@dataclass(frozen=True, slots=True)
class MethodActivity:
    """Rpcs of one method."""

    method: str = ""
    """`Service/Method`; of local clients' operations `local/kind`, whose times are not taken."""
    count: int = 0
    """The calls that ended."""
    failed_count: int = 0
    """Calls that ended with an error."""
    total_seconds: float = 0.0
    """Seconds they took together."""
    bounds_seconds: tuple[float, ...] = ()
    """Upper bounds of the buckets, in seconds, ascending."""
    bucket_counts: tuple[int, ...] = ()
    """Rpcs in each bucket, not summed up; one more, of those above every bound."""


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """Accesses to one session."""

    name: str = ""
    """Resource name."""
    tenant: str = ""
    """Its tenant."""
    access_count: int = 0
    """Accesses, halved from time to time."""
    token_count: int = 0
    """Its tokens."""
    dram_bytes: int = 0
    """Its bytes in DRAM."""
    ssd_bytes: int = 0
    """Its bytes on SSD."""


@dataclass(frozen=True, slots=True)
class TenantActivity:
    """Accesses to one tenant's sessions."""

    tenant: str = ""
    """The tenant."""
    access_count: int = 0
    """Accesses: reads, appends and changes, those of local clients too."""
    session_count: int = 0
    """Its sessions."""
    dram_bytes: int = 0
    """Bytes of its segments in DRAM."""
    ssd_bytes: int = 0
    """Bytes of its segments on SSD."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The server's activity.

    Counts are since the start: a caller divides the difference of two by the time between.
    """

    time_ns: int | None = None
    """When this was looked at."""
    is_ready: bool = False
    """Whether new work is taken."""
    methods: tuple[MethodActivity, ...] = ()
    """Rpcs by method, and local clients' operations."""
    sessions: tuple[SessionActivity, ...] = ()
    """The sessions that were accessed most of late, the busiest first."""
    tenants: tuple[TenantActivity, ...] = ()
    """The tenants whose sessions were accessed most, the busiest first."""
    oldest_lease_age_ns: int | None = None
    """Age of the lease that is held longest; unset when none is."""
    leased_bytes: int = 0
    """Bytes that leases keep in DRAM."""
    leased_limit_bytes: int = 0
    """Most bytes that they may."""
    oldest_dirty_age_ns: int | None = None
    """Since when the oldest rows that SSD is to have are not there; unset when there are none."""
    dirty_limit_bytes: int = 0
    """Above so many bytes that SSD has not, writers wait."""
    hit_count: int = 0
    """Reads and look-ups that found the session."""
    miss_count: int = 0
    """Reads and look-ups that did not, or were refused."""
    refused_rpc_count: int = 0
    """Rpcs refused because too many ran, or because of a drain."""
    problems: tuple[str, ...] = ()
    """Problems that need an operator, in words, the worst first. Not stable."""


@dataclass(frozen=True, slots=True)
class BackupPart:
    """Some of a backup, and how far it is. Counts are from its beginning."""

    data: bytes = b""
    """The next bytes of the archive."""
    session_count: int = 0
    """Sessions in it."""
    total_session_count: int = 0
    """Sessions that there were when it began."""
    copied_bytes: int = 0
    """Bytes on SSD of the segments in it."""
    total_bytes: int = 0
    """Bytes that were taken on SSD when it began."""
    segment_count: int = 0
    """Segments in it, shared ones counted once."""
    token_count: int = 0
    """Live tokens in it, by session."""
    unwritten_token_count: int = 0
    """Live tokens that only memory had, and that are not in it."""
    left_out_session_count: int = 0
    """Sessions that are not in it, because tokens of theirs were dropped faster than they were copied."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that may strike yet."""

    fault_id: int = 0
    """Its number. Never used again while the server runs."""
    kind: InjectedFaultKind = InjectedFaultKind.UNSPECIFIED
    """The sort of fault."""
    path: str = ""
    """The one file of the SSD tier that it is of. Empty: every one, or the metadata."""
    delay_ns: int | None = None
    """How much longer something takes. Unset: it is no delay."""
    error_number: int = 0
    """With which error number of Linux something is refused. 0: it refuses nothing."""
    left_count: int = 0
    """How often it strikes yet."""
    left_duration_ns: int | None = None
    """How long it may strike yet."""


@dataclass(frozen=True, slots=True)
class RecordedStore:
    """A store as it was when a recording began."""

    version: str = ""
    """Version of the server."""
    start_time_ns: int | None = None
    """When the recording began."""
    dram_bytes: int = 0
    """Most bytes that DRAM holds."""
    ssd_bytes: int = 0
    """Most bytes that SSD holds."""
    session_count: int = 0
    """Sessions that it had."""
    placement_policy: str = ""
    """Its placement policy."""


@dataclass(frozen=True, slots=True)
class RecordedStreams:
    """Streams whose rows are of one size."""

    row_bytes: int = 0
    """Bytes of a row."""
    count: int = 0
    """How many."""


@dataclass(frozen=True, slots=True)
class RecordedLayout:
    """The bytes that a token takes in sessions of one layout."""

    layout: int = 0
    """Number of it, from 0, of this recording."""
    streams: tuple[RecordedStreams, ...] = ()
    """Streams beside the token ids, by layer and kind; neighbours whose rows are of one size are told
    together.
    """
    token_bytes: int = 0
    """Bytes of a token's rows, token ids included."""
    segment_bytes: int = 0
    """Bytes that a segment takes."""
    segment_tokens: int = 0
    """Tokens of a segment."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call. Fields that say nothing of its kind are unset."""

    at_ns: int = 0
    """Nanoseconds since the recording began, by a clock that never goes back."""
    kind: RecordedKind = RecordedKind.UNSPECIFIED
    """The sort of call."""
    session: int = 0
    """The session: a hash of its tenant and name with a key that nobody has and that no other recording uses.
    """
    tenant: int = 0
    """Its tenant, likewise."""
    session_tokens: int = 0
    """Tokens that the session has after the call."""
    begin: int = 0
    """READ: the first token."""
    tokens: int = 0
    """Tokens that it was about: READ, LOOKUP: found; RESERVE: with room; APPEND: committed; TRUNCATE, CUT,
    EVICT, EXPIRE, DELETE: gone.
    """
    dram_tokens: int = 0
    """LOOKUP, READ: those of them that were in DRAM."""
    layout: int | None = None
    """Number of the layout; unset where there is no session."""
    ttl_ms: int = 0
    """OPEN, FORK, TOUCH: after which idle time, or with an instant after which time, the session ends. HINT:
    its time.
    """
    is_pinned: bool = False
    """OPEN, FORK, TOUCH: whether the session is pinned."""
    reason: str = ""
    """Why it was refused. Empty: it was not."""
    lease: int = 0
    """READ, RELEASE: which of them belong together."""
    took_us: int = 0
    """READ: microseconds in the store until all was in DRAM."""
    source: int = 0
    """FORK: the session that it was forked from."""
    dropped: tuple[int, ...] = ()
    """TRUNCATE: the ranges of indexes that were dropped, begin and end in turn."""
    hint: str = ""
    """HINT: what it asked for: share, prefetch, demote, pin, retain, expect, release."""
    budget_bytes: int | None = None
    """HINT: how much it may take in bytes."""
    priority: int = 0
    """HINT: its priority."""
    return_in_ms: int | None = None
    """HINT expect: when the session returns; unset: never."""
    end: int | None = None
    """HINT: the first tokens that it was about; unset: all."""


@dataclass(frozen=True, slots=True)
class RecordingPart:
    """Part of a recording. One comes at least twice a second, with or without calls."""

    store: RecordedStore | None = None
    """Where it was recorded; in the first part only."""
    layouts: tuple[RecordedLayout, ...] = ()
    """Layouts that the calls name and no part before them has told."""
    calls: tuple[RecordedCall, ...] = ()
    """Calls, in the order in which the store carried them out."""
    lost_count: int = 0
    """Calls that came after these and are lost: the reader was too slow."""
    elapsed_ns: int | None = None
    """Since the recording began: all that came before is told by now."""
