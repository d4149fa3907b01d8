"""What all tests may use. Lying here, it also makes `server_process` importable from every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

# Without a GPU kernels run in Triton's interpreter, which must be chosen before anybody imports Triton, as torch does.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it running; each uses names of its own."""
    with ServerProcess(tmp_path_factory.mktemp("shared") / "data") as server:
        yield server
