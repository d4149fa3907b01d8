"""Writes archive-v2.ctxarchive: the archive format, version 2, as bytes.

    python tests/archive/golden_archive.py

A change of its bytes is a change of the format, and needs a new version of it. Other tests make files with
`write`, too.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxcache.archive.contents import (
    FRAME_NUMBER,
    STRETCH,
    TOTALS,
    ArchivedModel,
    ArchivedSession,
    Origin,
)
from ctxcache.archive.frames import END, MADE, MODEL, ROWS, SAME, SESSION, VOID, FrameWriter
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, Content, DType, StateKind, Stream, StreamSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "archive-v2.ctxarchive"
FILE_ID = bytes(range(16))
BEGIN_TIME_NS = 1_500_000_000 * 10**9
HOUR_NS = 3600 * 10**9
ORIGIN = Origin("ctxcache 0.1.0", 3)
KINDS = [kind for kind in StateKind if StateKind.TOKENS < kind <= StateKind.ENGINE_BLOCK]
SPEC = ModelSpec(
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
MODELS = (
    ArchivedModel("acme", SPEC, BEGIN_TIME_NS - HOUR_NS),
    ArchivedModel("zenith", replace(SPEC, model_id="of-another-tenant"), BEGIN_TIME_NS),
)


class Cut(NamedTuple):
    """A frame of rows: of so many tokens, with `more` rows that only later sessions have.

    Or the same as frame `number`.
    """

    token_count: int
    more: int = 0
    number: int | None = None
    skipped: int = 0
    """Positions before it that are not live."""


class Written(NamedTuple):
    """A session and how it is put into frames; void where these do not have all of its tokens."""

    described: ArchivedSession
    cuts: tuple[Cut, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the frames have all tokens."""
        return self.described.log_end == sum(cut.skipped + cut.token_count for cut in self.cuts)


def described(
    session_id: str,
    token_count: int,
    *,
    is_sliding: bool = True,
    model: ArchivedModel = MODELS[0],
    dropped: int = 0,
    salt: bytes = b"",
    copies: int = 1,
    contents: tuple[Content, ...] = (),
) -> ArchivedSession:
    """A session of that model, of all its streams; the first `dropped` positions of its log are not live."""
    end = dropped + token_count
    return ArchivedSession(
        session_id=session_id,
        model=model,
        layout=(TOKENS, *(spec.stream for spec in model.spec.streams)),
        uid=bytes(range(100, 116)),
        generation=7,
        live=((dropped, end),) if token_count else (),
        log_end=end,
        create_time_ns=BEGIN_TIME_NS - 2 * HOUR_NS,
        access_time_ns=BEGIN_TIME_NS - HOUR_NS,
        expire_time_ns=BEGIN_TIME_NS + HOUR_NS,
        ttl_ns=HOUR_NS if is_sliding else 0,
        is_pinned=not is_sliding,
        salt=salt,
        copies=copies,
        contents=contents,
    )


def rows(described: ArchivedSession, stream: Stream, begin: int, end: int) -> npt.NDArray[np.uint8]:
    """Rows of positions of a stream: byte i of the log is (31*i + 7*kind) mod 256."""
    row_bytes = next(spec.row_bytes for spec in described.specs if spec.stream == stream)
    i = np.arange(begin * row_bytes, end * row_bytes)
    return ((31 * i + 7 * stream.kind) % 256).astype(np.uint8).reshape(end - begin, row_bytes)


def live_rows(described: ArchivedSession, stream: Stream) -> npt.NDArray[np.uint8]:
    """The rows of all live tokens."""
    parts = [rows(described, stream, begin, end) for begin, end in described.live]
    return np.concatenate(parts) if parts else rows(described, stream, 0, 0)


def rows_payload(described: ArchivedSession, begin: int, count: int, more: int = 0) -> bytes:
    """The payload of ROWS."""
    parts = (rows(described, spec.stream, begin, begin + count + more).tobytes() for spec in described.specs)
    return b"".join((STRETCH.pack(begin, count), *parts))


def put_session(writer: FrameWriter, one: Written, model_number: int) -> None:
    """Write a session in its frames."""
    writer.write(SESSION, one.described.encode(model_number))
    begin = 0
    for cut in one.cuts:
        begin += cut.skipped
        if cut.number is None:
            writer.write(ROWS, rows_payload(one.described, begin, cut.token_count, cut.more))
        else:
            writer.write(SAME, STRETCH.pack(begin, cut.token_count), FRAME_NUMBER.pack(cut.number))
        begin += cut.token_count
    if not one.is_whole:
        writer.write(VOID)


def plain(session_id: str, *counts: int, is_void: bool = False) -> Written:
    """A session without anything dropped, in frames of so many tokens."""
    return Written(described(session_id, sum(counts) + is_void), tuple(map(Cut, counts)))


CONTENTS = (Content(1, 4, bytes(range(32))), Content(5, 7, bytes(range(32, 64))))
GOLDEN_SESSIONS = (
    plain("every-kind", 3, is_void=True),
    # Seven rows of its second frame are those of sessions that share it.
    Written(described("every-kind", 5), (Cut(3), Cut(2, more=7))),
    plain("empty"),
    # One with a salt, two copies, and with a picture and a sound behind its tokens.
    Written(
        described("long:1", 7, is_sliding=False, salt=b"a user", copies=2, contents=CONTENTS),
        (Cut(3), Cut(3), Cut(1)),
    ),
    # A fork whose first tokens were dropped since: of its first frame, one of four positions is live.
    Written(described("fork", 6, dropped=6), (Cut(4, number=8, skipped=3), Cut(5))),
    Written(described("every-kind", 2, model=MODELS[1]), (Cut(2),)),
)
"""Frames by number: MADE 0, two models, SESS 3, ROWS 4, VOID 5, SESS 6, ROWS 7 and 8, SESS 9 and so on."""


def write(path: Path, sessions: Iterable[Written] = GOLDEN_SESSIONS) -> None:
    """Write a file of such sessions, with the end that is right for it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        writer = FrameWriter(fd, str(path), FILE_ID, BEGIN_TIME_NS)
        writer.write(MADE, ORIGIN.encode())
        for model in MODELS:
            writer.write(MODEL, model.encode())
        whole = []
        for one in sessions:
            put_session(writer, one, MODELS.index(one.described.model))
            whole += [one.described.token_count] * one.is_whole
        writer.write(END, TOTALS.pack(len(whole), sum(whole)))
    finally:
        os.close(fd)


if __name__ == "__main__":
    write(GOLDEN)
