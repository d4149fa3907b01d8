"""Placement by blocks: what is found, what leaves, and that holders under LRU are block LRU."""

import random
from dataclasses import replace

import pytest

from ctxcache.core.placement.policy import Capacities, Facts
from ctxcache.simulate.blocks import BlockReader, BlockReplay, HeldBlocks
from ctxcache.simulate.load import Load, TraceHint
from ctxcache.simulate.study import BELADY, Capacity, look, study
from ctxcache.simulate.trace import TraceTurn
from lab.placement.policies import POLICIES

BLOCK_TOKENS = 4
LOAD = Load(token_bytes=1, dram_bytes=0, ssd_bytes=160)
BLOCK_LIMIT = 40


def prompt(session: str, arrival_s: float, number: int, *names: str) -> TraceTurn:
    """A turn whose prompt is the named blocks and nothing else."""
    blocks = tuple(name.encode() for name in names)
    history_tokens = BLOCK_TOKENS * (len(blocks) - 1)
    return TraceTurn(session.encode(), arrival_s, BLOCK_TOKENS, 0, history_tokens, number, blocks)


def tree_of_prompts(count: int, seed: int) -> list[TraceTurn]:
    """Sessions of up to ten blocks that begin with one of three system prompts and come back at times."""
    chance = random.Random(seed)
    sessions: list[list[str]] = []
    turns = []
    for now in range(count):
        known = chance.random() < 0.6 and bool(sessions)
        number = chance.randrange(max(len(sessions) - 30, 0), len(sessions)) if known else len(sessions)
        if not known:
            common = chance.randrange(3)
            sessions.append([f"system {common}.{each}" for each in range(common + 1)])
        blocks = sessions[number]
        if len(blocks) < 10:
            blocks.append(f"{number}.{len(blocks)}")
        turns.append(prompt(f"session {number}", float(now), len(blocks), *blocks))
    return turns


def replayed(load: Load, turns: list[TraceTurn], name: str, *, ranks_holders: bool) -> int:
    """How many tokens of all prompts were found."""
    policy = POLICIES[name](Capacities(load.dram_bytes, load.ssd_bytes))
    policy.ranks_holders = ranks_holders
    tally = BlockReplay(load, policy, BLOCK_TOKENS, next_arrivals_s=look(turns)).run(turns)
    return tally.prompt_tokens - tally.computed_tokens


def slow_block_lru(turns: list[TraceTurn]) -> int:
    """The same by the last use of each block: a parent is used after its child."""
    used: dict[bytes, tuple[float, int]] = {}
    found_tokens = 0
    for turn in turns:
        blocks = turn.blocks or ()
        depth = 0
        while depth < len(blocks) and blocks[depth] in used:
            depth += 1
        found_tokens += depth * BLOCK_TOKENS
        for number, block in enumerate(blocks):
            used[block] = (turn.arrival_s, -number)
        while len(used) > BLOCK_LIMIT:
            del used[min(used, key=lambda block: used[block])]
    return found_tokens


@pytest.mark.parametrize("seed", range(5))
def test_block_lru_of_blocks_and_of_holders_find_what_a_slow_one_finds(seed: int) -> None:
    """A block is worth what the best of its holders is: under LRU its own last use."""
    turns = tree_of_prompts(800, seed)
    expected = slow_block_lru(turns)

    assert expected > 800
    assert replayed(LOAD, turns, "lru", ranks_holders=False) == expected
    assert replayed(LOAD, turns, "lru", ranks_holders=True) == expected


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ranks_holders", [True, False], ids=["holders", "blocks"])
def test_no_policy_holds_more_than_there_is_room_for(name: str, *, ranks_holders: bool) -> None:
    """Room for all finds all that came before, whatever the policy; less room finds less."""
    turns = tree_of_prompts(400, 9)
    seen: set[bytes] = set()
    most = 0
    for turn in turns:
        most += BLOCK_TOKENS * sum(block in seen for block in turn.blocks or ())
        seen.update(turn.blocks or ())
    roomy = replace(LOAD, ssd_bytes=len(seen) * BLOCK_TOKENS)

    assert replayed(roomy, turns, name, ranks_holders=ranks_holders) == most
    assert 0 < replayed(LOAD, turns, name, ranks_holders=ranks_holders) < most


def test_a_common_prompt_is_held_once() -> None:
    """Ten sessions of nine common blocks and one of their own need room for nineteen."""
    common = [f"common {number}" for number in range(9)]
    turns = [prompt(f"{n}", float(n), 1, *common, f"own {n}") for n in range(10)]
    turns += [prompt(f"{n}", float(10 + n), 2, *common, f"own {n}") for n in range(10)]
    load = replace(LOAD, ssd_bytes=19 * BLOCK_TOKENS)

    assert replayed(load, turns, "value", ranks_holders=True) == BLOCK_TOKENS * (9 * 9 + 10 * 10)


def test_sessions_that_are_said_to_end_make_room() -> None:
    """One of two sessions fits; the one that does not return leaves first, its common prompt does not."""
    turns = [
        prompt("returns", 0.0, 1, "common", *(f"a{n}" for n in range(20))),
        prompt("ends", 1.0, 1, "common", *(f"b{n}" for n in range(38))),
        prompt("returns", 900.0, 2, "common", *(f"a{n}" for n in range(20))),
    ]
    hinted = replace(LOAD, hints=frozenset(TraceHint))

    assert replayed(hinted, turns, "value", ranks_holders=True) == BLOCK_TOKENS * (1 + 21)
    assert replayed(hinted, turns, "lru", ranks_holders=True) < BLOCK_TOKENS * (1 + 21)


def test_a_session_that_leaves_takes_no_prefix_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both end in one block: the prefix is used on, also where a longer one is found."""
    policy = POLICIES["lru"](Capacities(0, 160))
    heard, idle = list[bytes](), policy.idle

    def listen(uid: bytes, facts: Facts, now_s: float) -> None:
        heard.append(uid)
        idle(uid, facts, now_s)

    monkeypatch.setattr(policy, "idle", listen)
    store, reader = HeldBlocks(policy, BLOCK_TOKENS, 1, BLOCK_LIMIT), BlockReader(BLOCK_TOKENS)
    # The fifth has no room, and the first two leave: each holds the common block alone.
    for number in range(6):
        own = ["behind", *(f"{number}.{each}" for each in range(19))] if number > 1 else []
        request = reader.request(prompt(f"{number}", float(number), 1, "common", *own))
        store.use(request, store.found(request.asked), float(number))
        store.settle()

    assert heard.count(b"prefix common") == 5, "of all but the first"


def documents_asked_of(count: int, seed: int) -> list[TraceTurn]:
    """Requests of one turn, each for one of 60 documents of four blocks, the first the likeliest."""
    chance = random.Random(seed)
    turns = []
    for now in range(count):
        name = min(int(chance.paretovariate(0.7)), 60)
        blocks = [f"document {name}.{each}" for each in range(4)]
        turns.append(prompt(f"request {now}", 10.0 * now, 1, *blocks, f"own {now}"))
    return turns


def test_a_document_that_is_given_up_between_its_requests_is_learned_all_the_same() -> None:
    """There is room for ten of sixty: the popular ones stay, and not those that came last."""
    turns = documents_asked_of(3000, 4)
    value, lru = (replayed(LOAD, turns, name, ranks_holders=True) for name in ("value", "lru"))

    assert value > 1.1 * lru


def test_truthful_ends_cost_no_hits_where_sessions_share_prefixes() -> None:
    """Each session ends with its first turn: what it leaves behind is found by others as before."""
    turns = documents_asked_of(3000, 5)
    told = replace(LOAD, hints=frozenset({TraceHint.ENDS}))
    found, untold = (replayed(load, turns, "value", ranks_holders=True) for load in (told, LOAD))

    assert found > 0.998 * untold


def slow_min(turns: list[TraceTurn]) -> int:
    """The most that any order of blocks finds: of all of them those stay that are asked for soonest."""
    held: set[bytes] = set()
    found_tokens = 0
    for number, turn in enumerate(turns):
        blocks = turn.blocks or ()
        depth = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
        found_tokens += depth * BLOCK_TOKENS
        held.update(blocks)

        def next_use(block: bytes, number: int = number) -> tuple[float, int]:
            for later in range(number + 1, len(turns)):
                if block in (turns[later].blocks or ()):
                    return later, (turns[later].blocks or ()).index(block)
            return float("inf"), 0

        held = set(sorted(held, key=next_use)[:BLOCK_LIMIT])
    return found_tokens


@pytest.mark.parametrize("seed", range(3))
def test_belady_by_blocks_is_the_bound(seed: int) -> None:
    """It may refuse a block, its own turn's too: it finds what a slow one does, and no policy finds more."""
    turns = tree_of_prompts(250, seed)
    load = replace(LOAD, dram_bytes=0)
    (bound,) = study(turns, load, [BELADY], [Capacity()], step=lambda *_: None, block_tokens=BLOCK_TOKENS)
    found = bound.tally.prompt_tokens - bound.tally.computed_tokens

    assert found == slow_min(turns)
    for name in POLICIES:
        assert replayed(LOAD, turns, name, ranks_holders=True) <= found


def test_the_footprint_by_blocks_is_of_what_is_asked_for_again() -> None:
    """Sessions of one turn that share a prompt need room for that: none of them ever returns."""
    common = [f"common {number}" for number in range(9)]
    turns = [prompt(f"{n}", float(n), 1, *common, f"own {n}") for n in range(10)]
    (outcome,) = study(
        turns, LOAD, ["value"], [Capacity(1.0)], step=lambda *_: None, block_tokens=BLOCK_TOKENS
    )

    assert outcome.load.dram_bytes + outcome.load.ssd_bytes == 9 * BLOCK_TOKENS
    assert outcome.tally.prompt_tokens - outcome.tally.computed_tokens == 9 * 9 * BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(3))
def test_a_space_of_blocks_under_lru_is_block_lru(seed: int) -> None:
    """Whatever memory has: SSD has it too, and of what continues a block the last leaves first."""
    turns = tree_of_prompts(800, seed)
    for memory_share in (0.1, 0.5):
        load = replace(LOAD, dram_bytes=int(160 * memory_share), ssd_bytes=160 - int(160 * memory_share))
        policy = POLICIES["lru"](Capacities(load.dram_bytes, load.ssd_bytes))
        tally = BlockReplay(load, policy, BLOCK_TOKENS, is_space=True).run(turns)

        assert tally.prompt_tokens - tally.computed_tokens == slow_block_lru(turns)


def test_a_block_is_written_each_time_that_it_comes_to_be_held() -> None:
    """As many as a slow block LRU takes in, by blocks and by holders."""
    turns, load = tree_of_prompts(800, 1), LOAD
    used: dict[bytes, tuple[float, int]] = {}
    expected = 0
    for turn in turns:
        blocks = turn.blocks or ()
        expected += sum(block not in used for block in blocks)
        used |= {block: (turn.arrival_s, -number) for number, block in enumerate(blocks)}
        for block in sorted(used, key=lambda block: used[block])[: max(len(used) - BLOCK_LIMIT, 0)]:
            del used[block]

    for ranks_holders in (True, False):
        policy = POLICIES["lru"](Capacities(load.dram_bytes, load.ssd_bytes))
        policy.ranks_holders = ranks_holders
        tally = BlockReplay(load, policy, BLOCK_TOKENS).run(turns)
        assert tally.ssd_written_bytes == expected * BLOCK_TOKENS * load.token_bytes
