"""Whether a prefix is worth its way: by times that are told."""

import pytest

from ctxcache.core.fleet.worth import LEAST_TOKENS, TRY_AGAIN, Worth, boundaries

KIB = 1024


@pytest.mark.parametrize(
    ("token_count", "lengths"),
    [(0, []), (1023, []), (1024, [1024]), (4095, [1024, 2048]), (4096, [1024, 2048, 4096])],
)
def test_lengths_double(token_count: int, lengths: list[int]) -> None:
    """Two prompts of any lengths have the boundaries below their common part in common."""
    assert boundaries(token_count) == lengths


def test_nobody_waits_longer_than_computing_takes() -> None:
    """7,000 tokens take a second to compute: so long a prefix may take to come, and no more."""
    worth = Worth(7000)
    assert worth.patience_s(7000, KIB) == 1.0
    assert worth.patience_s(LEAST_TOKENS - 1, KIB) == 0.0


def test_what_comes_later_than_it_is_computed_is_not_asked_for() -> None:
    """128 KiB a token at 100 MB/s are 763 tokens a second: slower engines wait for them, others do not."""
    slow, fast = Worth(500, bytes_per_s=100e6), Worth(7000, bytes_per_s=100e6)
    assert slow.patience_s(2000, 128 * KIB) == 4.0
    assert fast.patience_s(2000, 128 * KIB) == 0.0


def test_what_was_measured_is_believed_and_tried_again() -> None:
    """A network that was slow once is asked now and then, and used again when it is fast."""
    worth = Worth(7000)
    for _ in range(30):
        worth.came(1 << 20, 1.0)
    asked = [bool(worth.patience_s(2000, 16 * KIB)) for _ in range(10 * TRY_AGAIN)]
    assert sum(asked) == 10
    for _ in range(30):
        worth.came(1 << 30, 1.0)
    assert all(worth.patience_s(2000, 16 * KIB) for _ in range(10))


def test_a_bucket_that_never_knows_is_seldom_asked() -> None:
    """Prompts that nobody else has cost a look now and then, and not each."""
    worth = Worth(7000)
    assert worth.is_worth_looking(4096, 0, KIB)
    for _ in range(40):
        worth.looked(0.05, is_known=False)
    # As a store asks: first whether rows would come in time, which they would, and then whether to look.
    asked = [
        worth.patience_s(4096, KIB) > 0 and worth.is_worth_looking(4096, 0, KIB)
        for _ in range(10 * TRY_AGAIN)
    ]
    assert sum(asked) == 10
    for _ in range(40):
        worth.looked(0.05, is_known=True)
    assert worth.is_worth_looking(4096, 0, KIB)


@pytest.mark.parametrize(("asked", "found"), [(2047, 0), (4096, 1024), (4096, 4096)])
def test_short_prompts_and_those_that_are_here_ask_nobody(asked: int, found: int) -> None:
    """However fast the bucket."""
    assert not Worth(1, look_s=0.0).is_worth_looking(asked, found, 1)
