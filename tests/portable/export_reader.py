"""Reads a file of `ctxcache export` with docs/export_format.md alone: no line of ctxcache.

    python export_reader.py FILE

Worst case: a file that is not as the document says, which is a Refused with what is wrong.
"""

import hashlib
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

MAGIC = b"CTXCEXP\0"
DOMAIN = b"ctxcache.model.v1"
TOKENS = (-1, 1)


class Refused(Exception):
    """The file is not as the document says."""


@dataclass
class Session:
    """A whole session. `rows` by (layer, kind)."""

    uid: bytes
    generation: int
    token_count: int
    ttl_ns: int
    expire_time_ns: int
    is_pinned: bool
    session_id: str
    model_id: str
    model_fingerprint: bytes
    row_bytes: dict[tuple[int, int], int]
    rows: dict[tuple[int, int], bytearray] = field(default_factory=dict)


def read(data: bytes) -> dict[str, Session]:
    """All sessions by id. Raises Refused."""
    check(len(data) >= 48, "the header")
    magic, version, zero, file_id, _ = struct.unpack_from("<8sII16sq", data)
    check(magic == MAGIC and version == 1, "magic and version")
    check(zero == 0 and number(data, 40) == xxh3_64_intdigest(data[:40]), "the header's checksum")
    frames = cut(data, file_id)
    check(frames[-1][0] == b"END ", "the end")
    found: dict[str, Session] = {}
    at = 0
    while frames[at][0] == b"SESS":
        session = described(frames[at][1])
        at += 1
        token_count = 0
        while token_count < session.token_count and frames[at][0] == b"ROWS":
            token_count = take(session, token_count, frames[at][1])
            at += 1
        if token_count < session.token_count:
            check(frames[at] == (b"VOID", b""), "void")
            at += 1
        else:
            check(session.session_id not in found, "twice")
            found[session.session_id] = session
    check(at == len(frames) - 1, "tags")
    totals = struct.unpack("<qq", frames[at][1])
    check(totals == (len(found), sum(s.token_count for s in found.values())), "totals")
    return found


def cut(data: bytes, file_id: bytes) -> list[tuple[bytes, bytes]]:
    """All frames, verified."""
    frames: list[tuple[bytes, bytes]] = []
    at = 48
    while at < len(data):
        check(at + 16 <= len(data), "a frame's head")
        tag, size = struct.unpack_from("<4sI", data, at)
        end = at + 8 + size
        check(end + 8 <= len(data), "a frame's payload")
        seed = xxh3_64_intdigest(file_id + struct.pack("<Q", len(frames)))
        check(number(data, end) == xxh3_64_intdigest(data[at:end], seed=seed), "a frame's checksum")
        frames.append((tag, data[at + 8 : end]))
        at = end + 8
    check(bool(frames), "frames")
    return frames


def described(payload: bytes) -> Session:
    """What a SESS says."""
    uid, generation, token_count, ttl_ns, expire_time_ns, flags, *sizes = struct.unpack_from(
        "<16sqqqqHHHHII", payload
    )
    session_bytes, model_id_bytes, probe_bytes, stream_count, model_bytes = sizes
    check(flags in (0, 1), "flags")
    at = 64
    session_id = payload[at : at + session_bytes].decode()
    at += session_bytes
    model_id = payload[at : at + model_id_bytes].decode()
    at += model_id_bytes
    streams = [(a, b) for a, b in struct.iter_unpack("<ii", payload[at : at + 8 * stream_count])]
    at += 8 * stream_count
    model, probe = payload[at : at + model_bytes], payload[at + model_bytes :]
    check(len(model) == model_bytes and len(probe) == probe_bytes and streams[0] == TOKENS, "a session")
    sizes_of = {TOKENS: 4} | row_sizes(model)
    return Session(
        uid=uid,
        generation=generation,
        token_count=token_count,
        ttl_ns=ttl_ns,
        expire_time_ns=expire_time_ns,
        is_pinned=bool(flags),
        session_id=session_id,
        model_id=model_id,
        model_fingerprint=hashlib.sha256(model).digest(),
        row_bytes={stream: sizes_of[stream] for stream in streams},
        rows={stream: bytearray() for stream in streams},
    )


def row_sizes(model: bytes) -> dict[tuple[int, int], int]:
    """The rows of all streams that a model has."""
    check(model.startswith(DOMAIN), "a model")
    found = {}
    at = len(DOMAIN)
    while at < len(model):
        tag_bytes, value_bytes = struct.unpack_from("<HI", model, at)
        tag = model[at + 6 : at + 6 + tag_bytes]
        at += 6 + tag_bytes
        if tag == b"stream":
            layer, kind, row_bytes, _ = struct.unpack_from("<iiii", model, at)
            found[layer, kind] = row_bytes
        at += value_bytes
    return found


def take(session: Session, token_count: int, payload: bytes) -> int:
    """Add the rows of a ROWS; how many tokens there are with them."""
    begin, count = struct.unpack_from("<qq", payload)
    check(begin == token_count and 1 <= count <= session.token_count - begin, "rows")
    at = 16
    for stream, row_bytes in session.row_bytes.items():
        session.rows[stream] += payload[at : at + count * row_bytes]
        at += count * row_bytes
    check(at == len(payload), "rows' size")
    return int(begin + count)


def number(data: bytes, offset: int) -> int:
    """A u64."""
    return int.from_bytes(data[offset : offset + 8], "little")


def check(is_so: bool, what: str) -> None:  # noqa: FBT001  reads as an assertion
    """Refuse the file unless it is so."""
    if not is_so:
        raise Refused(what)


if __name__ == "__main__":
    for one in read(Path(sys.argv[1]).read_bytes()).values():
        sys.stdout.write(f"{one.session_id} {one.model_id} {one.token_count} {one.model_fingerprint.hex()}\n")
