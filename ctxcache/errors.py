"""Everything that can go wrong, one class per reason.

A class declares all that is said of an error: its stable `reason`, its `status`, its sentence. The wire,
the exit codes of commands and the history's account of failed accesses follow from the reason and the status.
Facts are keyword arguments and become attributes, so that the client can build the same error again.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    # For types alone: the import takes a tenth of a small command's time.
    from asyncio import Future

Fact = str | int
Status = Literal[
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "ABORTED",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "DATA_LOSS",
    "CANCELLED",
    "INTERNAL",
]
"""The names of gRPC's codes: what sort of failure it is to a client that does not know the reason."""


class CacheError(Exception):
    """Base of every error of the store. Facts are kept as strings or integers.

    A class that declares a reason is known by it from then on; a reason that has a class raises TypeError.
    """

    reason: ClassVar[str] = "INTERNAL"
    status: ClassVar[Status] = "INTERNAL"
    template: ClassVar[str] = "internal error"
    by_reason: ClassVar[dict[str, type["CacheError"]]] = {}
    """Every class that was imported."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "reason" in vars(cls) and cls.by_reason.setdefault(cls.reason, cls) is not cls:
            raise TypeError(f"{cls.reason} is the reason of {cls.by_reason[cls.reason].__name__}")

    def __init__(self, detail: str = "", /, **facts: Fact) -> None:
        """`detail` replaces the class's own sentence; `facts` fill its template."""
        super().__init__(detail or self.template.format_map(_Missing(facts)))
        self.facts = facts

    def __getattr__(self, name: str) -> Fact:
        """Facts read as attributes; a fact that was not given raises AttributeError."""
        try:
            facts: dict[str, Fact] = self.__dict__["facts"]
            return facts[name]
        except KeyError:
            raise AttributeError(name) from None


CacheError.by_reason[CacheError.reason] = CacheError


class _Missing(dict[str, Fact]):
    """Renders a fact that was not given as `?`, so that an error can always be printed."""

    def __missing__(self, key: str) -> str:
        return "?"


# -- the caller's request is wrong ---------------------------------------------------------------


class InvalidArgument(CacheError):
    """A field of the request is malformed; `field` names it."""

    reason = "INVALID_FIELD"
    status = "INVALID_ARGUMENT"
    template = "{field}: {problem}"


class ChecksumMismatch(CacheError):
    """Bytes that arrived do not match the checksum sent with them; nothing was changed."""

    reason = "CHECKSUM_MISMATCH"
    status = "INVALID_ARGUMENT"
    template = "{field}: data does not match its checksum"


class TokenRangeOutOfBounds(CacheError):
    """A token range reaches past the session's tokens."""

    reason = "TOKEN_RANGE_OUT_OF_BOUNDS"
    status = "OUT_OF_RANGE"
    template = "tokens [{begin}, {end}) are not within [0, {token_count})"


class Unauthenticated(CacheError):
    """The caller did not say, in a way we accept, who it is."""

    reason = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"
    template = "credentials are missing or not accepted"


class PermissionDenied(CacheError):
    """We know who the caller is, and it may not do that."""

    reason = "PERMISSION_DENIED"
    status = "PERMISSION_DENIED"
    template = "{subject}: {problem}"


# -- it is not there ------------------------------------------------------------------------------


class SessionNotFound(CacheError):
    """No such session for this tenant: never created, deleted, expired or evicted."""

    reason = "SESSION_NOT_FOUND"
    status = "NOT_FOUND"
    template = "{session} does not exist"


class FleetNotFound(CacheError):
    """The store is alone: it was started without `fleet_bucket`."""

    reason = "FLEET_NOT_FOUND"
    status = "NOT_FOUND"
    template = "this store is alone: it was started without fleet_bucket"


class ModelNotFound(CacheError):
    """No such model for this tenant."""

    reason = "MODEL_NOT_FOUND"
    status = "NOT_FOUND"
    template = "{model} is not registered"


class LeaseNotFound(CacheError):
    """The lease ended: released, past its deadline, or its stream broke."""

    reason = "LEASE_NOT_FOUND"
    status = "NOT_FOUND"
    template = "lease {lease_id} does not exist"


class ReservationNotFound(CacheError):
    """The reservation ended: committed, released, past its deadline, or its stream broke."""

    reason = "RESERVATION_NOT_FOUND"
    status = "NOT_FOUND"
    template = "reservation {reservation_id} does not exist"


class SessionAlreadyExists(CacheError):
    """A session of that id exists for this tenant."""

    reason = "SESSION_ALREADY_EXISTS"
    status = "ALREADY_EXISTS"
    template = "{session} already exists"


# -- the state does not allow it --------------------------------------------------------------------


class GenerationMismatch(CacheError):
    """The session changed since the caller last saw it."""

    reason = "GENERATION_MISMATCH"
    status = "ABORTED"
    template = "{session} is at generation {actual}, not {expected}"


class WriteOffsetMismatch(CacheError):
    """An append starts elsewhere than at the session's end; continue at `token_count`."""

    reason = "WRITE_OFFSET_MISMATCH"
    status = "ABORTED"
    template = "{session} holds {token_count} tokens, the append starts at {write_offset}"


class ModelFingerprintMismatch(CacheError):
    """State of one model was asked for, or saved, as another's."""

    reason = "MODEL_FINGERPRINT_MISMATCH"
    status = "FAILED_PRECONDITION"
    template = "{subject} is of {model}, not of {wanted} (fingerprint {actual!s:.12}, not {expected!s:.12})"


class ModelProbeMismatch(CacheError):
    """A model of the same fingerprint computes something else than the one that was registered first."""

    reason = "MODEL_PROBE_MISMATCH"
    status = "FAILED_PRECONDITION"
    template = "{model} computes something else than the engine that registered it: {problem}"


class PositionsNotRelocatable(CacheError):
    """The model's state depends on absolute positions: only its last tokens can be dropped."""

    reason = "POSITIONS_NOT_RELOCATABLE"
    status = "FAILED_PRECONDITION"
    template = "{model} learns absolute positions: only the newest tokens can be dropped"


class SessionTooFragmented(CacheError):
    """A truncation or a fork would leave the session in more runs of tokens than it may have."""

    reason = "SESSION_TOO_FRAGMENTED"
    status = "FAILED_PRECONDITION"
    template = "{session} would lie in {fragment_count} runs of tokens, {limit} are allowed"


class WriteInProgress(CacheError):
    """Another reservation is open on the session."""

    reason = "WRITE_IN_PROGRESS"
    status = "ABORTED"
    template = "{session} has an open reservation"


class SessionInUse(CacheError):
    """The session to be replaced is read, or a reader is expected; it stays as it is."""

    reason = "SESSION_IN_USE"
    status = "ABORTED"
    template = "{session} is read, or somebody waits for it"


class SessionMoved(CacheError):
    """Another host of the fleet continues the session, and is writing it: compute, and save nothing here."""

    reason = "SESSION_MOVED"
    status = "ABORTED"
    template = "{session} goes on at another host of the fleet"


class ModelInUse(CacheError):
    """Sessions are of the model; it stays as it is."""

    reason = "MODEL_IN_USE"
    status = "FAILED_PRECONDITION"
    template = "{model} has {session_count} {sessions}: delete what is of it first"


class EngineTakenOver(CacheError):
    """Another stream publishes this engine's queue now; this one has it no longer."""

    reason = "ENGINE_TAKEN_OVER"
    status = "ABORTED"
    template = "engine {engine} said hello on another stream"


class IncompleteAppend(CacheError):
    """A commit came before every stream of the layout had its rows."""

    reason = "INCOMPLETE_APPEND"
    status = "FAILED_PRECONDITION"
    template = "{stream} holds {row_count} rows of the {token_count} to commit"


class FaultsNotEnabled(CacheError):
    """A fault was to be injected into a server that was not started for that."""

    reason = "FAULTS_NOT_ENABLED"
    status = "FAILED_PRECONDITION"
    template = "no faults here: the server was started without fault_injection"


# -- there is no room --------------------------------------------------------------------------------


class CapacityExceeded(CacheError):
    """A tier cannot take the bytes even after everything that may leave has left."""

    reason = "CAPACITY_EXCEEDED"
    status = "RESOURCE_EXHAUSTED"
    template = "{tier}: {needed_bytes} B needed, {free_bytes} B free or evictable of {limit_bytes} B"


class TooManyRequests(CacheError):
    """A bound on concurrent work was reached; try again after a delay."""

    reason = "TOO_MANY_REQUESTS"
    status = "RESOURCE_EXHAUSTED"
    template = "{what}: the limit of {limit} is reached"


class Draining(CacheError):
    """The server takes no new work: it drains, or ends."""

    reason = "DRAINING"
    status = "UNAVAILABLE"
    template = "the server takes no new work: it drains, or ends"


# -- bytes are not what they must be -------------------------------------------------------------------


class CorruptSegment(CacheError):
    """Stored bytes failed their checksum or carry another identity; the state is a miss from there on."""

    reason = "CORRUPT_SEGMENT"
    status = "DATA_LOSS"
    template = "segment {segment_id}: {problem}"


class CorruptMetadata(CacheError):
    """A metadata record or the database itself cannot be trusted."""

    reason = "CORRUPT_METADATA"
    status = "DATA_LOSS"
    template = "{where}: {problem}"


class NothingToRebuild(CorruptMetadata):
    """Metadata cannot be made anew: there is no catalog to make it from that can be read."""

    reason = "NOTHING_TO_REBUILD"


class TierFailure(CacheError):
    """A device refused a read, write or sync, or did not return it in time."""

    reason = "TIER_FAILURE"
    status = "UNAVAILABLE"
    template = "{path}: {problem}"
    returned: "Future[None] | None" = None
    """Done when the device has let go of the caller's buffer; None: it has."""


# -- a file of the caller's -------------------------------------------------------------------------------


class FileUnusable(CacheError):
    """A file that was named cannot be opened, read or written."""

    reason = "FILE_UNUSABLE"
    status: ClassVar[Status] = "FAILED_PRECONDITION"
    template = "{path}: {problem}"


class FileFull(FileUnusable):
    """There is no room for a file that was to be written."""

    reason = "FILE_FULL"
    status = "RESOURCE_EXHAUSTED"


class FileAlreadyExists(CacheError):
    """A file that was to be written is there already."""

    reason = "FILE_ALREADY_EXISTS"
    status = "ALREADY_EXISTS"
    template = "{path} already exists"


class FileDamaged(CacheError):
    """A file is no archive of sessions, or not as it was written."""

    reason = "FILE_DAMAGED"
    status = "DATA_LOSS"
    template = "{path}: {problem}"


# -- the server cannot start ------------------------------------------------------------------------------


class DataDirectoryUnusable(CacheError):
    """The data directory cannot be created, read, written or locked."""

    reason = "DATA_DIRECTORY_UNUSABLE"
    status = "FAILED_PRECONDITION"
    template = "data directory {path}: {problem}"


class FormatTooNew(CacheError):
    """The data directory was written by a newer version."""

    reason = "FORMAT_TOO_NEW"
    status = "FAILED_PRECONDITION"
    template = "data directory {path} has format {found}; this version reads up to {supported}"


class InvalidConfiguration(CacheError):
    """A configuration value, file or environment variable is wrong."""

    reason = "INVALID_CONFIGURATION"
    status = "FAILED_PRECONDITION"
    template = "{source}: {problem}"


class AddressUnusable(CacheError):
    """The server cannot listen where it was told to."""

    reason = "ADDRESS_UNUSABLE"
    status = "FAILED_PRECONDITION"
    template = "cannot listen on {address}: {problem}"


class Unavailable(CacheError):
    """The server cannot be reached, or went away during the call."""

    reason = "UNAVAILABLE"
    status = "UNAVAILABLE"
    template = "{target}: {problem}"


class TlsFailed(Unavailable):
    """The server is there, and TLS between the two does not come about.

    The problem says at which side, and why.
    """

    reason = "TLS_FAILED"
    template = "{target}: TLS: {problem}"


class DeadlineExceeded(CacheError):
    """The call did not end within its deadline."""

    reason = "DEADLINE_EXCEEDED"
    status = "DEADLINE_EXCEEDED"
    template = "{target}: no answer within {timeout_s} s"
