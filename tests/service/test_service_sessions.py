"""The rpcs that move no rows: every promise of the proto, over a real socket."""

import os
from typing import Any, cast

import grpc
import pytest
from fakes import EPOCH_NS, FakeClock
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from service_rig import (
    HIDDEN,
    KV,
    STREAMS,
    TOKENS,
    Client,
    chunks,
    commit,
    make_model,
    ranges,
    refused,
    spec_of,
    until,
)

from ctxcache.core.ledger.session import former_id
from ctxcache.core.limits import Limits
from ctxcache.server.server import Server
from ctxcache.v1 import admin_pb2, model_pb2, session_pb2
from ctxcache.v1.session_pb2 import TokenRange

Code = grpc.StatusCode
HOSTILE_IDS = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "a/b",
    "-a",
    "a\0b",
    "a\n",
    "sessions/a",
    "\u0430dmin",
    "a\u202e",
    "x" * 129,
    "a b",
    "%2e%2e",
    "😀",
    "x" * 200_000,
]
HOSTILE_NAMES = [*(f"sessions/{i}" for i in HOSTILE_IDS), "a", "models/a", "sessions//a", "SESSIONS/a"]


async def test_an_answer_of_before_is_given_only_while_nothing_has_changed(
    client: Client, clock: FakeClock
) -> None:
    """Bytes of a session, of its expiry, and of the wall clock by which it is told."""
    await client.create("a")
    empty = await client.get("a")
    assert await client.get("a") == empty

    await client.append("a", 1, 0, 10)
    longer = await client.get("a")
    assert (longer.token_count, longer.whole_token_count) == (10, 10)
    clock.jump(to_ns=clock.now_ns() + 3600 * 10**9)
    later = await client.get("a")
    assert later.expire_time.seconds - longer.expire_time.seconds == 3600
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/a"))
    await client.create("a")
    other = await client.get("a")
    assert (other.token_count, other.uid == longer.uid) == (0, False)


# -- models ----------------------------------------------------------------------------------------------


async def test_registering_the_same_model_again_returns_it(client: Client) -> None:
    """A model is registered once; whoever registers it again gets the first one."""
    first = await client.models.GetModel(model_pb2.GetModelRequest(name="models/tiny"))
    again = await client.models.RegisterModel(model_pb2.RegisterModelRequest(model=make_model()))

    assert first == again
    assert first.fingerprint == client.fingerprint
    assert len(first.fingerprint) == 32


async def test_another_model_does_not_take_a_name(client: Client) -> None:
    """Anything that makes state another's makes the model another one."""
    for changes in ({"rope": "theta=1"}, {"settings": "x"}, {"revision": "2"}, {"is_relocatable": False}):
        request = model_pb2.RegisterModelRequest(model=make_model(**changes))
        await refused(
            client.models.RegisterModel(request), Code.FAILED_PRECONDITION, "MODEL_FINGERPRINT_MISMATCH"
        )


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model.name", {"name": "models/../x"}),
        ("model.name", {"name": "tiny"}),
        ("model.architecture", {"architecture": ""}),
        ("model.architecture", {"architecture": "ä" * 129}),
        ("model.rope", {"rope": "x" * 4097}),
        ("model.dtype", {"dtype": 0}),
        ("model.dtype", {"dtype": 99}),
        ("model.layer_count", {"layer_count": 0}),
        ("model.layer_count", {"layer_count": 4097}),
        ("model.hidden_size", {"hidden_size": -1}),
        ("model.kv_head_count", {"kv_head_count": -1}),
        ("model.head_size", {"head_size": -1}),
        ("model.streams", {"streams": []}),
        (
            "model.streams",
            {"streams": [spec_of(KV, row_bytes=1, dtype=model_pb2.DTYPE_INT32)] * 2},
        ),
        (
            "model.streams[0].row_bytes",
            {"streams": [spec_of(KV, row_bytes=(2 << 20) + 1, dtype=model_pb2.DTYPE_INT32)]},
        ),
        ("model.streams[0].dtype", {"streams": [spec_of(KV, row_bytes=1)]}),
        (
            "model.streams",
            {"streams": [spec_of(TOKENS, row_bytes=8, dtype=model_pb2.DTYPE_INT32)]},
        ),
    ],
)
async def test_a_model_that_cannot_be_is_refused(client: Client, field: str, changes: dict[str, Any]) -> None:
    """Each field has its bounds, and the refusal names it."""
    request = model_pb2.RegisterModelRequest(model=make_model(**({"name": "models/other"} | changes)))
    facts = await refused(client.models.RegisterModel(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")

    assert facts["field"] == field


async def test_a_model_that_is_not_there_has_its_own_error(client: Client) -> None:
    """Neither getting it nor creating a session of it works."""
    missing = model_pb2.GetModelRequest(name="models/none")
    await refused(client.models.GetModel(missing), Code.NOT_FOUND, "MODEL_NOT_FOUND")
    create = session_pb2.CreateSessionRequest(session_id="a", model="models/none")
    await refused(client.sessions.CreateSession(create), Code.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_models_are_listed_page_by_page(client: Client) -> None:
    """Every model once, by name; a last page that is full names no next one."""
    for name in ("b", "a", "c"):
        request = model_pb2.RegisterModelRequest(model=make_model(name=f"models/{name}"))
        await client.models.RegisterModel(request)
    first = await client.models.ListModels(model_pb2.ListModelsRequest(page_size=2))
    second = await client.models.ListModels(
        model_pb2.ListModelsRequest(page_size=2, page_token=first.next_page_token)
    )

    names = [model.name.removeprefix("models/") for page in (first, second) for model in page.models]
    assert (names, second.next_page_token) == (["a", "b", "c", "tiny"], "")


# -- names and pages
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
async def test_no_hostile_name_gets_past_the_edge(client: Client, name: str) -> None:
    """A name that is not exactly one of ours is refused by every rpc that takes one."""
    print_ = client.fingerprint
    for call in (
        client.sessions.GetSession(session_pb2.GetSessionRequest(name=name)),
        client.sessions.UpdateSession(session_pb2.UpdateSessionRequest(name=name)),
        client.sessions.TruncateSession(session_pb2.TruncateSessionRequest(name=name, keep_first=0)),
        client.sessions.ForkSession(session_pb2.ForkSessionRequest(name=name)),
        client.sessions.FlushSession(session_pb2.FlushSessionRequest(name=name)),
        client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=name)),
        client.sessions.LookupSessions(
            session_pb2.LookupSessionsRequest(
                queries=[session_pb2.LookupQuery(name=name, model_fingerprint=print_)]
            )
        ),
        client.sessions.ReadSession(session_pb2.ReadSessionRequest(name=name, model_fingerprint=print_)),
        client.sessions.AppendSession([client.header("a", 0, name=name)]),
        client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name=name)),
    ):
        await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")


@pytest.mark.parametrize("session_id", HOSTILE_IDS[1:], ids=range(len(HOSTILE_IDS) - 1))
async def test_no_session_gets_a_hostile_id(client: Client, session_id: str) -> None:
    """Neither creation nor fork takes an id that does not match."""
    create = session_pb2.CreateSessionRequest(session_id=session_id, model="models/tiny")
    await refused(client.sessions.CreateSession(create), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    await client.create("a")
    fork = session_pb2.ForkSessionRequest(name="sessions/a", session_id=session_id)
    await refused(client.sessions.ForkSession(fork), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_the_server_chooses_an_id_where_none_is_given(client: Client) -> None:
    """The chosen id is as good as any other."""
    made = await client.create("")

    assert await client.get(made.name.removeprefix("sessions/")) == made


async def test_sessions_are_listed_page_by_page(client: Client) -> None:
    """Every session once, in order; sizes out of bounds and tokens that are not ours are refused."""
    for number in range(7):
        await client.create(f"s{number}")
    names, token = [], ""
    for _ in range(4):
        page = await client.sessions.ListSessions(
            session_pb2.ListSessionsRequest(page_size=2, page_token=token)
        )
        names.append([session.name for session in page.sessions])
        token = page.next_page_token
    everything = await client.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=10**6))

    assert list(map(len, names)) == [2, 2, 2, 1]
    assert sum(names, []) == [f"sessions/s{number}" for number in range(7)]  # noqa: RUF017
    assert (token, everything.next_page_token) == ("", "")
    for changes in ({"page_size": -1}, {"page_token": "x"}, {"model": "nonsense"}):
        request = session_pb2.ListSessionsRequest(**changes)
        await refused(client.sessions.ListSessions(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")


# -- create, update, expire
# ----------------------------------------------------------------------------------------


async def test_a_created_session_says_what_it_is(client: Client) -> None:
    """Every field of a new session, and the same when it is asked for again."""
    made = await client.create("a", ttl=Duration(seconds=10), is_pinned=True)

    assert await client.get("a") == made
    assert (made.token_count, made.tenant, made.is_pinned) == (0, "default", True)
    assert 0 < made.generation < 1 << 32
    assert list(made.layout) == ranges(*STREAMS)
    assert made.expire_time.seconds - made.access_time.seconds == made.ttl.seconds == 10
    assert made.model_fingerprint == client.fingerprint
    create = session_pb2.CreateSessionRequest(session_id="a", model="models/tiny")
    await refused(client.sessions.CreateSession(create), Code.ALREADY_EXISTS, "SESSION_ALREADY_EXISTS")


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": ranges(model_pb2.StreamName(layer=5, kind=model_pb2.STATE_KIND_KV))},
        {"layout": ranges(HIDDEN, HIDDEN)},
        {"layout": ranges(model_pb2.StreamName(layer=0, kind=model_pb2.STATE_KIND_UNSPECIFIED))},
        {"layout": ranges(model_pb2.StreamName(layer=0, kind=model_pb2.STATE_KIND_TOKENS))},
        {"layout": ranges(model_pb2.StreamName(layer=0, kind=model_pb2.STATE_KIND_HIDDEN_INT8))},
        {"layout": ranges(model_pb2.StreamName(layer=0, kind=cast("model_pb2.StateKind.ValueType", 99)))},
        {"layout": ranges(model_pb2.StreamName(layer=-1, kind=model_pb2.STATE_KIND_HIDDEN))},
        {"layout": [model_pb2.StreamRange(kind=model_pb2.STATE_KIND_HIDDEN, layer_begin=1, layer_end=1)]},
        {"layout": [model_pb2.StreamRange(kind=model_pb2.STATE_KIND_HIDDEN, layer_begin=0, layer_end=4097)]},
        {"ttl": Duration(seconds=0, nanos=5)},
        {"ttl": Duration(seconds=3650 * 86400 + 1)},
        {"ttl": Duration(seconds=-1)},
        {"ttl": Duration(seconds=1, nanos=-1)},
        {"expire_time": Timestamp(seconds=1)},
        {"expire_time": Timestamp(seconds=-1)},
        {"expire_time": Timestamp(seconds=32503680000)},
        {"expire_time": Timestamp(seconds=EPOCH_NS // 10**9)},
        {"model": "models/"},
    ],
)
async def test_a_session_that_cannot_be_is_refused(client: Client, changes: dict[str, Any]) -> None:
    """Streams the model does not have and times that are none leave no session behind."""
    facts = {"session_id": "a", "model": "models/tiny"} | changes
    request = session_pb2.CreateSessionRequest(**facts)
    await refused(client.sessions.CreateSession(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")

    await refused(client.get("a"), Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_parts_of_a_second_count(client: Client) -> None:
    """Of a span and of an instant."""
    span, instant = Duration(seconds=10, nanos=5), Timestamp(seconds=EPOCH_NS // 10**9 + 60, nanos=7)
    sliding = await client.create("a", ttl=span)
    absolute = await client.create("b", expire_time=instant)

    assert (sliding.ttl, absolute.expire_time) == (span, instant)


async def test_an_update_counts_as_an_access(client: Client, clock: FakeClock) -> None:
    """An update that sets nothing is a touch; one that sets something changes that alone."""
    made = await client.create("a", ttl=Duration(seconds=10))
    clock.advance(seconds=5)
    update = client.sessions.UpdateSession
    touched = await update(session_pb2.UpdateSessionRequest(name="sessions/a"))
    pinned = await update(session_pb2.UpdateSessionRequest(name="sessions/a", is_pinned=True))
    clock.advance(seconds=9)
    later = await update(session_pb2.UpdateSessionRequest(name="sessions/a", ttl=Duration(seconds=20)))
    clock.advance(seconds=19)

    assert touched.expire_time.seconds == EPOCH_NS // 10**9 + 15
    assert (pinned.is_pinned, later.is_pinned, later.generation) == (True, True, made.generation)
    await client.get("a")
    clock.advance(seconds=1)
    await refused(client.get("a"), Code.NOT_FOUND, "SESSION_NOT_FOUND")


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_stream_does_not_bring_an_expired_session_back(
    client: Client, clock: FakeClock, *, is_committed: bool
) -> None:
    """An append whose session expires under it ends as a look-up does, at its next chunk or commit."""
    await client.create("a", ttl=Duration(seconds=10))
    call = client.sessions.AppendSession()
    for message in (client.header("a", 0), *chunks(1, 0, 5), commit(5)):
        await call.write(message)
    await until(lambda: _has(client, 5))
    for message in chunks(1, 5, 9) if is_committed else ():
        await call.write(message)
    clock.advance(seconds=10)
    await call.write(commit(9) if is_committed else chunks(1, 5, 9)[0])

    await refused(call, Code.NOT_FOUND, "SESSION_NOT_FOUND")
    await refused(client.get("a"), Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def _has(client: Client, token_count: int) -> bool:
    return (await client.get("a")).token_count == token_count


@pytest.mark.parametrize("step_s", [-7200, 7200])
async def test_times_are_told_by_the_wall_clock_as_it_is(
    client: Client, clock: FakeClock, step_s: int
) -> None:
    """Answers tell the rest of a session's life, before and after the clock was set.

    Absolute times too.
    """
    await client.create("a", ttl=Duration(seconds=60))
    fixed = Timestamp(seconds=EPOCH_NS // 10**9 + 60)
    before = await client.create("b", expire_time=fixed)
    clock.jump(to_ns=EPOCH_NS + step_s * 10**9)
    clock.advance(seconds=20)
    wall_s = EPOCH_NS // 10**9 + step_s + 20
    after = [await client.get(name) for name in ("a", "b")]
    update = session_pb2.UpdateSessionRequest(name="sessions/a", expire_time=Timestamp(seconds=wall_s + 30))
    given = await client.sessions.UpdateSession(update)
    clock.advance(seconds=29)
    await client.get("a")
    clock.advance(seconds=1)

    assert before.expire_time == fixed
    assert [found.expire_time.seconds - wall_s for found in after] == [40, 40]
    assert [wall_s - found.create_time.seconds for found in after] == [20, 20]
    assert given.expire_time.seconds == wall_s + 30
    await refused(client.get("a"), Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_an_expiry_in_the_past_means_now(client: Client) -> None:
    """A session can be ended by its expiry, pinned or not."""
    await client.create("a", is_pinned=True)
    request = session_pb2.UpdateSessionRequest(name="sessions/a", expire_time=Timestamp(seconds=1))
    await client.sessions.UpdateSession(request)

    await refused(client.get("a"), Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_every_rpc_about_a_session_that_is_not_there_says_so(client: Client) -> None:
    """One reason, wherever it is asked for."""
    name = "sessions/none"
    for call in (
        client.get("none"),
        client.sessions.UpdateSession(session_pb2.UpdateSessionRequest(name=name)),
        client.sessions.TruncateSession(session_pb2.TruncateSessionRequest(name=name, keep_first=0)),
        client.sessions.ForkSession(session_pb2.ForkSessionRequest(name=name)),
        client.sessions.FlushSession(session_pb2.FlushSessionRequest(name=name)),
        client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=name)),
        client.sessions.ReadSession(client.read_request("none")),
        client.sessions.AppendSession([client.header("none", 0)]),
        client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name=name)),
    ):
        await refused(call, Code.NOT_FOUND, "SESSION_NOT_FOUND")


# -- change
# --------------------------------------------------------------------------------------------------------


async def test_truncation_keeps_what_it_says(client: Client) -> None:
    """The newest and the sinks, all but some ranges, or the first: each as the proto has it."""
    await client.create("a")
    appended = await client.append("a", 1, 0, 100)
    truncate, request = client.sessions.TruncateSession, session_pb2.TruncateSessionRequest
    recent = session_pb2.KeepRecent(token_count=80)
    drop = session_pb2.DropRanges(ranges=[TokenRange(begin=70, end=84), TokenRange(begin=60, end=75)])
    counts = []
    cases: list[dict[str, Any]] = [
        {"keep_recent": recent},
        {"drop": drop},
        {"keep_first": 50},
        {"keep_first": 50},
    ]
    for kept in cases:
        session = await truncate(request(name="sessions/a", **kept))
        counts.append((session.token_count, session.generation - appended.generation))

    assert counts == [(84, 1), (60, 2), (50, 3), (50, 3)]


@pytest.mark.parametrize(
    ("facts", "code", "reason"),
    [
        ({}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"drop": session_pb2.DropRanges()}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (
            {"drop": session_pb2.DropRanges(ranges=[TokenRange(begin=2, end=1)])},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        ({"keep_recent": session_pb2.KeepRecent(token_count=-1)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"keep_first": 11}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"keep_first": -1}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        (
            {"drop": session_pb2.DropRanges(ranges=[TokenRange(begin=5, end=11)])},
            Code.OUT_OF_RANGE,
            "TOKEN_RANGE_OUT_OF_BOUNDS",
        ),
        (
            {"drop": session_pb2.DropRanges(ranges=[TokenRange(begin=5, end=6)] * 4097)},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
    ],
)
async def test_a_truncation_that_cannot_be_changes_nothing(
    client: Client, facts: dict[str, Any], code: Code, reason: str
) -> None:
    """A truncation must name tokens to keep, and they must be there."""
    await client.create("a")
    before = await client.append("a", 1, 0, 10)
    request = session_pb2.TruncateSessionRequest(name="sessions/a", **facts)
    await refused(client.sessions.TruncateSession(request), code, reason)

    assert (await client.get("a")).generation == before.generation


async def test_a_session_that_was_cut_too_often_says_so(server: Server, client: Client) -> None:
    """The refusal names the session, what the cut would come to, and the limit."""
    server.cache.state.limits = Limits(fragment_count=2)
    await client.create("a")
    await client.append("a", 1, 0, 10)
    drop = session_pb2.DropRanges(ranges=[TokenRange(begin=2, end=3), TokenRange(begin=5, end=6)])
    request = session_pb2.TruncateSessionRequest(name="sessions/a", drop=drop)
    call = client.sessions.TruncateSession(request)
    facts = await refused(call, Code.FAILED_PRECONDITION, "SESSION_TOO_FRAGMENTED")

    assert facts == {"session": "sessions/a", "fragment_count": "3", "limit": "2"}


async def test_absolute_positions_lose_only_their_end(client: Client) -> None:
    """A model whose state depends on positions keeps every token before a kept one."""
    model = make_model(name="models/fixed", is_relocatable=False)
    made = await client.models.RegisterModel(model_pb2.RegisterModelRequest(model=model))
    client.fingerprint = made.fingerprint
    create = session_pb2.CreateSessionRequest(session_id="a", model="models/fixed", layout=ranges(*STREAMS))
    await client.sessions.CreateSession(create)
    await client.append("a", 1, 0, 10)
    drop = session_pb2.DropRanges(ranges=[TokenRange(begin=1, end=2)])
    request = session_pb2.TruncateSessionRequest(name="sessions/a", drop=drop)

    await refused(
        client.sessions.TruncateSession(request), Code.FAILED_PRECONDITION, "POSITIONS_NOT_RELOCATABLE"
    )


async def test_a_condition_on_the_generation_holds_everywhere(client: Client) -> None:
    """Every rpc that takes a generation refuses another one and accepts the right one."""
    await client.create("a")
    at = (await client.append("a", 1, 0, 10)).generation
    name = "sessions/a"
    wrong: dict[str, Any] = {"name": name, "if_generation_match": at + 1}
    for call in (
        client.sessions.TruncateSession(session_pb2.TruncateSessionRequest(keep_first=1, **wrong)),
        client.sessions.ForkSession(session_pb2.ForkSessionRequest(**wrong)),
        client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(**wrong)),
        client.sessions.ReadSession(client.read_request("a", if_generation_match=at - 1)),
        client.sessions.AppendSession([client.header("a", 10, if_generation_match=0)]),
    ):
        facts = await refused(call, Code.ABORTED, "GENERATION_MISMATCH")
        assert facts["actual"] == str(at)
    await client.sessions.ForkSession(session_pb2.ForkSessionRequest(name=name, if_generation_match=at))
    truncated = await client.sessions.TruncateSession(
        session_pb2.TruncateSessionRequest(name=name, if_generation_match=at, keep_first=5)
    )
    await client.read("a", if_generation_match=truncated.generation)
    await client.sessions.DeleteSession(
        session_pb2.DeleteSessionRequest(name=name, if_generation_match=truncated.generation)
    )


async def test_a_fork_takes_another_s_place_on_conditions(client: Client) -> None:
    """At the generation that is named; what is missing, too much or another's is refused."""
    for name in ("a", "b"):
        await client.create(name)
        await client.append(name, 1, 0, 70)
    at = (await client.get("a")).generation
    fork, request = client.sessions.ForkSession, session_pb2.ForkSessionRequest
    for facts, code, reason in (
        ({"replaces_generation": at}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"session_id": "new", "is_rewrite": True}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (
            {"session_id": "a", "replaces_generation": at, "former_count": 1},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            {"session_id": "a", "replaces_generation": at, "is_rewrite": True, "former_count": 17},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            {"session_id": "a", "replaces_generation": at, "is_rewrite": True, "former_count": -1},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            {"session_id": "a", "replaces_generation": at, "ttl": Duration(seconds=9)},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        ({"session_id": "a", "replaces_generation": at + 1}, Code.ABORTED, "GENERATION_MISMATCH"),
        ({"session_id": "no", "replaces_generation": at}, Code.NOT_FOUND, "SESSION_NOT_FOUND"),
        ({"session_id": "a"}, Code.ALREADY_EXISTS, "SESSION_ALREADY_EXISTS"),
        (
            {"session_id": "a", "replaces_generation": at, "token_count": 9},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
    ):
        await refused(fork(request(name="sessions/b", **cast("Any", facts))), code, reason)
    assert (await client.get("a")).generation == at
    made = await fork(request(name="sessions/b", session_id="a", replaces_generation=at))
    assert (made.name, made.generation, made.token_count) == ("sessions/a", at + 1, 70)
    assert (await client.get("a")).uid == made.uid
    edit = request(
        name="sessions/b", session_id="a", replaces_generation=at + 1, token_count=9, is_rewrite=True
    )
    assert (await fork(edit)).token_count == (await client.get("a")).token_count == 9


async def test_a_former_rendering_cannot_be_asked_for(client: Client) -> None:
    """It is found by its tokens alone: its id is no name, and no list has it."""
    for name in ("a", "b"):
        await client.create(name)
        await client.append(name, 1, 0, 70)
    before = await client.get("a")
    await client.sessions.ForkSession(
        session_pb2.ForkSessionRequest(
            name="sessions/b", session_id="a", replaces_generation=before.generation, token_count=9,
            is_rewrite=True, former_count=1,
        )
    )  # fmt: skip
    hidden = f"sessions/{former_id('a', bytes.fromhex(before.uid))}"
    await refused(
        client.sessions.GetSession(session_pb2.GetSessionRequest(name=hidden)),
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
    )
    listed = await client.sessions.ListSessions(session_pb2.ListSessionsRequest())
    assert [session.name for session in listed.sessions] == ["sessions/a", "sessions/b"]


async def test_a_fork_goes_on_by_itself(client: Client) -> None:
    """A fork shares the first tokens, durably; its name and its length are checked."""
    await client.create("a")
    await client.append("a", 1, 0, 100)
    fork, request = client.sessions.ForkSession, session_pb2.ForkSessionRequest
    made = await fork(request(name="sessions/a", session_id="b", token_count=70))
    await client.append("b", 1, 70, 100)
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/a"))

    assert (made.token_count, made.durable_token_count) == (70, 70)
    assert len((await client.read_rows("b"))[1]) == 100 * 160
    for facts, code, reason in (
        ({"session_id": "b"}, Code.ALREADY_EXISTS, "SESSION_ALREADY_EXISTS"),
        ({"token_count": 101}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"token_count": -1}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"expire_time": Timestamp(seconds=1)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    ):
        await refused(fork(request(name="sessions/b", **facts)), code, reason)


async def test_lookups_answer_for_many_at_once(client: Client) -> None:
    """Hits and misses come in the order of the questions, each with its reason."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    await client.create("empty")
    query = session_pb2.LookupQuery
    answer = await client.sessions.LookupSessions(
        session_pb2.LookupSessionsRequest(
            queries=[
                query(name="sessions/none", model_fingerprint=client.fingerprint),
                query(name="sessions/a", model_fingerprint=client.fingerprint),
                query(name="sessions/a", model_fingerprint=bytes(32)),
                query(name="sessions/empty", model_fingerprint=client.fingerprint),
            ]
        )
    )

    miss, hit = session_pb2.LOOKUP_STATE_MISS, session_pb2.LOOKUP_STATE_HIT
    assert [(r.state, r.reason, r.token_count, r.dram_token_count) for r in answer.results] == [
        (miss, "SESSION_NOT_FOUND", 0, 0),
        (hit, "", 10, 10),
        (miss, "MODEL_FINGERPRINT_MISMATCH", 0, 0),
        (miss, "EMPTY", 0, 0),
    ]
    sizes = {
        item.kind: ([(run.begin, run.end) for run in item.layers], item.size_bytes)
        for item in answer.results[1].kinds
    }
    assert sizes == {1: ([(-1, 0)], 40), 2: ([(0, 1)], 960), 3: ([(1, 2)], 1600)}
    for queries in ([], [query(name="sessions/a", model_fingerprint=b"short")]):
        request = session_pb2.LookupSessionsRequest(queries=queries)
        await refused(client.sessions.LookupSessions(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_a_refused_sync_is_said_and_loses_nothing(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the device fails, flush, demotion and durable commits say so; the tokens stay readable."""
    await client.create("a")
    await client.append("a", 1, 0, 10)

    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuse)
    for call in (
        client.sessions.FlushSession(session_pb2.FlushSessionRequest(name="sessions/a")),
        client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a")),
        client.append("a", 1, 10, 20, is_durable=True),
        client.sessions.ForkSession(session_pb2.ForkSessionRequest(name="sessions/a", session_id="b")),
    ):
        await refused(call, Code.UNAVAILABLE, "TIER_FAILURE")

    assert (await client.get("a")).token_count == 20
    await refused(client.get("b"), Code.NOT_FOUND, "SESSION_NOT_FOUND")
    delete = session_pb2.DeleteSessionRequest(name="sessions/a")
    await client.sessions.DeleteSession(delete)
    assert server.storage.ssd.refusals


async def test_a_demoted_session_is_on_disk_only(client: Client) -> None:
    """Demotion makes durable, frees DRAM, and costs the reader nothing but time."""
    await client.create("a")
    await client.append("a", 1, 0, 100)
    demoted = await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a"))
    stats = await client.stats()

    assert (demoted.durable_token_count, demoted.dram_bytes) == (100, 0)
    assert stats.tiers[0].used_bytes == 0
    assert (stats.session_count, stats.model_count, stats.segment_count) == (1, 1, 2)
