"""Durable steps, and a SIGKILL at the Nth pass of one: `kill_STEP:N`, `kill_at_start_STEP:N`.

A step is a call that changes what a restart finds, and a side of it: before, halfway or after. Those
of the first form wait for SIGUSR1 before they count; those of the second count from the start.
Worst case: the product has lost a call that is named here, and the server does not start.
"""

import inspect
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

from ctxcache.cache import Cache
from ctxcache.core.extents import SlotAllocator
from ctxcache.runtime import files
from ctxcache.server.server import Server
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.metadata.catalog import Catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.tiers.dram import DramArena
from tests.faults.planted import PLANTS

Call = Callable[..., Any]
ALIGN_BYTES = 4096

_CALLS: dict[str, tuple[object, str]] = {
    "file_created": (os, "posix_fallocate"),
    "file_sync": (os, "fsync"),
    "file_rename": (os, "rename"),
    "directory_sync": (files, "sync_directory"),
    "slot_write": (os, "pwritev"),
    "slot_sync": (os, "fdatasync"),
    "record_write": (RocksDbMetadata, "_write"),
    "log_write": (RocksDbMetadata, "_write_log"),
    "record_sync": (RocksDbMetadata, "sync_log"),
    "witness_note": (Witness, "note"),
    "catalog_append": (Catalog, "_write"),
    "slot_given": (SlotAllocator, "give"),
    "slot_taken": (SlotAllocator, "take"),
    "arena_made": (DramArena, "__init__"),
    "load": (Cache, "open"),
    "run_begun": (DataDirectory, "begin_run"),
    "drain": (Server, "stop"),
    "cache_close": (Cache, "close"),
    "run_ended": (DataDirectory, "end_run"),
    "metadata_close": (RocksDbMetadata, "close"),
}
STARTING = ("file_created", "file_sync", "file_rename", "directory_sync", "arena_made", "load", "run_begun")
DRAINING = ("drain", "cache_close", "run_ended", "metadata_close")
WORKING = (
    "slot_write",
    "slot_sync",
    "record_write",
    "log_write",
    "record_sync",
    "witness_note",
    "catalog_append",
    "slot_given",
    "slot_taken",
)
SIDES = ("before", "after")


def steps_of(calls: tuple[str, ...]) -> list[str]:
    """Names of these calls' steps."""
    halves = ["slot_write_half"] if "slot_write" in calls else []
    return [f"{call}_{side}" for call in calls for side in SIDES] + halves


class _Countdown:
    """Kills at the Nth hit once it is armed."""

    def __init__(self, nth: int, *, is_armed: bool) -> None:
        self._nth, self._is_armed = nth, is_armed
        self._hits = itertools.count(1)  # threads share it

    def arm(self, *_: object) -> None:
        self._is_armed = True

    def is_due(self) -> bool:
        return self._is_armed and next(self._hits) == self._nth

    def hit(self) -> None:
        if self.is_due():
            os.kill(os.getpid(), signal.SIGKILL)


def _plant(step: str, countdown: _Countdown) -> None:
    call, _, side = step.rpartition("_")
    owner, name = _CALLS[call]
    original: Call = getattr(owner, name)
    if side == "half":
        wrapped = _half(original, countdown)
    elif inspect.iscoroutinefunction(original):
        wrapped = _around_awaited(original, side, countdown)
    else:
        wrapped = _around(original, side, countdown)
    setattr(owner, name, wrapped)


def _around(original: Call, side: str, countdown: _Countdown) -> Call:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if side == "before":
            countdown.hit()
        result = original(*arguments, **named)
        if side == "after":
            countdown.hit()
        return result

    return wrapped


def _around_awaited(original: Call, side: str, countdown: _Countdown) -> Call:
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        if side == "before":
            countdown.hit()
        result = await original(*arguments, **named)
        if side == "after":
            countdown.hit()
        return result

    return wrapped


def _half(write: Call, countdown: _Countdown) -> Call:
    def wrapped(fd: int, buffers: list[memoryview], offset: int) -> Any:
        if countdown.is_due():
            half = len(buffers[0]) // 2 // ALIGN_BYTES * ALIGN_BYTES
            write(fd, [buffers[0][:half]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, buffers, offset)

    return wrapped


def _kill(step: str) -> Callable[[int], None]:
    def plant(nth: int) -> None:
        countdown = _Countdown(nth, is_armed=False)
        signal.signal(signal.SIGUSR1, countdown.arm)
        _plant(step, countdown)

    return plant


def _kill_at_start(step: str) -> Callable[[int], None]:
    return lambda nth: _plant(step, _Countdown(nth, is_armed=True))


for _step in steps_of(tuple(_CALLS)):
    PLANTS[f"kill_{_step}"] = _kill(_step)
    PLANTS[f"kill_at_start_{_step}"] = _kill_at_start(_step)
