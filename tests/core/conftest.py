"""Events of a ledger come from somebody at work."""

import pytest

from ctxcache.core.ledger.work import Work


@pytest.fixture(autouse=True)
def at_work(work: Work) -> None:
    """The test is."""
