"""Truncation cuts a session's tokens into runs.

How many there may be is bounded, and so is what a cut costs.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
from cache_rig import TENANT, UNLIMITED, MemoryRig, Writer, expected

from ctxcache.core.ledger.session import Session
from ctxcache.core.ranges import Range
from ctxcache.errors import SessionTooFragmented

LIMIT = 4
EVERY_OTHER = ((1, 2), (3, 4), (5, 6))


class Counted(tuple[Range, ...]):
    """Ranges that count how often somebody walks over all of them."""

    __slots__ = ()
    walk_count = 0

    def __iter__(self) -> Iterator[Range]:
        """Walk."""
        Counted.walk_count += 1
        return super().__iter__()


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


@pytest.fixture
async def rig(rig: MemoryRig) -> MemoryRig:
    """A cache whose sessions may lie in four runs."""
    rig.limits = replace(UNLIMITED, fragment_count=LIMIT)
    await rig.restart()
    await rig.create("a")
    return rig


def session_of(rig: MemoryRig, session_id: str) -> Session:
    """The cache's view of the session."""
    return rig.cache.ledger.find(TENANT, session_id)


async def test_a_cut_into_too_many_runs_is_refused(rig: MemoryRig, writer: Writer) -> None:
    """It says what it would come to and changes nothing; a cut that leaves fewer goes on working."""
    tokens = writer.make(100)
    await rig.append("a", tokens)
    generation = (await rig.truncate("a", *EVERY_OTHER)).generation
    with pytest.raises(SessionTooFragmented) as refused:
        await rig.truncate("a", (10, 20))
    left = [tokens[0], tokens[2], tokens[4], *tokens[6:]]

    assert refused.value.facts == {"session": "sessions/a", "fragment_count": 5, "limit": LIMIT}
    assert rig.cache.sessions.get(TENANT, "a").generation == generation
    assert await rig.read("a") == expected(left)
    await rig.truncate("a", (0, 1), (2, 10))
    assert await rig.read("a") == expected([left[1], *left[10:]])


async def test_appends_and_cuts_in_turn_come_to_the_same_end(rig: MemoryRig, writer: Writer) -> None:
    """An append behind a cut is one run more, and counted when the cut is made: no append is refused."""
    for cut_count in range(1, LIMIT + 1):
        view = await rig.append("a", writer.make(2))
        cut = rig.cache.sessions.keep_first(TENANT, "a", None, view.token_count - 1)
        with pytest.raises(SessionTooFragmented) if cut_count == LIMIT else nullcontext():
            await cut
    await rig.append("a", writer.make(2))

    assert len(session_of(rig, "a").live) == LIMIT


async def test_forks_of_forks_stay_in_one_piece(rig: MemoryRig, writer: Writer) -> None:
    """A fork that ends within a segment goes on where it ends, and has all its tokens in one run."""
    tokens = writer.make(2)
    await rig.append("a", tokens)
    for source, name in pairwise("abcdefgh"):
        await rig.fork(source, name, len(tokens) - 1)
        tokens = [*tokens[:-1], *writer.make(2)]
        await rig.append(name, tokens[-2:])
        assert await rig.read(name) == expected(tokens)

    assert session_of(rig, "h").live == ((0, len(tokens)),)
    assert session_of(rig, "h").growing_tail


async def test_a_session_of_a_larger_limit_shrinks_only(rig: MemoryRig, writer: Writer) -> None:
    """It is read and appended to as before; a cut may leave as many runs as there are, or fewer."""
    tokens = writer.make(100)
    await rig.append("a", tokens)
    await rig.truncate("a", *EVERY_OTHER)
    left = [tokens[0], tokens[2], tokens[4], *tokens[6:]]
    rig.limits = replace(UNLIMITED, fragment_count=2)
    await rig.restart()
    more = writer.make(1)
    await rig.append("a", more)
    with pytest.raises(SessionTooFragmented):
        await rig.truncate("a", (10, 20))
    await rig.truncate("a", (0, 1))

    assert await rig.read("a") == expected([*left[1:], *more])


async def test_a_cut_walks_over_the_runs_a_few_times(rig: MemoryRig, writer: Writer) -> None:
    """However many ranges a call drops: once for each would take seconds of everybody's time."""
    rig.cache.state.limits = UNLIMITED
    await rig.append("a", writer.make(300))
    await rig.truncate("a", *((i, i + 1) for i in range(0, 200, 2)))
    session = session_of(rig, "a")
    session.live = Counted(session.live)
    Counted.walk_count = 0
    await rig.truncate("a", *((i, i + 1) for i in range(100)))

    assert session.live == ((200, 300),)
    assert 0 < Counted.walk_count < 10


async def test_an_append_does_not_walk_over_the_runs(rig: MemoryRig, writer: Writer) -> None:
    """A token more costs what it costs in a session that nobody cut, and so does a look at the session."""
    rig.cache.state.limits = UNLIMITED
    await rig.append("a", writer.make(300), is_durable=True)
    await rig.truncate("a", *((i, i + 1) for i in range(0, 200, 2)))
    session = session_of(rig, "a")
    session.live = Counted(session.live)
    Counted.walk_count = 0
    await rig.append("a", writer.make(1))
    session.live = Counted(session.live)
    view = rig.cache.sessions.get(TENANT, "a")

    assert Counted.walk_count == 0
    assert (view.token_count, view.durable_token_count) == (201, 200)
