"""Prompts without a name: what one host has of them comes to another. Real stores, and one bucket."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctxcache.client import OPAQUE, TOKENS, Content
from ctxcache.client.types import PrefixMatch
from ctxcache.errors import InvalidArgument
from ctxcache.fleet.borrowing import ASKED_INTERVAL_S
from tests.fleet.stores import Stores, rows_of
from tests.server_process import ServerProcess

# So slow an engine that it is worth it to wait for whatever comes.
SLOW = ("--prefill-tokens-per-s", "500")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Two stores whose bucket knows no prefixes: a router tells."""
    with Stores(tmp_path, 2, *SLOW, "--fleet-prefixes", "false") as both:
        yield both


@pytest.fixture
def knowing(tmp_path: Path) -> Iterator[Stores]:
    """Two stores whose bucket knows prefixes."""
    with Stores(tmp_path, 2, *SLOW) as both:
        yield both


def prompt(text: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a prompt, and the rows that an engine computes of them."""
    return rows_of(text, 0, count)


def joined(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One prompt of several, one behind the other."""
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([rows for _, rows in parts])


def save(stores: Stores, number: int, what: tuple[np.ndarray, np.ndarray], **made: object) -> str:
    """An engine's request without a name: its rows go into a session that the store names."""
    session = stores.clients[number].sessions.create(stores.models[number], **made)  # type: ignore[arg-type]
    session.append({TOKENS: what[0], OPAQUE: what[1]})
    return session.info.name


def match(stores: Stores, number: int, tokens: np.ndarray, **asked: object) -> PrefixMatch:
    """What a store has of a prompt."""
    return stores.clients[number].prefixes.match(stores.models[number], tokens, **asked)  # type: ignore[arg-type]


def brought(stores: Stores, number: int, tokens: np.ndarray, count: int, **asked: object) -> None:
    """Ask for a prompt until so much of it is there: on a busy machine a store may answer too late once."""
    deadline = time.monotonic() + 30
    while (found := match(stores, number, tokens, **asked).token_count) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def compare(
    stores: Stores, number: int, what: tuple[np.ndarray, np.ndarray], count: int, **made: object
) -> None:
    """A new session begins with what the store has of a prompt, and every row is compared."""
    session = stores.clients[number].sessions.create(stores.models[number], **made)  # type: ignore[arg-type]
    adopted = session.adopt(what[0])
    assert adopted.token_count == count
    with session.read() as read:
        assert np.array_equal(read.array(TOKENS).view(np.int32).reshape(-1), what[0][:count])
        assert np.array_equal(read.array(OPAQUE), what[1][:count])


def target(process: ServerProcess) -> str:
    """Where a router finds a store."""
    return process.target


def test_a_router_says_where_a_prompt_is(stores: Stores) -> None:
    """All whole runs of 64 tokens come, and every row is right; without a word nothing comes."""
    asked = prompt("report", 3000)
    save(stores, 0, asked)
    assert match(stores, 1, asked[0]).token_count == 0
    brought(stores, 1, asked[0], 2944, source=target(stores.processes[0]))
    compare(stores, 1, asked, 2944)
    view = stores.clients[1].admin.fleet()
    assert (view.borrowed_prefix_count, view.borrowed_token_count) == (1, 2944)
    assert stores.clients[0].admin.fleet().lent_prefix_count == 1


def test_only_what_is_lacking_comes(stores: Stores) -> None:
    """The system prompt is here; the conversation behind it comes."""
    system = prompt("system", 1280)
    asked = joined(system, prompt("talk", 1300))
    save(stores, 0, asked)
    save(stores, 1, system)
    brought(stores, 1, asked[0], 2560, source=target(stores.processes[0]))
    assert stores.clients[1].admin.fleet().borrowed_token_count == 1280
    compare(stores, 1, asked, 2560)


def test_what_came_stays_when_its_host_is_gone(stores: Stores) -> None:
    """The copy is this host's own: nobody asks for it again."""
    asked = prompt("report", 2048)
    save(stores, 0, asked)
    source = target(stores.processes[0])
    brought(stores, 1, asked[0], 2048, source=source)
    stores.processes[0].kill9()
    assert match(stores, 1, asked[0], source=source).token_count == 2048
    compare(stores, 1, asked, 2048)
    stores.processes[1].terminate()
    stores.restart(1)
    compare(stores, 1, asked, 2048)


def test_a_store_is_found_by_the_host_of_an_engine_beside_it(stores: Stores) -> None:
    """Routers know engines, and ports of theirs."""
    asked = prompt("report", 2048)
    save(stores, 0, asked)
    assert match(stores, 0, asked[0], engine_host="10.9.8.7").token_count == 2048
    records = Path(stores.bucket.removeprefix("file://")) / "v1/n"
    deadline = time.monotonic() + 20
    while not any("10.9.8.7" in record.read_text() for record in records.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert match(stores, 1, asked[0], source="10.9.8.8:5710").token_count == 0
    stores.processes[1].terminate()
    stores.restart(1)
    brought(stores, 1, asked[0], 2048, source="10.9.8.7:5710")


@pytest.mark.parametrize("source", ["10.1.2.3:7420", "nowhere", "[::1]:1", "127.0.0.1", "x" * 255, "\x00"])
def test_a_host_that_no_store_has_is_not_asked(stores: Stores, source: str) -> None:
    """Also not the address that several stores have: a caller must not choose whom a store calls."""
    asked = prompt("report", 2048)
    save(stores, 0, asked)
    assert match(stores, 1, asked[0], source=source).token_count == 0
    assert stores.clients[1].admin.fleet().borrowed_prefix_count == 0


def test_a_name_that_is_too_long_is_refused(stores: Stores) -> None:
    """By its field."""
    with pytest.raises(InvalidArgument, match="source"):
        match(stores, 1, prompt("report", 64)[0], source="x" * 256)


def test_a_host_that_hangs_costs_no_more_than_computing(stores: Stores) -> None:
    """The prompt is computed, and the next request does not wait again."""
    asked = prompt("report", 2048)
    save(stores, 0, asked)
    source = target(stores.processes[0])
    # Its record is read while it is there.
    assert match(stores, 1, prompt("other", 2048)[0], source=source).token_count == 0
    with stores.frozen(0):
        assert match(stores, 1, asked[0], source=source).token_count == 0
    assert match(stores, 1, asked[0]).token_count == 0


def test_another_salt_is_another_prompt(stores: Stores) -> None:
    """What one user has is not found by another; with the salt all comes."""
    asked = prompt("report", 2048)
    save(stores, 0, asked, salt=b"user 17")
    source = target(stores.processes[0])
    assert match(stores, 1, asked[0], source=source).token_count == 0
    assert match(stores, 1, asked[0], source=source, salt=b"user 18").token_count == 0
    brought(stores, 1, asked[0], 2048, source=source, salt=b"user 17")
    compare(stores, 1, asked, 2048, salt=b"user 17")


def test_contents_come_with_their_tokens(stores: Stores) -> None:
    """A picture behind the ids is part of the prompt, here and there."""
    tokens, rows = prompt("picture", 2048)
    pictures = {name: [Content(100, 676, bytes([name]) * 32)] for name in (1, 2)}
    session = stores.clients[0].sessions.create(stores.models[0])
    session.append({TOKENS: tokens, OPAQUE: rows}, contents=pictures[1])
    source = target(stores.processes[0])
    # Before the picture both prompts are one.
    brought(stores, 1, tokens, 64, source=source, contents=pictures[2])
    brought(stores, 1, tokens, 2048, source=source, contents=pictures[1])


def test_a_prefix_outlives_the_session_that_had_it(stores: Stores) -> None:
    """A deletion at its host takes nothing from what came; what comes later is not there."""
    asked = prompt("report", 2048)
    name = save(stores, 0, asked)
    brought(stores, 1, asked[0], 2048, source=target(stores.processes[0]))
    stores.clients[0].sessions.open(name, stores.models[0]).delete()
    compare(stores, 1, asked, 2048)


def test_many_requests_for_one_prompt_bring_it_once(stores: Stores) -> None:
    """They wait for the same rows."""
    asked = prompt("report", 4096)
    save(stores, 0, asked)
    source = target(stores.processes[0])
    calls = [
        stores.clients[1].prefixes.match_async(stores.models[1], asked[0], source=source) for _ in range(8)
    ]
    assert len({call.result(20).token_count for call in calls}) == 1
    brought(stores, 1, asked[0], 4096, source=source)
    assert stores.clients[1].admin.fleet().borrowed_prefix_count == 1


def test_what_is_sooner_computed_does_not_come(tmp_path: Path) -> None:
    """An engine that computes a million tokens a second needs no other host."""
    with Stores(tmp_path, 2, "--prefill-tokens-per-s", "1000000000") as stores:
        asked = prompt("report", 2048)
        save(stores, 0, asked)
        assert match(stores, 1, asked[0], source=target(stores.processes[0])).token_count == 0


# -- the bucket knows ------------------------------------------------------------------------------


def await_told(stores: Stores, number: int, count: int) -> None:
    """Wait until the bucket knows so many prefixes of a store."""
    deadline = time.monotonic() + 20
    while stores.clients[number].admin.fleet().told_prefix_count != count:
        assert time.monotonic() < deadline, stores.clients[number].admin.fleet()
        time.sleep(0.05)


def test_the_bucket_knows_who_has_a_prompt(knowing: Stores) -> None:
    """No router says anything, and the prompt goes on otherwise behind what both have."""
    first, second = (joined(prompt("tools", 2500), prompt(f"talk {talk}", 600)) for talk in (1, 2))
    save(knowing, 0, first)
    await_told(knowing, 0, 2)
    brought(knowing, 1, second[0], 2496)
    compare(knowing, 1, second, 2496)


def test_a_prompt_that_is_short_or_mostly_here_asks_nobody(knowing: Stores) -> None:
    """The bucket is not read."""
    short, long = prompt("short", 2000), prompt("long", 3000)
    for which in (short, long):
        save(knowing, 0, which)
    save(knowing, 1, (long[0][:1000], long[1][:1000]))
    await_told(knowing, 0, 3)
    before = knowing.clients[1].admin.fleet().head_read_count
    assert match(knowing, 1, short[0]).token_count == 0
    assert match(knowing, 1, short[0], source="a host that no store has").token_count == 0
    assert match(knowing, 1, long[0]).token_count == 960
    assert knowing.clients[1].admin.fleet().head_read_count == before


def test_a_holder_that_has_it_no_more_gives_its_place_to_another(knowing: Stores) -> None:
    """Whoever computes it anew says so, and is found by the next one."""
    asked = prompt("report", 2100)
    name = save(knowing, 0, asked)
    await_told(knowing, 0, 2)
    knowing.clients[0].sessions.open(name, knowing.models[0]).delete()
    deadline, unheard = time.monotonic() + 30, -1
    # What was not heard of in time is asked once more, some seconds later.
    while unheard != (unheard := knowing.clients[1].admin.fleet().no_answer_count):
        assert time.monotonic() < deadline
        assert match(knowing, 1, asked[0]).token_count == 0
        time.sleep(ASKED_INTERVAL_S)
    save(knowing, 1, asked)
    # The longer of the two was asked for; the shorter one stays as it is.
    await_told(knowing, 1, 1)
    brought(knowing, 0, asked[0], 2048)


def test_a_dead_holder_is_computed(knowing: Stores) -> None:
    """At once, and nothing wrong is served."""
    asked = prompt("report", 2100)
    save(knowing, 0, asked)
    await_told(knowing, 0, 2)
    knowing.processes[0].kill9()
    assert match(knowing, 1, asked[0]).token_count == 0
    save(knowing, 1, asked)
    compare(knowing, 1, asked, 2048)


def test_a_session_that_begins_with_a_prompt_brings_it(knowing: Stores) -> None:
    """Whoever looks for nothing before it begins."""
    asked = prompt("report", 2100)
    save(knowing, 0, asked)
    await_told(knowing, 0, 2)
    deadline = time.monotonic() + 30
    while not knowing.clients[1].sessions.create(knowing.models[1]).adopt(asked[0]).token_count:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    compare(knowing, 1, asked, 2048)
