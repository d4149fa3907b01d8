"""CUDA's driver, by its documented functions: other processes' memory, and the host's that it copies from.

Called through ctypes, and not through the runtime that torch uses: a call that fails here leaves no error
there for the next kernel to trip over. Worst case: no driver, which is Unavailable, or a call that fails,
which is an OSError with what the driver says.
"""

import ctypes
from typing import Any

from ctxcache.errors import Unavailable

IPC_HANDLE_BYTES = 64
UUID_BYTES = 16
NO_IPC = (
    "CUDA IPC leads to no memory that was made by cuMemCreate: start the engine with"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and vLLM without --enable-sleep-mode;"
    " or pass what cuMemExportToShareableHandle gives, as cuda_vmm"
)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Planes(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


MOST_PITCH_BYTES = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far."""
_HOST_MEMORY = 1
_DEVICE_MEMORY = 2
_POSIX_DESCRIPTOR = 1
_PINNED = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_MINIMUM = 0
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
_READ_ONLY = 8
_IS_IPC_CAPABLE = 10


class Libcuda:
    """CUDA's driver API, by its documented functions. Raises Unavailable where the library is not."""

    def __init__(self) -> None:
        self._contexts: dict[int, ctypes.c_void_p] = {}
        try:
            # Any: a library's functions have no types.
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(target="libcuda.so.1", problem=str(error)) from error
        self._call("cuInit", 0)

    def use(self, device: int) -> None:
        """See Driver."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            # The context is kept for good: torch works in the same one.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def uuid(self, device: int) -> bytes:
        """See Driver."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid", ctypes.byref(uuid), self._device(device))
        return bytes(uuid.bytes)

    def open_ipc(self, handle: bytes) -> int:
        """See Driver."""
        address = ctypes.c_uint64()
        # By value, as the function takes it.
        packed = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), packed, _LAZY_PEER_ACCESS)
        return address.value

    def is_ipc_capable(self, address: int) -> bool:
        """Whether `ipc_handle` can be had of the allocation that an address lies in."""
        answer = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(answer), _IS_IPC_CAPABLE, ctypes.c_uint64(address))
        return bool(answer.value)

    def ipc_handle(self, address: int) -> bytes:
        """The handle of the allocation that an address lies in, for other processes."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def allocation_begin(self, address: int) -> int:
        """Where the allocation begins that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        return base.value

    def close_ipc(self, address: int) -> None:
        """See Driver."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def allocation_bytes(self, address: int) -> int:
        """See Driver."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        return base.value + size.value - address

    def import_descriptor(self, fd: int) -> int:
        """See Driver."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _POSIX_DESCRIPTOR
        )
        return handle.value

    def release(self, handle: int) -> None:
        """See Driver."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def reserve(self, size_bytes: int) -> int:
        """See Driver."""
        address, anywhere = ctypes.c_uint64(), ctypes.c_uint64(0)
        flags, alignment = ctypes.c_ulonglong(0), ctypes.c_size_t(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(size_bytes),
            alignment,
            anywhere,
            flags,
        )
        return address.value

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def map(self, address: int, size_bytes: int, handle: int, device: int) -> None:
        """See Driver."""
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
        # A VMM allocation becomes memory of this process in four steps:
        #
        #     import (handle) ─ reserve (addresses) ─ map (both) ─ set access (this device)
        self._call("cuMemMap", at, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_ulonglong(0))
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        try:
            self._call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        except OSError:
            # The caller undoes what returned: a mapping without access is this function's to undo.
            self.unmap(address, size_bytes)
            raise

    def unmap(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def granularity(self, device: int) -> int:
        """See Driver."""
        size = ctypes.c_size_t()
        properties = _AllocationProperties(
            type=_PINNED, requestedHandleTypes=_POSIX_DESCRIPTOR, location=_Location(_ON_DEVICE, device)
        )
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), _MINIMUM)
        return size.value

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin memory that is mapped here to be read, for all contexts: copies come straight from it."""
        # Read-only, as the arena is mapped so here: the driver refuses to pin such memory for writing.
        flags = ctypes.c_uint(_PORTABLE | _READ_ONLY)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), flags)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`; no copy may be under way."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy_planes(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        *,
        plane_bytes: int,
        plane_count: int,
        stream: int,
    ) -> None:
        """Begin to copy planes of device memory into the host's, on a stream, by one call.

        `target`, `source`: the first plane's addresses; pitches: bytes from one plane to the next.
        """
        planes = _Planes(
            srcMemoryType=_DEVICE_MEMORY,
            srcDevice=source,
            srcPitch=source_pitch,
            dstMemoryType=_HOST_MEMORY,
            dstHost=target,
            dstPitch=target_pitch,
            WidthInBytes=plane_bytes,
            Height=plane_count,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(planes), ctypes.c_void_p(stream))

    def bring_planes(
        self, target: int, source: int, source_pitch: int, *, plane_bytes: int, plane_count: int, stream: int
    ) -> None:
        """Begin to copy planes of the host's memory onto the device, one behind the other; see `copy_planes`.

        Pitches are less than MOST_PITCH_BYTES.
        """
        planes = _Planes(
            srcMemoryType=_HOST_MEMORY,
            srcHost=source,
            srcPitch=source_pitch,
            dstMemoryType=_DEVICE_MEMORY,
            dstDevice=target,
            dstPitch=plane_bytes,
            WidthInBytes=plane_bytes,
            Height=plane_count,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(planes), ctypes.c_void_p(stream))

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            raise OSError(code, f"{name}: {(said.value or b'unknown error').decode()}")
