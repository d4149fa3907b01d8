"""What all tests may use. Lying here, it also makes `server_process` importable from every test."""

from collections.abc import Iterator

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it running; each uses names of its own."""
    with ServerProcess(tmp_path_factory.mktemp("shared") / "data") as server:
        yield server
