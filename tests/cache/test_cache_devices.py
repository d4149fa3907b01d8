"""SSD paths that sessions lie on, and what becomes of sessions when one of them is lost."""

from collections.abc import Callable

import pytest
from cache_rig import FINGERPRINT, SEGMENT_TOKENS, MemoryRig, Token, Writer, expected
from fakes import Operation

from ctxcache.cache.state import LOOKUP, READ
from ctxcache.core.history import Event
from ctxcache.errors import TierFailure
from ctxcache.observe.exposition import read_cache
from ctxcache.observe.status import problems_of_paths


def paths_of(rig: MemoryRig, session_id: str) -> list[int]:
    """The SSD path of each of a session's segments."""
    session = rig.cache.ledger.find(rig.tenant, session_id)
    return [segment.durable.path_index for segment in session.segments if segment.durable]


async def test_a_session_lies_on_one_path_and_sessions_on_all(rig: MemoryRig) -> None:
    """Segments of a session stay together, however they are written; sessions share the paths out."""
    for i in range(7):
        await rig.create(f"s{i}")
    for _ in range(3):
        for i in range(7):
            await rig.append(f"s{i}", Writer(i).make(SEGMENT_TOKENS), is_durable=True)

    homes = [set(paths_of(rig, f"s{i}")) for i in range(7)]
    assert [len(home) for home in homes] == [1] * 7
    assert sorted(sum(path in home for home in homes) for path in range(2)) == [3, 4]
    await rig.restart()
    await rig.append("s0", Writer(0).make(SEGMENT_TOKENS), is_durable=True)
    assert set(paths_of(rig, "s0")) == homes[0]


async def test_a_session_goes_on_elsewhere_when_its_path_is_full_or_fenced(rig: MemoryRig) -> None:
    """It moves once, and stays where it went."""
    await rig.create("s")
    await rig.append("s", Writer(1).make(SEGMENT_TOKENS), is_durable=True)
    (home,) = paths_of(rig, "s")
    rig.ssd.fence(home)
    for _ in range(3):
        await rig.append("s", Writer(1).make(SEGMENT_TOKENS), is_durable=True)

    assert paths_of(rig, "s") == [home, 1 - home, 1 - home, 1 - home]


async def stored(rig: MemoryRig, count: int, segment_count: int = 2) -> dict[str, list[Token]]:
    """So many sessions, durable and only on SSD."""
    made = {f"s{i}": Writer(i).make(segment_count * SEGMENT_TOKENS + 10) for i in range(count)}
    for name, tokens in made.items():
        await rig.create(name)
        await rig.append(name, tokens)
        await rig.demote(name)
    return made


def found(rig: MemoryRig) -> dict[str, int]:
    """Tokens of each session as look-ups say."""
    return {
        name: rig.cache.sessions.lookup(rig.tenant, name, FINGERPRINT).token_count for name in rig.names()
    }


async def test_a_lost_path_takes_its_sessions_and_no_other(rig: MemoryRig) -> None:
    """Before anything is read look-ups, lists and histories say which sessions are not there.

    The rest is whole.
    """
    made = await stored(rig, 8)
    on_lost = {name for name in made if set(paths_of(rig, name)) == {1}}
    reads = rig.ssd.counts[Operation.READ]
    rig.ssd.lose(1)
    await rig.cache.devices.look()

    whole = {name: 0 if name in on_lost else len(tokens) for name, tokens in made.items()}
    assert len(on_lost) == 4
    assert found(rig) == whole
    listed = [view async for view in rig.cache.sessions.list(rig.tenant, after="", model_id="")]
    assert {view.name.removeprefix("sessions/"): view.token_count for view in listed} == whole
    reasons = {name: rig.cache.sessions.lookup(rig.tenant, name, FINGERPRINT).reason for name in made}
    assert reasons == {name: "DEVICE_LOST" if name in on_lost else "" for name in made}
    for name in on_lost:
        (happened,) = rig.cache.state.journal.history.of(rig.tenant, name)
        assert (happened.event, happened.detail) == (Event.DEVICE_LOST, "memory/1")
    assert rig.ssd.counts[Operation.READ] == reads
    for name in made.keys() - on_lost:
        assert await rig.read(name) == expected(made[name])
    await rig.check()


@pytest.mark.parametrize(("by", "call"), [(LOOKUP, "lookup"), (LOOKUP, "get"), (READ, "read")])
async def test_an_access_to_a_session_on_a_lost_path_counts_as_lost(
    rig: MemoryRig, by: str, call: str
) -> None:
    """By whatever call: operators see what the loss costs, which is no session without tokens."""
    made = await stored(rig, 4)
    on_lost = [name for name in made if set(paths_of(rig, name)) == {1}]
    rig.ssd.lose(1)
    await rig.cache.devices.look()
    before = dict(rig.cache.state.journal.counts)
    for name in on_lost:
        if call == "lookup":
            rig.cache.sessions.lookup(rig.tenant, name, FINGERPRINT)
        elif call == "get":
            rig.cache.sessions.get(rig.tenant, name)
        else:
            assert await rig.read(name) == expected([])

    grown = {key: n - before.get(key, 0) for key, n in rig.cache.state.journal.counts.items()}
    assert {key: n for key, n in grown.items() if n} == {(by, "device_lost"): len(on_lost)}


async def test_a_look_up_is_honest_before_the_pass_over_all_sessions(rig: MemoryRig) -> None:
    """It asks for itself: a hundred thousand sessions take a while."""
    made = await stored(rig, 2)
    rig.ssd.lose(0)
    rig.cache.devices.note()

    assert sorted(found(rig).values()) == [0, len(made["s0"])]


def lost_by_metrics(rig: MemoryRig) -> int:
    """How many paths are lost, as metrics say."""
    return sum(
        bool(sample.value)
        for sample in read_cache(rig.cache)
        if sample.name == "ctxcache_path_state" and sample.labels[2] == "lost"
    )


def lost_by_status(rig: MemoryRig) -> int:
    """How many paths have a problem, as the status page says."""
    return len(problems_of_paths(rig.cache))


@pytest.mark.parametrize("lost_count", [lost_by_metrics, lost_by_status])
async def test_a_path_that_is_told_to_be_lost_is_lost_to_look_ups(
    rig: MemoryRig, lost_count: Callable[[MemoryRig], int]
) -> None:
    """Metrics and statistics may be read before upkeep comes to a loss, or to a return."""
    made = await stored(rig, 4)
    on_lost = {name for name in made if set(paths_of(rig, name)) == {1}}
    rig.ssd.lose(1)

    assert lost_count(rig) == 1
    assert {name for name, count in found(rig).items() if not count} == on_lost
    rig.ssd.find(1)
    assert lost_count(rig) == 0
    assert all(found(rig).values())


async def test_a_path_that_comes_back_brings_its_tokens(rig: MemoryRig) -> None:
    """At run time and at the next start: what was acknowledged and is still there is not thrown away."""
    made = await stored(rig, 4)
    generations = {name: rig.cache.sessions.get(rig.tenant, name).generation for name in made}
    rig.ssd.lose(0)
    await rig.cache.devices.look()
    lost = found(rig)
    rig.ssd.find(0)
    await rig.cache.devices.look()
    back = found(rig)
    rig.ssd.lose(0)
    await rig.crash()
    lost_again = found(rig)
    await rig.restart()
    rig.ssd.find(0)
    await rig.restart()

    assert lost == lost_again
    assert sorted(lost.values()) == [0, 0, 138, 138]
    assert back == found(rig) == {name: len(tokens) for name, tokens in made.items()}
    for name, tokens in made.items():
        assert await rig.read(name) == expected(tokens)
        # Nothing is known of the run that crashed; the two after it lost the path, and each time it came
        # back.
        changes = rig.cache.sessions.get(rig.tenant, name).generation - generations[name]
        assert changes == (4 if lost[name] == 0 else 0)
    await rig.check()


async def test_a_writer_that_goes_on_gives_up_what_is_withheld(rig: MemoryRig) -> None:
    """Its tokens stand where the lost ones stood: those never come back behind them."""
    made = await stored(rig, 2)
    rig.ssd.lose(0)
    await rig.cache.devices.look()
    (name,) = (name for name, count in found(rig).items() if count == 0)
    tokens = Writer(9).make(SEGMENT_TOKENS)
    await rig.append(name, tokens, is_durable=True)
    rig.ssd.find(0)
    await rig.cache.devices.look()
    assert await rig.read(name) == expected(tokens)
    await rig.crash()

    assert await rig.read(name) == expected(tokens)
    assert rig.token_count(next(iter(made.keys() - {name}))) == 138
    assert rig.cache.ledger.lost.withheld == {}
    await rig.check()


async def test_what_memory_has_of_a_lost_path_is_written_elsewhere(rig: MemoryRig) -> None:
    """It is served, counts as durable only when another path has it, and survives a crash from then on."""
    tokens = Writer(1).make(2 * SEGMENT_TOKENS)
    await rig.create("s")
    await rig.append("s", tokens, is_durable=True)
    (home,) = set(paths_of(rig, "s"))
    rig.ssd.lose(home)
    rig.cache.devices.note()
    before = rig.cache.sessions.get(rig.tenant, "s")
    await rig.cache.devices.look()
    after = rig.cache.sessions.get(rig.tenant, "s")
    await rig.check()
    await rig.crash()

    assert (before.token_count, before.durable_token_count) == (128, 0)
    assert (after.token_count, after.durable_token_count) == (128, 128)
    assert paths_of(rig, "s") == [1 - home, 1 - home]
    assert await rig.read("s") == expected(tokens)
    await rig.check()


async def test_places_on_a_lost_path_stay_taken_when_the_new_ones_are_not_recorded(rig: MemoryRig) -> None:
    """The old records may be read after the next start.

    Until they are known to be gone they name these places.
    """
    await rig.create("s")
    await rig.append("s", Writer(1).make(2 * SEGMENT_TOKENS), is_durable=True)
    named = {segment.slot for segment in rig.metadata.segments()}
    (home,) = {slot.path_index for slot in named}
    rig.ssd.lose(home)
    rig.metadata.fail("the log is gone")
    with pytest.raises(TierFailure):
        await rig.cache.devices.look()

    assert paths_of(rig, "s") == [1 - home, 1 - home]
    assert rig.cache.ledger.below.stranded.keys() == named
    await rig.check()


async def test_a_session_is_cut_where_its_first_lost_segment_begins(rig: MemoryRig) -> None:
    """Tokens before it are served; those behind it wait for the device, in forks as well."""
    tokens = Writer(1).make(3 * SEGMENT_TOKENS)
    await rig.create("s")
    await rig.append("s", tokens[:64], is_durable=True)
    (home,) = paths_of(rig, "s")
    rig.ssd.fence(home)
    await rig.append("s", tokens[64:], is_durable=True)
    await rig.fork("s", "f", 100)
    await rig.demote("s")
    rig.ssd.lose(1 - home)
    await rig.cache.devices.look()
    assert found(rig) == {"s": 64, "f": 64}
    assert await rig.read("f") == expected(tokens[:64])
    await rig.fork("f", "g")
    rig.ssd.find(1 - home)
    await rig.cache.devices.look()

    assert found(rig) == {"s": 192, "f": 100, "g": 64}
    assert await rig.read("f") == expected(tokens[:100])
    await rig.check()


async def test_a_path_whose_file_is_new_costs_its_sessions_at_once(rig: MemoryRig) -> None:
    """A disk that was replaced on purpose is empty.

    No session says that it has what was there, and its places are free.
    """
    made = await stored(rig, 4)
    on_lost = {name for name in made if set(paths_of(rig, name)) == {1}}
    await rig.close()
    rig.ssd.emptied = {1}
    await rig.open()
    counts = found(rig)
    await rig.crash()

    assert counts == found(rig) == {name: 0 if name in on_lost else 138 for name in made}
    assert rig.cache.ledger.below.used_bytes_by_path[1] == 0
    await rig.check()
