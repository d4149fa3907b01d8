"""The engine's side: attach to a worker on this host, restore, save. Thin: everything is in the proto.

Needs no torch. Thread-safe; an iteration over a restore belongs to one thread. Worst case: a worker that is
gone or does not answer, which is Unavailable or DeadlineExceeded within the deadline of the call.
"""

import array
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import grpc

from ctxcache.client.convert import durability_to_wire, stream_to_wire
from ctxcache.client.messages import read_session_info
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing, trace_metadata
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument, Unavailable
from ctxcache.format.streams import Stream
from ctxcache.wire.status import from_rpc_error
from gpu_worker.kernels.libcuda import NO_IPC, Libcuda
from gpu_worker.sidecar import errors as _errors  # noqa: F401  their codes are in the table then
from gpu_worker.v1 import attachment_pb2, worker_pb2, worker_pb2_grpc

DEFAULT_TIMEOUT_S = 30.0
ATTACH_TIMEOUT_S = 600.0
GRACE_S = 1.0
"""Seconds that a worker's answer may take on top of the time that it was given."""
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # An engine's end must be seen at its own worker alone.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class SharingDriver(Protocol):
    """The calls of CUDA's driver by which memory is shared. Each raises OSError with the driver's message."""

    def use(self, device: int) -> None:
        """Make the device's primary context current in this thread."""

    def uuid(self, device: int) -> bytes:
        """A device's UUID."""

    def is_ipc_capable(self, address: int) -> bool:
        """Whether a handle can be had of the allocation that an address lies in."""

    def ipc_handle(self, address: int) -> bytes:
        """The handle of an allocation."""

    def allocation_begin(self, address: int) -> int:
        """Where the allocation begins that an address lies in."""


def cuda_region(
    address: int, size_bytes: int, *, device: int = 0, driver: SharingDriver | None = None
) -> attachment_pb2.MemoryRegion:
    """Memory of this process on a GPU, such as a tensor's `data_ptr()` and bytes, as a hello names it.

    Raises InvalidArgument, with what to set, where the engine's allocator makes memory that CUDA IPC does not
    lead to; Unavailable where there is no driver.
    """
    driver = driver or Libcuda()
    try:
        driver.use(device)
        # Asked first: cuIpcGetMemHandle's own error for such memory says nothing of the reason.
        if not driver.is_ipc_capable(address):
            raise InvalidArgument(field="address", problem=NO_IPC)
        ipc = attachment_pb2.CudaIpc(
            handle=driver.ipc_handle(address),
            device_uuid=driver.uuid(device),
            # A handle is of a whole allocation, of which torch's tensors are parts.
            offset_bytes=address - driver.allocation_begin(address),
        )
    except OSError as error:
        raise InvalidArgument(field="address", problem=str(error)) from error
    return attachment_pb2.MemoryRegion(size_bytes=size_bytes, cuda_ipc=ipc)


class WorkerClient(Closing):
    """A connection to the worker that listens at `path`. A context manager."""

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._path, self._timeout_s = os.fspath(path), timeout_s
        self._target = f"unix:{self._path}"
        # A Unix socket that only its user can open: the file's mode is the authentication.
        self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def attach(
        self, hello: attachment_pb2.AttachHello, *, timeout_s: float = ATTACH_TIMEOUT_S
    ) -> "AttachedEngine":
        """Attach an engine until the result is closed, or this process ends. Raises as the proto says."""
        return AttachedEngine(self, hello, timeout_s)

    def pass_descriptors(self, fds: Sequence[int]) -> "PassedDescriptors":
        """Hand descriptors to the worker, which has copies until this is closed.

        Raises Unavailable, DeadlineExceeded.
        """
        return PassedDescriptors(f"{self._path}.fds", fds, self._timeout_s)

    def stats(self) -> worker_pb2.Stats:
        """The worker's attachments and counts."""
        return self.call(self.stub.GetStats, worker_pb2.GetStatsRequest())

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        request: _Request,
        timeout_s: float | None = None,
    ) -> _Response:
        """Make one unary call. Raises the worker's error as it raised it."""
        with self.errors():
            return method(request, timeout=timeout_s or self._timeout_s, metadata=trace_metadata())

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what gRPC raises within the block into errors of ours."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from error
        # grpc raises it for a call on a channel that was closed.
        except ValueError as error:
            raise Unavailable(target=self._target, problem="the client is closed") from error

    def close(self) -> None:
        """End every call; engines that this client attached and that did not leave are lost."""
        self._channel.close()


class AttachedEngine(Closing):
    """One attachment. A context manager: leaving it detaches."""

    def __init__(self, client: WorkerClient, hello: attachment_pb2.AttachHello, timeout_s: float) -> None:
        self._client = client
        # The attachment is this stream: gRPC takes requests from the queue, on a thread of its own.
        #
        #     queue    hello ................. farewell, None (the end)
        #     stream   ──► hello ──► welcome ... ──► farewell ──► farewell
        #
        # None alone ends it without a farewell, which the worker counts as lost.
        self._requests: queue.SimpleQueue[worker_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._requests.put(worker_pb2.AttachRequest(hello=hello))
        self._error: CacheError | None = None
        self.ended = threading.Event()
        """Set when the attachment is gone; `check` says why."""
        with client.errors():
            self._call = client.stub.Attach(iter(self._requests.get, None))
        # A stream that lasts has no deadline of its own; its first answer has.
        late = threading.Timer(timeout_s, self._call.cancel)
        late.daemon = True
        late.start()
        try:
            with client.errors():
                welcome: worker_pb2.AttachResponse | None = next(self._call, None)
            if welcome is None:
                raise Unavailable(target="attach", problem="it ended without a welcome")
            self.welcome = welcome
        except CacheError as error:
            self._requests.put(None)
            # The timer has run: gRPC says that this client cancelled, and the deadline is why.
            if not late.is_alive():
                raise DeadlineExceeded(target="attach", timeout_s=f"{timeout_s:g}") from error
            raise
        finally:
            late.cancel()
        threading.Thread(target=self._watch, name="ctxcache-attached", daemon=True).start()

    @property
    def attachment_id(self) -> str:
        """The attachment's name in the other rpcs."""
        return self.welcome.attachment_id

    def check(self) -> None:
        """Raise why the attachment has ended, if it has."""
        if self.ended.is_set():
            target = self._client._target  # noqa: SLF001
            raise self._error or Unavailable(target=target, problem="it was detached")

    def restore(
        self,
        session: str,
        block_ids: Sequence[int],
        *,
        token_end: int,
        token_begin: int = 0,
        token_ids: Sequence[int] = (),
        restore_id: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        if_generation_match: int | None = None,
        new_token_count: int = 0,
        on_layer: Callable[[int], None] | None = None,
    ) -> worker_pb2.RestoreResult:
        """Restore tokens into blocks and wait for the result: whole, or a miss with its reason.

        `on_layer` is called as each layer is whole. Raises what is wrong with the request; Unavailable and
        DeadlineExceeded where the worker is gone: nobody says then which blocks are as they were.
        """
        request = worker_pb2.RestoreRequest(
            attachment_id=self.attachment_id,
            restore_id=restore_id or secrets.token_hex(8),
            session=session,
            if_generation_match=if_generation_match,
            token_begin=token_begin,
            token_end=token_end,
            block_ids=block_ids,
            token_ids=token_ids,
            announces_layers=on_layer is not None,
            new_token_count=new_token_count,
        )
        request.timeout.FromNanoseconds(round(timeout_s * 1e9))
        with self._client.errors():
            calls = self._client.stub
            for response in calls.Restore(request, timeout=timeout_s + GRACE_S, metadata=trace_metadata()):
                if response.HasField("result"):
                    return response.result
                if on_layer is not None:
                    on_layer(response.layer_usable.layer)
        # A stream that ends in order without a result is a worker that was stopped in between.
        raise Unavailable(target=session, problem="the restore ended without a result")

    def cancel(self, restore_id: str) -> bool:
        """Cancel a restore; nothing is written for it any more when this returns.

        Returns whether it was under way.
        """
        request = worker_pb2.CancelRequest(attachment_id=self.attachment_id, restore_id=restore_id)
        return self._client.call(self._client.stub.Cancel, request).was_running

    def save(
        self,
        session: str,
        offsets: Mapping[Stream, int],
        *,
        write_offset: int,
        token_count: int,
        durability: Durability = Durability.MEMORY,
        timeout_s: float | None = None,
    ) -> SessionInfo:
        """Append tokens whose rows lie in the save area from these offsets on. Raises as the proto says."""
        request = worker_pb2.SaveRequest(
            attachment_id=self.attachment_id,
            session=session,
            write_offset=write_offset,
            token_count=token_count,
            durability=durability_to_wire(durability),
            streams=[
                worker_pb2.StreamRows(stream=stream_to_wire(stream), offset_bytes=offset)
                for stream, offset in offsets.items()
            ],
        )
        return read_session_info(self._client.call(self._client.stub.Save, request, timeout_s).session)

    def plan(self, token_count: int, *, new_token_count: int = 0) -> worker_pb2.PlanResponse:
        """How a restore would be done, if the store had all kinds."""
        request = worker_pb2.PlanRequest(
            attachment_id=self.attachment_id, token_count=token_count, new_token_count=new_token_count
        )
        return self._client.call(self._client.stub.Plan, request)

    def profile(self, token_counts: Sequence[int] = ()) -> worker_pb2.ProfileResponse:
        """The profile of plans, measured anew at these lengths if there are any."""
        request = worker_pb2.ProfileRequest(attachment_id=self.attachment_id, token_counts=token_counts)
        return self._client.call(self._client.stub.Profile, request)

    def close(self) -> None:
        """Say farewell and wait for its answer, but not long for a worker that does not hear it."""
        self._requests.put(worker_pb2.AttachRequest(farewell=worker_pb2.Farewell()))
        self._requests.put(None)
        if not self.ended.wait(GRACE_S):
            self._call.cancel()

    def _watch(self) -> None:
        try:
            with self._client.errors():
                for _ in self._call:
                    pass
        except CacheError as error:
            self._error = error
        finally:
            self.ended.set()


class PassedDescriptors(Closing):
    """Descriptors that the worker has.

    A context manager; leave it when the attach that names them is done.
    """

    def __init__(self, path: str, fds: Sequence[int], timeout_s: float) -> None:
        self.ticket = secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            rights = array.array("i", fds)
            self._socket.sendmsg([self.ticket], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            # Wait for the answer: an attach with the ticket may reach the worker before the descriptors do.
            is_taken = self._socket.recv(1) == b"\x01"
        except OSError as error:
            self._socket.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(target=path, timeout_s=f"{timeout_s:g}") from error
            raise Unavailable(target=path, problem=str(error)) from error
        if not is_taken:
            self._socket.close()
            raise Unavailable(target=path, problem="the descriptors were not taken")

    def descriptor(self, index: int) -> attachment_pb2.PassedDescriptor:
        """A descriptor, as a handle names it."""
        return attachment_pb2.PassedDescriptor(ticket=self.ticket, index=index)

    def close(self) -> None:
        """The worker closes its copies; memory that it has mapped stays mapped."""
        self._socket.close()
