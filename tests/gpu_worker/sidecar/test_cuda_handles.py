"""Handles of GPU memory, at the driver's edge.

Which calls, in which order, and what is closed at a failure.
"""

import os
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType
from gpu_worker.sidecar.attachment import Attachment
from gpu_worker.sidecar.attachments import Attachments
from gpu_worker.sidecar.cache_layout import CacheLayout
from gpu_worker.sidecar.client import cuda_region
from gpu_worker.sidecar.errors import MemoryInUse
from gpu_worker.sidecar.handles.cuda import CudaOpener, DeviceMemory
from gpu_worker.sidecar.regions import Regions

UUID = bytes(range(16))
BASE = 0x7F0000000000
GRANULARITY = 1 << 21
SIZE = 3 << 20


class FakeDriver:
    """A driver that writes down what it is asked, and fails where it is told to."""

    def __init__(self, fails: str = "", size_bytes: int = SIZE) -> None:
        self.calls: list[str] = []
        self._fails, self._size_bytes = fails, size_bytes

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise OSError(1, f"{name}: invalid argument")

    def use(self, device: int) -> None:
        """See Driver."""
        assert device == 0

    def uuid(self, device: int) -> bytes:
        """See Driver."""
        assert device == 0
        return UUID

    def open_ipc(self, handle: bytes) -> int:
        """See Driver."""
        assert len(handle) == 64
        self._call("open_ipc")
        return BASE

    def close_ipc(self, address: int) -> None:
        """See Driver."""
        assert address == BASE
        self._call("close_ipc")

    def allocation_bytes(self, address: int) -> int:
        """See Driver."""
        assert address == BASE
        self._call("allocation_bytes")
        return self._size_bytes

    def import_descriptor(self, fd: int) -> int:
        """See Driver."""
        os.fstat(fd)
        self._call("import_descriptor")
        return 7

    def release(self, handle: int) -> None:
        """See Driver."""
        assert handle == 7
        self._call("release")

    def reserve(self, size_bytes: int) -> int:
        """See Driver."""
        assert size_bytes % GRANULARITY == 0
        self._call("reserve")
        return BASE

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        assert (address, size_bytes % GRANULARITY) == (BASE, 0)
        self._call("free_addresses")

    def map(self, address: int, size_bytes: int, handle: int, device: int) -> None:
        """See Driver."""
        assert (address, size_bytes % GRANULARITY, handle, device) == (BASE, 0, 7, 0)
        self._call("map")

    def unmap(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        assert (address, size_bytes % GRANULARITY) == (BASE, 0)
        self._call("unmap")

    def granularity(self, device: int) -> int:
        """See Driver."""
        assert device == 0
        return GRANULARITY


def _opener(driver: FakeDriver, shown: list[tuple[int, int, int]]) -> CudaOpener:
    def show(address: int, size_bytes: int, device: int) -> Tensor:
        shown.append((address, size_bytes, device))
        return torch.empty(0, dtype=torch.uint8)

    return CudaOpener(0, driver, show)


def test_an_ipc_handle_is_opened_and_closed() -> None:
    """The region begins where it was said to, and its allocation is closed with it."""
    driver, shown = FakeDriver(), list[tuple[int, int, int]]()

    memory = _opener(driver, shown).open_ipc(bytes(64), UUID, 512, 1024, "field")

    assert shown == [(BASE + 512, 1024, 0)]
    assert "close_ipc" not in driver.calls
    memory.close()
    assert driver.calls == ["open_ipc", "allocation_bytes", "close_ipc"]


@pytest.mark.parametrize(
    ("handle", "uuid", "offset", "size", "closes"),
    [
        (bytes(63), UUID, 0, 16, False),
        (bytes(64), bytes(16), 0, 16, False),
        (bytes(64), UUID, -1, 16, False),
        (bytes(64), UUID, SIZE, 1, True),
        (bytes(64), UUID, 0, SIZE + 1, True),
    ],
)
def test_an_ipc_handle_that_is_wrong_is_refused(
    handle: bytes, uuid: bytes, offset: int, size: int, *, closes: bool
) -> None:
    """A handle of another size, another GPU's, or less memory than said; what was opened is closed."""
    driver = FakeDriver()

    with pytest.raises(InvalidArgument) as refused:
        _opener(driver, []).open_ipc(handle, uuid, offset, size, "regions[0].cuda_ipc")

    assert refused.value.field == "regions[0].cuda_ipc"
    assert ("close_ipc" in driver.calls) == closes


def test_a_vmm_allocation_is_mapped_and_unmapped() -> None:
    """Addresses of whole pages, in the order that the driver wants, and back again."""
    driver, shown = FakeDriver(), list[tuple[int, int, int]]()
    fd = os.open(os.devnull, os.O_RDONLY)

    memory = _opener(driver, shown).open_vmm(fd, b"", SIZE, "field")

    assert shown == [(BASE, SIZE, 0)]
    assert driver.calls == ["import_descriptor", "reserve", "map"]
    memory.close()
    assert driver.calls[3:] == ["unmap", "free_addresses", "release"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("fails", "closed"),
    [
        ("import_descriptor", []),
        ("reserve", ["release"]),
        ("map", ["free_addresses", "release"]),
    ],
)
def test_a_vmm_allocation_that_fails_leaves_nothing(fails: str, closed: list[str]) -> None:
    """Whatever step fails, those before it are taken back, the descriptor too."""
    driver = FakeDriver(fails)
    fd = os.open(os.devnull, os.O_RDONLY)

    with pytest.raises(InvalidArgument, match=fails):
        _opener(driver, []).open_vmm(fd, UUID, SIZE, "field")

    assert driver.calls[driver.calls.index(fails) + 1 :] == closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("handle", "advice"),
    [
        (b"\x02e" + bytes(22), "expandable_segments:False"),
        (b"\x02c" + bytes(64), "those behind the first 2"),
        (bytes(60), "this one 60"),
    ],
)
def test_a_handle_of_torch_says_what_to_set(handle: bytes, advice: str) -> None:
    """Torch puts a version and a letter before CUDA's bytes; its expandable segments have none of these."""
    driver = FakeDriver()
    with pytest.raises(InvalidArgument, match=advice):
        _opener(driver, []).open_ipc(handle, UUID, 0, 16, "field")
    assert not driver.calls


def test_two_handles_of_one_ipc_allocation_are_one_memory() -> None:
    """The driver gives an allocation the address that it has here, and so regions that overlap are seen."""
    opener = _opener(FakeDriver(), [])
    one, other = (opener.open_ipc(bytes(64), UUID, offset, 1024, "field") for offset in (0, 512))

    assert one.identity == other.identity is not None
    assert other.begin_bytes - one.begin_bytes == 512
    assert one.kin is other.kin is None


def _attached(memory: DeviceMemory, engine: str) -> Attachment:
    found = object.__new__(Attachment)
    found.memory, found.engine, found.attachment_id = Regions([memory], ExitStack()), engine, engine
    found.layout = CacheLayout(DType.FLOAT16, 1, 1, ())
    return found


def test_two_engines_with_vmm_memory_are_refused() -> None:
    """Each export of an allocation has a descriptor of its own: nobody can tell that it is one allocation."""
    opened = []
    for _ in range(2):
        fd = os.open(os.devnull, os.O_RDONLY)
        opened.append(_opener(FakeDriver(), []).open_vmm(fd, UUID, SIZE, "field"))
    ipc = _opener(FakeDriver(), []).open_ipc(bytes(64), UUID, 0, 16, "field")
    first, second, again = (_attached(opened[0], "a"), _attached(opened[1], "b"), _attached(opened[1], "a"))
    attachments = object.__new__(Attachments)
    attachments._mapped = [first]
    attachments._by_id = attachments._by_engine = {"a": first}

    with pytest.raises(MemoryInUse, match=r"engine a is attached with cuda_vmm too.*pass cuda_ipc"):
        attachments._before(second)
    assert attachments._before(again) is first
    assert attachments._before(_attached(ipc, "c")) is None


class FakeSharing:
    """A driver of an engine's process, whose memory is of one allocation."""

    def __init__(self, *, is_capable: bool = True) -> None:
        self.is_capable = is_capable

    def use(self, device: int) -> None:
        """See SharingDriver."""
        assert device == 0

    def uuid(self, device: int) -> bytes:
        """See SharingDriver."""
        assert device == 0
        return UUID

    def is_ipc_capable(self, address: int) -> bool:
        """See SharingDriver."""
        assert address >= BASE
        return self.is_capable

    def ipc_handle(self, address: int) -> bytes:
        """See SharingDriver."""
        if not self.is_capable or address < BASE:
            raise OSError(1, "cuIpcGetMemHandle: invalid argument")
        return bytes(64)

    def allocation_begin(self, address: int) -> int:
        """See SharingDriver."""
        assert address >= BASE
        return BASE


def test_an_engine_shares_memory_that_begins_within_an_allocation() -> None:
    """As the worker opens it: the handle is the allocation's, the region begins where the tensor does."""
    region = cuda_region(BASE + 512, 1024, driver=FakeSharing())
    ipc, shown = region.cuda_ipc, list[tuple[int, int, int]]()
    _opener(FakeDriver(), shown).open_ipc(
        ipc.handle, ipc.device_uuid, ipc.offset_bytes, region.size_bytes, ""
    )

    assert shown == [(BASE + 512, 1024, 0)]


def test_an_engine_whose_memory_cannot_be_shared_is_told_what_to_set() -> None:
    """Before it asks for a handle: the driver would only say that an argument is invalid."""
    with pytest.raises(InvalidArgument, match=r"expandable_segments:False.*sleep-mode.*cuda_vmm") as refused:
        cuda_region(BASE, 1024, driver=FakeSharing(is_capable=False))
    assert refused.value.field == "address"
