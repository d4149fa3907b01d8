"""The study of edited conversations: replies are compared, and tokens by who waits for them."""

import random

import pytest
from tiny_models import VOCABULARY_SIZE, build

from lab.studies.edits import KINDS, UNEDITED, WAYS, Call, Sizes, studied, summary, table

SMALL = Sizes(system=70, message=8, thought=20, call=6, result=40, answer=40, generated=3)


@pytest.fixture(scope="module")
def calls() -> list[tuple[Call, int]]:
    """A conversation of each sort, of three turns, by a tiny model."""
    draw = random.Random(1)
    text = draw.choices(range(3, VOCABULARY_SIZE), k=4000)
    return list(
        studied(
            build("llama"), text, sizes=SMALL, kinds=KINDS, conversations=1, turns=3, seed=1,
            pauses_s=[60.0], store_bytes=64 << 20,
        )
    )  # fmt: skip


def test_every_way_says_the_same(calls: list[tuple[Call, int]]) -> None:
    """Each call of each way, and the conversation that nobody edits has nothing that differs."""
    assert all(call.is_right for call, _ in calls)
    for way in (*WAYS, UNEDITED):
        assert len([call for call, _ in calls if call.way == way]) == 3 * (1 + 2 + 2)
    assert not sum(call.differing_tokens for call, _ in calls if call.way == UNEDITED)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_ahead_is_not_computed_while_a_user_waits(
    calls: list[tuple[Call, int]], kind: str
) -> None:
    """`today` computes all that differs, `ahead` next to none of it."""
    lines = {way: summary(calls, kind, way) for way in (*WAYS, UNEDITED)}
    waited = {way: lines[way]["history_tokens_computed_in_a_user_s_time"] for way in lines}
    changed = lines["today"]["changed_tokens"]
    assert isinstance(changed, int)
    assert changed > 0
    assert isinstance(waited["today"], int)
    assert waited["today"] >= changed
    assert isinstance(waited["ahead"], int)
    assert waited["ahead"] < 0.05 * changed
    assert all(line["are_replies_right"] for line in lines.values())
    assert table(list(lines.values())).count("\n") == 5
