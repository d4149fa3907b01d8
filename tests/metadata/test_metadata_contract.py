"""Every metadata store there is, under the contract of metadata stores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import FakeClock
from memory_metadata import MemoryMetadata
from metadata_contract import MetadataContract

from ctxcache.storage.injection import COUNT_LIMIT, Fault, FaultKind, Faults, SlowMetadata
from ctxcache.storage.metadata.base import MetadataStore
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata


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
    """The contract on disk, also where every durable commit is made slow."""

    @pytest.fixture(params=["real", "slow"])
    def open_store(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> Iterator[Callable[[], MetadataStore]]:
        """Open the database of this test."""
        stores: list[RocksDbMetadata] = []
        faults = Faults(FakeClock())
        faults.inject(Fault(kind=FaultKind.COMMIT_DELAY, left_count=COUNT_LIMIT, end_ns=1, delay_ns=1))

        def open_store() -> MetadataStore:
            path = tmp_path / "metadata"
            stores.append(SlowMetadata(path, faults) if request.param == "slow" else RocksDbMetadata(path))
            return stores[-1]

        yield open_store
        stores[-1].close()
