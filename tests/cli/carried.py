"""Sessions to carry from one store to another: rows of every kind, known again wherever they are."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from stored import connected, model_spec
from stored_model import stored_model

from ctxcache.client import Client
from ctxcache.client.types import SessionInfo
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

Rows = Mapping[Stream, npt.NDArray[np.uint8]]
KINDS = [kind for kind in StateKind if kind is not StateKind.TOKENS]
SPEC: ModelSpec = replace(
    model_spec("carried"),
    streams=tuple(
        StreamSpec(Stream(0, kind), 48, DType.PACKED if kind > StateKind.LATENT else DType.FLOAT16)
        for kind in KINDS
    ),
)
WIDE: ModelSpec = replace(
    model_spec("wide"), streams=(StreamSpec(Stream(0, StateKind.KV), 1 << 18, DType.FLOAT16),)
)
"""Bytes of a token; 64 tokens are a block of an export."""


def make_rows(spec: ModelSpec, token_count: int, seed: int) -> Rows:
    """Random ones of all streams of a model."""
    chance = np.random.default_rng(seed)
    sizes = {one.stream: one.row_bytes for one in spec.resolve(one.stream for one in spec.streams)}
    return {stream: chance.integers(0, 256, (token_count, size), np.uint8) for stream, size in sizes.items()}


def keep(client: Client, spec: ModelSpec, session_id: str, token_count: int, **ends: object) -> Rows:
    """Store a session; its rows."""
    model = client.models.register(spec)
    made: SessionInfo = client.sessions.create(
        model,
        id=session_id,
        layout=[one.stream for one in spec.streams],
        **ends,  # type: ignore[arg-type]  # as create_session names them
    ).info
    rows = make_rows(spec, token_count, token_count)
    if token_count:
        client.sessions.open(made, model).append(rows)
    return rows


def found(client: Client, session_id: str) -> Rows:
    """The rows of a session."""
    session = client.sessions.get(f"sessions/{session_id}")
    with client.sessions.open(session, stored_model(client, session.name)).read() as read:
        return {stream: read.array(stream) for stream in read.streams}


def assert_rows(target: str, session_id: str, expected: Rows) -> None:
    """The session has exactly these."""
    with connected(target) as client:
        assert_equal(found(client, session_id), expected)


def assert_equal(actual: Rows, expected: Rows) -> None:
    """All streams are equal, bit for bit."""
    assert set(actual) == set(expected)
    for stream, rows in expected.items():
        np.testing.assert_array_equal(actual[stream], rows)


def names(target: str) -> list[str]:
    """Every session's id."""
    with connected(target) as client:
        return [session.name.removeprefix("sessions/") for session in client.sessions.list()]
