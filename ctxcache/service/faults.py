"""Rpcs of AdminService that inject faults, into a server that was started for that."""

import errno

from ctxcache.errors import FaultsNotEnabled, InvalidArgument
from ctxcache.service import convert, validate
from ctxcache.service.operations import OperationRpcs
from ctxcache.service.rpc import Context
from ctxcache.storage.injection.faults import (
    COUNT_LIMIT,
    DELAY_LIMIT_NS,
    DURATION_LIMIT_NS,
    Fault,
    FaultKind,
    Faults,
)
from ctxcache.v1 import faults_pb2

_NUMBERS = {kind: faults_pb2.FaultKind.Value(f"FAULT_KIND_{kind.name}") for kind in FaultKind}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}


class FaultRpcs(OperationRpcs):
    """See proto/ctxcache/v1/admin.proto."""

    async def InjectFault(  # noqa: N802
        self,
        request: faults_pb2.InjectFaultRequest,
        context: Context,  # noqa: ARG002
    ) -> faults_pb2.Fault:
        """See the proto."""
        faults = self._faults()
        kind = _KINDS.get(request.kind)
        if kind is None:
            raise InvalidArgument(field="kind", problem=f"{request.kind} is no kind of fault")
        if request.path and not kind.is_of_ssd:
            raise InvalidArgument(field="path", problem="it is of no SSD path")
        duration_ns = validate.within(request.duration.ToNanoseconds(), 1, DURATION_LIMIT_NS, "duration")
        fault = Fault(
            kind=kind,
            left_count=validate.within(request.count, 1, COUNT_LIMIT, "count"),
            end_ns=faults.clock.monotonic_ns() + duration_ns,
            path_index=self._path_index(request.path) if request.path else None,
            delay_ns=_delay_ns(request, kind),
            error_number=_error_number(request.error_number, kind),
        )
        return self._fault(faults, faults.inject(fault))

    async def ListFaults(  # noqa: N802
        self,
        request: faults_pb2.ListFaultsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> faults_pb2.ListFaultsResponse:
        """See the proto."""
        faults = self._faults()
        return faults_pb2.ListFaultsResponse(faults=[self._fault(faults, fault) for fault in faults.active()])

    async def ClearFaults(  # noqa: N802
        self,
        request: faults_pb2.ClearFaultsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> faults_pb2.ClearFaultsResponse:
        """See the proto."""
        return faults_pb2.ClearFaultsResponse(cleared_fault_count=self._faults().clear())

    def _faults(self) -> Faults:
        """Raises FaultsNotEnabled."""
        if self._controls.faults is None:
            raise FaultsNotEnabled
        return self._controls.faults

    def _fault(self, faults: Faults, fault: Fault) -> faults_pb2.Fault:
        return faults_pb2.Fault(
            fault_id=fault.fault_id, kind=_NUMBERS[fault.kind], error_number=fault.error_number,
            path="" if fault.path_index is None else self._cache.ssd.paths[fault.path_index],
            delay=convert.duration(fault.delay_ns) if fault.kind.is_delay else None, left_count=fault.left_count,
            left_duration=convert.duration(max(fault.end_ns - faults.clock.monotonic_ns(), 0)),
        )  # fmt: skip


def _delay_ns(request: faults_pb2.InjectFaultRequest, kind: FaultKind) -> int:
    if kind.is_delay:
        return validate.within(request.delay.ToNanoseconds(), 1, DELAY_LIMIT_NS, "delay")
    if request.HasField("delay"):
        raise InvalidArgument(field="delay", problem="it is of delays")
    return 0


def _error_number(number: int, kind: FaultKind) -> int:
    if kind.is_error and number not in errno.errorcode:
        raise InvalidArgument(field="error_number", problem=f"{number} is no error number")
    if number and not kind.is_error:
        raise InvalidArgument(field="error_number", problem="it is of errors")
    return number
