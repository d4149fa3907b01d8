"""PrefixService, and the same operations for local clients: what is found, shared and refused."""

import hashlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from service_rig import (
    HIDDEN,
    KV,
    STREAMS,
    TOKENS,
    Access,
    Client,
    all_rows,
    ranges,
    refused,
    rows,
)

from ctxcache.server.server import Server
from ctxcache.v1 import prefix_pb2, prefix_pb2_grpc, session_pb2

Code = grpc.StatusCode
HIT, MISS = session_pb2.LOOKUP_STATE_HIT, session_pb2.LOOKUP_STATE_MISS
PENDING = session_pb2.LOOKUP_STATE_PENDING
Connect = Callable[[], Awaitable[Access]]


def ids(token_count: int, tag: int = 1) -> prefix_pb2.Prefix:
    """A session's first tokens, as `service_rig` appends them."""
    return prefix_pb2.Prefix(token_ids=rows(tag, 0, token_count, TOKENS))


def match_of(**changes: Any) -> prefix_pb2.MatchPrefixRequest:
    """Look for the first 200 tokens, with changes."""
    facts: dict[str, Any] = {"model": "models/tiny", "layout": ranges(*STREAMS), "prefix": ids(200)}
    return prefix_pb2.MatchPrefixRequest(**(facts | changes))


def adopt_of(client: Client, **changes: Any) -> prefix_pb2.AdoptPrefixRequest:
    """Let `b` adopt them, with changes."""
    facts: dict[str, Any] = {
        "session": "sessions/b",
        "model_fingerprint": client.fingerprint,
        "prefix": ids(200),
    }
    return prefix_pb2.AdoptPrefixRequest(**(facts | changes))


@pytest.fixture
def stub(client: Client) -> Any:
    """PrefixService."""
    return prefix_pb2_grpc.PrefixServiceStub(client.channel)


def documented_keys(tenant: str, fingerprint: bytes, token_ids: bytes) -> list[bytes]:
    """Keys as docs/prefixes.md has them, written by its words alone."""
    layout = hashlib.sha256(struct.pack("<6i", HIDDEN.kind, 0, 1, KV.kind, 1, 2)).digest()
    found, parent = [], bytes(32)
    for begin in range(0, len(token_ids) // 256 * 256, 256):
        block = token_ids[begin : begin + 256]
        fields = (b"ctxcache.prefix.v1", tenant.encode(), fingerprint, layout, b"", parent, block)
        parent = hashlib.sha256(b"".join(struct.pack("<I", len(f)) + f for f in fields)).digest()
        found.append(parent)
    return found


async def test_a_prompt_is_found_and_adopted(client: Client, stub: Any) -> None:
    """By tokens and by keys that a client has made itself; the adopter goes on with its own rows."""
    assert (await stub.MatchPrefix(match_of())).state == MISS
    await client.create("a")
    await client.append("a", 1, 0, 200)
    found = await stub.MatchPrefix(match_of())
    assert (found.state, found.token_count, found.dram_token_count) == (PENDING, 192, 192)
    keys = documented_keys("default", client.fingerprint, rows(1, 0, 200, TOKENS))
    by_key = await stub.MatchPrefix(match_of(prefix=prefix_pb2.Prefix(keys=keys)))
    assert (found.reason, by_key.reason) == ("SHORT", "")
    assert (by_key.state, by_key.token_count) == (PENDING, 192)
    counted = prefix_pb2.Prefix(keys=keys, token_count=200)
    assert await stub.MatchPrefix(match_of(prefix=counted)) == found

    await client.create("b")
    adopted = (await stub.AdoptPrefix(adopt_of(client))).session
    assert (adopted.name, adopted.token_count, adopted.durable_token_count) == ("sessions/b", 192, 192)
    assert (await stub.MatchPrefix(match_of())).state == HIT
    await client.append("b", 1, 192, 200)
    assert await client.read_rows("b") == all_rows(1, 200)

    await client.create("c")
    request = adopt_of(client, session="sessions/c", prefix=prefix_pb2.Prefix(keys=keys[:1]))
    assert (await stub.AdoptPrefix(request)).session.token_count == 64
    await client.create("d")
    nothing = await stub.AdoptPrefix(adopt_of(client, session="sessions/d", prefix=ids(64, tag=2)))
    assert nothing.session.token_count == 0


async def test_what_sessions_share_is_listed(client: Client, stub: Any) -> None:
    """Shared prefixes of the caller's own sessions come in order of what they save.

    Nothing where nothing is shared.
    """
    request = prefix_pb2.ListSharedPrefixesRequest(page_size=1)
    for name, tag, count in (("a", 1, 200), ("b", 2, 80)):
        await client.create(name)
        await client.append(name, tag, 0, count, is_durable=True)
    assert not (await stub.ListSharedPrefixes(request)).prefixes
    for name, tag, count in (("c", 1, 200), ("d", 2, 80), ("e", 2, 80)):
        await client.create(name)
        session = f"sessions/{name}"
        await stub.AdoptPrefix(adopt_of(client, session=session, prefix=ids(count, tag)))
    [most] = (await stub.ListSharedPrefixes(request)).prefixes
    assert (most.token_count, most.session_count) == (192, 2)
    assert most.key == documented_keys("default", client.fingerprint, rows(1, 0, 192, TOKENS))[-1]
    both = (await stub.ListSharedPrefixes(prefix_pb2.ListSharedPrefixesRequest())).prefixes
    assert 3 * both[1].saved_bytes == 2 * both[0].saved_bytes
    assert [(one.token_count, one.session_count) for one in both] == [(192, 2), (64, 3)]
    negative = prefix_pb2.ListSharedPrefixesRequest(page_size=-1)
    await refused(stub.ListSharedPrefixes(negative), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_other_layouts_and_models_have_other_state(client: Client, stub: Any) -> None:
    """The same tokens, and nothing is there."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    assert (await stub.MatchPrefix(match_of(layout=ranges(KV)))).state == MISS
    assert (await stub.MatchPrefix(match_of(layout=ranges(KV, HIDDEN)))).token_count == 192
    error = await refused(stub.MatchPrefix(match_of(model="models/other")), Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert error["model"] == "models/other"


REFUSED = {
    "model": (match_of(model="tiny"), "model"),
    "layout": (match_of(layout=ranges(KV, KV)), "layout"),
    "nothing": (match_of(prefix=prefix_pb2.Prefix()), "prefix.token_ids"),
    "both": (match_of(prefix=prefix_pb2.Prefix(token_ids=bytes(4), keys=[bytes(32)])), "prefix.keys[0]"),
    "part of an id": (match_of(prefix=prefix_pb2.Prefix(token_ids=bytes(258))), "prefix.token_ids"),
    "short key": (match_of(prefix=prefix_pb2.Prefix(keys=[bytes(32), bytes(31)])), "prefix.keys[1]"),
    "too few keys": (
        match_of(prefix=prefix_pb2.Prefix(keys=[bytes(32)], token_count=128)),
        "prefix.token_count",
    ),
    "too many keys": (
        match_of(prefix=prefix_pb2.Prefix(keys=[bytes(32)], token_count=63)),
        "prefix.token_count",
    ),
    "no count": (match_of(prefix=prefix_pb2.Prefix(keys=[bytes(32)], token_count=-64)), "prefix.token_count"),
    "other ids": (
        match_of(prefix=prefix_pb2.Prefix(token_ids=bytes(8), token_count=3)),
        "prefix.token_count",
    ),
    "long key": (match_of(prefix=prefix_pb2.Prefix(keys=[bytes(33)])), "prefix.keys[0]"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_bad_matches_are_refused_by_field(
    client: Client, stub: Any, connect: Connect, what: str
) -> None:
    """Over gRPC and as an operation."""
    request, field = REFUSED[what]
    facts = await refused(stub.MatchPrefix(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert facts["field"] == field
    way = await connect()
    result = await way.one(match_prefix=request)
    assert (result.error.reason, result.error.metadata["field"]) == ("INVALID_FIELD", field)


async def test_keys_that_are_offered_with_tokens_must_be_theirs(client: Client, stub: Any) -> None:
    """A client that makes other keys than the server is told which is the first; nothing is changed."""
    await client.create("a")
    await client.append("a", 1, 0, 200)
    await client.create("b")
    token_ids = rows(1, 0, 200, TOKENS)
    keys = documented_keys("default", client.fingerprint, token_ids)
    for given, number in (
        ([keys[0], bytes(32)], 1),
        ([keys[1]], 0),
        ([*keys, keys[0]], 3),
    ):
        prefix = prefix_pb2.Prefix(token_ids=token_ids, keys=given)
        for call in (
            stub.MatchPrefix(match_of(prefix=prefix)),
            stub.AdoptPrefix(adopt_of(client, prefix=prefix)),
        ):
            facts = await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
            assert facts["field"] == f"prefix.keys[{number}]"
    found = await stub.MatchPrefix(match_of(prefix=prefix_pb2.Prefix(token_ids=token_ids, keys=keys)))
    assert found.token_count == 192
    assert (await client.get("b")).token_count == 0


async def test_what_is_too_long_is_refused(connect: Connect) -> None:
    """More tokens, and more keys, than a prompt may have: one more than what is taken."""
    way = await connect()
    for prefix, field in (
        (prefix_pb2.Prefix(token_ids=bytes((1 << 20) + 4)), "prefix.token_ids"),
        (prefix_pb2.Prefix(keys=[bytes(32)] * 4097), "prefix.keys"),
    ):
        result = await way.one(match_prefix=match_of(prefix=prefix))
        assert (result.error.reason, result.error.metadata["field"]) == ("INVALID_FIELD", field)


async def test_who_may_not_adopt_is_told_why(client: Client, stub: Any) -> None:
    """And nothing is changed."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    await client.create("b")
    for changes, code, reason in (
        ({"session": "sessions/none"}, Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        ({"session": "none"}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"session": "sessions/a"}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"model_fingerprint": bytes(31)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"model_fingerprint": bytes(32)}, Code.FAILED_PRECONDITION, "MODEL_FINGERPRINT_MISMATCH"),
        ({"if_generation_match": 99}, Code.ABORTED, "GENERATION_MISMATCH"),
        ({"prefix": None}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    ):
        await refused(stub.AdoptPrefix(adopt_of(client, **changes)), code, reason)
    assert (await client.get("b")).token_count == 0
    assert (await client.get("a")).token_count == 200


async def test_local_clients_match_and_adopt(client: Client, connect: Connect) -> None:
    """One batch: the match, the adoption, and a lease of what was adopted."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    await client.create("b")
    way = await connect()
    matched = await way.one(match_prefix=match_of())
    assert (matched.matched.state, matched.matched.token_count) == (HIT, 192)
    adopted = await way.one(adopt_prefix=adopt_of(client))
    assert adopted.adopted.session.token_count == 192
    lease = {"session": "sessions/b", "model_fingerprint": client.fingerprint}
    assert (await way.one(acquire_lease=lease)).lease.range.end == 192


async def test_a_prompt_as_long_as_may_be_is_found(server: Server, connect: Connect, client: Client) -> None:
    """A quarter of a million tokens, of which the first are there."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    token_ids = rows(1, 0, 200, TOKENS).ljust(1 << 20, b"\0")
    way = await connect()
    result = await way.one(match_prefix=match_of(prefix=prefix_pb2.Prefix(token_ids=token_ids)))
    assert result.matched.token_count == 192
