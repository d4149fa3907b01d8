"""Return times: how many sessions of a class came back at which idle time, and what that promises. Pure.

    class   root (idle, queued, over) > turn count > time away before the last turn
            > magnitude of its answer > magnitude of its input
            root (prefix) > magnitude of the mean time between its uses > how many there were
    watch   idle --ages through bins--> returned | ended | forgotten past the last bin

A class with few counts leans on its parent class: on its hazards, times how much more or less often its own
sessions return than those would say. A bin of a root leans on the bin before. Sessions are watched
past their eviction, at most WATCHED at once: their return is what is learned. Sessions with a job in the
queue are classes of their own, so that how long jobs wait and how many never come is learned in the same way.
The same events give the same numbers. Counts can be saved as plain numbers, and a later run goes on from
them. Worst case: the load changes within an hour; what was learned is wrong until the counts have halved.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from ctxcache.core.placement.policy import Facts

# Bins are short where returns are common, and long where few are left: an equal width would need hundreds.
AGES_S = (
    *(0, 0.5, 2, 5, 10, 20, 30, 40, 55, 70, 90, 110, 135, 160, 195, 230, 280, 330, 400, 480),
    *(700, 1000, 1500, 2400, 3600),
)
"""Where an idle time passes into the next bin; the last bin is taken to last LAST_BIN_S."""
LAST_BIN_S = 3600
LENGTHS_S = tuple(b - a for a, b in zip(AGES_S, (*AGES_S[1:], AGES_S[-1] + LAST_BIN_S), strict=True))
BINS = range(len(AGES_S))
PRIOR_COUNT = 12.0
"""How many sessions in a bin of a root outweigh what its bin before says."""
CLASS_PRIOR_COUNT = 30.0
"""How many sessions in a bin of a class outweigh what its parent class and its ratio say."""
RATIO_PRIOR_COUNT = 3.0
"""How many returns outweigh that a class returns as often as its parent class."""
RATIO_AGES_S = (40, 230)
"""Where one ratio gives way to the next: a class may be quick to return, and seldom late."""
_RATIO_BEGINS = (0, *(bisect_left(AGES_S, age_s) for age_s in RATIO_AGES_S), len(AGES_S))
RATIO_BINS = tuple(slice(begin, end) for begin, end in pairwise(_RATIO_BEGINS))
"""The bins of each ratio."""
MOST_HAZARD = 0.95
SessionClass = tuple[int, ...]
IDLE, QUEUED, OVER, PREFIX = 0, 1, 2, 3
"""Roots.

IDLE: nothing was said of the session, or not that it is over. QUEUED: its job waits. OVER: it is said to be
over. PREFIX: it is no session, but what several have in common.
"""
FIRST_HAZARDS = {IDLE: 0.25, QUEUED: 0.25, OVER: 0.0, PREFIX: 0.25}
"""A root's prior for its first bin: clients and schedulers are right."""
DEEPEST = 5
"""Parts of a name: root, turn count, time away before the last turn, magnitudes of answer and input."""
NEWEST_SHARE = 0.25
"""What the last time between two uses of a prefix counts in their mean."""
GAPS_S = (2, 10)
"""Where that time passes into the next class; it is 0 where there was none."""


@dataclass(slots=True)
class ReturnShare:
    """How likely a session is to return at all: the share of turns so far that another turn followed.

    Begins at 1, by which nothing is lost whatever sessions do. For those that keep idle sessions in forms.
    """

    turn_count: int = 0
    session_count: int = 0

    def turn(self, *, is_first: bool) -> None:
        """A session had a turn, which is its first, or follows another one."""
        self.turn_count += 1
        self.session_count += is_first

    @property
    def share(self) -> float:
        """Within (0, 1]."""
        return (self.turn_count - self.session_count + 1) / (self.turn_count + 1)


# How counts become a rate, for one bin of a class:
#
#     hazard     (came + 30 x prior) / (away + 30)      prior: the parent's hazard x this class's ratio
#     index      the best return per second kept, over all horizons from that bin on
#
# With few counts the prior is the answer, with many it does not matter.
class ReturnClass:
    """How many reached each bin of idle time, how many returned in it, and what that promises."""

    __slots__ = (
        "_chances_of",
        "away",
        "aways",
        "came",
        "cames",
        "first_hazard",
        "hazards",
        "hazards_of",
        "indices",
        "parent",
        "refreshed",
    )

    def __init__(self, parent: "ReturnClass | None", first_hazard: float = 0.0) -> None:
        self.parent, self.first_hazard = parent, first_hazard
        self.away, self.came = [0.0] * len(AGES_S), [0.0] * len(AGES_S)
        # A count goes to the class and to all above it in one loop.
        # Its own counts and those of all classes above, which count the same.
        self.aways: tuple[list[float], ...] = (self.away, *(parent.aways if parent else ()))
        self.cames: tuple[list[float], ...] = (self.came, *(parent.cames if parent else ()))
        self.hazards: list[float] = []
        self.hazards_of = -1
        self.indices: list[float] = []
        self._chances_of: list[float] = []
        self.refreshed = -1

    def refresh(self, number: int, wait_s: float) -> None:
        """Compute anew what follows from the counts, once per `number`."""
        if self.refreshed == number:
            return
        self.refreshed = number
        # No hazard is certain: an index would be infinite, and the session could never leave.
        hazards = [min(MOST_HAZARD, each) for each in self._hazards(number)]
        self.indices = gittins_indices(hazards, wait_s)
        self._chances_of = hazards

    @property
    def chances(self) -> list[float]:
        """By bin, how likely one that is in it returns at all, as of the last `refresh`."""
        away = list(accumulate((1 - hazard for hazard in reversed(self._chances_of)), mul))
        return [1 - each for each in reversed(away)]

    def _hazards(self, number: int) -> list[float]:
        """How likely one that is in a bin returns in it; computed anew once per `number`.

        Few counts lean on the class above, or on the bin before.
        """
        if self.hazards_of == number:
            return self.hazards
        self.hazards_of = number
        if self.parent is not None:
            self.hazards = self._leaning_on(self.parent._hazards(number))  # noqa: SLF001  another of its kind
            return self.hazards
        self.hazards, hazard = [], self.first_hazard
        for came, away in zip(self.came, self.away, strict=True):
            # A root leans on the bin before: hazards change little from one bin to the next.
            hazard = (came + PRIOR_COUNT * hazard) / (away + PRIOR_COUNT)
            self.hazards.append(hazard)
        return self.hazards

    def _leaning_on(self, above: list[float]) -> list[float]:
        """Hazards as far as its counts tell them, else those above times the ratio of its age.

        A ratio needs far fewer counts than a hazard by bin: it is of all returns of some minutes.
        """
        # One ratio for several bins: a class's returns in 40 s are many before those in one bin are.
        hazards: list[float] = []
        for bins in RATIO_BINS:
            cames, aways, priors = self.came[bins], self.away[bins], above[bins]
            expected_count = sum(map(mul, aways, priors), RATIO_PRIOR_COUNT)
            ratio = sum(cames, RATIO_PRIOR_COUNT) / expected_count
            for came, away, prior in zip(cames, aways, priors, strict=True):
                prior *= ratio  # noqa: PLW2901
                prior = min(prior, MOST_HAZARD)  # noqa: PLW2901
                hazards.append((came + CLASS_PRIOR_COUNT * prior) / (away + CLASS_PRIOR_COUNT))
        return hazards


class ReturnClasses:
    """All classes that were seen, by name; the roots are there from the start."""

    def __init__(self) -> None:
        self._by_name: dict[SessionClass, ReturnClass] = {
            (root,): ReturnClass(None, hazard) for root, hazard in FIRST_HAZARDS.items()
        }

    def of(self, name: SessionClass) -> ReturnClass:
        """The class of that name; those above it come to be with it."""
        # Parents first: counts of a new class go to all of them.
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = ReturnClass(self.of(name[:-1]))
        return found

    def halve(self) -> None:
        """Let all counts weigh half as much against what is counted from now on."""
        for one in self._by_name.values():
            for values in (one.away, one.came):
                values[:] = [value / 2 for value in values]

    def counts(self) -> dict[str, object]:
        """The counts, as JSON has them."""
        classes = {
            ".".join(map(str, name)): [list(one.away), list(one.came)] for name, one in self._by_name.items()
        }
        return {"ages_s": list(AGES_S), "classes": classes}

    def recount(self, counts: Mapping[str, Any]) -> None:
        """Go on from `counts` of an earlier run, and from nothing besides.

        Raises ValueError, KeyError, TypeError, and has changed nothing then.
        """
        if counts["ages_s"] != list(AGES_S):
            raise ValueError(f"counts by ages of {counts['ages_s']}")
        told = counts["classes"].items()
        found = {_name(text): (_checked(away), _checked(came)) for text, (away, came) in told}
        nothing = [0.0] * len(AGES_S)
        # Both sets of names: a class that the saved counts do not have begins from nothing.
        for name in {*self._by_name, *found}:
            one = self.of(name)
            one.away[:], one.came[:] = found.get(name, (nothing, nothing))


def _name(text: str) -> SessionClass:
    name = tuple(map(int, text.split(".")))
    if name[0] not in FIRST_HAZARDS or len(name) > DEEPEST:
        raise ValueError(f"no class is named {text!r}")
    return name


def _checked(values: list[float]) -> list[float]:
    if len(values) != len(AGES_S) or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"{values} are no counts")
    return [float(value) for value in values]


def gittins_indices(hazards: list[float], wait_s: float) -> list[float]:
    """By bin, the best rate of returns per second kept that keeping one to some later bin promises.

    max over h of P(return within h) / E[time kept until then], a return costing `wait_s` besides. Source:
    Gittins, Bandit Processes and Dynamic Allocation Indices, JRSS B 41(2), 1979. Chances and times that are
    counted from the first bin differ from those counted from another by one factor, so the best rate from a
    bin is the steepest line from its point to a later one: a side of the upper hull. O(bins).
    """
    away, came, kept_s = 1.0, 0.0, 0.0
    points: list[tuple[float, float]] = []
    # From the first bin on, cumulative: kept time and returns of one who is away at its beginning. Those who
    # return in a bin are kept half of it on average.
    for length_s, hazard in zip(LENGTHS_S, hazards, strict=True):
        points.append((came, kept_s))
        now = away * hazard
        kept_s = kept_s + length_s * (away - now / 2) + now * wait_s
        came += now
        away -= now
    # The hull's points but the nearest, and its sides, in their order from the last.
    hull: list[tuple[float, float]] = []
    rates: list[float] = []
    indices: list[float] = []
    for point in reversed(points):
        came_here, kept_here_s = point
        rate = (came - came_here) / ((kept_s - kept_here_s) or 1e-300)
        # From the last bin to the first, and a side of the hull that is not steeper than the next is no side:
        # each point is removed once, so that all bins cost one pass.
        while rates and rate <= rates[-1]:
            came, kept_s = hull.pop()
            rates.pop()
            rate = (came - came_here) / ((kept_s - kept_here_s) or 1e-300)
        indices.append(rate)
        hull.append((came, kept_s))
        rates.append(rate)
        came, kept_s = point
    indices.reverse()
    return indices


WATCHED = 1 << 17
HALVED_EVERY = 1 << 15
"""Turns after which counts are halved: old counts say little."""
LEAST_REFRESHED, MOST_REFRESHED = 8, 256
"""Turns after which classes are computed anew: few while little is known, and what is new says much."""
REFRESHED_SHARE = 1 / 64
AGED_AT_ONCE = 256
"""Sessions that one call ages or forgets at most: the caller must not wait, however long the gap was."""
MOST_TURNS = 6
MOST_MAGNITUDE = 20
ANSWER_BITS = 2
"""Magnitudes of answers are told apart by so many bits."""
WAIT_MEMORY = 64
WAIT_TIMES = 2.0
"""A job that joins the queue now waits that many times as long as those that came to their turns of late."""


def class_of(facts: Facts, gap_s: float | None) -> SessionClass:
    """Turn count, `gap_s`, how long it was away before (None: never), magnitudes of the answer and the input.

    A long input in a late turn seldom has a sequel; who was quick to return is again; and an agent whose
    answer is short has called a tool.
    """
    gap = 0 if gap_s is None else 1 + bisect_right(GAPS_S, gap_s)
    answer_bits = int(facts.answer_bytes / facts.token_bytes).bit_length()
    input_bits = int((facts.appended_bytes - facts.answer_bytes) / facts.token_bytes).bit_length()
    answer = -(-min(answer_bits, MOST_MAGNITUDE) // ANSWER_BITS)
    return (min(facts.turn_count, MOST_TURNS), gap, answer, min(input_bits, MOST_MAGNITUDE))


def class_of_prefix(facts: Facts, mean_gap_s: float | None) -> SessionClass:
    """Magnitude of the mean time between two uses (None: it had one), and how many uses there were.

    Prefixes have no turns of their own: how often each was asked for says most.
    """
    gap = 0 if mean_gap_s is None else 1 + int(mean_gap_s + 1).bit_length()
    return (gap, min(facts.turn_count, MOST_TURNS))


class _Watch:
    """A session that is away since `since_s`, and has come to `bin` by now.

    `before` is its watch before its job was queued. `counted` is the part of its return that was counted when
    the job was queued, or when another session went on where it ended. `mean_gap_s` is of a prefix that was
    used before.
    """

    __slots__ = ("before", "bin", "counted", "index_per_s", "mean_gap_s", "name", "of", "since_s", "uid")

    def __init__(
        self, uid: bytes, since_s: float, name: SessionClass, of: ReturnClass, before: "_Watch | None" = None
    ) -> None:
        self.uid, self.since_s, self.name, self.of, self.before = uid, since_s, name, of, before
        self.bin = 0
        self.counted = 0.0
        self.mean_gap_s: float | None = None
        self.index_per_s = -1.0
        """Its promise when it was first asked for in this bin; less than 0 before that.

        So how often somebody looks changes nothing.
        """

    def went_on(self) -> None:
        """Count that it is still away in this bin."""
        self.index_per_s = -1.0
        for away in self.of.aways:
            away[self.bin] += 1

    def is_of(self, name: SessionClass, of: ReturnClass) -> None:
        """Let it have been of another class since it came into this bin."""
        for away in self.of.aways:
            away[self.bin] = max(away[self.bin] - 1, 0.0)
        self.name, self.of = name, of
        self.went_on()

    def came(self, share: float = 1.0) -> None:
        """Count that it returned in this bin, as likely as `share`.

        Earlier counts no longer matter.
        """
        more = share - self.counted
        self.counted = share
        for came in self.of.cames:
            came[self.bin] += more
            # A watch may have been counted before the counts were halved.
            # Counts may have been halved since.
            if came[self.bin] < 0:
                came[self.bin] = 0.0


class ReturnTimes:
    """Per class and idle time, how many were still away and how many came back.

    `aged` hears of each new bin.
    """

    def __init__(self, aged: Callable[[bytes], None]) -> None:
        self._aged = aged
        self._watches: OrderedDict[bytes, _Watch] = OrderedDict()
        self._bins: list[OrderedDict[bytes, _Watch]] = [OrderedDict() for _ in BINS]
        """Sessions by idle time, in bins: the first of a bin has been in it for longest."""
        self._dues_s = [math.inf] * (len(AGES_S) - 1)
        """When the first of each bin but the last passes into the next, or earlier."""
        self._due_s = math.inf
        self._is_behind = False
        """Whether the last call left some for the next."""
        self._classes = ReturnClasses()
        self._queued = self._classes.of((QUEUED,))
        self._turn_count = self._refreshed = 0
        self._refreshed_at = 0
        self._coming_of, self._coming_share = -1, 0.0
        self._wait_s = self._queued_share = 0.0
        """How long those that returned by the queue waited, and how many of those that returned did."""
        self._counts_age_s = math.inf
        """How old the counts of an earlier run were when it was gone on from them."""
        self._gaps_s: OrderedDict[bytes, float] = OrderedDict()
        """How long those in a turn were away before it; of a prefix, on average."""
        self.now_s = 0.0

    @property
    def coming_share(self) -> float:
        """How likely a job that is queued comes to its turn.

        Learned slowly: jobs may all wait for longer than the load is old, and none has come then.
        """
        number = self._turn_count // MOST_REFRESHED
        if self._coming_of != number:
            self._coming_of = number
            self._queued.refresh(self._refreshed, 0.0)
            self._coming_share = self._queued.chances[0]
        return self._coming_share

    def advance(self, now_s: float) -> None:
        """Let time pass: idle sessions grow older, or some of them when many do, and others at the next call.

        Amortised O(1) per session and bin.
        """
        # Events may come from callers that looked at the clock before others.
        self.now_s = max(self.now_s, now_s)
        if self.now_s < self._due_s:
            return
        left, dues_s = AGED_AT_ONCE, self._dues_s
        # When the last call left some, the oldest bins go first: they would be counted in the wrong bin
        # otherwise.
        # A late session goes where it belongs at once; the oldest first, so that each bin stays in order.
        for number in reversed(BINS[:-1]) if self._is_behind else BINS[:-1]:
            if dues_s[number] > self.now_s:
                continue
            waiting = self._bins[number]
            age_s = AGES_S[number + 1]
            due_s = next(iter(waiting.values())).since_s + age_s if waiting else math.inf
            while left and due_s <= self.now_s:
                self._age(waiting.popitem(last=False)[1], number + 1)
                left -= 1
                due_s = next(iter(waiting.values())).since_s + age_s if waiting else math.inf
            dues_s[number] = due_s
        self._due_s = min(dues_s)
        left = self._forget(left)
        self._is_behind = not left
        if self._is_behind:
            self._due_s = -math.inf

    def _age(self, watch: _Watch, number: int) -> None:
        # Late by several bins: it was away in each of them, and is counted in each.
        last = max(self._bin(watch.since_s), number) if self._is_behind else number
        for watch.bin in range(number, last + 1):
            watch.went_on()
        self._bins[last][watch.uid] = watch
        if last + 1 < len(AGES_S):
            due_s = watch.since_s + AGES_S[last + 1]
            self._dues_s[last] = min(self._dues_s[last], due_s)
        self._aged(watch.uid)

    def began(self, uid: bytes, now_s: float) -> None:
        """A turn of the session begins."""
        if now_s >= self._due_s:
            self.advance(now_s)
        elif now_s > self.now_s:
            self.now_s = now_s
        watch = self._watches.pop(uid, None)
        if watch is not None:
            # From when it was idle, not from when its job came.
            self._bins[watch.bin].pop(uid, None)
            watch.came()
            gap_s, mean_gap_s = self.now_s - (watch.before or watch).since_s, watch.mean_gap_s
            if mean_gap_s is not None:
                gap_s = mean_gap_s + (gap_s - mean_gap_s) * NEWEST_SHARE
            self._gaps_s[uid] = gap_s
            if len(self._gaps_s) > WATCHED:
                self._gaps_s.popitem(last=False)
            # Two returns of one session: from idleness, and from the queue.
            if watch.before is not None:
                watch.before.came()
                self._wait_s += (self.now_s - watch.since_s - self._wait_s) / WAIT_MEMORY
            self._queued_share += ((watch.before is not None) - self._queued_share) / WAIT_MEMORY

    def continued(self, uid: bytes) -> None:
        """Another session went on where this one ended, which is away: as good as a return, counted once."""
        watch = self._watches.get(uid)
        if watch is not None:
            (watch.before or watch).came()

    def ended(self, uid: bytes) -> None:
        """The session is gone for good; that it stayed away has been counted."""
        self._unwatch(uid)
        self._gaps_s.pop(uid, None)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """A turn of the session is over."""
        if now_s >= self._due_s:
            self.advance(now_s)
        elif now_s > self.now_s:
            self.now_s = now_s
        if uid in self._watches:
            self._unwatch(uid)
        gap_s = self._gaps_s.pop(uid, None)
        if facts.is_prefix:
            name: SessionClass = (PREFIX, *class_of_prefix(facts, gap_s))
        else:
            name = (IDLE, *class_of(facts, gap_s))
        watch = _Watch(uid, self.now_s, name, self._classes.of(name))
        watch.mean_gap_s = gap_s if facts.is_prefix else None
        self._watch(watch)
        self._turn_count += 1
        # Often at first and seldom later: early counts change hazards much, and a pass over all classes costs
        # time.
        if self._turn_count >= self._refreshed_at:
            self._refreshed += 1
            pause = max(LEAST_REFRESHED, int(self._turn_count * REFRESHED_SHARE))
            self._refreshed_at = self._turn_count + min(pause, MOST_REFRESHED)
        if self._turn_count % HALVED_EVERY == 0:
            self._classes.halve()

    def recalled(self, uid: bytes, idle_s: float) -> None:
        """The session has been idle for that long, and how it came to be is not known. The oldest come first.

        It is counted from here on; what the run counted of it whose counts were gone on from, not again.
        """
        # Older than what is learned: nothing would follow from it.
        if idle_s < AGES_S[-1] + LAST_BIN_S:
            since_s, counted_s = self.now_s - idle_s, self.now_s - self._counts_age_s
            # The earlier run counted it up to when its counts were saved.
            is_counted = since_s <= counted_s and self._bin(since_s) == self._bin(since_s, counted_s)
            watch = _Watch(uid, since_s, (IDLE,), self._classes.of((IDLE,)))
            self._watch(watch, is_counted=is_counted)

    def counts(self) -> dict[str, object]:
        """The learned counts, as JSON has them: a later run may go on from them."""
        return {**self._classes.counts(), "wait_s": self._wait_s, "queued_share": self._queued_share}

    def recount(self, counts: Mapping[str, Any], age_s: float) -> None:
        """Go on from `counts`, which are so old.

        Raises ValueError, KeyError, TypeError, and has changed nothing then.
        """
        wait_s, queued_share = float(counts["wait_s"]), float(counts["queued_share"])
        if not (0 <= wait_s < math.inf and 0 <= queued_share <= 1):
            raise ValueError(f"a wait of {wait_s} s, a share of {queued_share}")
        self._classes.recount(counts)
        self._coming_of = -1
        self._wait_s, self._queued_share, self._counts_age_s = wait_s, queued_share, age_s
        self._refreshed += 1

    def queued(self, uid: bytes) -> None:
        """A job of the session waits."""
        before = self._watches.get(uid)
        if before is not None and before.before is None:
            # Its return is counted in part, by how likely jobs come to their turn, and corrected when it has.
            # A job may never come, and whether it does shows late.
            before.came(self.coming_share)
            self._bins[before.bin].pop(uid, None)
            name = (QUEUED, *before.name[1:])
            self._watch(_Watch(uid, self.now_s, name, self._classes.of(name), before))

    def unqueued(self, uid: bytes) -> None:
        """The job is gone although no turn began: the session is idle as it was."""
        watch = self._watches.get(uid)
        if watch is not None and watch.before is not None:
            self._bins[watch.bin].pop(uid, None)
            # It did not return after all: the part that was counted is taken back.
            before = self._watches[uid] = watch.before
            before.came(0.0)
            before.bin, before.index_per_s = self._bin(before.since_s), -1.0
            self._bins[before.bin][uid] = before
            if before.bin + 1 < len(AGES_S):
                due_s = before.since_s + AGES_S[before.bin + 1]
                self._dues_s[before.bin] = min(self._dues_s[before.bin], due_s)

    def said(self, uid: bytes, *, is_over: bool) -> None:
        """The client says that the session will not return, or that it will.

        Others of which it said so did, or not.
        """
        watch = self._watches.get(uid)
        if watch is None:
            return
        watch = watch.before or watch
        name = (OVER if is_over else IDLE, *watch.name[1:])
        if name != watch.name:
            watch.is_of(name, self._classes.of(name))

    def index_per_s(self, uid: bytes) -> float:
        """The best rate, in returns per second kept, that keeping the session for some time promises.

        It is the Gittins index of its class at its idle time: max over h of P(return within h) / E[time
        kept]. A session that returns waits in the queue, which is time kept, too.
        """
        watch = self._watches.get(uid)
        if watch is None:
            return 0.0
        # Kept until the next bin, so that the number of looks changes nothing.
        if watch.index_per_s < 0:
            if watch.of.refreshed != self._refreshed:
                watch.of.refresh(self._refreshed, self._queue_wait_s(watch))
            watch.index_per_s = watch.of.indices[watch.bin]
        return watch.index_per_s

    def chance(self, uid: bytes) -> float:
        """How likely the session returns at all, within what is learned; 0 for one that is not watched."""
        watch = self._watches.get(uid)
        if watch is None:
            return 0.0
        watch.of.refresh(self._refreshed, self._queue_wait_s(watch))
        return watch.of.chances[watch.bin]

    def _queue_wait_s(self, watch: _Watch) -> float:
        """How long it will wait in the queue once it returns.

        No time if its job is there, or returns go by none.
        """
        return 0.0 if watch.before is not None else WAIT_TIMES * self._wait_s * self._queued_share

    def _bin(self, since_s: float, now_s: float | None = None) -> int:
        return bisect_right(AGES_S, (self.now_s if now_s is None else now_s) - since_s) - 1

    def _watch(self, watch: _Watch, *, is_counted: bool = False) -> None:
        self._watches[watch.uid] = watch
        # The oldest watch goes: its return would say least.
        if len(self._watches) > WATCHED:
            self._unwatch(next(iter(self._watches)))
        if watch.since_s < self.now_s:
            watch.bin = self._bin(watch.since_s)
        self._bins[watch.bin][watch.uid] = watch
        if not is_counted:
            watch.went_on()
        if watch.bin + 1 < len(AGES_S):
            due_s = watch.since_s + AGES_S[watch.bin + 1]
            self._dues_s[watch.bin] = min(self._dues_s[watch.bin], due_s)
            self._due_s = min(self._due_s, due_s)

    def _unwatch(self, uid: bytes) -> _Watch | None:
        watch = self._watches.pop(uid, None)
        if watch is not None:
            self._bins[watch.bin].pop(uid, None)
        return watch

    def _forget(self, left: int) -> int:
        """Stop watching so many of those that are away for longer than is learned.

        Returns how many less there were.
        """
        last = self._bins[-1]
        while left and last and next(iter(last.values())).since_s + AGES_S[-1] + LAST_BIN_S <= self.now_s:
            left -= 1
            uid, watch = last.popitem(last=False)
            # A job may wait for longer; the number of watches bounds those.
            # A job in the queue may wait longer than is learned, and its turn is still to be counted.
            if watch.before is None:
                del self._watches[uid]
        return left
