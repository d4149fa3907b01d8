"""Claims of several hosts on one register, by seeds, and the bugs that these histories must find."""

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from ctxcache.core.fleet.claims import Busy, Verdict
from ctxcache.core.fleet.heads import ForeignObject, Head, Name, NodeRecord, Secret
from tests.fleet import model
from tests.fleet.model import CONTROLS, NAMES, SECRET, Node, Rows, World, is_broken, try_seed

HISTORIES = 800
HISTORIES_OF_A_BUG = 1500


def test_no_history_of_three_hosts_breaks_anything() -> None:
    """Terms rise, each is of one run of one host, and a copy that was taken is not continued."""
    moves = sum(try_seed(seed).moves for seed in range(HISTORIES))
    # Histories in which nothing moves would prove nothing.
    assert moves > HISTORIES


@pytest.mark.parametrize("control", CONTROLS)
def test_a_planted_bug_is_found(control: str) -> None:
    """The histories above can fail: each of these bugs makes one of them do so."""
    assert any(is_broken(seed, control) for seed in range(HISTORIES_OF_A_BUG))


@pytest.mark.parametrize("control", ["", "no_fence"])
def test_a_collection_needs_its_fence_and_no_grace(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence alone keeps the objects that a head is about to name; without grace nothing breaks."""
    monkeypatch.setattr(model, "GRACE", -1)
    assert any(is_broken(seed, control) for seed in range(HISTORIES)) is bool(control)


HEAD = Head("1" * 32, "n", "i", "host:1", 3, "f" * 16)


def test_an_object_is_read_as_it_was_written() -> None:
    """Heads and node records go through their bytes unchanged."""
    secret = Secret(b"0123456789abcdef")
    assert secret.read_head(secret.write(HEAD)) == HEAD
    record = NodeRecord("n", "i", "host:1", 7, "0" * 16, ("v1/s/a",), hosts=("10.0.0.7",))
    assert secret.read_node(secret.write(record)) == record


def test_an_object_of_another_fleet_is_refused() -> None:
    """A head under another secret is no head."""
    with pytest.raises(ForeignObject, match="another fleet secret"):
        Secret(b"another secret of another fleet").read_head(Secret(b"0123456789abcdef").write(HEAD))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"null", b'{"object":"{}","digest":1}', b"\xff\xfe"),
        *(b"[" * 100_000, b'{"object":"' + b"[" * 100_000 + b'","digest":""}'),
        *(
            b'{"object":"\\ud800","digest":""}',
            b'{"object":"7","digest":""}',
            b'{"object":"\\"a\\"","digest":""}',
        ),
        *(b'{"object":"{\\"version\\":Infinity}","digest":""}', b"9" * 5000),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """Bytes of any kind are refused by one error."""
    with pytest.raises(ForeignObject):
        Secret(b"0123456789abcdef").read_head(body)


def test_a_node_record_is_no_head() -> None:
    """An object of one kind does not pass for one of another."""
    secret = Secret(b"0123456789abcdef")
    with pytest.raises(ForeignObject):
        secret.read_head(secret.write(NodeRecord("n", "i", "host:1", 7, "0" * 16)))


def test_every_edited_byte_is_noticed() -> None:
    """Whoever edits a head has to know the secret."""
    secret = Secret(b"0123456789abcdef")
    body = secret.write(HEAD)
    for i in range(len(body)):
        with pytest.raises(ForeignObject):
            secret.read_head(body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :])


def test_paths_tell_nothing_and_differ_by_tenant_and_secret() -> None:
    """A listing of the bucket shows no names."""
    secret = Secret(b"0123456789abcdef")
    paths = {
        secret.head_path(Name("a", "s")),
        secret.head_path(Name("b", "s")),
        secret.head_path(Name("a", "t")),
        Secret(b"0123456789abcdeg").head_path(Name("a", "s")),
    }
    assert len(paths) == 4
    assert not any("alice" in secret.head_path(Name("alice", "alice")) for _ in paths)


def test_a_short_secret_is_refused() -> None:
    """A secret that can be guessed is refused."""
    with pytest.raises(ValueError, match="at least 16"):
        Secret(b"short")


def test_the_past_of_a_head_is_bounded() -> None:
    """A head stays below 1 KiB however often its session moves."""
    head = HEAD
    for i in range(20):
        head = head.followed_by(Head(f"{i:032x}", "n", "i", "host:1", 1, "0"))
    assert head.past is None
    assert head.is_past("any")
    assert head.term == 23
    assert len(Secret(b"0123456789abcdef").write(head)) < 1024


def done(work: Coroutine[Any, str, Any], *fates: str) -> Any:
    """What work returns whose calls have these fates, and are answered from then on."""
    left, fate = iter(fates), None
    while True:
        try:
            work.send(fate)  # type: ignore[arg-type]  # None to begin with
        except StopIteration as end:
            return end.value
        fate = next(left, "done")


def host_with_a_session() -> tuple[World, Node, Rows]:
    """A world, and one of its hosts, which has published a session."""
    world = World(0)
    for node in world.nodes.values():
        done(node.claims.beat())
    owner = world.nodes["a"]
    done(owner.turn(NAMES[0]))
    done(owner.publish())
    return world, owner, owner.named[NAMES[0]]


def test_what_was_asked_for_and_not_taken_over_is_had_again() -> None:
    """A host that stops behind its question, or has no place for the session, ends nobody's session."""
    world, owner, rows = host_with_a_session()
    # The head is read, the owner gives it up, and there is no place.
    assert done(world.nodes["b"].claims.settle(NAMES[0]), "done", "done", "lost") is Verdict.ABSENT
    assert owner.uid(NAMES[0]) is None
    done(owner.claims.reclaim())
    assert owner.named[NAMES[0]] is rows
    assert owner.claims.is_here(NAMES[0])


def test_a_head_that_nobody_can_read_stops_no_look_at_others() -> None:
    """Its session is asked for again at its next use."""
    world, owner, rows = host_with_a_session()
    path = SECRET.head_path(NAMES[0])
    world.objects[path] = world.objects[path]._replace(body=b"garbage")
    assert done(owner.claims.look_after(NAMES[0]))
    assert owner.named[NAMES[0]] is rows


def begun_meanwhile(after: int, control: str = "") -> bool:
    """A session begins while a dead head of its name is removed, after so many of that's calls.

    Returns whether it has a head at last.
    """
    world, owner, _ = host_with_a_session()
    done(owner.delete(NAMES[0]))
    world.step, world.control = 1000, control
    for node in world.nodes.values():
        done(node.claims.beat())
    removing, other = world.nodes["c"].tidy(NAMES[0]), world.nodes["b"]
    with suppress(StopIteration):
        for number in range(after):
            removing.send("done" if number else None)
        done(other.turn(NAMES[0]))
        done(other.publish())
        while True:
            removing.send("done" if after else None)
            after += 1
    done(other.turn(NAMES[0]))
    done(other.publish())
    head = world.head(NAMES[0])
    return head is not None and head.uid == other.uid(NAMES[0])


def test_the_removal_of_a_dead_head_meets_no_new_one() -> None:
    """Nobody changes a head that is marked, so that none is lost which is there after the look at it."""
    assert all(begun_meanwhile(after) for after in range(6))
    assert not all(begun_meanwhile(after, "no_mark") for after in range(6))


def test_what_was_taken_over_is_not_had_again() -> None:
    """The head decides: a guest stays one."""
    world, owner, _ = host_with_a_session()
    assert done(world.nodes["b"].claims.settle(NAMES[0])) is Verdict.HERE
    done(owner.claims.reclaim())
    assert owner.uid(NAMES[0]) is None
    assert world.nodes["b"].claims.is_here(NAMES[0])


def test_an_owner_that_has_not_published_what_took_its_place_is_busy() -> None:
    """Whoever asks by the outdated head is told to look again, not that there is nothing."""
    world, owner, before = host_with_a_session()
    owner.named[NAMES[0]] = Rows("f" * 32, [])
    owner.claims.created(NAMES[0])
    with pytest.raises(Busy):
        owner.claims.yielded(NAMES[0], before.uid, 1)
    done(owner.publish())
    assert done(world.nodes["b"].claims.settle(NAMES[0])) is Verdict.HERE
