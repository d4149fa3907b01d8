"""Shares whose size changes while they are in use."""

import pytest

from ctxcache.core.placement.shares import Share, Shares


def test_sizes_change_and_whose_they_are_does_not() -> None:
    """In the order that there was; whoever looks sees it."""
    shares = Shares({"a": Share(0.2), "b": Share(0.1)})
    shares.become({"b": Share(0.3), "a": Share(0.5)})
    assert list(shares.by_tenant) == ["a", "b"]
    assert shares.guaranteed_bytes("a", 100) == 50


@pytest.mark.parametrize(
    "other", [{}, {"a": Share(0.2)}, {"a": Share(0.2), "c": Share(0.1)}, {"a": Share(0.6), "b": Share(0.5)}]
)
def test_what_cannot_be_changes_nothing(other: dict[str, Share]) -> None:
    """Others' shares, or more than everything."""
    shares = Shares({"a": Share(0.2), "b": Share(0.1)})
    with pytest.raises(ValueError, match=r"settled at the start|is guaranteed"):
        shares.become(other)
    assert shares.by_tenant == {"a": Share(0.2), "b": Share(0.1)}
