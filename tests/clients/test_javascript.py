"""The JavaScript client's own tests, run by node against a real server.

Skipped, and said so, where node 18, npm or the packages cannot be had.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_process import ServerProcess

DIRECTORY = Path(__file__).with_name("javascript")
INSTALLED = DIRECTORY / "node_modules"
# Outside what npm keeps in order, so that a half-made installation has no stamp.
STAMP = INSTALLED / ".installed-from"
NODE_MAJOR = 18
INSTALL_TIMEOUT_S = 90
RUN_TIMEOUT_S = 100
UNREACHABLE = re.compile(r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|E5\d\d)\b")


@pytest.fixture(scope="module")
def node() -> str:
    """Path of node, with the packages of the lock file installed."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("THE JAVASCRIPT CLIENT IS NOT TESTED: node is not installed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MAJOR:
        pytest.skip(f"THE JAVASCRIPT CLIENT IS NOT TESTED: node {version.strip()} is older than {NODE_MAJOR}")
    install()
    return found


def install() -> None:
    """Install what the lock file names, unless that is there. Skips when the registry cannot be reached."""
    digest = hashlib.sha256((DIRECTORY / "package-lock.json").read_bytes()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("THE JAVASCRIPT CLIENT IS NOT TESTED: npm is not installed")
    result = run_npm_ci(npm)
    if result.returncode and (found := UNREACHABLE.search(result.stderr)):
        pytest.skip(f"THE JAVASCRIPT CLIENT IS NOT TESTED: the npm registry cannot be reached ({found[0]})")
    assert result.returncode == 0, result.stderr
    STAMP.write_text(digest)


def run_npm_ci(npm: str) -> subprocess.CompletedProcess[str]:
    """Install by the lock file; what does not end in time counts as unreachable."""
    command = [npm, "ci", "--prefer-offline", "--no-progress", "--fetch-retries=1"]
    try:
        return subprocess.run(
            command, cwd=DIRECTORY, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, "", f"ETIMEDOUT after {error.timeout} s")


def test_node_tests_pass_against_a_server(node: str, running_server: ServerProcess) -> None:
    """A client of another language lives a whole conversation: every test of it passes, none is left out."""
    environment = os.environ | {"CTXCACHE_TARGET": running_server.target}
    result = subprocess.run(
        [node, "--test"], cwd=DIRECTORY, env=environment, timeout=RUN_TIMEOUT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    report = result.stdout + result.stderr
    assert result.returncode == 0, report
    counts = {
        name: int(count)
        for name, count in re.findall(r"^\S+ (tests|pass|skipped|todo) (\d+)$", report, re.MULTILINE)
    }
    assert counts["pass"] == counts["tests"] > 30, report
    assert counts["skipped"] == counts["todo"] == 0, report


def test_the_lock_file_names_no_registry() -> None:
    """Packages come from whatever registry npm is set up with, checked by their digests."""
    lock = (DIRECTORY / "package-lock.json").read_text()

    assert '"resolved"' not in lock
    assert lock.count('"integrity": "sha512-') == lock.count('"node_modules/')
