"""The study of shadow decoding: its second row has no thought, and its ratios are those that it says."""

import random

from tiny_models import VOCABULARY_SIZE, build

from lab.studies.shadow import CHUNK_TOKENS, Figures, Round, check, figures, measured, table


def test_the_second_row_is_the_history_without_the_thought() -> None:
    """Row by row what a pass over the answer leaves, but for the order of sums."""
    ids = random.Random(1).choices(range(3, VOCABULARY_SIZE), k=90)
    model = build("llama")
    assert check(model, ids[:40], ids[40:60], ids[60:80]) < 1e-4
    assert check(model, ids[:40], [], ids[60:80]) < 1e-4
    one = measured(model, ids[:40], ids[40:60], ids[60 : 60 + CHUNK_TOKENS])
    assert (one.history_tokens, one.answer_tokens) == (40, CHUNK_TOKENS)
    assert min(one.plain_s, one.shadow_s, one.behind_s, one.chunks_s) > 0


def test_ratios_are_those_of_medians() -> None:
    """Over the reply that is decoded alone."""
    rounds = [Round(256, 10, plain, 1.5, 0.2, 1.3) for plain in (1.0, 9.0, 0.5)]
    assert figures(rounds) == Figures(256, 1.5, 1.2, 1.3)
    assert "| 256 | 1.500 | 1.200 | 1.300 |" in table([figures(rounds)])
