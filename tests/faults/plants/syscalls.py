"""Bugs that `tests.faults.syscalls` must find."""

import contextlib
import os
from collections.abc import Callable, Sequence

from ctxcache.cli import serve
from ctxcache.server import starting
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers import ssd
from ctxcache.storage.tiers.base import TierRefusal
from tests.faults.planted import plant


@plant
def sync_errors_ignored(_: int) -> None:
    """A failed fdatasync of an SSD file is taken for success."""
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        with contextlib.suppress(OSError):
            real(fd)

    os.fdatasync = fdatasync  # type: ignore[assignment]  # a narrower argument


@plant
def sync_retried(_: int) -> None:
    """A failed fdatasync is called again until it succeeds."""
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                return real(fd)

    os.fdatasync = fdatasync  # type: ignore[assignment]  # a narrower argument


@plant
def short_write_is_whole(_: int) -> None:
    """A write of fewer bytes than asked for is taken for all of them."""

    def once(
        fd: int, call: Callable[[int, Sequence[memoryview], int], int], offset: int, buffer: memoryview
    ) -> None:
        call(fd, [buffer], offset)

    ssd._loop = once


@plant
def refused_record_acknowledged(_: int) -> None:
    """A record that found no room is acknowledged."""

    def fail(_: RocksDbMetadata, error: Exception) -> None:
        """Go on."""

    def refuse(metadata: RocksDbMetadata, _: BaseException) -> None:
        """Tell all that wait that their records are there."""
        rounds, metadata._round = metadata._round, None
        callers = (metadata._waiting_done, rounds.done if rounds else None)
        metadata._waiting, metadata._waiting_done = [], None
        for caller in filter(None, callers):
            caller.set_result(None)

    RocksDbMetadata._fail = fail  # type: ignore[method-assign,assignment]  # it returns
    RocksDbMetadata._refuse = refuse  # type: ignore[method-assign,assignment]


@plant
def failed_path_in_rotation(_: int) -> None:
    """A path that failed is still handed out."""

    def refusals(_: ssd.SsdFiles) -> dict[int, TierRefusal]:
        return {}

    ssd.SsdFiles.refusals = property(refusals)  # type: ignore[assignment,method-assign]


@plant
def room_unchecked(_: int) -> None:
    """The room for records is not looked at."""
    check = RocksDbMetadata.check

    def check_failure_alone(store: RocksDbMetadata, **_: bool) -> None:
        check(store, is_growing=False)

    RocksDbMetadata.check = check_failure_alone  # type: ignore[method-assign,assignment]


@plant
def address_space_unchecked(_: int) -> None:
    """A bound on memory is met by whichever library comes to it first."""
    # The command asks before it maps anything, and every start asks, as the doctor does.
    for module in (serve, starting):
        setattr(module, "check_address_space", lambda _: None)  # noqa: B010  # mypy would have it typed
