"""Devices: lanes and buffers of the place where the engine's cache is, the host or a GPU.

The only module that speaks to a device in its own terms. On a machine without a GPU lanes are threads,
and the copying lane has nothing to do.

On a GPU a lane is a stream and the thread that issues into it. A CUDA event that is not yet recorded
holds nothing up. An event is therefore two things: the work was issued, for which threads wait, and the
work has passed on the device, for which streams wait. Worst case: a kernel that never ends. `settle_by`
asks until its deadline, and never blocks in the driver.
"""

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ctxcache.errors import CacheError
from gpu_worker.pipeline.lane import Deadline, HostLane, Lane, LaneEvent, OnError, Work, passed


class Device(ABC):
    """Where the engine's cache is."""

    device: torch.device
    is_unified: bool
    """Whether work on the device reads the host's buffers in place, so that nothing is copied onto it."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """A lane whose work runs on the device."""

    @abstractmethod
    def host_buffer(self, size_bytes: int) -> Tensor:
        """A buffer [size_bytes] uint8 on the host, from which the device can copy by itself."""

    @abstractmethod
    def device_buffer(self, size_bytes: int) -> Tensor:
        """A buffer [size_bytes] uint8 on the device."""

    @abstractmethod
    def mark(self) -> LaneEvent:
        """The end of what the calling thread has issued to the device so far."""

    def host_lane(self, name: str) -> Lane:
        """A lane whose work the host does."""
        return HostLane(name)


_POLL_S = 20e-6


class CudaEvent(LaneEvent):
    """The end of work in a stream."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._is_begun = False
        self.issued: LaneEvent = passed()
        """The end of issuing; set by the lane before anybody sees the event."""

    def begin(self, stream: torch.cuda.Stream) -> None:
        """The work begins at this place of the stream."""
        self._begin.record(stream)
        self._is_begun = True

    def end(self, stream: torch.cuda.Stream) -> None:
        """The work ends at this place of the stream."""
        self._end.record(stream)

    def order(self, stream: torch.cuda.Stream, deadline: Deadline) -> None:
        """Put all later work of `stream` behind this work.

        Raises what issuing it raised, RestoreTooLate.
        """
        self.issued.wait(deadline)
        stream.wait_event(self._end)

    def settle_by(self, deadline: Deadline) -> bool:
        """See LaneEvent. Raises the device's own error where that has failed."""
        if not self.issued.settle_by(deadline):
            return False
        while not self._end.query():  # type: ignore[no-untyped-call]
            if not deadline.left_s:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def error(self) -> CacheError | None:
        """See LaneEvent."""
        return self.issued.error

    @property
    def busy_s(self) -> float:
        """See LaneEvent."""
        is_timed = self._is_begun and self.error is None
        return self._begin.elapsed_time(self._end) / 1e3 if is_timed else 0.0


class CudaLane(Lane):
    """A stream, and the thread that issues into it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._issuer = HostLane(name)

    def submit(
        self,
        work: Work,
        *,
        after: Sequence[LaneEvent] = (),
        deadline: Deadline,
        on_error: OnError | None = None,
    ) -> LaneEvent:
        """See Lane."""
        event = CudaEvent()
        event.issued = self._issuer.submit(
            lambda: self._issue(work, after, deadline, event), deadline=deadline, on_error=on_error
        )
        return event

    def close(self, deadline: Deadline) -> None:
        """See Lane."""
        try:
            self.fence(deadline)
        finally:
            self._issuer.close(deadline)

    def _issue(self, work: Work, after: Sequence[LaneEvent], deadline: Deadline, event: CudaEvent) -> None:
        with torch.cuda.stream(self._stream):
            for before in after:
                if isinstance(before, CudaEvent):
                    before.order(self._stream, deadline)
                else:
                    before.wait(deadline)
            event.begin(self._stream)
            try:
                work()
            finally:
                # Also behind work that broke: what it issued before that still uses its buffers.
                event.end(self._stream)


class Cuda(Device):
    """One GPU."""

    is_unified = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lane(self, name: str) -> Lane:
        """See Device."""
        return CudaLane(name, self.device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device. Pinned: a copy from other memory would wait for the host."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device.

        What had the memory before has ended when it is handed out: other streams will use it.
        """
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return buffer

    def mark(self) -> LaneEvent:
        """See Device."""
        event = CudaEvent()
        stream = torch.cuda.current_stream(self.device)
        event.begin(stream)
        event.end(stream)
        return event


class Host(Device):
    """The CPU as the device."""

    def __init__(self, *, is_unified: bool = True) -> None:
        """Without `is_unified`, rows are copied once more, as they are onto a GPU: for tests of that way."""
        self.device = torch.device("cpu")
        self.is_unified = is_unified

    def lane(self, name: str) -> Lane:
        """See Device."""
        return HostLane(name)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device. On a page, where files can be read into it around the page cache."""
        memory = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        begin = -memory.data_ptr() % mmap.PAGESIZE
        return memory[begin : begin + size_bytes]

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def mark(self) -> LaneEvent:
        """See Device. Calls on a CPU have ended when they return."""
        return passed()


def device_of(device: torch.device) -> Device:
    """The device by torch's name for it."""
    if device.type == "cuda":
        return Cuda(device)
    return Host()
