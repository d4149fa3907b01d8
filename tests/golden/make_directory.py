"""Writes directory-v5.tar.xz: a data directory of format 5 as a killed server leaves it.

    python tests/golden/make_directory.py

Made once for each format; kept to prove that directories open for good while the format is the same. Two SSD
files; some records are in tables, some in the log alone; sessions that were truncated, forked, and grown
after a fork; one with a salt and a picture behind its tokens. Rows are those of `tests.faults.rows`, with the
number in the session's name as owner; token ids too. The SSD files are sparse where nothing was ever written.
"""

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS_SPEC, Content, DType, StateKind, Stream, StreamSpec
from tests.faults.rows import rows_of
from tests.server_process import ServerProcess

ARCHIVE = Path(__file__).parent / "directory-v5.tar.xz"
SSD_SIZE_BYTES = 4 << 20
SSD_NAMES = ("ssd-a", "ssd-b")
# Nothing in it may ever expire.
EXPIRE_TIME = datetime(2200, 1, 1, tzinfo=UTC)
MODEL = ModelSpec(
    model_id="golden",
    architecture="GoldenForCausalLM",
    revision="1",
    weights_digest="w",
    tokenizer_digest="t",
    dtype=DType.FLOAT16,
    layer_count=2,
    hidden_size=24,
    kv_head_count=1,
    head_size=12,
    rope="theta=10000",
    norm="rms",
    is_relocatable=True,
    settings="{}",
    streams=(
        StreamSpec(Stream(0, StateKind.HIDDEN), 48, DType.FLOAT16),
        StreamSpec(Stream(1, StateKind.KV), 48, DType.FLOAT16),
    ),
)
STREAMS = (TOKENS_SPEC, *MODEL.streams)
SESSIONS = {
    "s1": [(0, 200)],
    "s2": [(0, 4), (100, 150)],
    "s3": [(0, 64)],
    "s4": [(0, 70)],
    "s5": [],
}
"""The tokens that each session has, by their indexes when they were appended; s4 is a fork of s1."""
FORKED_TOKENS = 50
SALTS = {"s3": b"a user"}
PICTURES = (Content(10, 40, bytes(range(32))), Content(60, 80, bytes(32)))
"""Behind the tokens of s3, of which the first 64 are left."""


def owner_of(session_id: str, index: int) -> int:
    """The session that wrote the token of that index."""
    return 1 if session_id == "s4" and index < FORKED_TOKENS else int(session_id[1:])


def append(client: Client, name: str, begin: int, end: int, contents: Sequence[Content] = ()) -> None:
    """Append self-describing rows, durable; `[begin, end)` are the tokens' indexes."""
    owner = int(name.rpartition("s")[2])
    rows = {spec.stream: rows_of(owner, spec.stream, begin, end, spec.row_bytes) for spec in STREAMS}
    session = client.sessions.open(name, CallerModel(MODEL))
    session.append(dict(rows), contents=contents, durability=Durability.DISK)


def fill(client: Client) -> None:
    """Make what lies in tables after a restart."""
    client.models.register(MODEL)
    for session_id in ("s1", "s2", "s3", "s5", "s6"):
        layout = [spec.stream for spec in MODEL.streams]
        client.sessions.create(
            CallerModel(MODEL),
            id=session_id,
            layout=layout,
            expire_time=EXPIRE_TIME,
            salt=SALTS.get(session_id, b""),
        )
    append(client, "sessions/s1", 0, 130)
    append(client, "sessions/s2", 0, 150)
    append(client, "sessions/s3", 0, 100, PICTURES)
    append(client, "sessions/s6", 0, 100)


def go_on(client: Client) -> None:
    """Make what lies in the log alone."""
    append(client, "sessions/s1", 130, 200)
    client.sessions.open("sessions/s2").drop_ranges([(4, 100)])
    client.sessions.open("sessions/s3").keep_first(64)
    client.sessions.open("sessions/s1").fork(id="s4", token_count=FORKED_TOKENS)
    append(client, "sessions/s4", FORKED_TOKENS, 70)
    client.sessions.open("sessions/s6").delete()


def pack(directory: Path) -> bytes:
    """Archive the directories, holes left out: GNU tar's own sparse members cannot be written by Python."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.name != "ctxcache.sock":
                archive.add(path, str(path.relative_to(directory)), filter=anonymous)
    return packed.getvalue()


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made it and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    """Make the directory with a real server, kill it, and archive what is left."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "golden" / "data"
        data.parent.mkdir()
        ssd = [part for name in SSD_NAMES for part in ("--ssd-directories", str(data.parent / name))]
        server = ServerProcess(data, *ssd, "--ssd-size-bytes", str(SSD_SIZE_BYTES))
        with server:
            with ctxcache.connect(server.target, access="remote") as client:
                fill(client)
            server.terminate()
            server.start()
            with ctxcache.connect(server.target, access="remote") as client:
                go_on(client)
            server.kill9()
        facts = json.loads((data / "FORMAT").read_text())
        if facts["format"] != 5:
            raise SystemExit(f"this version writes format {facts['format']}")
        for log in (data / "metadata").glob("LOG*"):
            log.unlink()
        os.sync()
        for stray in data.parent.glob("*.stderr"):
            stray.unlink()
        ARCHIVE.write_bytes(pack(data.parent))


if __name__ == "__main__":
    main()
