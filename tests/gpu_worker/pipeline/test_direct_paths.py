"""Which direct path is live, and why.

Kvikio as it may be found, its probe, and its edge with the module faked.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ctxcache.errors import TierFailure
from gpu_worker.direct import DirectPath, KvikioFound, Wanted, choose
from gpu_worker.direct import storage as probe_module
from gpu_worker.direct.source import KvikioFiles
from gpu_worker.direct.storage import probe_kvikio, read_answer

GPU = torch.device("cuda:0")
GDS = KvikioFound("", is_gds=True, version="26.10")
COMPAT = KvikioFound("", version="26.10")
BROKEN = KvikioFound("libcufile is missing")


@pytest.mark.parametrize(
    ("wanted", "found", "path"),
    [
        (Wanted.AUTO, GDS, DirectPath.GDS),
        (Wanted.AUTO, COMPAT, DirectPath.COMPAT),
        (Wanted.AUTO, BROKEN, DirectPath.POSIX),
        (Wanted.AUTO, None, DirectPath.OFF),
        (Wanted.OFF, GDS, DirectPath.OFF),
        (Wanted.POSIX, GDS, DirectPath.POSIX),
        (Wanted.POSIX, None, DirectPath.POSIX),
        (Wanted.GDS, COMPAT, DirectPath.COMPAT),
        (Wanted.GDS, None, DirectPath.POSIX),
        (Wanted.COMPAT, GDS, DirectPath.COMPAT),
        (Wanted.COMPAT, BROKEN, DirectPath.POSIX),
    ],
)
def test_the_best_path_within_what_is_wanted(
    wanted: Wanted, found: KvikioFound | None, path: DirectPath
) -> None:
    """With a reason, always."""
    live = choose(wanted, found)

    assert live.path is path
    assert live.reason
    assert BROKEN.problem in live.reason or found is not BROKEN or wanted is Wanted.POSIX


def test_without_a_gpu_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started."""
    monkeypatch.setattr(subprocess, "run", _never)
    assert probe_kvikio(torch.device("cpu")) is None


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a process was started")


def test_kvikio_that_is_not_installed_says_how_to_get_it() -> None:
    """Without a process."""
    found = probe_kvikio(GPU)
    assert found is not None
    assert found.problem.startswith("not installed")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("raise RuntimeError('libcufile.so.0 is not there')", "RuntimeError: libcufile.so.0 is not there"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
        ("print('nonsense')", "said 'nonsense'"),
        ("print('[]')", "said '[]'"),
        ("pass", "ended with status 0"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ('print(\'{"version": "1", "is_gds": true}\')', ""),
    ],
)
def test_a_probe_that_fails_hangs_or_dies_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, program: str, problem: str
) -> None:
    """The worker goes on."""
    monkeypatch.setattr(probe_module, "_PROGRAM", program)
    monkeypatch.setattr(probe_module, "find_spec", lambda _name: object())

    found = probe_kvikio(GPU, timeout_s=1.0 if "sleep" in program else 60.0)

    assert found is not None
    assert found.problem == problem
    assert found.is_gds == (not problem)


def test_a_python_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other failure."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(probe_module, "find_spec", lambda _name: object())
    found = probe_kvikio(GPU)
    assert found is not None
    assert found.problem == "cannot be tried: No such file or directory"
    assert read_answer(0, '{"is_gds": false}', "").problem


class _FakeFile:
    """As kvikio's CuFile."""

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r"
        self._data = Path(path).read_bytes()

    def pread(self, into: torch.Tensor, size: int, offset: int) -> Any:
        """See kvikio."""
        if offset > len(self._data):
            raise ValueError("planted")
        part = self._data[offset : offset + size]
        into[: len(part)].copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))

        class Future:
            def get(self) -> int:
                return len(part)

        return Future()


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module of that name, and what it was told."""
    told: dict[str, Any] = {}
    module, defaults = ModuleType("kvikio"), ModuleType("kvikio.defaults")

    class CompatMode:
        AUTO, ON, OFF = "auto", "on", "off"

    module.CompatMode, module.CuFile, module.defaults = CompatMode, _FakeFile, defaults  # type: ignore[attr-defined]
    defaults.set = told.update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    return told


@pytest.mark.parametrize("is_gds", [True, False])
def test_files_are_read_as_kvikio_is_told(kvikio: dict[str, Any], tmp_path: Path, *, is_gds: bool) -> None:
    """Never without its fallback, which does not return where GDS is not there; around the page cache."""
    paths = _files(tmp_path)
    files = KvikioFiles(paths, is_gds=is_gds)
    into = torch.zeros(4, dtype=torch.uint8)

    assert files.begin(1, 2, into).get() == 4
    assert bytes(into.tolist()) == b"2345"
    assert kvikio["compat_mode"] == ("auto" if is_gds else "on")
    assert kvikio["auto_direct_io_read"] is True
    with pytest.raises(TierFailure, match="ValueError: planted"):
        files.begin(0, 100, into)


def _files(tmp_path: Path) -> Sequence[str]:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"01234567")
    return [str(tmp_path / name) for name in ("a", "b")]


def test_a_kvikio_that_cannot_be_used_is_a_failure_of_the_path(
    kvikio: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that it cannot open, and a library that does not load."""
    with pytest.raises(TierFailure, match="FileNotFoundError"):
        KvikioFiles([str(tmp_path / "missing")], is_gds=False)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(TierFailure, match="kvikio"):
        KvikioFiles(_files(tmp_path), is_gds=False)
    assert "compat_mode" in kvikio
