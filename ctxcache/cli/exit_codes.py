"""Exit codes: the one table from what went wrong to what a script sees. docs/commands.md has it too.

Knows error classes and nothing of commands. Worst case: a class that nobody listed exits as its
base does, in the end as INTERNAL, never as success.
"""

import enum

from ctxcache import errors
from ctxcache.errors import CacheError


class ExitCode(enum.IntEnum):
    """What the process ends with. Numbers are never given to another meaning."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    INVALID_ARGUMENT = 5
    UNAVAILABLE = 6
    RESOURCE_EXHAUSTED = 7
    DATA_LOSS = 8
    DATA_DIRECTORY_UNUSABLE = 9
    FORMAT_TOO_NEW = 10
    CONFIGURATION = 11
    ADDRESS = 12
    DEVICE = 13
    UNAUTHENTICATED = 14
    PERMISSION_DENIED = 15


EXIT_CODES: dict[type[CacheError], ExitCode] = {
    CacheError: ExitCode.INTERNAL,
    errors.SessionNotFound: ExitCode.NOT_FOUND,
    errors.ModelNotFound: ExitCode.NOT_FOUND,
    errors.LeaseNotFound: ExitCode.NOT_FOUND,
    errors.ReservationNotFound: ExitCode.NOT_FOUND,
    errors.SessionAlreadyExists: ExitCode.CONFLICT,
    errors.GenerationMismatch: ExitCode.CONFLICT,
    errors.WriteInProgress: ExitCode.CONFLICT,
    errors.WriteOffsetMismatch: ExitCode.CONFLICT,
    errors.ModelFingerprintMismatch: ExitCode.CONFLICT,
    errors.ModelProbeMismatch: ExitCode.CONFLICT,
    errors.PositionsNotRelocatable: ExitCode.CONFLICT,
    errors.SessionTooFragmented: ExitCode.CONFLICT,
    errors.FileAlreadyExists: ExitCode.CONFLICT,
    errors.IncompleteAppend: ExitCode.CONFLICT,
    errors.EngineTakenOver: ExitCode.CONFLICT,
    errors.InvalidArgument: ExitCode.INVALID_ARGUMENT,
    errors.ChecksumMismatch: ExitCode.INVALID_ARGUMENT,
    errors.TokenRangeOutOfBounds: ExitCode.INVALID_ARGUMENT,
    errors.Unavailable: ExitCode.UNAVAILABLE,
    errors.TlsFailed: ExitCode.UNAVAILABLE,
    errors.DeadlineExceeded: ExitCode.UNAVAILABLE,
    errors.Draining: ExitCode.UNAVAILABLE,
    errors.TooManyRequests: ExitCode.UNAVAILABLE,
    errors.CapacityExceeded: ExitCode.RESOURCE_EXHAUSTED,
    errors.FileFull: ExitCode.RESOURCE_EXHAUSTED,
    errors.CorruptSegment: ExitCode.DATA_LOSS,
    errors.CorruptMetadata: ExitCode.DATA_LOSS,
    errors.FileDamaged: ExitCode.DATA_LOSS,
    errors.DataDirectoryUnusable: ExitCode.DATA_DIRECTORY_UNUSABLE,
    errors.FormatTooNew: ExitCode.FORMAT_TOO_NEW,
    errors.InvalidConfiguration: ExitCode.CONFIGURATION,
    errors.FaultsNotEnabled: ExitCode.CONFIGURATION,
    errors.AddressUnusable: ExitCode.ADDRESS,
    errors.TierFailure: ExitCode.DEVICE,
    errors.FileUnusable: ExitCode.DEVICE,
    errors.Unauthenticated: ExitCode.UNAUTHENTICATED,
    errors.PermissionDenied: ExitCode.PERMISSION_DENIED,
}


def exit_code_of(error: CacheError) -> ExitCode:
    """Return an error's exit code; a class that the table does not name has its base's."""
    return next(EXIT_CODES[base] for base in type(error).__mro__ if base in EXIT_CODES)
