"""Context windows: what falls out, what that leaves of the store's state, and of its hits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playing import LOAD, ROOMY, played, turn

from ctxcache.simulate.load import MODELS, Overflow
from ctxcache.simulate.replay import dropped_tokens
from ctxcache.simulate.trace import TraceTurn

WINDOW = replace(ROOMY, context_tokens=1000)
VOID = replace(WINDOW, overflow=Overflow.INVALIDATE)


@pytest.mark.parametrize(
    ("token_count", "dropped"), [(0, 0), (1000, 0), (1001, 500), (1500, 500), (1501, 1000), (4000, 3000)]
)
def test_halves_of_the_window_go_as_few_as_will_do(token_count: int, dropped: int) -> None:
    """A window of 1,000 tokens loses 500 at a time."""
    assert dropped_tokens(token_count, 1000) == dropped


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_what_is_left_fits_and_is_more_than_half(token_count: int, context_tokens: int) -> None:
    """Or everything, where nothing had to go."""
    left = token_count - dropped_tokens(token_count, context_tokens)

    assert 0 <= left <= context_tokens
    assert left == token_count or left > context_tokens - (context_tokens + 1) // 2 - 1


def test_state_that_overflows_stays_valid_or_is_void() -> None:
    """900 tokens held, 200 come: 400 are left and hit; without decoupling the prompt of 600 is computed."""
    turns = [turn("a", 0, 900), turn("a", 1, 200), turn("a", 2, 100)]
    kept, void = played(WINDOW, turns), played(VOID, turns)

    assert (kept.overflows, void.overflows) == (1, 1)
    assert (kept.dram_hits, kept.hit_tokens, kept.computed_tokens) == (2, 400 + 600, 900 + 200 + 100)
    assert (void.dram_hits, void.hit_tokens, void.void_turns) == (1, 600, 1)
    assert void.computed_tokens == 900 + 600 + 100
    assert kept.prompt_tokens == void.prompt_tokens == 900 + 600 + 700


def test_an_answer_that_overflows_leaves_the_next_turn_nothing() -> None:
    """The window is passed while decoding: 1,100 tokens, of which 600 are left, or void."""
    turns = [turn("a", 0, 900, 200), turn("a", 1, 100)]
    kept, void = played(WINDOW, turns), played(VOID, turns)

    assert (kept.dram_hits, kept.hit_tokens, kept.computed_tokens) == (1, 600, 900 + 100)
    assert (void.dram_hits, void.void_turns, void.computed_tokens) == (0, 1, 900 + 700)


def test_a_history_of_the_trace_counts_what_fell_out() -> None:
    """A trace that tells untruncated histories is told the same figures."""
    turns = [turn("a", 0, 900), turn("a", 1, 200), turn("a", 2, 100)]
    told = [each._replace(history_tokens=held) for each, held in zip(turns, (0, 900, 1100), strict=True)]

    assert played(WINDOW, told).figures() == played(WINDOW, turns).figures()


def test_an_input_longer_than_the_window_keeps_its_end() -> None:
    """1,600 tokens into 1,000: all of the history and 1,000 of the prompt's 2,000 tokens are dropped."""
    tally = played(WINDOW, [turn("a", 0, 400), turn("a", 1, 1600)])

    assert (tally.prompt_tokens, tally.computed_tokens, tally.hit_tokens) == (400 + 1000, 400 + 1000, 0)


def test_what_is_left_on_ssd_is_not_written_again() -> None:
    """SSD has 4,000 of 9,000 B left; the 2,000 that come are all that is written."""
    load = replace(WINDOW, dram_bytes=0)
    tally = played(load, [turn("a", 0, 900), turn("a", 1, 200)])

    assert tally.ssd_written_bytes == 9000 + 2000


TURNS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900), st.integers(0, 900)), max_size=40)


@given(TURNS.map(lambda rows: [turn(name, i, new, out) for i, (name, new, out) in enumerate(rows)]))
def test_decoupled_never_hits_less(turns: list[TraceTurn]) -> None:
    """Where there is room for all: state that stays valid hits at least whenever void state would have."""
    kept, void = played(WINDOW, turns), played(VOID, turns)

    assert kept.dram_hits >= void.dram_hits
    assert kept.computed_tokens <= void.computed_tokens
    assert kept.prompt_tokens == void.prompt_tokens
    assert kept.void_turns == 0
    assert kept.dram_hits == kept.later_turns


def test_models_have_the_papers_bytes() -> None:
    """CachedAttention, section 4.2: 0.78, 2.5, 0.31 and 0.12 MB a token."""
    mib = {name: round(model.token_bytes / 2**20, 2) for name, model in MODELS.items()}

    assert mib == {
        "llama-13b": 0.78, "llama-65b": 2.5, "llama-70b": 0.31, "falcon-40b": 0.12, "mistral-7b": 0.12,
    }  # fmt: skip
    assert MODELS["llama-65b"].served(LOAD).context_tokens == 2048
