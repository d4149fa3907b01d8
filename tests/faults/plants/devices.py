"""Bugs that `devices` must find."""

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ctxcache.cache import eviction, flushing, sessions
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.ledger.lost_paths import LostPaths
from ctxcache.core.ledger.session import Session, SessionView
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata.base import SessionRecord
from ctxcache.storage.metadata.catalog import Catalog, Entry
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.path_health import PathHealth
from ctxcache.storage.tiers.ssd import SsdFiles
from tests.faults.planted import plant


@plant
def paths_in_turn(_: int) -> None:
    """Segments of a session go round the paths."""
    whole = SlotAllocator.take

    def take(
        allocator: SlotAllocator, size_bytes: int, *, closed: Collection[int] = (), **_: int
    ) -> Slot | None:
        return whole(allocator, size_bytes, closed=closed)

    setattr(SlotAllocator, "take", take)  # noqa: B010  mypy would have it typed


@plant
def claims_what_is_lost(_: int) -> None:
    """Sessions show what lies on a lost path."""
    setattr(LostPaths, "reckon", lambda *_: None)  # noqa: B010


@plant
def cut_for_good(_: int) -> None:
    """Records of sessions are cut when a path is lost."""
    whole = eviction.record_of

    def record_of(session: Session) -> SessionRecord:
        record = whole(session)
        kept = tuple(s.segment_id for s in session.shown if s.begin < session.recorded_end)
        return replace(record, live=session.live, segment_ids=kept)

    for module in (flushing, eviction, sessions):
        setattr(module, "record_of", record_of)  # noqa: B010


@plant
def takes_any_directory(_: int) -> None:
    """A path is used though its directory is gone."""
    setattr(PathHealth, "displace", lambda *_: None)  # noqa: B010


@plant
def makes_one_copy(_: int) -> None:
    """Sessions that shall have two copies have one."""
    whole = sessions.Sessions.create

    async def create(self: sessions.Sessions, *arguments: Any, copies: int = 0, **facts: Any) -> SessionView:
        return await whole(self, *arguments, copies=1, **facts)

    setattr(sessions.Sessions, "create", create)  # noqa: B010


@plant
def waits_for_what_hangs(_: int) -> None:
    """Operations that a device does not return are waited for."""
    setattr(SsdFiles, "give_up_overdue", lambda *_: None)  # noqa: B010


@plant
def waits_for_the_catalog(_: int) -> None:
    """The event loop waits for each write of the catalog."""
    whole = Catalog.append

    def append(catalog: Catalog, commits: Sequence[tuple[Sequence[Entry], int]]) -> None:
        whole(catalog, commits)
        if catalog.last_write:
            catalog.last_write.result()

    setattr(Catalog, "append", append)  # noqa: B010


@plant
def waits_for_the_log(_: int) -> None:
    """The event loop waits for each write of the records' log."""
    whole = RocksDbMetadata._put

    def put(
        metadata: RocksDbMetadata, entries: Sequence[Entry], *, is_durable: bool
    ) -> "asyncio.Future[Future[None] | None]":
        done = whole(metadata, entries, is_durable=is_durable)
        if metadata._round and metadata._round.work:
            metadata._round.work.result()
        return done

    setattr(RocksDbMetadata, "_put", put)  # noqa: B010
