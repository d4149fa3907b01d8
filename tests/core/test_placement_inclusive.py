"""Inclusive tiers.

A session in DRAM is on SSD too, if it is worth that, within both capacities, for any events and policy.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Facts, Level
from ctxcache.simulate.store import Act, InclusiveTiers, Move
from lab.placement.policies import POLICIES

CAPACITIES = Capacities(memory_bytes=100, below_bytes=200)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("turn", "arrived", "ended", "pin", "unpin", "hinted", "prefetch")),
        st.integers(0, 11),
        st.integers(0, 330),
    ),
    max_size=120,
)


def _turn(ledger: InclusiveTiers, uid: bytes, now_s: float, size_bytes: int = 40) -> list[Move]:
    return ledger.arrived(uid, now_s) + ledger.idle(uid, Facts(size_bytes, 1, 8, 1), now_s)


class Worth(LeastRecentlyUsed, ranks_holders=True):
    """A session is worth what was said, or the first byte of its name."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[bytes, float] = {}

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        rank = super().rank(uid)
        return rank and (self.said.get(uid, uid[0]), *rank)

    def say(self, said: dict[bytes, float]) -> None:
        """From now on a session is worth so much."""
        self.said = said
        for uid in self._numbers:
            self._fallen(uid)


@pytest.mark.parametrize("name", [*POLICIES, "worth"])
@settings(max_examples=40)
@given(events=EVENTS)
def test_no_capacity_is_exceeded_and_nothing_pinned_is_evicted(
    name: str, events: list[tuple[str, int, int]]
) -> None:
    """SSD holds all but what is in DRAM alone; what is used is what the sessions add up to."""
    policy = Worth() if name == "worth" else POLICIES[name](CAPACITIES)
    ledger = InclusiveTiers(CAPACITIES, policy, buffer_bytes=10)
    sizes, pins = dict[bytes, int](), dict[bytes, int]()
    for now_s, (event, number, size_bytes) in enumerate(events):
        uid, moves = bytes([number]), list[Move]()
        if event == "turn":
            moves = _turn(ledger, uid, now_s, size_bytes)
            sizes[uid] = size_bytes
        elif event == "arrived":
            moves = ledger.arrived(uid, now_s)
        elif event == "ended":
            moves, _ = ledger.ended(uid), pins.pop(uid, None)
        elif event == "pin" and ledger.tier(uid):
            ledger.pin(uid)
            pins[uid] = pins.get(uid, 0) + 1
        elif event == "unpin" and pins.get(uid):
            ledger.unpin(uid)
            pins[uid] -= 1
        elif event == "hinted":
            ledger.policy.hinted(uid, size_bytes)
        elif event == "prefetch":
            moves = ledger.prefetch()
        # One that is pinned and cannot grow stays as it was.
        refused = [move for move in moves if move.act is Act.REFUSE and pins.get(move.uid)]
        sizes |= {move.uid: sizes[move.uid] - move.size_bytes for move in refused}

        held = {uid: size for uid, size in sizes.items() if ledger.tier(uid)}
        in_dram = sum(size for uid, size in held.items() if ledger.tier(uid) is Level.MEMORY)
        on_ssd = sum(size for uid, size in held.items() if ledger.is_on_ssd(uid))
        assert ledger.used_bytes(Level.BELOW) == on_ssd <= 300
        assert all(ledger.tier(uid) is Level.MEMORY for uid in held if not ledger.is_on_ssd(uid))
        assert ledger.used_bytes(Level.MEMORY) == in_dram <= 100
        assert all(ledger.tier(uid) for uid, count in pins.items() if count)


def test_leaving_dram_costs_nothing_and_growing_what_it_grew() -> None:
    """SSD is written as much as came; it is full with what both tiers together take."""
    ledger = InclusiveTiers(Capacities(80, 80), LeastRecentlyUsed())
    moves = [move for number in range(5) for move in _turn(ledger, bytes([number]), number)]
    moves += _turn(ledger, b"\4", 5, 60)

    written = [move.size_bytes for move in moves if move.act in (Act.ADMIT, Act.GROW)]
    assert written == [40, 40, 40, 40, 40, 20]
    tiers = [ledger.tier(bytes([number])) for number in range(5)]
    assert tiers == [None, None, Level.BELOW, Level.BELOW, Level.MEMORY]
    assert ledger.used_bytes(Level.BELOW) == 140


def test_a_session_larger_than_dram_lies_on_ssd() -> None:
    """It is kept and read where it lies."""
    ledger = InclusiveTiers(Capacities(80, 80), LeastRecentlyUsed())
    _turn(ledger, b"large", 0, 100)

    assert ledger.tier(b"large") is Level.BELOW
    assert not ledger.arrived(b"large", 1)


def _full() -> tuple[InclusiveTiers, Worth]:
    """DRAM of 80 of 200 bytes of SSD, which is full of five sessions worth more than 9."""
    policy = Worth()
    ledger = InclusiveTiers(Capacities(80, 120), policy)
    for number in range(5):
        _turn(ledger, bytes([10 + number]), number)
    return ledger, policy


def test_what_is_worth_less_than_all_of_a_full_ssd_stays_in_dram_and_leaves_from_there() -> None:
    """It is read from DRAM; the next one takes its place, and nothing of either is ever written."""
    ledger, _ = _full()
    first, second = _turn(ledger, b"\1", 5), _turn(ledger, b"\2", 6)
    third = _turn(ledger, b"\3", 7, 60)

    assert [(move.act, move.uid, move.tier) for move in first] == [
        (Act.DROP, b"\x0d", Level.BELOW),
        (Act.ADMIT, b"\1", Level.MEMORY),
    ]
    assert [(move.act, move.uid) for move in second] == [(Act.EVICT, b"\1"), (Act.ADMIT, b"\2")]
    assert [(move.act, move.uid) for move in third] == [
        (Act.EVICT, b"\2"),
        (Act.DROP, b"\x0e"),
        (Act.ADMIT, b"\3"),
    ]
    assert all(ledger.is_on_ssd(bytes([10 + number])) for number in range(5))
    assert not ledger.is_on_ssd(b"\3")


def test_who_is_worth_it_by_now_is_written_when_it_leaves_dram_or_grows() -> None:
    """The sessions on SSD have come to be worth less, and go for it."""
    ledger, policy = _full()
    _turn(ledger, b"\1", 5)
    policy.say({bytes([10 + number]): 0.5 for number in range(4)})
    moves = _turn(ledger, b"\x14", 6, 80)

    assert (Act.DEMOTE, b"\1") in [(move.act, move.uid) for move in moves]
    assert ledger.tier(b"\1") is Level.BELOW

    ledger, policy = _full()
    _turn(ledger, b"\1", 5)
    policy.say({b"\1": 20})
    moves = _turn(ledger, b"\1", 6, 50)

    assert [
        (move.act, move.size_bytes) for move in moves if move.tier is Level.BELOW and move.uid == b"\1"
    ] == [
        (Act.DEMOTE, 40),
        (Act.GROW, 10),
    ]


def test_who_is_fetched_does_not_leave_for_one_that_dram_gives_up_for_it() -> None:
    """It is worth least on SSD, and whoever leaves DRAM has come to be worth writing: another makes room."""
    ledger, policy = _full()
    on_ssd = next(uid for uid in (b"\x0a", b"\x0b", b"\x0c") if ledger.tier(uid) is Level.BELOW)
    _turn(ledger, b"\1", 5)
    policy.say(
        {b"\1": 20.0, on_ssd: 0.0}
        | {uid: 30.0 for uid in ledger._held if ledger.tier(uid) is Level.MEMORY and uid != b"\1"}
    )
    policy.prefetch = lambda accepts=lambda _: True: on_ssd  # type: ignore[method-assign]  # noqa: ARG005
    moves = ledger.prefetch()

    assert (Act.DEMOTE, b"\1") in [(move.act, move.uid) for move in moves]
    assert moves[-1] == Move(Act.PROMOTE, on_ssd, 40, Level.MEMORY)
    assert ledger.tier(on_ssd) is Level.MEMORY


def test_who_has_something_on_ssd_grows_there_whatever_it_is_worth() -> None:
    """Others leave for it."""
    ledger, _ = _full()
    moves = _turn(ledger, b"\x0a", 5, 70)

    assert Move(Act.GROW, b"\x0a", 30, Level.BELOW) in moves
    assert ledger.is_on_ssd(b"\x0a")


def test_a_policy_without_ranks_has_everything_written() -> None:
    """As S3-FIFO and ARC: nobody can say what one session is worth beside another."""
    ledger = InclusiveTiers(CAPACITIES, POLICIES["arc"](CAPACITIES))
    for number in range(20):
        _turn(ledger, bytes([number]), number)
        assert ledger.is_on_ssd(bytes([number]))
