"""Metadata of which durable commits can be made slow. Worst case: a commit that is a few seconds late."""

import asyncio
from pathlib import Path

from ctxcache.injection.faults import FaultKind, Faults
from ctxcache.metadata.base import Changes
from ctxcache.metadata.catalog import Catalog
from ctxcache.metadata.rocksdb import RocksDbMetadata
from ctxcache.metadata.witness import Witness


class SlowMetadata(RocksDbMetadata):
    """See RocksDbMetadata."""

    def __init__(
        self,
        path: str | Path,
        faults: Faults,
        *,
        witness: Witness | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        """See RocksDbMetadata."""
        super().__init__(path, witness=witness, catalog=catalog)
        self._faults = faults

    async def commit(self, changes: Changes, *, is_durable: bool) -> None:
        """See MetadataStore. As on a slow device, it is the sync that takes long: changes keep their order."""
        await super().commit(changes, is_durable=is_durable)
        if is_durable and (fault := self._faults.strike(FaultKind.COMMIT_DELAY)):
            await asyncio.sleep(fault.delay_ns / 10**9)
