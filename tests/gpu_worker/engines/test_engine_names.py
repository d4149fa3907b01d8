"""Callers' names of conversations, and what of a plugin's settings is refused: on a real store."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server_process import ServerProcess
from tiny_models import build

import ctxcache
from ctxcache.errors import InvalidArgument
from ctxcache.format.ids import SESSION_ID
from gpu_worker.engines.link import Refused, StoreSettings
from gpu_worker.engines.names import part_of, session_id
from gpu_worker.model.spec import model_spec

PLAIN = ["alice", "A", "0", "a.b:c-d_e", "rank1", "alice.rank", "x" * 128, "chat-2026:11:28"]
"""Names that are ids as they are."""
ODD = [
    "alice@example.com",
    "my chat",
    "/home/alice/notes.md",
    "_hidden",
    "x" * 129,
    "x" * 100_000,
    "会話",
    "a\n",
    "\0",
    "\ud800",
    "\U0001f600",
    "\ud83d\ude00",
    *(unicodedata.normalize(form, "Ame\u0301lie \ufb01") for form in ("NFC", "NFD", "NFKC", "NFKD")),
    "\u212a",
    "alice.rank1",
    "sha256:" + 64 * "0",
    session_id("alice@example.com"),
    session_id(session_id("alice@example.com")),
]
"""Names that are known by their digest; the last two are ids of others."""
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=()), min_size=1),
    st.from_regex(SESSION_ID, fullmatch=True),
    st.from_regex(r"[a-z.]{1,3}(\.rank[0-9]{1,3}){0,2}", fullmatch=True),
    st.sampled_from(PLAIN + ODD),
)


def ids_of(name: str) -> list[str]:
    """The ids of a conversation's sessions on twelve ranks."""
    first = session_id(name)
    return [first, *(part_of(first, rank) for rank in range(1, 12))]


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_that_is_an_id_is_the_id(name: str) -> None:
    """An operator finds the conversation under the name that its caller gave it."""
    assert session_id(name) == name


@given(NAMES, NAMES)
@example("a", "a.rank1")
@example("a" * 125, "a" * 125 + ".rank1")
@example("a" * 125, session_id("a" * 129))
def test_two_names_have_no_id_in_common(left: str, right: str) -> None:
    """Neither as a whole nor in any rank's part, and each fits the store's alphabet."""
    ids = ids_of(left) + (ids_of(right) if left != right else [])
    assert len(set(ids)) == len(ids)
    assert all(SESSION_ID.fullmatch(id_) for id_ in ids)


def test_names_of_all_sorts_are_sessions_of_their_own(tmp_path: Path) -> None:
    """The store takes each of them, and finds each again."""
    assert not [one for one in ODD if session_id(one) == one]
    with (
        ServerProcess(tmp_path / "data") as server,
        ctxcache.connect(server.target, timeout_s=10) as cache,
    ):
        model = cache.models.register(model_spec(build("llama"), model_id="named"))
        names = PLAIN + ODD
        for name in names:
            for id_ in ids_of(name)[:2]:
                cache.sessions.create(model, id=id_)
        assert len(list(cache.sessions.list())) == 2 * len(set(names))
        for name in names:
            assert cache.sessions.get(f"sessions/{session_id(name)}").token_count == 0


def test_an_empty_name_names_nothing() -> None:
    """All requests that name no conversation would share one."""
    with pytest.raises(InvalidArgument, match="session_id"):
        session_id("")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("http://127.0.0.1:7420", r"begins with a scheme: say 127\.0\.0\.1:7420"),
        ("grpc://store:7420/path", "begins with a scheme: say store:7420"),
        ("tcp://", "begins with a scheme: say host:port"),
        ("store", "is not host:port"),
        ("store :7420", "is not host:port"),
        ("store/a:7420", "is not host:port"),
        ("/run/ctxcache.sock", "is not host:port"),
        ("", "is not host:port"),
    ],
)
def test_an_address_that_is_none_is_refused(target: str, told: str) -> None:
    """At the start: gRPC would look up such a host for ever. By a client's call, too."""
    with pytest.raises(Refused, match=f"extra.target: '{target}' {told}"):
        StoreSettings.of({"target": target}, "extra")
    with pytest.raises(InvalidArgument, match=f"target: '{target}' {told}"):
        ctxcache.connect(target)


@pytest.mark.parametrize(
    "target", ["store:7420", "[::1]:7420", "unix:/run/store", "dns:///store:7420", "a_b:1"]
)
def test_an_address_is_taken(target: str) -> None:
    """In each of its forms."""
    assert StoreSettings.of({"target": target}, "extra").target == target
    ctxcache.connect(target).close()


@pytest.mark.parametrize(
    ("name", "meant"), [("targget", "target"), ("tls-ca", "tls_ca"), ("ttl", "ttl_s"), ("qqq", "")]
)
def test_a_misspelt_setting_is_refused_with_the_nearest_right_one(name: str, meant: str) -> None:
    """By all plugins alike."""
    with pytest.raises(Refused, match=f"extra.{name}: not one of target, ") as caught:
        StoreSettings.of({name: "x"}, "extra")
    assert str(caught.value).endswith(f"; did you mean {meant}?") == bool(meant)
