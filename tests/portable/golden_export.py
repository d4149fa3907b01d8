"""Writes export-v1.ctxexport: the export format, version 1, as bytes.

    python tests/portable/golden_export.py

A change of its bytes is a change of the format, and needs a new version of it. Files are `write`'s to make for other tests, too.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.portable.description import Description
from ctxcache.portable.frame_writer import FrameWriter
from ctxcache.portable.layout import BLOCK, BLOCK_HEAD, END, SESSION, TOTALS, VOID

GOLDEN = Path(__file__).parents[1] / "golden" / "export-v1.ctxexport"
FILE_ID = bytes(range(16))
BEGIN_TIME_NS = 1_500_000_000 * 10**9
HOUR_NS = 3600 * 10**9
KINDS = [kind for kind in StateKind if kind is not StateKind.TOKENS]
MODEL = ModelSpec(
    model_id="every-kind",
    architecture="GoldenForCausalLM",
    revision="main",
    weights_digest="sha256:00ff",
    tokenizer_digest="",
    dtype=DType.BFLOAT16,
    layer_count=2,
    hidden_size=16,
    kv_head_count=1,
    head_size=16,
    rope='{"theta": 10000}',
    norm="rms",
    is_relocatable=True,
    streams=tuple(
        StreamSpec(Stream(0, kind), 8 * kind, DType.PACKED if kind > StateKind.LATENT else DType.BFLOAT16)
        for kind in KINDS
    ),
    settings="é",
)


def described(session_id: str, token_count: int, *, is_sliding: bool = True) -> Description:
    """A session of that model, of all its streams."""
    return Description(
        session_id=session_id,
        uid=bytes(range(100, 116)),
        generation=7,
        token_count=token_count,
        ttl_ns=HOUR_NS if is_sliding else 0,
        expire_time_ns=BEGIN_TIME_NS + HOUR_NS,
        is_pinned=not is_sliding,
        model=MODEL,
        layout=(TOKENS, *(spec.stream for spec in MODEL.streams)),
    )


def rows(described: Description, stream: Stream) -> npt.NDArray[np.uint8]:
    """All rows of a stream: byte i is (31*i + 7*kind + tokens) mod 256."""
    row_bytes = next(spec.row_bytes for spec in described.specs if spec.stream == stream)
    i = np.arange(described.token_count * row_bytes)
    values = (31 * i + 7 * stream.kind + described.token_count) % 256
    return values.astype(np.uint8).reshape(described.token_count, row_bytes)


def put_session(writer: FrameWriter, described: Description, counts: Iterable[int]) -> None:
    """Write a session in frames of so many tokens, void where that is not all of them."""
    writer.write(SESSION, described.encode())
    begin = 0
    for count in counts:
        parts = [rows(described, spec.stream)[begin : begin + count].tobytes() for spec in described.specs]
        writer.write(BLOCK, BLOCK_HEAD.pack(begin, count), *parts)
        begin += count
    if begin < described.token_count:
        writer.write(VOID)


GOLDEN_SESSIONS = (
    (described("every-kind", 5), (3,)),
    (described("every-kind", 5), (5,)),
    (described("empty", 0), ()),
    (described("long:1", 7, is_sliding=False), (3, 3, 1)),
)


def write(path: Path, sessions: Iterable[tuple[Description, Iterable[int]]] = GOLDEN_SESSIONS) -> None:
    """Write a file of such sessions, with the end that is right for it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        writer = FrameWriter(fd, str(path), FILE_ID, BEGIN_TIME_NS)
        whole = []
        for one, counts in sessions:
            put_session(writer, one, counts)
            whole += [one.token_count] * (sum(counts) == one.token_count)
        writer.write(END, TOTALS.pack(len(whole), sum(whole)))
    finally:
        os.close(fd)


if __name__ == "__main__":
    write(GOLDEN)
