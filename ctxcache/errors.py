"""Everything that can go wrong, one class per reason.

Each class owns a stable `reason`; facts are keyword arguments and become attributes, so that
`status.py` can put them on the wire and the client can build the same error again.
This file knows no gRPC code and no transport.
"""

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    # For types alone: the import takes a tenth of a small command's time.
    from asyncio import Future

Fact = str | int


class CacheError(Exception):
    """Base of every error of the store. Facts are kept as strings or integers."""

    reason: ClassVar[str] = "INTERNAL"
    template: ClassVar[str] = "internal error"

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


class _Missing(dict[str, Fact]):
    """Renders a fact that was not given as `?`, so that an error can always be printed."""

    def __missing__(self, key: str) -> str:
        return "?"


# -- the caller's request is wrong ---------------------------------------------------------------


class InvalidArgument(CacheError):
    """A field of the request is malformed; `field` names it."""

    reason = "INVALID_FIELD"
    template = "{field}: {problem}"


class ChecksumMismatch(CacheError):
    """Bytes that arrived do not match the checksum sent with them; nothing was changed."""

    reason = "CHECKSUM_MISMATCH"
    template = "{field}: data does not match its checksum"


class TokenRangeOutOfBounds(CacheError):
    """A token range reaches past the session's tokens."""

    reason = "TOKEN_RANGE_OUT_OF_BOUNDS"
    template = "tokens [{begin}, {end}) are not within [0, {token_count})"


class Unauthenticated(CacheError):
    """The caller did not say, in a way we accept, who it is."""

    reason = "UNAUTHENTICATED"
    template = "credentials are missing or not accepted"


class PermissionDenied(CacheError):
    """We know who the caller is, and it may not do that."""

    reason = "PERMISSION_DENIED"
    template = "{subject}: {problem}"


# -- it is not there ------------------------------------------------------------------------------


class SessionNotFound(CacheError):
    """No such session for this tenant: never created, deleted, expired or evicted."""

    reason = "SESSION_NOT_FOUND"
    template = "{session} does not exist"


class ModelNotFound(CacheError):
    """No such model for this tenant."""

    reason = "MODEL_NOT_FOUND"
    template = "{model} is not registered"


class LeaseNotFound(CacheError):
    """The lease ended: released, past its deadline, or its stream broke."""

    reason = "LEASE_NOT_FOUND"
    template = "lease {lease_id} does not exist"


class ReservationNotFound(CacheError):
    """The reservation ended: committed, released, past its deadline, or its stream broke."""

    reason = "RESERVATION_NOT_FOUND"
    template = "reservation {reservation_id} does not exist"


class SessionAlreadyExists(CacheError):
    """A session of that id exists for this tenant."""

    reason = "SESSION_ALREADY_EXISTS"
    template = "{session} already exists"


# -- the state does not allow it --------------------------------------------------------------------


class GenerationMismatch(CacheError):
    """The session changed since the caller last saw it."""

    reason = "GENERATION_MISMATCH"
    template = "{session} is at generation {actual}, not {expected}"


class WriteOffsetMismatch(CacheError):
    """An append starts elsewhere than at the session's end; continue at `token_count`."""

    reason = "WRITE_OFFSET_MISMATCH"
    template = "{session} holds {token_count} tokens, the append starts at {write_offset}"


class ModelFingerprintMismatch(CacheError):
    """State of one model was asked for, or saved, as another's."""

    reason = "MODEL_FINGERPRINT_MISMATCH"
    template = "{model} has fingerprint {actual}, not {expected}"


class ModelProbeMismatch(CacheError):
    """A model of the same fingerprint computes something else than the one that was registered first."""

    reason = "MODEL_PROBE_MISMATCH"
    template = "{model} computes something else than the engine that registered it: {problem}"


class PositionsNotRelocatable(CacheError):
    """The model's state depends on absolute positions: only its last tokens can be dropped."""

    reason = "POSITIONS_NOT_RELOCATABLE"
    template = "{model} learns absolute positions: only the newest tokens can be dropped"


class SessionTooFragmented(CacheError):
    """A truncation or a fork would leave the session in more runs of tokens than it may have."""

    reason = "SESSION_TOO_FRAGMENTED"
    template = "{session} would lie in {fragment_count} runs of tokens, {limit} are allowed"


class WriteInProgress(CacheError):
    """Another reservation is open on the session."""

    reason = "WRITE_IN_PROGRESS"
    template = "{session} has an open reservation"


class SessionInUse(CacheError):
    """The session to be replaced is read, or a reader is expected; it stays as it is."""

    reason = "SESSION_IN_USE"
    template = "{session} is read, or somebody waits for it"


class EngineTakenOver(CacheError):
    """Another stream publishes this engine's queue now; this one has it no longer."""

    reason = "ENGINE_TAKEN_OVER"
    template = "engine {engine} said hello on another stream"


class IncompleteAppend(CacheError):
    """A commit came before every stream of the layout had its rows."""

    reason = "INCOMPLETE_APPEND"
    template = "{stream} holds {row_count} rows of the {token_count} to commit"


class FaultsNotEnabled(CacheError):
    """A fault was to be injected into a server that was not started for that."""

    reason = "FAULTS_NOT_ENABLED"
    template = "no faults here: the server was started without fault_injection"


# -- there is no room --------------------------------------------------------------------------------


class CapacityExceeded(CacheError):
    """A tier cannot take the bytes even after everything that may leave has left."""

    reason = "CAPACITY_EXCEEDED"
    template = "{tier}: {needed_bytes} B needed, {free_bytes} B free or evictable of {limit_bytes} B"


class TooManyRequests(CacheError):
    """A bound on concurrent work was reached; try again after a delay."""

    reason = "TOO_MANY_REQUESTS"
    template = "{what}: the limit of {limit} is reached"


class Draining(CacheError):
    """The server takes no new work: it drains, or ends."""

    reason = "DRAINING"
    template = "the server takes no new work: it drains, or ends"


# -- bytes are not what they must be -------------------------------------------------------------------


class CorruptSegment(CacheError):
    """Stored bytes failed their checksum or carry another identity; the state is a miss from there on."""

    reason = "CORRUPT_SEGMENT"
    template = "segment {segment_id}: {problem}"


class CorruptMetadata(CacheError):
    """A metadata record or the database itself cannot be trusted."""

    reason = "CORRUPT_METADATA"
    template = "{where}: {problem}"


class NothingToRebuild(CorruptMetadata):
    """Metadata cannot be made anew: there is no catalog to make it from that can be read."""

    reason = "NOTHING_TO_REBUILD"


class TierFailure(CacheError):
    """A device refused a read, write or sync, or did not return it in time."""

    reason = "TIER_FAILURE"
    template = "{path}: {problem}"
    returned: "Future[None] | None" = None
    """Done when the device has let go of the caller's buffer; None: it has."""


# -- a file of the caller's -------------------------------------------------------------------------------


class FileUnusable(CacheError):
    """A file that was named cannot be opened, read or written."""

    reason = "FILE_UNUSABLE"
    template = "{path}: {problem}"


class FileFull(FileUnusable):
    """There is no room for a file that was to be written."""

    reason = "FILE_FULL"


class FileAlreadyExists(CacheError):
    """A file that was to be written is there already."""

    reason = "FILE_ALREADY_EXISTS"
    template = "{path} already exists"


class FileDamaged(CacheError):
    """A file is no archive of sessions, or not as it was written."""

    reason = "FILE_DAMAGED"
    template = "{path}: {problem}"


# -- the server cannot start ------------------------------------------------------------------------------


class DataDirectoryUnusable(CacheError):
    """The data directory cannot be created, read, written or locked."""

    reason = "DATA_DIRECTORY_UNUSABLE"
    template = "data directory {path}: {problem}"


class FormatTooNew(CacheError):
    """The data directory was written by a newer version."""

    reason = "FORMAT_TOO_NEW"
    template = "data directory {path} has format {found}; this version reads up to {supported}"


class InvalidConfiguration(CacheError):
    """A configuration value, file or environment variable is wrong."""

    reason = "INVALID_CONFIGURATION"
    template = "{source}: {problem}"


class AddressUnusable(CacheError):
    """The server cannot listen where it was told to."""

    reason = "ADDRESS_UNUSABLE"
    template = "cannot listen on {address}: {problem}"


class Unavailable(CacheError):
    """The server cannot be reached, or went away during the call."""

    reason = "UNAVAILABLE"
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
    template = "{target}: no answer within {timeout_s} s"
