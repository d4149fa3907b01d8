"""The chunk format as documented: a reader written from docs/chunk_format.md finds what the server wrote."""

import ast
import json
import re
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from independent_reader import (
    ALIGN_BYTES,
    FIXED_BYTES,
    NotASegment,
    Segment,
    align,
    read_chunks,
    read_header,
    read_log,
    scan,
    unpack_row,
)
from parsing import parse
from server_process import ServerProcess

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS as TOKENS_STREAM
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

READER = Path(__file__).parents[1] / "independent_reader.py"
GOLDEN = json.loads((READER.parent / "golden" / "segments.json").read_text(encoding="utf-8"))
HIDDEN, KV, PACKED = (
    Stream(layer, kind) for layer, kind in ((0, StateKind.HIDDEN), (1, StateKind.KV), (1, StateKind.KV_INT8))
)
ROW_BYTES = {TOKENS_STREAM: 4, HIDDEN: 96, KV: 96, PACKED: 80}
DTYPES = {HIDDEN: DType.BFLOAT16, KV: DType.BFLOAT16, PACKED: DType.PACKED}
TOKEN_COUNT = 200
EARLY_COUNT = 130
DROPPED = range(10, 30)
FORK_TOKEN_COUNT = 150
FORK_APPENDED_COUNT = 5


@dataclass(frozen=True)
class Stopped:
    """The files that a server left behind.

    Its file, also as it was after the first append, and its sessions.
    """

    path: Path
    early_file: bytes
    file: bytes
    source: SessionInfo
    fork: SessionInfo


def saved_rows(begin: int, end: int) -> dict[Stream, npt.NDArray[np.generic]]:
    """Make rows that differ by stream and token."""
    tokens = np.arange(begin, end, dtype=np.int32).reshape(-1, 1)
    numbers = np.arange(begin, end, dtype=np.int64).reshape(-1, 1)
    rows: dict[Stream, npt.NDArray[np.generic]] = {TOKENS_STREAM: tokens + 1000}
    for stream in DTYPES:
        values = numbers * 7 + np.arange(ROW_BYTES[stream]) * 31 + stream.layer * 101
        rows[stream] = (values % 256).astype(np.uint8)
    return rows


def expected_row(token: int) -> dict[tuple[int, int], bytes]:
    """State what a reader finds for one token."""
    rows = saved_rows(token, token + 1)
    return {(stream.layer, int(stream.kind)): row.tobytes() for stream, row in rows.items()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A stopped server that took two appends, a truncation and a fork that goes on."""
    directory = tmp_path_factory.mktemp("format") / "data"
    path = directory / "ssd" / "segments.dat"
    with ServerProcess(directory) as server:
        with ctxcache.connect(server.target, access="remote") as client:
            model, source = new_session(client)
            client.sessions.open(source.name, model).append(
                saved_rows(0, EARLY_COUNT), durability=Durability.DISK
            )
            early_file = path.read_bytes()
            client.sessions.open(source.name, model).append(
                saved_rows(EARLY_COUNT, TOKEN_COUNT), durability=Durability.DISK
            )
            fork = client.sessions.open(source.name).fork(token_count=FORK_TOKEN_COUNT).info
            added = saved_rows(TOKEN_COUNT, TOKEN_COUNT + FORK_APPENDED_COUNT)
            client.sessions.open(fork.name, model).append(added, durability=Durability.DISK)
            source = client.sessions.open(source.name).drop_ranges([(DROPPED.start, DROPPED.stop)])
        assert server.terminate() == 0
    return Stopped(path, early_file, path.read_bytes(), source, fork)


def new_session(client: Client) -> tuple[CallerModel, SessionInfo]:
    """Create a session that stores hidden states of one layer and K/V of another, packed too."""
    specs = tuple(StreamSpec(stream, ROW_BYTES[stream], dtype) for stream, dtype in DTYPES.items())
    model = client.models.register(
        ModelSpec(
            "tiny", "TinyForCausalLM", "", "", "", DType.BFLOAT16, 2, 48, 3, 8, "", "",
            is_relocatable=True, streams=specs,
        )
    )  # fmt: skip
    return model, client.sessions.create(model, layout=list(DTYPES)).info


def whole_segments(file: bytes) -> list[Segment]:
    """List the segments that a scan trusts."""
    return [segment for _, segment, _ in scan(file) if segment]


def test_the_reader_knows_nothing_of_ours() -> None:
    """It imports the standard library and xxhash: what it knows, it knows from the document."""
    nodes = list(ast.walk(parse(READER.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}

    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"xxhash"}


def test_what_was_saved_is_found_by_position(stopped: Stopped) -> None:
    """Every token lies under its position with the rows it was saved with, dropped tokens included."""
    log = read_log(stopped.file, bytes.fromhex(stopped.source.uid))

    assert stopped.source.token_count == TOKEN_COUNT - len(DROPPED)
    assert log == {token: expected_row(token) for token in range(TOKEN_COUNT)}


def test_a_fork_goes_on_behind_the_tokens_it_shares(stopped: Stopped) -> None:
    """Its own segments carry its own uid and begin behind the last shared token."""
    log = read_log(stopped.file, bytes.fromhex(stopped.fork.uid))

    assert log == {FORK_TOKEN_COUNT + i: expected_row(TOKEN_COUNT + i) for i in range(FORK_APPENDED_COUNT)}


def test_of_flushes_of_one_segment_the_one_with_most_tokens_counts(stopped: Stopped) -> None:
    """A growing segment is written to a new slot each time; which copy comes first means nothing."""
    uid = bytes.fromhex(stopped.source.uid)

    assert read_log(stopped.early_file, uid) == {token: expected_row(token) for token in range(EARLY_COUNT)}
    assert {s.token_count for s in whole_segments(stopped.early_file)} == {128, EARLY_COUNT - 128}
    for both in (stopped.early_file + stopped.file, stopped.file + stopped.early_file):
        assert read_log(both, uid) == {token: expected_row(token) for token in range(TOKEN_COUNT)}


def test_headers_say_whose_the_rows_are(stopped: Stopped) -> None:
    """Tenant, model and streams of a header are those of the session."""
    for segment in whole_segments(stopped.file):
        assert segment.tenant == stopped.source.tenant
        assert segment.model_fingerprint == stopped.source.model_fingerprint
        assert [(s.layer, s.kind) for s in segment.streams] == [
            tuple(stream) for stream in stopped.source.streams()
        ]


def test_the_command_prints_tokens_and_rows(stopped: Stopped) -> None:
    """Run by itself, away from the repository, it prints what it found."""
    command = [sys.executable, str(READER), str(stopped.path)]
    result = subprocess.run(command, cwd=stopped.path.parent, capture_output=True, text=True, check=True)

    assert re.search(rf"session {stopped.source.uid}, generation \d+, tokens \[0, 128\)", result.stdout)
    assert f"token ids {' '.join(str(1000 + token) for token in range(128))}\n" in result.stdout
    first = expected_row(0)[0, StateKind.HIDDEN][:8].hex()
    assert f"layer 0 hidden: 128 rows of 96 B, the first begins with {first}" in result.stdout


# -- damage ---------------------------------------------------------------------------------------


def damaged(stopped: Stopped, problem: str) -> tuple[bytes, int]:
    """Return the file with one segment damaged, and that segment's offset."""
    segment = whole_segments(stopped.file)[0]
    begin = segment.offset_bytes
    file = bytearray(stopped.file)
    first, second = (begin + stream.offset_bytes for stream in segment.streams[1:3])
    match problem:
        case "a bit of a row":
            file[first + 96 * 63] ^= 1
        case "a bit of the header":
            file[begin + 40] ^= 1
        case "a bit of the stream table":
            file[begin + FIXED_BYTES + 8] ^= 1
        case "another layer's rows":
            file[first : first + 64 * 96] = stopped.file[second : second + 64 * 96]
        case "another segment's rows":
            other = whole_segments(stopped.file)[1]
            theirs = other.offset_bytes + other.streams[1].offset_bytes
            file[first : first + 64 * 96] = stopped.file[theirs : theirs + 64 * 96]
    return bytes(file), begin


@pytest.mark.parametrize(
    "problem",
    [
        "a bit of a row",
        "a bit of the header",
        "a bit of the stream table",
        "another layer's rows",
        "another segment's rows",
    ],
)
def test_damage_and_misplacement_are_found(stopped: Stopped, problem: str) -> None:
    """The segment that is not as it was sealed is named, and only that one."""
    file, offset_bytes = damaged(stopped, problem)

    before = {offset for offset, segment, _ in scan(stopped.file) if segment}
    assert {offset for offset, segment, _ in scan(file) if segment is None} == {offset_bytes}
    assert {offset for offset, segment, _ in scan(file) if segment} == before - {offset_bytes}


def test_rows_under_another_identity_do_not_pass(stopped: Stopped) -> None:
    """The same bytes at the same place fail when the header names another generation, tenant or session."""
    segment = whole_segments(stopped.file)[0]
    others = (
        replace(segment, generation=segment.generation + 1),
        replace(segment, tenant="another"),
        replace(segment, session_uid=bytes(16)),
        replace(segment, begin=segment.begin + 64),
        replace(segment, model_fingerprint=bytes(32)),
    )

    for other in others:
        with pytest.raises(NotASegment, match="does not match its checksum"):
            read_chunks(stopped.file, other)


# -- golden vectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["segments"], ids=lambda case: f"segment {case['segment_id']}")
def test_golden_segments_read_as_documented(case: dict[str, Any]) -> None:
    """Header, layout, identity and every chunk of the kept vectors agree with the document."""
    file = golden_slot(case)

    segment = read_header(file, ALIGN_BYTES)
    read_chunks(file, segment)

    assert facts_of(segment) == {name: case[name] for name in facts_of(segment)}
    assert [[s.layer, s.kind, s.row_bytes, s.dtype] for s in segment.streams] == case["streams"]
    assert [f"{s.checksum:016x}" for s in segment.streams] == case["chunk_checksums_hex"]


def golden_slot(case: dict[str, Any]) -> bytes:
    """Build a file whose second page begins the case's slot, chunks made as the golden file's note says."""
    slot = bytearray(case["size_bytes"])
    header = bytes.fromhex(case["header_hex"])
    slot[: len(header)] = header
    for number, (stream, offset_bytes) in enumerate(zip(case["streams"], case["offsets"], strict=True)):
        rows = bytes((31 * i + 7 * number + 1) % 256 for i in range(stream[2] * case["token_count"]))
        slot[offset_bytes : offset_bytes + len(rows)] = rows
    return bytes(ALIGN_BYTES) + bytes(slot)


def facts_of(segment: Segment) -> dict[str, object]:
    """State a segment in the words of the golden file."""
    return {
        "segment_id": segment.segment_id,
        "tenant": segment.tenant,
        "session_uid_hex": segment.session_uid.hex(),
        "generation": segment.generation,
        "begin": segment.begin,
        "token_count": segment.token_count,
        "model_fingerprint_hex": segment.model_fingerprint.hex(),
        "identity_seed_hex": f"{segment.identity_seed():016x}",
        "header_bytes": align(FIXED_BYTES + 24 * len(segment.streams)),
        "size_bytes": segment.size_bytes,
        "offsets": [stream.offset_bytes for stream in segment.streams],
    }


@pytest.mark.parametrize(
    "case", GOLDEN["packed_rows"], ids=lambda case: f"{case['kind']} {case['element_count']}"
)
def test_golden_rows_are_unpacked_by_the_documented_layout(case: dict[str, Any]) -> None:
    """Every packed kind, at sizes that fill no group and that have fewer elements than outliers."""
    elements = unpack_row(bytes.fromhex(case["row_hex"]), case["kind"], case["element_count"])

    assert struct.pack(f"<{len(elements)}f", *elements).hex() == case["elements_hex"]
