"""Lanes and events: work that is done in the order it was submitted, and the moments when it has passed.

```
   lane "read"      ─[a1]──[a2]──[a3]──►  in the order submitted
                        │ event
   lane "compute"   ────▼──[b1]──────►    b1 was submitted with `after=[event of a1]`
```

Where the host is the device, a lane is a thread that does its work. On a GPU it is a stream, and the thread
that submits work issues it: a hand-over to another thread takes as long as issuing. Work that waits, or takes
long, and all that comes behind it, is issued by a thread of the lane. Events alone order the work of
different lanes. Every wait has a deadline, a moment that is passed on to each wait below. Worst case: work
that never ends. A wait for it ends at the deadline, and the lane is not used again.

No other module speaks to a device in its own terms. A CUDA event that is not yet recorded holds nothing up.
An event is therefore two things: the work was issued, for which threads wait, and the work has passed on the
device, for which streams wait. A kernel may never end: `settle_by` asks until its deadline, and never blocks
in the driver.
"""

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ctxcache.errors import CacheError
from gpu_worker.errors import LaneStuck, RestoreFailed, RestoreTooLate
from gpu_worker.forms.rows import BATCH_TOKENS

LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock."""

    at_ns: int

    @classmethod
    def after_s(cls, seconds: float) -> Self:
        """So many seconds from now, at most LONGEST_S: every wait has an end."""
        return cls(time.monotonic_ns() + int(min(seconds, LONGEST_S) * 1e9))

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    def check(self, what: str) -> None:
        """Raise RestoreTooLate once it has passed."""
        if time.monotonic_ns() >= self.at_ns:
            raise RestoreTooLate(what=what)

    def earlier(self, other: "Deadline | None") -> "Deadline":
        """The earlier of both."""
        return self if other is None or self.at_ns <= other.at_ns else other


class _Thread(threading.local):
    """The state of this thread."""

    is_lanes = False
    """Whether only lanes work in this thread."""
    issuing: "torch.cuda.Stream | None" = None
    """The stream that a lane's thread issues into at the moment."""


_thread = _Thread()
Work = Callable[[], None]
OnError = Callable[[CacheError], object]


class LaneEvent(ABC):
    """The end of a piece of work. Any thread may wait for it."""

    @abstractmethod
    def settle_by(self, deadline: Deadline) -> bool:
        """Wait until the work has ended on its device, well or not; False once the deadline has passed."""

    @property
    @abstractmethod
    def is_issued(self) -> bool:
        """Whether nobody has to wait to go on behind the work: it was issued to its device, or has ended."""

    @property
    @abstractmethod
    def error(self) -> CacheError | None:
        """The error that the work raised; known once the work was issued."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds that the work took on its device, waits not counted; known once it has ended."""

    def wait(self, deadline: Deadline) -> None:
        """Wait until the work has ended on its device. Raises what it raised, and RestoreTooLate."""
        if not self.settle_by(deadline):
            raise RestoreTooLate(what="work on a lane")
        if self.error is not None:
            raise self.error


class Lane(ABC):
    """Work in order. Any thread may submit."""

    name: str

    @abstractmethod
    def submit(
        self,
        work: Work,
        *,
        after: Sequence[LaneEvent] = (),
        deadline: Deadline,
        on_error: OnError | None = None,
        does_wait: bool = False,
    ) -> LaneEvent:
        """Have `work` done behind all that was submitted before, and behind the events `after`.

        If an event of `after` failed, `work` is not done and its own event fails alike. `on_error` hears of
        it before anybody who waits does. `does_wait`: `work` waits for something, or takes long. Never waits
        itself, but may do other work in the calling thread.
        """

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """End the lane behind what was submitted. Raises LaneStuck if that takes longer than `deadline`."""

    def fence(self, deadline: Deadline) -> None:
        """Wait until all that was submitted has ended. Raises LaneStuck if that takes longer."""
        if not self.submit(_nothing, deadline=deadline).settle_by(deadline):
            raise LaneStuck(lane=self.name)


class HostEvent(LaneEvent):
    """The end of work that a thread does itself."""

    def __init__(self) -> None:
        # A bare lock, held until the work has ended: a threading.Event takes ten times as long to make.
        self._running = threading.Lock()
        self._running.acquire()
        self._has_ended = False
        self._error: CacheError | None = None
        self._busy_s = 0.0

    def end(self, error: CacheError | None, busy_s: float) -> None:
        """The work has ended. The lane says so once."""
        self._error, self._busy_s = error, busy_s
        self._has_ended = True
        self._running.release()

    def settle_by(self, deadline: Deadline) -> bool:
        """See LaneEvent."""
        if not self._has_ended and self._running.acquire(timeout=deadline.left_s):
            # Released for the next thread that waits.
            self._running.release()
        # The lock alone does not tell: another thread that waited may hold it for a moment.
        return self._has_ended

    @property
    def is_issued(self) -> bool:
        """See LaneEvent."""
        return self._has_ended

    @property
    def error(self) -> CacheError | None:
        """See LaneEvent."""
        return self._error

    @property
    def busy_s(self) -> float:
        """See LaneEvent."""
        return self._busy_s


def passed() -> LaneEvent:
    """An event that has passed already."""
    event = HostEvent()
    event.end(None, 0.0)
    return event


class _Job(NamedTuple):
    work: Work
    after: Sequence[LaneEvent]
    deadline: Deadline
    on_error: OnError | None
    event: HostEvent


class HostLane(Lane):
    """A thread that does its work itself: reading, announcing, and everything if the device is the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ctxcache-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Work,
        *,
        after: Sequence[LaneEvent] = (),
        deadline: Deadline,
        on_error: OnError | None = None,
        does_wait: bool = False,
    ) -> LaneEvent:
        """See Lane."""
        del does_wait
        job = _Job(work, after, deadline, on_error, HostEvent())
        self._jobs.put(job)
        return job.event

    def close(self, deadline: Deadline) -> None:
        """See Lane."""
        self._jobs.put(None)
        self._thread.join(deadline.left_s)
        if self._thread.is_alive():
            raise LaneStuck(lane=self.name)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # a thread's own setting
        _thread.is_lanes = True
        while (job := self._jobs.get()) is not None:
            _do(job)
            del job  # what the work holds must not outlive it here until the next one comes


def _do(job: _Job) -> None:
    begin_ns = time.perf_counter_ns()
    error: CacheError | None = None
    try:
        # Waits are on the lane's thread, not the submitter's: `submit` never waits.
        for event in job.after:
            event.wait(job.deadline)
        # The time begins anew: waits for other lanes are not the time of this work.
        begin_ns = time.perf_counter_ns()
        job.work()
    except CacheError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001  # the lane's supervisor: whatever it is, it is a miss
        error = RestoreFailed(problem=f"{type(raised).__name__}: {raised}")
        error.__cause__ = raised
    if error is not None and job.on_error is not None:
        # Told before the event ends: a thread that waits for it must find the restore failed already.
        job.on_error(error)
    # The event ends in every case: one that never ends would hold a ring's buffer until the deadline.
    job.event.end(error, (time.perf_counter_ns() - begin_ns) / 1e9)


def _nothing() -> None:
    return


# -- on a GPU ----------------------------------------------------------------------------------------


class Device(ABC):
    """Where the engine's cache is."""

    device: torch.device
    is_unified: bool
    """Whether work on the device reads the host's buffers in place, so that nothing is copied onto it."""
    batch_tokens: int = BATCH_TOKENS
    """Most rows that are worked on at a time."""
    slot_bytes: int = 8 << 20
    """Bytes of a buffer for these rows."""
    slot_count: int = 4
    """Buffers of the host, and as many of the device where it has memory of its own."""

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


# Two moments of one piece of work on a GPU (R5):
#
#     issuing thread   ──[ wait for other issues ][ launch ]──► issued
#     stream           ─────────────────────────────[ begin ═══ kernels ═══ end ]──► passed
#
# A wait for `end` before it is recorded returns at once, and orders nothing: hence `issued` first. Where the
# submitter issues, `submit` returns with `issued` passed.
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 200e-6
"""A wait begins with short pauses; each pause takes the interpreter from the threads that issue work."""


_PASSED = passed()


class CudaEvent(LaneEvent):
    """The end of work in a stream."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._is_begun = False
        self.issued: LaneEvent = _PASSED
        """The end of issuing; set by the lane before anybody sees the event."""

    def begin(self, stream: torch.cuda.Stream) -> None:
        """The work begins at this place of the stream."""
        # Recorded behind the waits for other streams: `busy_s` counts this work alone.
        self._begin.record(stream)
        self._is_begun = True

    def end(self, stream: torch.cuda.Stream) -> None:
        """The work ends at this place of the stream."""
        # Recorded by the issuing thread, before `issued` is set: a thread that saw `issued` may wait for it.
        self._end.record(stream)

    def order(self, stream: torch.cuda.Stream, deadline: Deadline) -> None:
        """Put all later work of `stream` behind this work.

        Raises what issuing it raised, RestoreTooLate.
        """
        self.issued.wait(deadline)
        # Only now: before the event is recorded, waiting for it would hold nothing up.
        stream.wait_event(self._end)

    def settle_by(self, deadline: Deadline) -> bool:
        """See LaneEvent. Raises the device's own error where that has failed."""
        # An event without a record answers `query` with True: not issued would look like passed (R3).
        if not self.issued.settle_by(deadline):
            return False
        pause_s = _FIRST_POLL_S
        while not self._end.query():  # type: ignore[no-untyped-call]
            if not deadline.left_s:
                return False
            # Not Event.synchronize, which has no deadline: a kernel that hangs would keep this thread.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        return True

    @property
    def is_issued(self) -> bool:
        """See LaneEvent."""
        return self.issued.is_issued

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
    """A stream, and a thread that issues what the submitter must not wait for."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._issuing = threading.Lock()
        """Held while work is issued, its waits included."""
        self._handing = threading.Lock()
        self._handed: LaneEvent = _PASSED
        """The issue of the last work that was handed over."""
        self._issuer: HostLane | None = None

    def submit(
        self,
        work: Work,
        *,
        after: Sequence[LaneEvent] = (),
        deadline: Deadline,
        on_error: OnError | None = None,
        does_wait: bool = False,
    ) -> LaneEvent:
        """See Lane."""
        event = CudaEvent()

        def issue() -> None:
            self._issue(work, after, deadline, event)

        # The submitter issues the work, unless it had to wait for it, or for work before it:
        #
        #     lane    [a: issued][b: waits ···── handed over ──···][c: behind b, handed over too][d: issued]
        can_issue = not does_wait and all(before.is_issued for before in after)
        if can_issue and self._issuing.acquire(blocking=False):
            try:
                # Asked with the lock held: nothing that was handed over before is still to be issued.
                if self._handed.is_issued:
                    job = _Job(issue, (), deadline, on_error, HostEvent())
                    _do(job)
                    event.issued = job.event
                    return event
            finally:
                self._issuing.release()
        self._hand_over(issue, event, deadline, on_error)
        return event

    def fence(self, deadline: Deadline) -> None:
        """See Lane."""
        mark = CudaEvent()
        # Issues come first, then the stream: work that is handed over has no place there yet.
        if self._handed.settle_by(deadline):
            mark.end(self._stream)
            if mark.settle_by(deadline):
                return
        raise LaneStuck(lane=self.name)

    def close(self, deadline: Deadline) -> None:
        """See Lane."""
        try:
            # The stream first: the issuing thread has long returned while a kernel still writes.
            self.fence(deadline)
        finally:
            if self._issuer is not None:
                self._issuer.close(deadline)

    def _hand_over(self, issue: Work, event: CudaEvent, deadline: Deadline, on_error: OnError | None) -> None:
        def issue_alone() -> None:
            with self._issuing:
                issue()

        # Handed over one at a time: `_handed` is the last in the thread's own order.
        with self._handing:
            if self._issuer is None:
                self._issuer = HostLane(self.name)
            event.issued = self._issuer.submit(issue_alone, deadline=deadline, on_error=on_error)
            self._handed = event.issued

    def _issue(self, work: Work, after: Sequence[LaneEvent], deadline: Deadline, event: CudaEvent) -> None:
        if _thread.is_lanes:
            # The thread's next work sets its own stream. Restoring the former one takes as long as a launch.
            torch.cuda.set_stream(self._stream)
            outer, _thread.issuing = _thread.issuing, self._stream
            try:
                self._issue_here(work, after, deadline, event)
            finally:
                _thread.issuing = outer
                # The work that issued this one goes on in its own stream.
                if outer is not None:
                    torch.cuda.set_stream(outer)
        else:
            # The caller's thread may be an engine's, which keeps its own settings.
            with torch.cuda.stream(self._stream), torch.no_grad():
                self._issue_here(work, after, deadline, event)

    def _issue_here(
        self, work: Work, after: Sequence[LaneEvent], deadline: Deadline, event: CudaEvent
    ) -> None:
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
    # The host's part of a batch does not depend on its size (lab/notes/gpu.md), and 64 MiB are copied in 1.2
    # ms. Such buffers are also 32 reads of a mebibyte and more.
    batch_tokens = 16384
    slot_bytes = 64 << 20
    slot_count = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lane(self, name: str) -> Lane:
        """See Device."""
        return CudaLane(name, self.device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device. Pinned: a copy from other memory would wait for the host."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device.

        The earlier user of the memory has ended when it is handed out: other streams will use it.
        """
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        # torch's allocator orders reuse of memory within one stream only.
        torch.cuda.synchronize(self.device)
        return buffer

    def mark(self) -> LaneEvent:
        """See Device."""
        event = CudaEvent()
        # The engine's own stream, as `mark` is called from its thread (R4).
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
        """See Device. Work here is done by the lane's own thread."""
        return HostLane(name)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device. On a page, where files can be read into it around the page cache."""
        memory = torch.empty(size_bytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
        # One page more was allocated than is asked for.
        begin = -memory.data_ptr() % mmap.PAGESIZE
        return memory[begin : begin + size_bytes]

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> LaneEvent:
        """See Device. Calls on a CPU have ended when they return."""
        return passed()


def device_of(device: torch.device) -> Device:
    """The device by torch's name for it."""
    if device.type == "cuda":
        return Cuda(device)
    return Host()
