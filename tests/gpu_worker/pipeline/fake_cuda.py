"""CUDA's streams and events on threads: what is issued runs later; an unrecorded event holds nobody up.

Stands in for `torch.cuda` where the pipeline touches it. Tensors are the host's; what would be a kernel is
`launch`ed.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from slow_pipelines import DELAY_S, SlowLane
from torch import Tensor

from gpu_worker.pipeline import pipeline, sources
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Cuda, CudaLane, HostLane, Lane, LaneEvent, Work
from gpu_worker.pipeline.sources import BatchLanding
from gpu_worker.pipeline.target import LayerRoom
from gpu_worker.planning.plan import Method

_JOIN_S = 30.0


class Stream:
    """Work in order, done by a thread some time after it was issued."""

    cuda_stream = 77

    def __init__(self, _device: object = None) -> None:
        self.delay_s = 0.0
        self.awaited = threading.Event()
        """Set when another stream has come to a wait for work of this one."""
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def issue(self, work: Callable[[], object] | None) -> None:
        """Have it done later; None ends the stream."""
        self._work.put(work)

    def wait_event(self, event: "StreamEvent") -> None:
        """Work issued from here on comes behind the work that the event was recorded behind, if it was."""
        marker, other = event.marker, event.stream
        if marker is None or other is None:
            return

        def wait() -> None:
            other.awaited.set()
            marker.wait(_JOIN_S)

        self.issue(wait)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while (work := self._work.get()) is not None:
            work()


class StreamEvent:
    """A place in a stream."""

    def __init__(self, **_: bool) -> None:
        self.marker: threading.Event | None = None
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        """The event is passed when what was issued so far has been done."""
        self.marker, self.stream = threading.Event(), stream
        stream.issue(self.marker.set)

    def query(self) -> bool:
        """Whether it was passed; an event that nobody recorded was."""
        return self.marker is None or self.marker.is_set()

    def elapsed_time(self, _other: "StreamEvent") -> float:
        """Milliseconds between two."""
        return 1.0


class Driver:
    """Streams of one test."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._current = threading.local()
        self.default = self.make()

    def make(self, device: object = None) -> Stream:
        """A new stream."""
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current(self, _device: object = None) -> Stream:
        """The calling thread's stream."""
        found: Stream = getattr(self._current, "stream", self.default)
        return found

    def set(self, stream: Stream) -> None:
        """The calling thread issues into `stream` from here on."""
        self._current.stream = stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """The calling thread issues into `stream`."""
        before = self.current()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        """Issue a kernel into the calling thread's stream."""
        stream = self.current()

        def run() -> None:
            threading.Event().wait(stream.delay_s)
            kernel()

        stream.issue(run)

    def settle(self) -> None:
        """Wait until the calling thread's stream has done what was issued into it."""
        done = threading.Event()
        self.current().issue(done.set)
        assert done.wait(_JOIN_S)


class HandedLane(CudaLane):
    """A lane all of whose work is handed over, to a thread that is late with each piece."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self._issuer = SlowLane(name)

    def submit(self, work: Work, **options: Any) -> LaneEvent:
        """See Lane."""
        return super().submit(work, **options | {"does_wait": True})


class FakeGpu(Cuda):
    """The GPU's own lanes and events, on fake streams."""

    def __init__(self, driver: Driver, slow: Collection[str], slow_issuers: Collection[str] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self._driver, self._slow, self._slow_issuers = driver, slow, slow_issuers

    def lane(self, name: str) -> Lane:
        """See Device."""
        lane = HandedLane(name, self.device) if name in self._slow_issuers else super().lane(name)
        self._driver.streams[-1].delay_s = DELAY_S if name in self._slow else 0.0
        return lane

    def host_lane(self, name: str) -> Lane:
        """See Device."""
        return HostLane(name)

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def device_buffer(self, size_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(size_bytes, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Fake streams in the place of torch's."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "Stream", driver.make)
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    monkeypatch.setattr(torch.cuda, "stream", driver.use)
    monkeypatch.setattr(torch.cuda, "set_stream", driver.set)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current)
    copy, restore = pipeline._copy, Modules.restore
    monkeypatch.setattr(pipeline, "_copy", lambda rows, landed: driver.launch(lambda: copy(rows, landed)))

    monkeypatch.setattr(
        sources,
        "_transfer",
        lambda into, copies: driver.launch(lambda: sources._copy_all(into, copies)),
    )
    sum_up = BatchLanding.sum_up
    monkeypatch.setattr(BatchLanding, "sum_up", lambda landing: driver.launch(lambda: sum_up(landing)))

    def launched(
        self: Modules, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom
    ) -> None:
        driver.launch(lambda: restore(self, layer, method, data, begin, room))

    monkeypatch.setattr(Modules, "restore", launched)
    yield driver
    for stream in driver.streams:
        stream.issue(None)
