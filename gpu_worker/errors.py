"""Errors between the store's rows and an engine's cache, one class per reason.

Knows neither torch nor the store. Each of these is raised before a cache is handed out, so that
the worst case is a session recomputed from its tokens, never a wrong KV.
"""

from ctxcache.errors import CacheError


class UnsupportedArchitecture(CacheError):
    """The model's family, or a setting of it, is not one that state can be saved for."""

    reason = "UNSUPPORTED_ARCHITECTURE"
    status = "FAILED_PRECONDITION"
    template = "{architecture}: {problem}"


class WeightsNotVisible(CacheError):
    """A module computes with something that cannot be looked into. No fingerprint would be true of it."""

    reason = "WEIGHTS_NOT_VISIBLE"
    status = "FAILED_PRECONDITION"
    template = "{module}: {problem}"


class ModelChanged(CacheError):
    """A model is not what it was described as any more: another adapter, other weights, other settings."""

    reason = "MODEL_CHANGED"
    template = (
        "{model} was changed since it was described: "
        "its {field} is {found}, not {described}; make a new engine"
    )


class ShapeMismatch(CacheError):
    """A tensor does not have the shape that the model and the token range demand."""

    reason = "SHAPE_MISMATCH"
    status = "FAILED_PRECONDITION"
    template = "{what}: expected shape {expected}, got {actual}"


class UnsupportedDtype(CacheError):
    """Rows or weights are of an element type that is not the model's, or that no row can have."""

    reason = "UNSUPPORTED_DTYPE"
    status = "FAILED_PRECONDITION"
    template = "{what}: expected {expected}, got {actual}"


class RowNotRepresentable(CacheError):
    """A row has numbers that few bits cannot hold; no session stores what would not come back as it was."""

    reason = "ROW_NOT_REPRESENTABLE"
    template = "{what}: row {row} {problem}"


class BaseMismatch(CacheError):
    """A delta was taken from other rows than those that it would be added to."""

    reason = "BASE_MISMATCH"
    template = "{stream} at token {token}: it is no delta to what came back of layer {below}"


class UnsupportedBatch(CacheError):
    """Capture sees one sequence per forward pass; the pass had more."""

    reason = "UNSUPPORTED_BATCH"
    status = "FAILED_PRECONDITION"
    template = "capture needs batch size 1, the pass has {batch_size}"


class IncompleteRestore(CacheError):
    """A cache was asked for before every layer had all its rows."""

    reason = "INCOMPLETE_RESTORE"
    status = "INTERNAL"
    template = "layer {layer} holds {row_count} of {token_count} tokens"


class SnapshotMismatch(CacheError):
    """A snapshot is of other tokens, another model or another layer than the state that is asked for."""

    reason = "SNAPSHOT_MISMATCH"
    template = "the state of layer {layer}: {problem}"


class RestoreTooLate(CacheError):
    """A restore, or a part of it, was not there by its deadline."""

    reason = "RESTORE_TOO_LATE"
    template = "{what} was not there by the deadline"


class RestoreCancelled(CacheError):
    """The restore was cancelled by its caller."""

    reason = "RESTORE_CANCELLED"
    template = "the restore was cancelled"


class RestoreFailed(CacheError):
    """Something that is no error of the store's broke a restore: memory, a device, a model's own code."""

    reason = "RESTORE_FAILED"
    template = "the restore broke: {problem}"


class LaneStuck(CacheError):
    """Work on a lane did not end in time: what it writes to must not be used, nor the lane."""

    reason = "LANE_STUCK"
    template = "the {lane} lane did not come to rest"


class DeviceFailed(CacheError):
    """The device that computes rows failed: what it was copying is lost."""

    reason = "DEVICE_FAILED"
    template = "the device failed: {problem}"


class RankLost(CacheError):
    """A rank that a restore needs did not come, or went: its share of the rows is missing."""

    reason = "RANK_LOST"
    template = "rank {rank}: {problem}"


class RankFailed(CacheError):
    """Another rank of the engine could not restore its part; no rank's part is used then."""

    reason = "RANK_FAILED"
    template = "rank {rank} failed: {problem}"


class RanksDisagree(CacheError):
    """Ranks were asked for different restores under one name, or their settings do not fit together."""

    reason = "RANKS_DISAGREE"
    template = "{what} is {actual} on this rank, {expected} on the first one"
