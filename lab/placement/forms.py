"""Forms: a trace's sessions kept as K/V, in fewer bits, as token ids alone, or each for as long as it pays.

A form takes bytes while a session is idle, and prefill when it returns. A pure strategy has one form. The
mixed one goes from form to form with the time that a session is idle, as `gpu_worker.saving.aging` does: it
has the form that would have been the cheapest for a return just now. `learned` does so for a return as
likely as those so far: what never returns is not worth its rent. `knows` picks the best form for each return
that it foresees, and no store can. Turns take no time, and room is never short: it is paid for. Memory: an
entry per session. Worst case: a trace without second turns, in which nothing is worth keeping.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ctxcache.core.placement.returns import ReturnShare
from ctxcache.errors import InvalidArgument
from ctxcache.simulate.load import GB, HOUR_S, Load
from ctxcache.simulate.replay import dropped_tokens
from ctxcache.simulate.rows import TraceTurn

MIXED, LEARNED, KNOWS = "mixed", "learned", "knows"
THAW_RETURNS = 2
"""A session that returned is made hot again where that pays after so many returns more."""
MOST_FORMS = 16


@dataclass(frozen=True, slots=True)
class Form:
    """A form: bytes a token, and shares of its prefill to bring it back and to make it of the first."""

    name: str
    token_bytes: float
    back_share: float
    make_share: float = 0.0


def forms_of(text: str, token_bytes: int) -> tuple[Form, ...]:
    """Read `kv=1:0,kv_int4=0.31:0.01,tokens=0:1`: the first is hot, bytes are shares of `token_bytes`.

    A third number is the share of prefill that making it takes. Token ids take 4 bytes in every form. Raises
    InvalidArgument(field="forms").
    """
    found: list[Form] = []
    for part in text.split(","):
        name, _, numbers = part.partition("=")
        try:
            size, back, *make = (float(number) for number in numbers.split(":"))
        except ValueError:
            raise _wrong(f"{part!r} is not NAME=BYTES:BACK or NAME=BYTES:BACK:MAKE") from None
        shares = (size, back, *make)
        if not name or len(make) > 1 or not all(0 <= share < math.inf for share in shares):
            raise _wrong(f"{part!r} is not NAME=BYTES:BACK or NAME=BYTES:BACK:MAKE, none of them negative")
        if name in (MIXED, LEARNED, KNOWS) or any(name == other.name for other in found):
            raise _wrong(f"{name!r} is there already")
        # Ids are kept with every form, since a session is found by them.
        found.append(Form(name, 4.0 + size * token_bytes, back, make[0] if make else 0.0))
    if not 2 <= len(found) <= MOST_FORMS:
        raise _wrong(f"{len(found)} forms; 2 to {MOST_FORMS} can be compared")
    if any(form.token_bytes > found[0].token_bytes for form in found):
        raise _wrong("the first form is the one of sessions in use, and none is larger")
    return tuple(found)


def _wrong(problem: str) -> InvalidArgument:
    return InvalidArgument(field="forms", problem=problem)


@dataclass(slots=True)
class Kept:
    """The figures of one strategy. GPU seconds: bringing back, making, and computing what had expired."""

    strategy: str
    returns: int = 0
    gpu_s: float = 0.0
    byte_s: float = 0.0
    changed_count: int = 0
    """Times that a session was given another form."""

    def to_dict(self, load: Load, span_s: float) -> dict[str, object]:
        """For JSON: times in seconds, money in US dollars; `mean_bytes` over the trace and its last TTL."""
        gpu_cost = load.prices.gpu(self.gpu_s * load.gpu_count)
        storage_cost = load.prices.ssd_gb_hour * self.byte_s / GB / HOUR_S
        return {
            "strategy": self.strategy,
            "returns": self.returns,
            "gpu_s": self.gpu_s * load.gpu_count,
            "gb_hours": self.byte_s / GB / HOUR_S,
            "mean_bytes": self.byte_s / span_s if span_s else 0.0,
            "changed_count": self.changed_count,
            "cost": gpu_cost + storage_cost,
        }


@dataclass(frozen=True, slots=True)
class Rest:
    """A session's time between two turns, per token: prefill shares, byte seconds, and the form after it."""

    gpu_share: float
    byte_s: float
    changes: int
    after: int


# The cost of a token over the time that it rests: bringing it back, and the rent of its bytes.
#
#     form           bringing back     rent
#     kv             nothing           most
#     fewer bits     little            less
#     token ids      all of prefill    next to none
#
#     idle   0 ─── kv ───┬─── fewer bits ───┬─── token ids ───►
#                        └──────────────────┴ `_segments`: where the next form becomes the cheapest
class Keeper:
    """The cost of keeping a token, by form and time. Knows no trace."""

    def __init__(self, forms: Sequence[Form], load: Load) -> None:
        self.forms = forms
        prefill_s = load.prefill_s(1) * load.gpu_count
        self._gpu = load.prices.gpu(prefill_s)
        """US dollars for the prefill of a token."""
        self._rent = load.prices.ssd_gb_hour / GB / HOUR_S
        """US dollars for a byte and second."""
        if not self._rent or not self._gpu:
            raise InvalidArgument(field="forms", problem="nothing is to be weighed where a price is 0")
        # One for each keeper: a function's cache would outlive it.
        self._envelope = cache(self._segments)

    def again_share(self, form: int) -> float:
        """Prefill that makes a returned session hot again: all of it, where that is to pay."""
        gain = self.forms[form].back_share - self.forms[0].back_share
        return 1.0 if form and THAW_RETURNS * gain > 1.0 else 0.0

    def _cost(self, form: int, begin: int, idle_s: float, returning: float) -> float:
        one = self.forms[form]
        share = returning * (one.back_share + self.again_share(form))
        share += one.make_share if form != begin else 0.0
        return self._gpu * share + self._rent * one.token_bytes * idle_s

    def _segments(self, begin: int, returning: float) -> tuple[tuple[float, int], ...]:
        """From which time idle on the mixed strategy has which form, of a session that begins with one.

        `returning`: how likely it is taken to return.
        """
        found, at_s, form = [(0.0, begin)], 0.0, begin
        while True:
            crossings = []
            for other, one in enumerate(self.forms):
                less = self.forms[form].token_bytes - one.token_bytes
                if less <= 0:
                    # A form of more bytes never gets cheaper with time, so the way goes to smaller forms
                    # only.
                    continue
                ahead = self._cost(other, begin, at_s, returning) - self._cost(form, begin, at_s, returning)
                crossings.append((at_s + max(ahead, 0.0) / (self._rent * less), one.token_bytes, other))
            if not crossings:
                return tuple(found)
            # At one moment the smallest of them: it stays the cheapest from there on.
            at_s, _, form = min(crossings)
            found.append((at_s, form))

    def pure(self, form: int, idle_s: float, *, returns: bool) -> Rest:
        """One form all the time."""
        one = self.forms[form]
        return Rest(one.back_share if returns else 0.0, one.token_bytes * idle_s, 0, form)

    def mixed(self, begin: int, idle_s: float, *, returns: bool, returning: float = 1.0) -> Rest:
        """From form to form, as is best where a session is so likely to return."""
        # Rounded, so that few envelopes are made.
        segments = self._envelope(begin, round(returning, 2))
        gpu = byte_s = 0.0
        # `segments` begin with the form that the session has, so the first one is never a change.
        form, changes = begin, 0
        for index, (since_s, now) in enumerate(segments):
            if since_s > idle_s:
                break
            until_s = segments[index + 1][0] if index + 1 < len(segments) else math.inf
            byte_s += self.forms[now].token_bytes * (min(until_s, idle_s) - since_s)
            if now != form:
                gpu += self.forms[now].make_share
                changes += 1
            form = now
        # Its rent has been paid all the same, and what was made was made for nothing.
        if not returns:
            return Rest(gpu, byte_s, changes, form)
        again = self.again_share(form)
        gpu += self.forms[form].back_share + again
        return Rest(gpu, byte_s, changes + bool(again), 0 if again else form)

    def knows(self, idle_s: float, *, returns: bool) -> Rest:
        """The best form for a return that is foreseen; nothing is kept of a session that never returns."""
        if not returns:
            return Rest(0.0, 0.0, 0, 0)

        def cost(form: int) -> float:
            one = self.forms[form]
            share = one.back_share + one.make_share * bool(form)
            return self._gpu * share + self._rent * one.token_bytes * idle_s

        form = min(range(len(self.forms)), key=cost)
        one = self.forms[form]
        share = one.back_share + one.make_share * bool(form)
        return Rest(share, one.token_bytes * idle_s, bool(form), 0)


@dataclass(slots=True)
class _Session:
    token_count: int = 0
    dropped_count: int = 0
    rested_s: float = 0.0
    form: int = 0
    """The form by the mixed strategy."""
    learned_form: int = 0
    returning: float = 1.0
    """How likely a return was taken to be when the session began to rest."""


def keep(
    turns: Iterable[TraceTurn],
    load: Load,
    forms: Sequence[Form],
    step: Callable[[int], None] = lambda _: None,
) -> tuple[list[Kept], float]:
    """Play the trace by each pure form, by the mixed strategies and by the one that knows.

    Returns their figures, and from the first turn to the end of the last session's life, in seconds. Raises
    InvalidArgument(field="forms") where a price is 0, and what reading the trace raises.
    """
    keeper = Keeper(forms, load)
    kept = [Kept(form.name) for form in forms] + [Kept(name) for name in (MIXED, LEARNED, KNOWS)]
    sessions: dict[bytes, _Session] = {}
    returning = ReturnShare()
    first_s, last_s, index = math.inf, 0.0, 0
    for index, turn in enumerate(turns, 1):
        first_s, last_s = min(first_s, turn.arrival_s), turn.arrival_s
        session = sessions.get(turn.session)
        returning.turn(is_first=session is None)
        if session is None:
            session = sessions[turn.session] = _Session()
        else:
            _rest(keeper, kept, session, turn.arrival_s - session.rested_s, load, returns=True)
        _grow(session, turn, load)
        session.rested_s = turn.arrival_s
        session.returning = returning.share
        if index % 1024 == 0:
            step(index)
    for session in sessions.values():
        _rest(keeper, kept, session, load.ttl_s, load, returns=False)
    step(index)
    return kept, last_s + load.ttl_s - first_s if sessions else 0.0


def _grow(session: _Session, turn: TraceTurn, load: Load) -> None:
    """A session after a turn: as many of its tokens as the window holds."""
    history = session.token_count
    if turn.history_tokens is not None:
        history = max(turn.history_tokens - session.dropped_count, 0)
    count = history + turn.input_tokens + turn.output_tokens
    if load.context_tokens is not None:
        dropped = dropped_tokens(count, load.context_tokens)
        session.dropped_count += dropped
        count -= dropped
    session.token_count = count


def _rest(
    keeper: Keeper, kept: Sequence[Kept], session: _Session, idle_s: float, load: Load, *, returns: bool
) -> None:
    """Count a session's time without a turn, for every strategy. Behind its TTL all is computed anew."""
    is_there = returns and idle_s <= load.ttl_s
    # A session is there for its TTL at most, and rent is due until then, whether it returns or not.
    held_s, count = min(idle_s, load.ttl_s), session.token_count
    rests = [keeper.pure(form, held_s, returns=is_there) for form in range(len(keeper.forms))]
    mixed = keeper.mixed(session.form, held_s, returns=is_there)
    learned = keeper.mixed(session.learned_form, held_s, returns=is_there, returning=session.returning)
    rests += [mixed, learned, keeper.knows(held_s, returns=is_there)]
    session.form, session.learned_form = (mixed.after, learned.after) if is_there else (0, 0)
    for one, rest in zip(kept, rests, strict=True):
        one.returns += returns
        one.gpu_s += load.prefill_s(1) * count * (rest.gpu_share + (1.0 if returns and not is_there else 0.0))
        one.byte_s += count * rest.byte_s
        one.changed_count += rest.changes
