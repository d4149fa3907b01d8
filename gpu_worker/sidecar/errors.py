"""Errors between an engine and the worker beside it. Worst case: as in `ctxcache.errors`."""

from ctxcache.errors import CacheError


class AttachmentNotFound(CacheError):
    """The engine is not attached: it never was, its stream ended, or another one took its name over."""

    reason = "ATTACHMENT_NOT_FOUND"
    status = "NOT_FOUND"
    template = "attachment {attachment_id} does not exist"


class RestoreAlreadyExists(CacheError):
    """A restore of that name is under way."""

    reason = "RESTORE_ALREADY_EXISTS"
    status = "ALREADY_EXISTS"
    template = "restore {restore_id} is under way"


class TokensDiffer(CacheError):
    """The session holds other tokens than the engine wants restored."""

    reason = "TOKENS_DIFFER"
    status = "FAILED_PRECONDITION"
    template = "the session has {common_token_count} of the {token_count} tokens asked for"


class Cancelled(CacheError):
    """The engine cancelled the restore, or is gone."""

    reason = "CANCELLED"
    status = "CANCELLED"
    template = "the restore was cancelled"


class BlockInUse(CacheError):
    """Blocks of the restore are written to by another restore that is under way."""

    reason = "BLOCK_IN_USE"
    status = "FAILED_PRECONDITION"
    template = "block {block_id} belongs to restore {restore_id}"


class MemoryInUse(CacheError):
    """An engine's cache lies on that of another attached engine, or may do so."""

    reason = "MEMORY_IN_USE"
    status = "FAILED_PRECONDITION"
    template = "engine {engine} is attached with {what}"
