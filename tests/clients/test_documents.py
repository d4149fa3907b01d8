"""The snippets and tables of docs/clients.md and docs/chunk_format.md are those that run."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from server_process import ServerProcess
from xxhash import xxh3_64_intdigest

from ctxcache import errors
from ctxcache.errors import CacheError

ROOT = Path(__file__).parents[2]
CLIENTS = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
CHUNK_FORMAT = (ROOT / "docs" / "chunk_format.md").read_text(encoding="utf-8")
DEFAULT_TARGET = "127.0.0.1:7420"
TIMEOUT_S = 60
# Raised where the server starts or in a client, and never sent.
NOT_ON_THE_WIRE = {
    errors.AddressUnusable,
    errors.DataDirectoryUnusable,
    errors.DeadlineExceeded,
    errors.FileDamaged,
    errors.FileAlreadyExists,
    errors.FileFull,
    errors.FileUnusable,
    errors.FormatTooNew,
    errors.InvalidConfiguration,
    errors.TlsFailed,
    errors.Unavailable,
}


def blocks(language: str) -> list[str]:
    """List the snippets of docs/clients.md in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", CLIENTS, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("js"), ids=lambda block: block.splitlines()[0])
def test_javascript_snippets_are_lines_of_the_tested_client(block: str) -> None:
    """A snippet is there, line by line, in what node runs."""
    sources = [path.read_text() for path in Path(__file__).with_name("javascript").glob("*.js")]

    assert any(textwrap.indent(block, indent) in source for source in sources for indent in ("", "  "))


def test_shell_snippets_run(tmp_path: Path) -> None:
    """A reader can paste them one after the other, against a server that is empty."""
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("buf", path=search_path) is None:
        pytest.skip("THE SHELL SNIPPETS ARE NOT TESTED: buf is not installed")

    with ServerProcess(tmp_path / "data") as server:
        script = "".join(blocks("sh")).replace(DEFAULT_TARGET, server.target)
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env=os.environ | {"PATH": search_path},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert "ctxcache.v1.SessionService/AppendSession" in result.stdout
    assert '"durableTokenCount": "2"' in result.stdout
    assert '"data": "AAECAwQFBgcICQoLDA0ODw=="' in result.stdout


def test_the_table_of_errors_is_the_servers() -> None:
    """Every reason that can arrive is there, with its code."""
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| \S", CLIENTS, re.MULTILINE))

    # A worker in this process adds errors of its own.
    servers = [each for each in CacheError.by_reason.values() if each.__module__ == "ctxcache.errors"]
    assert table == {error.reason: error.status for error in servers if error not in NOT_ON_THE_WIRE}


def test_the_header_table_leaves_no_byte_out() -> None:
    """Fields follow one another from byte 0 to 256, of the stream table to 24, of a snapshot's head to 96."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (?:bytes|[iu]\d+) \|", CHUNK_FORMAT, re.MULTILINE)

    ends = [0]
    for begin, size in rows:
        if begin == "0" and ends[-1]:
            ends.append(0)
        assert int(begin) == ends[-1]
        ends.append(int(begin) + int(size))
    assert [end for end, after in pairwise([*ends, 0]) if not after] == [256, 24, 96]


def test_the_checksum_vectors_are_right() -> None:
    """The table that other libraries are checked with agrees with xxHash's own."""
    vectors = re.findall(r"^\| (\d+) \| `([0-9a-f]{16})` \|$", CHUNK_FORMAT, re.MULTILINE)

    assert len(vectors) == 8
    for size, expected in vectors:
        ramp = bytes((31 * i + 1) % 256 for i in range(int(size)))
        assert f"{xxh3_64_intdigest(ramp):016x}" == expected
