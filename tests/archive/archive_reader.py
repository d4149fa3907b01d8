"""Reads a file of `ctxcache export` with docs/archive_format.md alone: no line of ctxcache.

    python archive_reader.py FILE

Worst case: a file that is not as the document says, which is a Refused with what is wrong.
"""

import hashlib
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

MAGIC = b"CTXCARC\0"
DOMAIN = b"ctxcache.model.v1"
TOKENS = (-1, 1)


class Refused(Exception):
    """The file is not as the document says."""


@dataclass
class Model:
    """A model. `row_bytes` by (layer, kind)."""

    tenant: str
    model_id: str
    create_time_ns: int
    fingerprint: bytes
    row_bytes: dict[tuple[int, int], int]


@dataclass
class Session:
    """A whole session. `rows` of its live tokens by (layer, kind)."""

    uid: bytes
    generation: int
    log_end: int
    create_time_ns: int
    access_time_ns: int
    expire_time_ns: int
    ttl_ns: int
    is_pinned: bool
    session_id: str
    model: Model
    streams: list[tuple[int, int]]
    live: list[tuple[int, int]]
    salt: bytes
    copies: int
    labels: tuple[tuple[str, ...], ...]
    contents: tuple[tuple[int, int, bytes], ...]
    rows: dict[tuple[int, int], bytearray] = field(default_factory=dict)

    @property
    def token_count(self) -> int:
        """Live tokens."""
        return sum(end - begin for begin, end in self.live)


def read(data: bytes) -> dict[tuple[str, str], Session]:
    """All sessions by tenant and id. Raises Refused."""
    check(len(data) >= 48, "the header")
    magic, version, zero, file_id, _ = struct.unpack_from("<8sII16sq", data)
    check(magic == MAGIC and version == 2, "magic and version")
    check(zero == 0 and number(data, 40) == xxh3_64_intdigest(data[:40]), "the header's checksum")
    frames = cut(data, file_id)
    check(frames[0][0] == b"MADE" and frames[-1][0] == b"END ", "the begin and the end")
    models: list[Model] = []
    found: dict[tuple[str, str], Session] = {}
    written: dict[int, Session] = {}
    at = 1
    while frames[at][0] in (b"MODL", b"SESS"):
        tag, payload = frames[at]
        at += 1
        if tag == b"MODL":
            models.append(modelled(payload))
            continue
        session = described(payload, models)
        position, end = 0, session.live[-1][1] if session.live else 0
        while position < end and frames[at][0] in (b"ROWS", b"SAME"):
            position = take(session, position, frames, at, written)
            at += 1
        if position < end:
            check(frames[at] == (b"VOID", b""), "void")
            at += 1
        else:
            check((session.model.tenant, session.session_id) not in found, "twice")
            found[session.model.tenant, session.session_id] = session
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


def modelled(payload: bytes) -> Model:
    """The model that a MODL frame describes."""
    create_time_ns, *sizes = struct.unpack_from("<qHHII", payload)
    tenant, model_id, encoded, _probe = parts(payload, 20, sizes)
    fingerprint = hashlib.sha256(encoded).digest()
    return Model(
        tenant.decode(), model_id.decode(), create_time_ns, fingerprint, {TOKENS: 4} | row_sizes(encoded)
    )


def described(payload: bytes, models: list[Model]) -> Session:
    """The session that a SESS frame describes."""
    uid, generation, log_end, created, accessed, expires, ttl, model, flags, *sizes = struct.unpack_from(
        "<16sqqqqqqIHHIIII", payload
    )
    name_bytes, stream_count, range_count, salt_bytes, content_count = sizes
    sizes = [name_bytes, 8 * stream_count, 16 * range_count, salt_bytes, 48 * content_count]
    check(flags in range(8), "flags")
    sizes.append(len(payload) - 88 - sum(sizes) if flags & 4 else 0)
    name, streams, live, salt, contents, labels = parts(payload, 88, sizes)
    check(bool(labels) == bool(flags & 4), "labels")
    pairs = tuple(tuple(line.split("=")) for line in labels.decode("ascii").split("\n") if line)
    found = [(a, b) for a, b in struct.iter_unpack("<ii", streams)]
    check(found[0] == TOKENS, "a session")
    return Session(
        uid=uid,
        generation=generation,
        log_end=log_end,
        create_time_ns=created,
        access_time_ns=accessed,
        expire_time_ns=expires,
        ttl_ns=ttl,
        is_pinned=bool(flags & 1),
        session_id=name.decode(),
        model=models[model],
        streams=found,
        live=[(a, b) for a, b in struct.iter_unpack("<qq", live)],
        salt=salt,
        copies=1 + (flags >> 1 & 1),
        labels=pairs,
        contents=tuple((a, b, c) for a, b, c in struct.iter_unpack("<qq32s", contents)),
        rows={stream: bytearray() for stream in found},
    )


def parts(payload: bytes, begin: int, sizes: list[int]) -> list[bytes]:
    """The parts that follow the fixed one."""
    check(len(payload) == begin + sum(sizes), "sizes")
    found = []
    for size in sizes:
        found.append(payload[begin : begin + size])
        begin += size
    return found


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


def take(
    session: Session, position: int, frames: list[tuple[bytes, bytes]], at: int, written: dict[int, Session]
) -> int:
    """Add the live rows of a ROWS or a SAME; the position that it ends at."""
    tag, payload = frames[at]
    begin, count = struct.unpack_from("<qq", payload)
    if tag == b"SAME":
        check(len(payload) == 24, "a SAME's size")
        (at,) = struct.unpack_from("<Q", payload, 16)
        writer = written.get(at)
        check(writer is not None and writer.model is session.model, "a SAME's frame")
        check(writer is not None and writer.streams == session.streams, "a SAME's streams")
        payload = frames[at][1]
        check(struct.unpack_from("<q", payload) == (begin,), "a SAME's begin")
    else:
        written[at] = session
    row_bytes = session.model.row_bytes
    row_count, rest = divmod(len(payload) - 16, sum(row_bytes[stream] for stream in session.streams))
    live = [(max(low, begin), min(high, begin + count)) for low, high in session.live]
    check(begin >= position and 1 <= count <= row_count and not rest, "rows")
    check(begin + count <= session.log_end and any(low < high for low, high in live), "rows' positions")
    check(not any(max(low, position) < min(high, begin) for low, high in session.live), "left out rows")
    offset = 16
    for stream in session.streams:
        for low, high in live:
            if low < high:
                first, last = (offset + (p - begin) * row_bytes[stream] for p in (low, high))
                session.rows[stream] += payload[first:last]
        offset += row_count * row_bytes[stream]
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
        model = one.model
        sys.stdout.write(f"{one.session_id} {model.model_id} {one.token_count} {model.fingerprint.hex()}\n")
