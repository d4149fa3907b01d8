"""Errors on the wire, in both directions.

Knows nothing of what a caller was doing. Worst case: an error whose reason no class has arrives as the base
class with its code in the message, never as success.
"""

import re
from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache import errors
from ctxcache.errors import CacheError, Fact

DOMAIN = "ctxcache"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
RETRY_DELAY_MS = 250
# Trailing metadata is bounded (8 KiB by default): a long text must not turn an error into another one.
FACT_CHARACTERS = 256
MESSAGE_CHARACTERS = 512
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

# An error crosses the wire in both directions, and in both ways:
#
#     error ── status, reason, facts ──► status details (gRPC) or OperationError (control socket)
#     error ◄── CacheError.by_reason ── reason, facts ◄──┘
#           ◄── by the code alone: a reason of a newer server, or an error of gRPC itself
#
# The reason says which class it is; the code is for clients in other languages, proxies and gRPC's retries.
RETRYABLE = (errors.TooManyRequests, errors.Draining, errors.Unavailable)
"""Errors that pass by themselves. So does CapacityExceeded where what was asked for could ever fit."""

FIELD_ERRORS = (errors.InvalidArgument, errors.ChecksumMismatch)
"""Errors of a field, which their answers name: all whose status is INVALID_ARGUMENT."""


def code_of(error: CacheError) -> grpc.StatusCode:
    """Return the gRPC code of an error."""
    return grpc.StatusCode[error.status]


def code_name(end: str) -> tuple[str, str]:
    """The code's name and the reason of an end: an error's reason, or a code's name, which has no reason."""
    error_class = CacheError.by_reason.get(end)
    return (end, "") if error_class is None else (error_class.status, end)


def to_status(error: CacheError) -> status_pb2.Status:
    """Put an error into a status: ErrorInfo with its facts, RetryInfo and BadRequest where they apply."""
    status = status_pb2.Status(code=_number(code_of(error)), message=message_of(error))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=wire_facts(error))
    status.details.add().Pack(info)
    # Two forms of the same number: RetryInfo is for callers, the pushback in the metadata for gRPC's own
    # retries.
    if _is_retryable(error):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(RETRY_DELAY_MS)
        status.details.add().Pack(retry)
    if isinstance(error, FIELD_ERRORS):
        status.details.add().Pack(_bad_request(error))
    return status


def trailing_metadata(error: CacheError) -> tuple[tuple[str, str | bytes], ...]:
    """Return what a servicer sets as trailing metadata before it aborts with `code_of`, `message_of`."""
    details = ((DETAILS_KEY, to_status(error).SerializeToString()),)
    return (*details, (PUSHBACK_KEY, str(RETRY_DELAY_MS))) if _is_retryable(error) else details


def message_of(error: CacheError) -> str:
    """Return the error's sentence, short enough for a header."""
    return _clip(str(error), MESSAGE_CHARACTERS)


def wire_facts(error: CacheError) -> dict[str, str]:
    """Return the error's facts as ErrorInfo.metadata and OperationError.metadata carry them."""
    return {name: _clip(str(fact), FACT_CHARACTERS) for name, fact in error.facts.items()}


def from_rpc_error(error: grpc.RpcError, target: str) -> CacheError:
    """Rebuild the error that the server at `target` raised, or say how the call failed."""
    if not isinstance(error, grpc.Call):
        return errors.Unavailable(target=target, problem=str(error))
    message = error.details() or ""
    info = _error_info(error)
    if info is None:
        return _from_code(error.code(), message, target)
    return from_parts(_number(error.code()), info.reason, message, info.metadata, target=target)


def from_status(status: status_pb2.Status, target: str) -> CacheError:
    """Rebuild the error that a status carries, as `from_rpc_error` does."""
    info = _info_in(status)
    if info is None:
        return _from_code(_code(status.code), status.message, target)
    return from_parts(status.code, info.reason, status.message, info.metadata, target=target)


def from_encoded_status(encoded: bytes, target: str) -> CacheError:
    """Rebuild the error that an encoded status carries; one that cannot be read is an error too."""
    try:
        return from_status(status_pb2.Status.FromString(encoded), target)
    except DecodeError:
        return CacheError(f"{target}: an error that cannot be read")


def from_parts(
    code: int, reason: str, message: str, metadata: Mapping[str, str], *, target: str = "server"
) -> CacheError:
    """Rebuild an error from an OperationError's fields. An unknown reason is read by its code."""
    error_class = CacheError.by_reason.get(reason)
    # A newer server's reason: code and sentence are kept, and only the class is lost.
    if error_class is None:
        return _from_code(_code(code), message, target)
    return error_class(message, **{name: _fact(text) for name, text in metadata.items()})


def _from_code(code: grpc.StatusCode, message: str, target: str) -> CacheError:
    # A call that arrives as the server stops is dropped by gRPC itself, before anybody has seen it.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.Unavailable(target=target, problem=message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{target}: {message}", target=target)
    return CacheError(f"{target}: {code.name}: {message}", target=target, code=code.name)


def _is_retryable(error: CacheError) -> bool:
    # Room that exceeds the whole limit will not be there later either, so such a call is not to be repeated.
    if isinstance(error, errors.CapacityExceeded):
        facts = error.facts
        return int(facts.get("needed_bytes", 0)) <= int(facts.get("limit_bytes", -1))
    return isinstance(error, RETRYABLE)


def _error_info(call: grpc.Call) -> error_details_pb2.ErrorInfo | None:
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _parse_info(value)
    return None


def _parse_info(encoded: bytes) -> error_details_pb2.ErrorInfo | None:
    try:
        return _info_in(status_pb2.Status.FromString(encoded))
    except DecodeError:
        return None


def _info_in(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    return next((info for d in status.details if d.Unpack(info) and info.domain == DOMAIN), None)


def _bad_request(error: CacheError) -> error_details_pb2.BadRequest:
    facts = wire_facts(error)
    request = error_details_pb2.BadRequest()
    request.field_violations.add(
        field=facts.get("field", ""), description=facts.get("problem", message_of(error))
    )
    return request


def _fact(text: str) -> Fact:
    # Facts travel as strings, and an error must have the same ones on both sides.
    return int(text) if _INTEGER.fullmatch(text) else text


def _clip(text: str, limit: int) -> str:
    # A path may hold bytes that are not UTF-8; protobuf would refuse the whole status.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _number(code: grpc.StatusCode) -> int:
    return int(code.value[0])


def _code(number: int) -> grpc.StatusCode:
    return next((code for code in grpc.StatusCode if _number(code) == number), grpc.StatusCode.UNKNOWN)
