"""The error table: what a servicer raises is what the client's caller catches."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache import errors
from ctxcache.cache.state import event_of
from ctxcache.errors import CacheError, Fact
from ctxcache.wire import status

Metadata = tuple[tuple[str, str | bytes], ...]
TARGET = "cache.example:7420"
FACT_NAMES = st.from_regex(r"[a-z][a-z_]{0,20}", fullmatch=True)
FACT_VALUES = st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=80).filter(
    lambda text: not _is_number(text)
)
FACTS = st.dictionaries(FACT_NAMES, FACT_VALUES, max_size=6)


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _error_classes() -> list[type[CacheError]]:
    members = vars(errors).values()
    return [member for member in members if inspect.isclass(member) and issubclass(member, CacheError)]


class _FailedCall(grpc.RpcError, grpc.Call):
    """A call that ended, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        super().__init__()
        self._end = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._end[0]

    def details(self) -> str:
        return self._end[1]

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]  # the stub wants pairs with names
        return self._end[2]

    def initial_metadata(self) -> Metadata:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:  # type: ignore[override]  # what gRPC says of no deadline
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002  # named by grpc.Call
        return False


def _failed(error: CacheError) -> _FailedCall:
    return _FailedCall(status.code_of(error), status.message_of(error), status.trailing_metadata(error))


def _details(error: CacheError, kind: type[Message]) -> Iterator[Any]:
    for packed in status.to_status(error).details:
        message = kind()
        if packed.Unpack(message):
            yield message


@pytest.mark.parametrize("error_class", _error_classes())
def test_every_error_class_says_what_sort_of_failure_it_is(error_class: type[CacheError]) -> None:
    """A class that declares no status would be an internal error to every caller."""
    assert (error_class.status == "INTERNAL") == (error_class is CacheError)
    assert error_class.status in grpc.StatusCode.__members__


REFUSED = {"INVALID_ARGUMENT", "OUT_OF_RANGE", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"}
REFUSED |= {"ALREADY_EXISTS", "ABORTED", "FAILED_PRECONDITION", "INTERNAL"}
"""Statuses of accesses for which the history has no event: the caller erred."""


@pytest.mark.parametrize("error_class", _error_classes())
def test_every_error_says_what_became_of_an_access(error_class: type[CacheError]) -> None:
    """The caller's fault has no event; a fingerprint of another model, and what the server lacks, has one."""
    is_refused = error_class.status in REFUSED or error_class is errors.Draining

    event = event_of(error_class())

    assert (event is None) == (is_refused and error_class is not errors.ModelFingerprintMismatch)


def test_reasons_are_unique() -> None:
    """A reason names one class, or the client could not tell which to rebuild."""
    with pytest.raises(TypeError, match="SESSION_NOT_FOUND is the reason of SessionNotFound"):

        class Another(CacheError):
            reason = "SESSION_NOT_FOUND"


@pytest.mark.parametrize("error_class", _error_classes())
@settings(max_examples=30)
@given(facts=FACTS)
def test_an_error_survives_the_wire_with_its_facts(
    error_class: type[CacheError], facts: dict[str, Fact]
) -> None:
    """The client rebuilds class, sentence and facts, integers as integers."""
    error = error_class(**facts)

    rebuilt = status.from_rpc_error(_failed(error), TARGET)

    assert type(rebuilt) is error_class
    assert rebuilt.facts == facts
    assert str(rebuilt) == str(error)[: status.MESSAGE_CHARACTERS]


@pytest.mark.parametrize("error_class", _error_classes())
@settings(max_examples=30)
@given(facts=FACTS)
def test_an_error_survives_an_operation_error(error_class: type[CacheError], facts: dict[str, Fact]) -> None:
    """The four fields of OperationError say as much as a status does."""
    error = error_class(**facts)

    rebuilt = status.from_parts(
        status.code_of(error).value[0], error.reason, str(error), status.wire_facts(error)
    )

    assert (type(rebuilt), rebuilt.facts) == (error_class, facts)


def test_a_subclass_without_a_row_takes_the_code_of_its_base() -> None:
    """An error that only one module knows still leaves the server as what it is a kind of."""

    class Narrower(errors.SessionNotFound):
        """A kind of miss."""

    assert status.code_of(Narrower()) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("error", [errors.Draining(), errors.TooManyRequests(what="reads", limit=8)])
def test_an_error_worth_retrying_says_when(error: CacheError) -> None:
    """RetryInfo carries the delay, as the contract promises for these two."""
    (retry,) = _details(error, error_details_pb2.RetryInfo)

    assert retry.retry_delay.ToMilliseconds() == status.RETRY_DELAY_MS


def test_an_error_not_worth_retrying_carries_no_delay() -> None:
    """Repeating a request for a session that is not there would find it missing again."""
    assert not list(_details(errors.SessionNotFound(session="sessions/a"), error_details_pb2.RetryInfo))


@pytest.mark.parametrize("error_class", [errors.InvalidArgument, errors.ChecksumMismatch])
def test_a_bad_field_is_named(error_class: type[CacheError]) -> None:
    """BadRequest names the field, for clients that know nothing of our reasons."""
    (bad,) = _details(error_class(field="ttl", problem="is negative"), error_details_pb2.BadRequest)

    assert [(one.field, one.description) for one in bad.field_violations] == [("ttl", "is negative")]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_broken_connection_is_unavailable(code: grpc.StatusCode) -> None:
    """A failure of gRPC itself carries no details; its code says what it was."""
    rebuilt = status.from_rpc_error(_FailedCall(code, "refused"), TARGET)

    assert type(rebuilt) is errors.Unavailable
    assert rebuilt.facts == {"target": TARGET, "problem": "refused"}


def test_a_late_answer_is_a_deadline_exceeded() -> None:
    """A deadline that passed on this side is the same class as one that passed on the other."""
    rebuilt = status.from_rpc_error(_FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), TARGET)

    assert type(rebuilt) is errors.DeadlineExceeded
    assert TARGET in str(rebuilt)


def test_an_unknown_reason_is_read_by_its_code() -> None:
    """A newer server may name reasons that this client has never heard of."""
    rebuilt = status.from_parts(14, "SHARD_MOVED", "ask elsewhere", {})

    assert type(rebuilt) is errors.Unavailable


@pytest.mark.parametrize("code", [0, 2, 13, 99])
def test_an_unknown_code_is_still_an_error(code: int) -> None:
    """Whatever a server says went wrong, the caller sees the base class."""
    assert type(status.from_parts(code, "WHO_KNOWS", "?", {})) is CacheError


def test_unreadable_details_do_not_hide_the_failure() -> None:
    """Details that do not parse are as good as none."""
    call = _FailedCall(grpc.StatusCode.UNAVAILABLE, "gone", ((status.DETAILS_KEY, b"\xff\xff"),))

    assert type(status.from_rpc_error(call, TARGET)) is errors.Unavailable


def test_details_of_another_domain_are_not_ours() -> None:
    """A proxy's ErrorInfo may carry a reason that happens to be one of ours."""
    foreign = status_pb2.Status(code=14)
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="proxy.example"))
    call = _FailedCall(
        grpc.StatusCode.UNAVAILABLE, "gone", ((status.DETAILS_KEY, foreign.SerializeToString()),)
    )

    assert type(status.from_rpc_error(call, TARGET)) is errors.Unavailable


def test_a_long_text_fits_into_a_header() -> None:
    """A fact of a megabyte is cut, so that the error does not become a metadata overflow."""
    ((_, encoded),) = status.trailing_metadata(errors.TierFailure(path="x" * 2**20, problem="y" * 2**20))

    assert len(encoded) < 4096


def test_a_path_that_is_no_text_still_leaves_the_server() -> None:
    """A file name of undecodable bytes is replaced instead of breaking the status."""
    error = errors.TierFailure(path=b"/\xff".decode(errors="surrogateescape"), problem="refused")

    assert type(status.from_rpc_error(_failed(error), TARGET)) is errors.TierFailure


def test_an_error_of_a_wrong_field_names_the_field() -> None:
    """Its answer carries BadRequest, where its status says so and nowhere else."""
    for error_class in _error_classes():
        assert issubclass(error_class, status.FIELD_ERRORS) == (error_class.status == "INVALID_ARGUMENT")
