"""Rows of any size fit into messages of the promised size; values outside a closed set are refused."""

from pathlib import Path

import grpc
import pytest
from service_rig import KV, TOKENS, Client, chunks, make_model, ranges, refused, spec_of

from ctxcache.format.checksums import wire_checksum
from ctxcache.settings.config import Settings
from ctxcache.v1 import model_pb2, session_pb2

ROW_BYTES = 72 << 10
MESSAGE_LIMIT_BYTES = 2 << 20


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A server that has room for a segment of large rows."""
    return Settings(
        data_directory=tmp_path / "data", listen="127.0.0.1:0", unix_socket="",
        arena_size_bytes=16 << 20, ssd_size_bytes=16 << 20,
    )  # fmt: skip


async def test_large_rows_are_read_in_messages_of_the_promised_size(client: Client) -> None:
    """A client with gRPC's default limit reads a segment that is larger than a message may be."""
    spec = spec_of(KV, row_bytes=ROW_BYTES, dtype=model_pb2.DTYPE_FLOAT16)
    model = make_model(name="models/large", streams=[spec])
    request = model_pb2.RegisterModelRequest(model=model)
    client.fingerprint = (await client.models.RegisterModel(request)).fingerprint
    await client.sessions.CreateSession(
        session_pb2.CreateSessionRequest(session_id="a", model="models/large", layout=ranges(KV))
    )
    data = b"".join(bytes([i]) * ROW_BYTES for i in range(64))
    pieces = [
        (TOKENS, 0, bytes(256)),
        *((KV, i, data[i * ROW_BYTES : (i + 1) * ROW_BYTES]) for i in range(64)),
    ]
    await client.send(
        [
            client.header("a", 0),
            *(
                session_pb2.AppendSessionRequest(
                    chunk=session_pb2.Chunk(
                        stream=stream, token_begin=begin, data=rows, checksum=wire_checksum(rows)
                    )
                )
                for stream, begin, rows in pieces
            ),
            session_pb2.AppendSessionRequest(commit=session_pb2.AppendCommit(token_count=64)),
        ]
    )
    found = [item for item in (await client.read("a"))[1] if item.stream == KV]

    assert b"".join(item.data for item in found) == data
    assert max(len(item.data) for item in found) <= MESSAGE_LIMIT_BYTES
    assert [item.token_begin * ROW_BYTES for item in found] == [
        sum(len(before.data) for before in found[:i]) for i in range(len(found))
    ]


async def test_a_durability_that_does_not_exist_is_refused(client: Client) -> None:
    """A client of a later version is not told that its tokens are as safe as it asked for."""
    await client.create("a")
    commit = session_pb2.AppendCommit(token_count=3, durability=9)  # type: ignore[arg-type]  # on purpose
    messages = [client.header("a", 0), *chunks(1, 0, 3), session_pb2.AppendSessionRequest(commit=commit)]
    facts = await refused(
        client.sessions.AppendSession(messages), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"
    )

    assert facts["field"] == "commit.durability"
    assert (await client.get("a")).token_count == 0
