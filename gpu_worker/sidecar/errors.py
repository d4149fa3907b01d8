"""Errors between an engine and the worker beside it, and their gRPC codes.

Importing it adds the codes to the one table that both sides read. Worst case: as in `ctxcache.errors`.
"""

import grpc

from ctxcache.errors import CacheError
from ctxcache.wire.status import add_codes
from gpu_worker.errors import (
    IncompleteRestore,
    ShapeMismatch,
    UnsupportedArchitecture,
    UnsupportedBatch,
    UnsupportedDtype,
    WeightsNotVisible,
)


class AttachmentNotFound(CacheError):
    """The engine is not attached: it never was, its stream ended, or another one took its name over."""

    reason = "ATTACHMENT_NOT_FOUND"
    template = "attachment {attachment_id} does not exist"


class RestoreAlreadyExists(CacheError):
    """A restore of that name is under way."""

    reason = "RESTORE_ALREADY_EXISTS"
    template = "restore {restore_id} is under way"


class TokensDiffer(CacheError):
    """The session holds other tokens than the engine wants restored."""

    reason = "TOKENS_DIFFER"
    template = "the session has {common_token_count} of the {token_count} tokens asked for"


class Cancelled(CacheError):
    """The engine cancelled the restore, or is gone."""

    reason = "CANCELLED"
    template = "the restore was cancelled"


class BlockInUse(CacheError):
    """Blocks of the restore are written to by another restore that is under way."""

    reason = "BLOCK_IN_USE"
    template = "block {block_id} belongs to restore {restore_id}"


class MemoryInUse(CacheError):
    """An engine's cache lies on that of another attached engine, or may do so."""

    reason = "MEMORY_IN_USE"
    template = "engine {engine} is attached with {what}"


add_codes(
    {
        UnsupportedArchitecture: grpc.StatusCode.FAILED_PRECONDITION,
        WeightsNotVisible: grpc.StatusCode.FAILED_PRECONDITION,
        ShapeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        UnsupportedDtype: grpc.StatusCode.FAILED_PRECONDITION,
        UnsupportedBatch: grpc.StatusCode.FAILED_PRECONDITION,
        IncompleteRestore: grpc.StatusCode.INTERNAL,
        AttachmentNotFound: grpc.StatusCode.NOT_FOUND,
        RestoreAlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
        BlockInUse: grpc.StatusCode.FAILED_PRECONDITION,
        MemoryInUse: grpc.StatusCode.FAILED_PRECONDITION,
        TokensDiffer: grpc.StatusCode.FAILED_PRECONDITION,
        Cancelled: grpc.StatusCode.CANCELLED,
    }
)
