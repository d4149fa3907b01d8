"""Placement: capacities, pins, windows, and what each policy is for, whatever the events."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from most_turns_first import MostTurnsFirst

from ctxcache.core.placement.baselines import LeastRecentlyUsed, TailOptimised
from ctxcache.core.placement.look_ahead import Belady, LookAhead, Window
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Facts, Level, Policy, Ranked
from ctxcache.core.placement.returns import class_of
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.value import MissCost, Objective, ReturnValue, public_return_times
from ctxcache.simulate.store import Act, Move, Tiers
from lab.placement.policies import POLICIES, AdaptiveReplacement, S3Fifo

CAPACITIES = Capacities(memory_bytes=100, below_bytes=300)
BUFFER_BYTES = 10
SEEDS = 30
PLACEMENT_PAGE = Path(__file__).parents[2] / "docs" / "placement.md"
RANKED_MAKERS: dict[str, Callable[[Capacities], Ranked]] = {
    **RANKED,
    "most-turns-first": lambda _: MostTurnsFirst(),
}
MAKERS: dict[str, Callable[[Capacities], Policy]] = {
    **POLICIES,
    "most-turns-first": lambda _: MostTurnsFirst(),
    "t-lru of small sessions": lambda _: TailOptimised(40),
    "belady": lambda capacities: Belady(capacities, lambda uid: float(uid[0] * 37 % 11)),
}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("arrived", "idle", "ended", "pin", "unpin", "hinted", "withdrawn", "expected", "prefetch"),
                *("resized", "slept"),
            )
        ),
        st.integers(0, 11),
        st.integers(0, 130),
        st.integers(0, 400),
    ),
    max_size=120,
)
Events = list[tuple[str, int, int, int]]


class _Checked:
    """A ledger whose every answer is checked against capacities, pins and its own moves."""

    def __init__(self, policy: Policy, capacities: Capacities = CAPACITIES) -> None:
        self.capacities = capacities
        self.tiers = Tiers(capacities, policy, buffer_bytes=BUFFER_BYTES)
        self.pins: dict[bytes, int] = {}
        self.in_turn: set[bytes] = set()
        self.sizes: dict[bytes, tuple[int, Level]] = {}
        self.facts: dict[bytes, Facts] = {}
        """The facts that the policy heard last, by session."""
        self.awaited: set[bytes] = set()
        """Sessions whose return was said: these do not sleep."""
        self.asleep: dict[bytes, float] = {}
        """Sessions that the policy forgot, with what `recalled` is to be told."""
        self.now_s = 0.0
        self.moves: list[Move] = []

    def play(self, event: str, uid: bytes, size_bytes: int, passed_s: int) -> None:
        """One event, as far as it means anything for the session."""
        self.now_s += passed_s
        ledger = self.tiers
        if uid in self.asleep:
            self._wake(uid)
        if event == "arrived":
            self.in_turn.add(uid)
            self.awaited.discard(uid)
            self._follow(uid, ledger.arrived(uid, self.now_s))
        elif event == "idle":
            self.in_turn.add(uid)
            turn_count = self.facts[uid].turn_count + 1 if uid in self.facts else 1
            self.facts[uid] = Facts(size_bytes, turn_count, size_bytes // 2, 1)
            self._follow(uid, ledger.idle(uid, self.facts[uid], self.now_s))
            self.in_turn.discard(uid)
        elif event == "ended":
            self.pins.pop(uid, None)
            self.in_turn.discard(uid)
            self._follow(uid, ledger.ended(uid))
        elif event == "pin" and ledger.tier(uid):
            ledger.pin(uid)
            self.pins[uid] = self.pins.get(uid, 0) + 1
        elif event == "unpin" and self.pins.get(uid):
            ledger.unpin(uid)
            self.pins[uid] -= 1
        elif event == "prefetch":
            self._follow(uid, ledger.prefetch())
        else:
            self._tell(event, uid, size_bytes)

    def _tell(self, event: str, uid: bytes, size_bytes: int) -> None:
        """An event that the policy alone hears."""
        policy = self.tiers.policy
        if event == "hinted":
            self.awaited.add(uid)
            policy.hinted(uid, float(size_bytes))
        elif event == "withdrawn":
            policy.withdrawn(uid)
        elif event == "expected":
            self.awaited.add(uid)
            policy.expected(uid, self.now_s + size_bytes if size_bytes % 2 else None)
        elif event == "resized" and uid in self.resting:
            self.facts[uid] = self.facts[uid]._replace(size_bytes=size_bytes, appended_bytes=0)
            policy.resized(uid, self.facts[uid])
        elif event == "slept" and uid in self.resting - self.awaited and self.tiers.tier(uid) is Level.BELOW:
            self.asleep[uid] = policy.slept(uid)
            self.tiers._order.discard(uid)

    @property
    def resting(self) -> set[bytes]:
        """Sessions that may leave, and that the policy ranks."""
        pinned = {uid for uid, count in self.pins.items() if count}
        return self.sizes.keys() - self.in_turn - self.asleep.keys() - pinned

    def _wake(self, uid: bytes) -> None:
        policy = self.tiers.policy
        policy.recalled(uid, self.facts[uid], self.asleep.pop(uid), is_watched=False)
        policy.placed(uid, Level.BELOW)
        self.tiers._order.put(uid, Level.BELOW)

    def _follow(self, subject: bytes, moves: list[Move]) -> None:
        self.moves += moves
        for move in moves:
            if move.uid != subject:
                assert not self.pins.get(move.uid)
                assert move.uid not in self.in_turn
            if move.act in (Act.ADMIT, Act.GROW):
                size_bytes = self.sizes.get(move.uid, (0, move.tier))[0] + move.size_bytes
                self.sizes[move.uid] = (size_bytes, move.tier)
            elif move.act in (Act.PROMOTE, Act.DEMOTE):
                assert self.sizes[move.uid] == (move.size_bytes, _other(move.tier))
                self.sizes[move.uid] = (move.size_bytes, move.tier)
            elif move.act is Act.EVICT:
                assert self.sizes.pop(move.uid) == (move.size_bytes, move.tier)
            # After each move, not only after the last: whoever carries them out has no more room.
            self._check()
        for tier in Level:
            assert self.tiers.used_bytes(tier) == sum(
                size for size, where in self.sizes.values() if where is tier
            )
        assert {uid: self.tiers.tier(uid) for uid in self.sizes} == {u: t for u, (_, t) in self.sizes.items()}
        assert all(uid in self.sizes for uid, count in self.pins.items() if count)

    def _check(self) -> None:
        limits = {Level.MEMORY: self.capacities.memory_bytes, Level.BELOW: self.capacities.below_bytes}
        for tier, limit in limits.items():
            assert sum(size for size, where in self.sizes.values() if where is tier) <= limit


def _other(tier: Level) -> Level:
    return Level.BELOW if tier is Level.MEMORY else Level.MEMORY


def _play(make: Callable[[Capacities], Policy], events: Events) -> _Checked:
    checked = _Checked(make(CAPACITIES))
    for event, number, size_bytes, passed_s in events:
        checked.play(event, bytes([number]), size_bytes, passed_s)
    return checked


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40)
@given(events=EVENTS)
def test_no_capacity_is_exceeded_and_nothing_in_use_is_moved(name: str, events: Events) -> None:
    """After each single move both tiers are within bounds; pinned sessions, and those in a turn, stay."""
    _play(MAKERS[name], events)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40)
@given(events=EVENTS)
def test_the_same_events_make_the_same_moves(name: str, events: Events) -> None:
    """No decision depends on anything but the events."""
    assert _play(MAKERS[name], events).moves == _play(MAKERS[name], events).moves


@settings(max_examples=100)
@given(events=EVENTS)
def test_nobody_in_the_window_leaves_while_others_can(events: Events) -> None:
    """`evict` names none of the queue's first jobs, unless all that may leave are; then it is their last."""
    policy = LookAhead(CAPACITIES)
    checked = _Checked(policy)
    queue: dict[bytes, float] = {}
    for event, number, size_bytes, passed_s in events:
        uid = bytes([number])
        if event == "hinted":
            queue[uid] = size_bytes
        elif event in ("arrived", "ended", "withdrawn"):
            queue.pop(uid, None)
        checked.play(event, uid, size_bytes, passed_s)
        _check_window(policy, checked, queue)


def _first(policy: Ranked, *uids: bytes) -> bytes:
    """The session of these that leaves first."""
    return min(uids, key=lambda uid: policy.rank(uid) or ())


def _window_length(policy: LookAhead) -> int:
    """How many jobs of the queue's head are exempt from eviction while others can go."""
    return policy._capacities.total_bytes // policy._average_bytes


def _check_window(policy: LookAhead, checked: _Checked, queue: dict[bytes, float]) -> None:
    held = checked.sizes.keys() - checked.asleep.keys()
    size_bytes = sum(checked.facts[uid].size_bytes for uid in held)
    length = CAPACITIES.total_bytes // max(size_bytes // max(len(held), 1), 1)
    assert _window_length(policy) == length
    # No job of several with one order at the border is in the window.
    orders = sorted(queue.values())
    window = {uid for uid, order in queue.items() if order < (orders[length:] or [1e9])[0]}
    others = {uid for uid in held if not checked.pins.get(uid)}
    victim = _first(policy, *others) if others else None
    if victim is not None and victim in window:
        assert others <= window
        assert queue[victim] == max(queue[uid] for uid in others)


def test_beyond_the_window_the_queue_leaves_from_its_tail() -> None:
    """A session without a job goes first, then that of the last job, though the window ends before it."""
    capacities = Capacities(0, 80)
    policy = LookAhead(capacities)
    ledger = Tiers(capacities, policy)
    for number in range(2):
        _turn(ledger, bytes([number]), number)
    for number, order in ((8, 0), (9, 1), (1, 2), (0, 3)):
        policy.hinted(bytes([number]), order)
    assert _window_length(policy) == 2

    _turn(ledger, b"none", 2)
    assert not ledger.tier(b"\0")
    _turn(ledger, b"none either", 3)
    assert ledger.tier(b"\1")


@given(
    st.lists(
        st.tuples(st.sampled_from(("put", "discard", "resize")), st.integers(0, 9), st.integers(0, 30)),
        max_size=60,
    )
)
def test_a_window_is_the_head_of_the_queue(steps: list[tuple[str, int, int]]) -> None:
    """Whatever deltas come, the window holds the earliest jobs and no more than its length.

    Each change is heard of.
    """
    heard: set[bytes] = set()

    def changed(uid: bytes) -> None:
        heard.symmetric_difference_update({uid})

    window, orders, length = Window(changed), dict[bytes, int](), 1
    for step, number, value in steps:
        uid = bytes([number])
        if step == "put":
            window.put(uid, value)
            orders[uid] = value
        elif step == "discard":
            window.discard(uid)
            orders.pop(uid, None)
        else:
            length = max(value // 4, 1)
            window.resize(length)
        inside = window.uids
        assert len(inside) == min(length, len(orders))
        assert sorted(orders[uid] for uid in inside) == sorted(orders.values())[: len(inside)]
        assert heard == inside


def _turn(ledger: Tiers, uid: bytes, now_s: float, *, size_bytes: int = 40, turn_count: int = 1) -> bool:
    """Play a turn; whether the session was there."""
    was_there = ledger.tier(uid) is not None
    ledger.arrived(uid, now_s)
    ledger.idle(uid, Facts(size_bytes, turn_count, 8, 1), now_s)
    return was_there


def test_the_least_recently_used_is_demoted_then_evicted() -> None:
    """DRAM's coldest goes to SSD, the store's coldest out of it."""
    ledger = Tiers(Capacities(80, 80), LeastRecentlyUsed())
    for number in range(5):
        _turn(ledger, bytes([number]), number)

    tiers = [ledger.tier(bytes([number])) for number in range(5)]
    assert tiers == [None, Level.BELOW, Level.BELOW, Level.MEMORY, Level.MEMORY]


def test_a_hinted_session_is_promoted_before_its_turn() -> None:
    """The head of the queue comes from SSD; whoever is not waited for makes room."""
    ledger = Tiers(Capacities(80, 80), LookAhead(Capacities(80, 80)))
    for number in range(4):
        _turn(ledger, bytes([number]), number)
    ledger.policy.hinted(b"\0", 1)

    moves = ledger.prefetch()

    assert [(move.act, move.uid) for move in moves] == [
        (Act.EVICT, b"\1"),
        (Act.DEMOTE, b"\2"),
        (Act.PROMOTE, b"\0"),
    ]
    assert not ledger.prefetch()


def test_whoever_is_needed_later_gives_way_to_a_prefetch() -> None:
    """DRAM is full with the window's second: the first takes its place, and does not give it back."""
    ledger = Tiers(Capacities(40, 200), LookAhead(Capacities(40, 200)))
    for number in range(8):
        _turn(ledger, bytes([number]), number, size_bytes=10 if number < 6 else 40)
    ledger.policy.hinted(b"\6", 1)
    ledger.policy.hinted(b"\7", 2)

    assert [(move.act, move.uid) for move in ledger.prefetch()] == [(Act.DEMOTE, b"\7"), (Act.PROMOTE, b"\6")]
    assert not ledger.prefetch()


@pytest.mark.parametrize("make", [S3Fifo, AdaptiveReplacement])
def test_a_scan_of_one_shots_does_not_flood_what_returns(make: Callable[[int], Policy]) -> None:
    """Sessions that were used again outlive any number that were not; under LRU they do not."""

    def survivors(policy: Policy) -> int:
        ledger = Tiers(Capacities(80, 320), policy)
        for turn in range(3):
            for number in range(4):
                _turn(ledger, bytes([number]), turn, turn_count=turn + 1)
        for number in range(60):
            _turn(ledger, b"one-shot" + bytes([number]), 5)
        return sum(ledger.tier(bytes([number])) is not None for number in range(4))

    assert survivors(make(400)) == 4
    assert survivors(LeastRecentlyUsed()) == 0


def test_what_can_be_recomputed_in_time_leaves_first() -> None:
    """T-LRU gives up the small session although the large one is colder."""
    ledger = Tiers(Capacities(0, 100), TailOptimised(40))
    _turn(ledger, b"large", 0, size_bytes=60)
    _turn(ledger, b"small", 1, size_bytes=20)
    _turn(ledger, b"new", 2, size_bytes=30)

    assert ledger.tier(b"large")
    assert ledger.tier(b"small") is None


def _learned() -> tuple[Tiers, ReturnValue]:
    """A store that has seen first turns stay away, and third turns return after 30 s."""
    policy = ReturnValue(Capacities(0, 400))
    ledger = Tiers(Capacities(0, 400), policy)
    for number in range(400):
        now_s = 20.0 * number
        _turn(ledger, b"one-shot %d" % number, now_s)
        _turn(ledger, b"loyal %d" % (number % 2), now_s, turn_count=3)
    return ledger, policy


def test_what_never_returned_is_given_up_for_what_did() -> None:
    """Value ranks by what its class did before: the newest one-shot goes before the older loyal one."""
    ledger, _ = _learned()
    now_s = 9000.0
    _turn(ledger, b"loyal", now_s, turn_count=3)
    for number in range(30):
        _turn(ledger, b"flood %d" % number, now_s + 1)

    assert ledger.tier(b"loyal")


@pytest.mark.parametrize(
    ("cost", "first"),
    [
        (MissCost(Objective.TURNS), b"long"),
        (MissCost(Objective.TOKENS), b"old"),
        (MissCost(Objective.SECONDS, prefill_tokens_per_s=1e6), b"long"),
        (MissCost(Objective.SECONDS, prefill_tokens_per_s=1.0, per_miss_s=0.0), b"old"),
    ],
)
def test_what_leaves_first_follows_from_what_is_to_be_saved(cost: MissCost, first: bytes) -> None:
    """Two sessions of one class and age: by turns the long one leaves, by tokens the one used earlier."""
    policy = ReturnValue(Capacities(0, 400), cost)
    for uid, size_bytes in ((b"old", 8), (b"long", 64)):
        policy.idle(uid, Facts(size_bytes, 2, 8, 1), 0.0)
        policy.placed(uid, Level.BELOW)

    assert _first(policy, b"old", b"long") == first


def test_a_miss_costs_a_turn_its_tokens_or_their_prefill() -> None:
    """A turn, 3,000 tokens, or their 1.5 s and what is lost whatever the length."""
    costs = [
        MissCost(objective, prefill_tokens_per_s=2000, per_miss_s=0.5).of(3000) for objective in Objective
    ]

    assert costs == [1, 3000, 2.0]


def test_the_same_tokens_are_of_one_class_whatever_bytes_a_token_takes() -> None:
    """So that return times of one model say something of another's sessions."""
    for token_bytes in (0.5, 4096, 819_200):
        sizes = [int(count * token_bytes) for count in (3000, 1000, 100)]
        facts = Facts(sizes[0], 2, sizes[1], token_bytes, sizes[2])
        assert class_of(facts, None) == (2, 0, 4, 10)


def test_a_store_that_has_seen_nothing_knows_return_times_of_public_traces() -> None:
    """None of those that judge it; and what it learns itself outweighs them."""
    public, fresh = public_return_times(), ReturnValue(CAPACITIES)
    knowing_nothing = ReturnValue(CAPACITIES, lessons={**public, "classes": {}})
    for policy in (fresh, knowing_nothing):
        for uid, at_s in ((b"idle for long", 0.0), (b"just now", 1500.0)):
            policy.idle(uid, Facts(1000, 1, 1000, 1), at_s)
            policy.placed(uid, Level.BELOW)
    told, untold = (policy.rank(b"just now") or () for policy in (fresh, knowing_nothing))

    assert 0 < told[0] < untold[0] / 2
    assert (fresh.rank(b"idle for long") or ())[0] < told[0] / 2
    assert not any("conversation" in source for source in public["sources"])
    assert 100 < public["classes"]["0"][0][0] < 1000


def test_a_newcomer_leaves_before_a_session_whose_return_is_near() -> None:
    """Most sessions that return do so after some 20 s: until then the value rises with idle time."""
    policy = ReturnValue(CAPACITIES)
    for uid, at_s in ((b"idle for long", 0.0), (b"due", 45.0), (b"new", 60.0)):
        policy.idle(uid, Facts(1000, 1, 1000, 1), at_s)
        policy.placed(uid, Level.BELOW)

    assert sorted((b"due", b"new", b"idle for long"), key=lambda uid: policy.rank(uid) or ()) == [
        b"idle for long",
        b"new",
        b"due",
    ]


@pytest.mark.parametrize("names", [(b"a", b"b"), (b"b", b"a")])
def test_of_equals_the_least_recently_used_leaves_first(names: tuple[bytes, bytes]) -> None:
    """Two sessions of one class, age and size: what they are called decides nothing."""
    ledger, policy = _learned()
    for uid in names:
        _turn(ledger, uid, 9000)

    assert _first(policy, *names) == names[0]


def test_a_session_said_to_be_over_goes_first_while_that_holds() -> None:
    """An end that a client announces is believed; after lies it no longer is."""
    ledger, policy = _learned()
    _turn(ledger, b"loyal", 9000, turn_count=3)
    policy.expected(b"loyal", None)
    assert _first(policy, *ledger._held) == b"loyal"

    for number in range(600):
        now_s = 9000.0 + 20 * number
        _turn(ledger, b"liar", now_s, turn_count=3)
        policy.expected(b"liar", None)
        _turn(ledger, b"one-shot again %d" % number, now_s)
    assert ledger.tier(b"liar")
    candidates = (b"liar", b"one-shot again 599")
    assert _first(policy, *candidates) == b"one-shot again 599"


def test_an_expected_return_is_waited_for_until_it_is_overdue() -> None:
    """A session that is said to return soon stays before one that is said to return late.

    Once overdue, it is as others are.
    """
    ledger, policy = _learned()
    for uid, wait_s in ((b"soon", 60.0), (b"late", 6000.0)):
        _turn(ledger, uid, 9000)
        policy.expected(uid, 9000 + wait_s)
    assert _first(policy, b"soon", b"late") == b"late"

    _turn(ledger, b"other", 14500)
    assert _first(policy, b"soon", b"late") == b"soon"


def test_who_comes_up_is_looked_at_again() -> None:
    """A return that was said long ago is near by now, though nothing has happened to the session since."""
    ledger, policy = _learned()
    _turn(ledger, b"near", 9000)
    policy.expected(b"near", 9990)
    _turn(ledger, b"far", 9900)
    policy.expected(b"far", 10_020)
    policy.passed(9980)

    assert _first(policy, b"near", b"far") == b"far"


def _serve_queue(ledger: Tiers, pick: Callable[[int], int], rounds: int, *, start: int = 0) -> None:
    """Keep 20 jobs in the queue, in the order of their numbers, and start the one that `pick` names."""
    waiting = [start * 100 + number for number in range(20)]
    for number in waiting:
        _turn(ledger, b"%d" % number, start * 1000, size_bytes=1)
        ledger.policy.hinted(b"%d" % number, number)
    for done in range(rounds):
        started = waiting.pop(pick(done) % len(waiting))
        _turn(ledger, b"%d" % started, start * 1000 + done, size_bytes=1)
        waiting.append(start * 100 + 20 + done)
        _turn(ledger, b"%d" % waiting[-1], start * 1000 + done, size_bytes=1)
        ledger.policy.hinted(b"%d" % waiting[-1], waiting[-1])
    for number in waiting:
        ledger.policy.withdrawn(b"%d" % number)


def test_an_order_that_does_not_come_true_is_left_aside() -> None:
    """A queue whose last job starts first fetches no session; one that comes true is followed again."""
    policy = ReturnValue(CAPACITIES)
    ledger = Tiers(CAPACITIES, policy)
    assert policy.follows_order
    _serve_queue(ledger, lambda _: -1, 100)
    assert not policy.follows_order

    _serve_queue(ledger, lambda _: 0, 400, start=1)
    assert policy.follows_order


def test_who_waits_stays_though_the_order_is_false() -> None:
    """That a job waits is believed while such jobs come, whatever their places were worth."""
    policy = ReturnValue(CAPACITIES)
    ledger = Tiers(CAPACITIES, policy)
    for again in range(4):
        _serve_queue(ledger, lambda done: done * 7, 100, start=again)
    ledger = Tiers(CAPACITIES, policy)
    for uid in (b"waits", b"idle"):
        _turn(ledger, uid, 9000)
    policy.hinted(b"waits", 0)
    assert not policy.follows_order

    assert _first(policy, b"waits", b"idle") == b"idle"


def test_jobs_that_never_come_do_not_keep_their_sessions() -> None:
    """Phantoms wait as long as real jobs do and then are worth what idle sessions are."""
    policy = ReturnValue(CAPACITIES)
    ledger = Tiers(CAPACITIES, policy)
    for number in range(400):
        _turn(ledger, b"phantom %d" % number, 10.0 * number)
        policy.hinted(b"phantom %d" % number, number)
        _turn(ledger, b"loyal %d" % (number % 2), 10.0 * number, turn_count=3)

    assert _first(policy, b"phantom 399", b"loyal 1") == b"phantom 399"


@pytest.mark.parametrize("make", RANKED_MAKERS.values(), ids=RANKED_MAKERS)
def test_who_is_evicted_is_whose_rank_is_lowest(make: Callable[[Capacities], Ranked]) -> None:
    """The order of ranks is the order in which sessions leave, for the tiers and for others that ask."""
    _check_orders(make)


class _Deaf(LeastRecentlyUsed, ranks_holders=True):
    """The largest session leaves first; nobody hears that one has grown."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[bytes, int] = {}

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        super().idle(uid, facts, now_s)
        self._sizes[uid] = facts.size_bytes

    def resized(self, uid: bytes, facts: Facts) -> None:
        super().resized(uid, facts)
        self._sizes[uid] = facts.size_bytes

    def rank(self, uid: bytes) -> Key | None:
        last_use = super().rank(uid)
        return last_use and (-self._sizes[uid], *last_use)


def test_a_policy_that_tells_of_no_fall_is_found() -> None:
    """The control of the test above: an order that was not told of a lower rank is another order."""
    with pytest.raises(AssertionError):
        _check_orders(lambda _: _Deaf())


def _check_orders(make: Callable[[Capacities], Ranked]) -> None:
    for seed in range(SEEDS):
        _check_order(make(CAPACITIES), seed)


def _check_order(policy: Ranked, seed: int) -> None:
    # Drawn evenly: lists of hypothesis are short, and seldom let a session rest, grow and be asked for.
    draw = random.Random(seed)
    kinds = ["idle"] * 3 + ["arrived", "ended", "pin", "unpin", "hinted", "withdrawn", "expected", "prefetch"]
    kinds += ["resized", "slept"]
    checked = _Checked(policy)
    for _ in range(150):
        event, number = draw.choice(kinds), draw.randrange(12)
        size_bytes, passed_s = draw.randrange(131), draw.randrange(401)
        checked.play(event, bytes([number]), size_bytes, passed_s)
        # A session in a turn has a rank and no place in the order, because it may not leave.
        ranks = {uid: policy.rank(uid) for uid in checked.resting}
        victim = checked.tiers._order.first(Level.BELOW, ranks.__contains__)
        assert None not in ranks.values()
        assert not any(policy.rank(uid) for uid in checked.asleep)
        assert (victim is None) == (not ranks)
        if victim is not None:
            assert ranks[victim] == min(rank for rank in ranks.values() if rank is not None)


@pytest.mark.parametrize("make", RANKED_MAKERS.values(), ids=RANKED_MAKERS)
def test_sessions_of_an_earlier_run_are_ranked_and_forgotten(make: Callable[[Capacities], Ranked]) -> None:
    """A policy that is told of them by `recalled` has a rank for each, until the session has left."""
    policy = make(CAPACITIES)
    for uid, idle_s in ((b"older", 90.0), (b"old", 5.0)):
        policy.recalled(uid, Facts(20, 1, 20, 1), idle_s)
        policy.placed(uid, Level.BELOW)
    assert policy.rank(b"older")
    assert policy.rank(b"old")

    policy.evicted(b"older")
    policy.ended(b"old")
    assert policy.rank(b"older") is None
    assert policy.rank(b"old") is None


@pytest.mark.parametrize("make", RANKED_MAKERS.values(), ids=RANKED_MAKERS)
def test_a_new_size_is_no_use(make: Callable[[Capacities], Ranked]) -> None:
    """Of two equal sessions the one that was used first leaves first, though its size was told again."""
    policy, facts = make(CAPACITIES), Facts(20, 1, 20, 1)
    for uid in (b"first", b"second"):
        policy.idle(uid, facts, 0.0)
        policy.placed(uid, Level.BELOW)
    policy.resized(b"first", facts._replace(appended_bytes=0))

    assert _first(policy, b"first", b"second") == b"first"


def test_a_session_that_shrinks_below_the_goal_leaves_first() -> None:
    """T-LRU goes by the size that a session has now, also where no turn changed it."""
    policy = TailOptimised(40)
    for uid in (b"small", b"large"):
        policy.idle(uid, Facts(60 if uid == b"large" else 20, 1, 8, 1), 0.0)
    policy.resized(b"large", Facts(30, 1, 0, 1))
    policy.resized(b"small", Facts(33, 1, 0, 1))

    assert _first(policy, b"small", b"large") == b"large"


def test_every_policy_is_in_the_document() -> None:
    """Each has a row that says what leaves first."""
    rows = [line.split("|")[1] for line in PLACEMENT_PAGE.read_text().splitlines() if line.startswith("| `")]
    named = set("".join(rows).replace(",", " ").split())

    assert named == {f"`{name}`" for name in (*POLICIES, "belady")}


def test_a_policy_says_what_blocks_are_to_it() -> None:
    """One that does not is no class, also where it refines another that does."""
    with pytest.raises(TypeError, match="ranks_holders"):

        class Forgetful(LeastRecentlyUsed):  # type: ignore[call-arg]
            pass


def test_who_is_new_says_nothing_about_a_queue() -> None:
    """No queue of a store can name a session that is not there yet: however many come, it is believed."""
    policy = ReturnValue(CAPACITIES)
    ledger = Tiers(CAPACITIES, policy)
    _turn(ledger, b"waits", 0)
    policy.hinted(b"waits", 0)
    for number in range(100):
        _turn(ledger, b"%d" % number, number)

    assert policy.follows_order


def test_a_buffer_larger_than_dram_is_refused() -> None:
    """A buffer that cannot be kept free is refused."""
    with pytest.raises(ValueError, match="buffer"):
        Tiers(Capacities(1, 1), LeastRecentlyUsed(), buffer_bytes=2)
