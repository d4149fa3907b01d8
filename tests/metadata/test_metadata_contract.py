"""Every metadata store there is, under the contract of metadata stores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctxcache.metadata.base import MetadataStore
from ctxcache.metadata.memory import MemoryMetadata
from ctxcache.metadata.rocksdb import RocksDbMetadata
from ctxcache.testing.metadata import MetadataContract


class TestMemoryMetadata(MetadataContract):
    """The contract in memory; opening again is what remains after a power cut."""

    @pytest.fixture
    def open_store(self) -> Callable[[], MetadataStore]:
        """Open the one before the last one's remains."""
        stores = [MemoryMetadata()]

        def open_store() -> MetadataStore:
            stores.append(stores[-1].crash())
            return stores[-1]

        return open_store


class TestRocksDbMetadata(MetadataContract):
    """The contract on disk."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[Callable[[], MetadataStore]]:
        """Open the database of this test."""
        stores: list[RocksDbMetadata] = []

        def open_store() -> MetadataStore:
            stores.append(RocksDbMetadata(tmp_path / "metadata"))
            return stores[-1]

        yield open_store
        stores[-1].close()
