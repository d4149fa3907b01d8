"""A replay's queue: a policy hears of it what it would hear in a server."""

from ctxcache.core.placement.policy import Policy
from ctxcache.core.placement.schedule import GIVEN_UP_AFTER, LEAST_PATIENCE_S
from ctxcache.simulate.replay import Waiting

FIRST, SECOND, ABSENT = b"first", b"second", b"absent"


class Heard(Policy):
    """Jobs that wait, as it heard."""

    def __init__(self) -> None:
        self.orders: dict[bytes, float] = {}
        self.now_s = 0.0

    def passed(self, now_s: float) -> None:
        """See Policy."""
        self.now_s = now_s

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy."""
        self.orders[uid] = order

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        self.orders.pop(uid, None)


def _waiting() -> tuple[Waiting, Heard]:
    policy = Heard()
    return Waiting(policy, lambda uid: uid != ABSENT), policy


def test_a_job_that_does_not_start_is_put_off_and_then_given_up() -> None:
    """As by the server: the jobs behind it come before it first, and in the end nobody waits for it."""
    waiting, policy = _waiting()
    waiting.put(FIRST, 0.0, 0.0)
    waiting.put(SECOND, 1.0, 0.0)
    foreseen_s = policy.orders[FIRST]

    waiting.passed(LEAST_PATIENCE_S - 1)
    assert policy.orders[FIRST] == foreseen_s < policy.orders[SECOND]
    waiting.passed(2 * LEAST_PATIENCE_S)
    assert policy.orders[FIRST] > foreseen_s
    late_s = 2 * LEAST_PATIENCE_S
    while FIRST in policy.orders:
        late_s *= 2
        waiting.passed(late_s)
    assert late_s <= 4 * GIVEN_UP_AFTER * LEAST_PATIENCE_S


def test_a_turn_that_begins_takes_its_own_job_out_of_the_queue() -> None:
    """One that was put for nothing stands there still, and is heard of again when the turn is over."""
    waiting, policy = _waiting()
    waiting.put(FIRST, 0.0, 0.0)
    waiting.put(FIRST, 5.0, 0.0, is_turn=False)
    waiting.started(FIRST, 1.0)
    policy.withdrawn(FIRST)
    waiting.rested(FIRST)
    assert policy.orders

    waiting.put(SECOND, 2.0, 1.0)
    waiting.started(SECOND, 2.0)
    waiting.rested(SECOND)
    assert set(policy.orders) == {FIRST}


def test_nobody_hears_of_a_session_that_is_not_there() -> None:
    """It keeps its place in the queue, and orders nothing."""
    waiting, policy = _waiting()
    waiting.put(ABSENT, 0.0, 0.0)
    waiting.put(FIRST, 1.0, 0.0)
    assert set(policy.orders) == {FIRST}
    assert policy.orders[FIRST] > 0

    waiting.lost()
    assert not policy.orders
