"""Fixtures of all tests. Lying here, it also makes `server_process` importable from every test."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from server_process import ServerProcess

from ctxcache.core.ledger.work import Work

# The same examples in every run, and no example fails for being slow on a busy machine. In spite of
# `derandomize` hypothesis also draws numbers that it reads in the code of all modules imported so far: a test
# would have other examples beside other files than alone. Hypothesis has no setting for this.
providers._get_local_constants = Constants
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

# Without a GPU kernels run in Triton's interpreter, which must be chosen before anybody imports Triton, as
# torch does.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A background job of a shell is deaf to Ctrl-C, and so would be what it starts: programs under test are not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let no collection look at what stays: modules and tests. Some tests collect hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Give back the level of logs, which a reload of settings changes for the whole process."""
    yield
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def work() -> Iterator[Work]:
    """A work that begins and ends with the test."""
    with Work() as begun:
        yield begun


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it running; each uses names of its own."""
    with ServerProcess(tmp_path_factory.mktemp("shared") / "data") as server:
        yield server


@pytest.fixture
def session_id(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    name: str = request.node.name
    return "".join(letter if letter.isalnum() else "-" for letter in name)
