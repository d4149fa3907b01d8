"""A harness's arguments in two sizes: the short one is a part of `make test`, the long one of `make long`."""

from collections.abc import Sequence

import pytest


def sized(*, short: Sequence[str], long: Sequence[str]) -> pytest.MarkDecorator:
    """Run a test with each `size`; the long one has an hour."""
    whole = pytest.param(long, marks=(pytest.mark.long, pytest.mark.timeout(3600)))
    return pytest.mark.parametrize("size", [short, whole], ids=["short", "long"])
