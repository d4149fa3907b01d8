"""Prefixes of the typed client, against a real server, by each way that a call may take."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC
from live_server import WAYS, LiveServer, connected, serving, serving_small, settings_in

import ctxcache
from ctxcache.archive.contents import ImportWishes, OnConflict
from ctxcache.archive.frames import FrameWriter, destination, source
from ctxcache.archive.reader import ArchiveReader
from ctxcache.archive.transfer import Exporter, Importer
from ctxcache.client import CallerModel, Client
from ctxcache.client.routes import Access, Transport
from ctxcache.client.types import BlockSpace, Durability, LookupState, PrefixMatch
from ctxcache.errors import (
    InvalidArgument,
    LeaseNotFound,
    ModelFingerprintMismatch,
    ModelNotFound,
)
from ctxcache.format.layout import slot_bytes
from ctxcache.format.streams import TOKENS, Content, Stream, contents_within
from ctxcache.v1.arena_pb2 import AcquireLease, Operation
from ctxcache.v1.session_pb2 import TokenRange

PROMPT = np.arange(5, 205, dtype=np.int64)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A small server."""
    with serving_small(tmp_path) as made:
        yield made


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Client]:
    """A client by each way that a call may take."""
    with connected(live, request.param) as made:
        made.models.register(SPEC)
        yield made


def rows_of(token_ids: np.ndarray) -> dict[Stream, np.ndarray]:
    """Rows that spell their token's id."""
    specs = OWN.specs(LAYOUT)
    rows = {
        stream: np.repeat(token_ids.astype(np.uint8)[:, None], spec.row_bytes, axis=1)
        for stream, spec in specs.items()
    }
    rows[TOKENS] = token_ids.astype("<i4")
    return rows


def test_a_prompt_is_adopted_and_continued(client: Client) -> None:
    """Match, adopt, append the rest: the rows are those of both writers."""
    assert client.prefixes.match(OWN, PROMPT, layout=LAYOUT) == PrefixMatch(
        LookupState.MISS, reason="NOT_STORED"
    )
    first = client.sessions.create(OWN, id="a", layout=LAYOUT)
    assert first.adopt(PROMPT).token_count == 0
    first.append(rows_of(PROMPT), durability=Durability.DISK)
    assert client.prefixes.match(OWN, PROMPT, layout=LAYOUT) == PrefixMatch(
        LookupState.HIT, 192, 192, "SHORT", ready_in_ns=0
    )

    longer = np.concatenate([PROMPT[:130], np.arange(7, 60)])
    assert client.prefixes.match(OWN, list(longer), layout=LAYOUT).token_count == 128
    second = client.sessions.create(OWN, id="b", layout=LAYOUT)
    assert second.adopt(longer).token_count == second.info.token_count == 128
    second.append(rows_of(longer[second.info.token_count :]))
    with second.read() as found:
        for stream, expected in rows_of(longer).items():
            assert found.array(stream).tobytes() == expected.tobytes()
    [shared] = client.prefixes.most_shared()
    assert (shared.token_count, shared.session_count) == (128, 2)
    assert shared.session in ("sessions/a", "sessions/b")
    assert shared.saved_bytes == 2 * slot_bytes(list(OWN.specs(LAYOUT).values()))


def test_what_cannot_be_asked_is_refused_by_name(client: Client) -> None:
    """By the client where no server needs to be asked."""
    unknown = CallerModel(replace(SPEC, model_id="none"))
    with pytest.raises(ModelNotFound):
        client.prefixes.match(unknown, PROMPT, layout=LAYOUT)
    for bad in ([1.5], [[1, 2]], [1 << 31], []):
        with pytest.raises(InvalidArgument, match="token_ids"):
            client.prefixes.match(OWN, bad, layout=LAYOUT)  # type: ignore[arg-type]  # that is what is tested
    session = client.sessions.create(OWN, id="a", layout=LAYOUT)
    session.append(rows_of(PROMPT))
    with pytest.raises(InvalidArgument, match="has or had tokens"):
        session.adopt(PROMPT)


def test_a_prompt_of_any_length_is_answered_alike_by_every_way(live: LiveServer) -> None:
    """By keys over the control socket, by ids else: with salt, with a lease, without a whole 64, too long."""
    ways: tuple[tuple[Access, Transport], ...] = (("local", "socket"), ("local", "grpc"), ("remote", "grpc"))
    with ExitStack() as clients:
        socket, stream, remote = (
            clients.enter_context(
                ctxcache.connect(live.target, timeout_s=10, access=access, transport=transport)
            )
            for access, transport in ways
        )
        remote.models.register(SPEC)
        for salt in (b"", b"user 17", bytes(64)):
            assert not socket.prefixes.match(OWN, PROMPT, salt=salt, layout=LAYOUT).token_count
            remote.sessions.create(OWN, layout=LAYOUT, salt=salt).append(
                rows_of(PROMPT), durability=Durability.DISK
            )
            for length in (1, 63, 64, 65, 127, 128, 191, 200):
                for prompt in (PROMPT[:length], np.append(PROMPT[:length], 4), list(PROMPT[:length])):
                    by_keys, by_stream, by_ids = (
                        one.prefixes.match(OWN, prompt, salt=salt, layout=LAYOUT)
                        for one in (socket, stream, remote)
                    )
                    assert by_keys == by_stream == by_ids
                    assert by_ids.token_count == length // 64 * 64
        held = socket.prefixes.match(OWN, PROMPT, layout=LAYOUT, lease_ttl=timedelta(seconds=9))
        with stream.prefixes.leased(held.lease_token, OWN) as rows:
            assert rows.array(TOKENS).tobytes() == PROMPT[:192].astype("<i4").tobytes()
        for one in (socket, stream):
            with pytest.raises(InvalidArgument, match=r"prefix\.token_ids"):
                one.prefixes.match(OWN, np.zeros((1 << 18) + 1, np.int32), layout=LAYOUT)
            with pytest.raises(InvalidArgument, match="salt: is longer than 64 bytes"):
                one.prefixes.match(OWN, PROMPT, layout=LAYOUT, salt=bytes(65))


DIGEST = bytes(range(32))
PICTURES = (Content(70, 100, DIGEST), Content(150, 160, DIGEST))


def test_pictures_and_salt_keep_equal_ids_apart(client: Client) -> None:
    """By whichever way rows and calls travel; a session says what it has."""
    salt = b"user 17"
    first = client.sessions.create(OWN, id="a", layout=LAYOUT, salt=salt)
    rows = rows_of(PROMPT)
    first.append({stream: part[:80] for stream, part in rows.items()}, contents=PICTURES[:1])
    with first.writer(len(PROMPT) - 80, contents=[Content(80, 100, DIGEST), PICTURES[1]]) as writer:
        for stream, part in rows.items():
            writer.write(stream, 0, part[80:])
        writer.commit(90, keep_open=True)
        writer.commit(durability=Durability.DISK)
    told = client.sessions.get("sessions/a")
    assert (told.salt, told.contents, told.whole_token_count) == (salt, PICTURES, len(PROMPT))

    def found(**facts: Any) -> int:
        return client.prefixes.match(OWN, PROMPT, layout=LAYOUT, **facts).token_count

    other = (Content(70, 100, bytes(32)), PICTURES[1])
    counts = [found(salt=salt, contents=PICTURES), found(salt=salt, contents=other), found(contents=PICTURES)]
    assert counts == [192, 64, 0]
    second = client.sessions.create(OWN, id="b", layout=LAYOUT, salt=salt)
    assert second.adopt(PROMPT, contents=other).token_count == 64
    assert second.fork(id="c").refresh().salt == salt


@pytest.mark.parametrize(
    ("contents", "field"),
    [
        ([Content(5, 5, DIGEST)], r"contents\[0\]: \[5, 5\) is no range"),
        ([Content(-1, 5, DIGEST)], r"contents\[0\]"),
        ([Content(1, 5, DIGEST), Content(4, 6, DIGEST)], r"contents\[1\]"),
        ([Content(1, 5, DIGEST[1:])], r"contents\[0\].digest: 32 bytes expected, 31 given"),
        ([Content(i, i + 1, DIGEST) for i in range(1025)], "contents: 1025"),
    ],
)
def test_contents_that_are_none_are_refused_by_name(
    client: Client, contents: list[Content], field: str
) -> None:
    """By every call that takes them; nothing is changed."""
    session = client.sessions.create(OWN, id="a", layout=LAYOUT)
    with pytest.raises(InvalidArgument, match=field):
        session.append(rows_of(PROMPT), contents=contents)
    with pytest.raises(InvalidArgument, match=f"prefix.{field}"):
        session.adopt(PROMPT, contents=contents)
    with pytest.raises(InvalidArgument, match=f"prefix.{field}"):
        client.prefixes.match(OWN, PROMPT, layout=LAYOUT, contents=contents)
    assert session.refresh().token_count == 0
    session.append(rows_of(PROMPT[:64]))
    with pytest.raises(InvalidArgument, match=r"contents\[0\]: \[63, 70\) is no range of tokens behind 64"):
        session.append(rows_of(PROMPT[64:]), contents=[Content(63, 70, DIGEST)])


def test_salt_and_contents_are_in_keys_already(client: Client) -> None:
    """So that whoever gives both has misunderstood; a salt is short."""
    key = bytes(32)
    for facts, field in (
        ({"salt": b"x"}, "salt: is in the keys"),
        ({"contents": PICTURES}, "prefix.contents: are in the keys"),
        ({"salt": bytes(65)}, "salt: is"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            client.prefixes.match(OWN, [], keys=[key], layout=LAYOUT, **facts)
    with pytest.raises(InvalidArgument, match="salt: is longer than 64 bytes"):
        client.sessions.create(OWN, id="a", layout=LAYOUT, salt=bytes(65))


@pytest.mark.parametrize("dropped", [None, (0, 10), (110, 120)])
def test_what_is_imported_is_found_as_far_as_nothing_was_dropped(
    client: Client, tmp_path: Path, dropped: tuple[int, int] | None
) -> None:
    """With salt and contents. Rows behind dropped tokens are not those of the tokens that are left."""
    session = client.sessions.create(OWN, id="a", layout=LAYOUT, salt=b"s")
    session.append(rows_of(PROMPT), contents=PICTURES, durability=Durability.DISK)
    left = PROMPT if dropped is None else np.concatenate([PROMPT[: dropped[0]], PROMPT[dropped[1] :]])
    if dropped is not None:
        session.drop_ranges([dropped])
    whole_count = len(PROMPT) if dropped is None else dropped[0]
    with destination(str(tmp_path / "file"), is_forced=False) as fd:
        writer = FrameWriter(fd, "file", bytes(16), 0)
        [exported] = Exporter(client, writer, lambda *_: None, skips_gone=False).export(["sessions/a"])
    client.sessions.open("sessions/a").delete()
    with source(str(tmp_path / "file")) as opened:
        reader = ArchiveReader(opened)
        wishes = ImportWishes(on_conflict=OnConflict.FAIL)
        [outcome] = Importer(client, wishes, reader.begin_time_ns, lambda *_: None).take(reader.sessions())

    assert (exported.error, outcome.error) == (None, None)
    told = client.sessions.get("sessions/a")
    contents = contents_within(PICTURES, 0, whole_count)
    assert (told.token_count, told.salt, told.contents) == (len(left), b"s", contents)
    assert told.whole_token_count == whole_count
    with client.sessions.open(told, OWN).read() as found:
        for stream, expected in rows_of(left).items():
            assert found.array(stream).tobytes() == expected.tobytes()
    match = client.prefixes.match(OWN, left, layout=LAYOUT, salt=b"s", contents=contents)
    assert match.token_count == whole_count // 64 * 64


def test_a_match_holds_its_tokens_for_another_connection(client: Client, live: LiveServer) -> None:
    """A scheduler matches by any way; a worker on the host reads, whatever came of the session."""
    session = client.sessions.create(OWN, id="a", layout=LAYOUT)
    session.append(rows_of(PROMPT), durability=Durability.DISK)
    found = client.prefixes.match(OWN, PROMPT, layout=LAYOUT)
    assert (found.lease_token, found.ready_in_ns) == (b"", 0)
    assert client.prefixes.match(OWN, PROMPT + 1, layout=LAYOUT).ready_in_ns is None
    match = client.prefixes.match(OWN, PROMPT, layout=LAYOUT, lease_ttl=timedelta(seconds=100))
    assert (match.token_count, len(match.lease_token)) == (192, 16)
    assert match.lease_expire_time_ns is not None
    session.delete()
    with ctxcache.connect(live.target, timeout_s=10) as worker:
        with worker.prefixes.leased(match.lease_token, OWN) as rows:
            client.prefixes.release(match.lease_token)
            for stream, expected in rows_of(PROMPT[:192]).items():
                assert rows.array(stream).tobytes() == expected.tobytes()
        for token in (match.lease_token, bytes(16)):
            with pytest.raises(LeaseNotFound):
                worker.prefixes.leased(token, OWN)
            with pytest.raises(LeaseNotFound):
                client.prefixes.release(token)
        with pytest.raises(InvalidArgument, match="token: 16 bytes expected, 3 given"):
            worker.prefixes.leased(b"abc", OWN)
        with pytest.raises(InvalidArgument, match="token: is empty"):
            worker.prefixes.leased(b"", OWN)
    for ttl in (timedelta(), timedelta(seconds=301)):
        with pytest.raises(InvalidArgument, match="lease_ttl"):
            client.prefixes.match(OWN, PROMPT, layout=LAYOUT, lease_ttl=ttl)


@pytest.mark.parametrize("dropped", [(0, 1), (70, 71), (100, 150)])
def test_writers_that_cut_what_they_share_are_not_found_beyond_it(
    tmp_path: Path, dropped: tuple[int, int]
) -> None:
    """Rows behind a dropped token are of other tokens: neither a lease nor an adoption gives them."""
    prompt = np.arange(512)
    # Room enough for one long segment, which has keys on both sides of the cut.
    with (
        serving(settings_in(tmp_path, arena_size_bytes=32 << 20, ssd_size_bytes=64 << 20)) as live,
        ctxcache.connect(live.target, timeout_s=10) as client,
    ):
        client.models.register(SPEC)
        source = client.sessions.create(OWN, id="a", layout=LAYOUT)
        source.append(rows_of(prompt), durability=Durability.DISK)
        assert [
            s.row_count for s in live.ask(lambda s: s.cache.ledger.names.sessions["default", "a"].segments)
        ] == [512]
        for session in (source, source.fork(id="b")):
            # Both list the segment, so that its keys stay, and end behind the last of them.
            session.drop_ranges([dropped])
            session.append(rows_of(prompt[:100]), durability=Durability.DISK)
        whole_count = dropped[0] // 64 * 64
        match = client.prefixes.match(OWN, prompt, layout=LAYOUT, lease_ttl=timedelta(seconds=9))
        assert match.token_count == whole_count
        if match.lease_token:
            with client.prefixes.leased(match.lease_token, OWN) as rows:
                assert rows.array(TOKENS).tobytes() == prompt[:whole_count].astype("<i4").tobytes()
        third = client.sessions.create(OWN, id="c", layout=LAYOUT)
        assert third.adopt(prompt).token_count == whole_count


def test_a_token_is_of_blocks_or_of_a_prefix(live: LiveServer) -> None:
    """And says so where the other is asked for; nothing comes with it."""
    with ctxcache.connect(live.target, timeout_s=10) as client:
        client.models.register(SPEC)
        client.sessions.create(OWN, id="a", layout=LAYOUT).append(rows_of(PROMPT))
        prefix = client.prefixes.match(OWN, PROMPT, layout=LAYOUT, lease_ttl=timedelta(seconds=9)).lease_token
        space = BlockSpace(model_fingerprint=bytes(32))
        client.blocks.put(space, {bytes(32): b"block"})
        with client.blocks.lease(space, [bytes(32)]) as blocks:
            with pytest.raises(InvalidArgument, match="token: is that of blocks: LeaseBlocks takes it"):
                client.prefixes.leased(blocks.token, OWN)
            with pytest.raises(InvalidArgument, match="token: is that of a prefix: AcquireLease takes it"):
                client.blocks.leased(prefix)
        other = CallerModel(replace(SPEC, weights_digest="others"))
        with pytest.raises(ModelFingerprintMismatch):
            client.prefixes.leased(prefix, other)
        attachment = client.routes.attach()
        assert attachment is not None
        for field, value in {
            "session": "sessions/a",
            "range": TokenRange(begin=0, end=1),
            "if_generation_match": 2,
            "leave_on_ssd": True,
        }.items():
            facts: dict[str, Any] = {field: value}
            lease = AcquireLease(token=prefix, model_fingerprint=OWN.fingerprint, **facts)
            with pytest.raises(InvalidArgument, match=f"{field}: comes with a token"):
                attachment.stream.carry_out(Operation(acquire_lease=lease))
