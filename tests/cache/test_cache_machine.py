"""The cache against a dictionary: whatever is done in whatever order, reads bring what was written.

An arena of six segments and little SSD make demotion, promotion and eviction happen all the time;
after every step the books are checked, and after a crash everything durable must still be there.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from uuid import UUID

import pytest
from block_rig import SPACE as BLOCKS_SPACE
from block_rig import data_of, key_of, load, look, put
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, DiskRig, MemoryRig, Token, Writer, expected
from fakes import Operation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ctxcache.cache import blocks, sessions
from ctxcache.cache.blocks import BlockState
from ctxcache.cache.leases import Lease
from ctxcache.cache.prefixes import Match
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.session import HIDDEN
from ctxcache.core.limits import DEFAULT_WATERMARKS
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.served import RANKED
from ctxcache.errors import CapacityExceeded, TierFailure, TooManyRequests
from ctxcache.server.upkeep import Upkeep
from ctxcache.storage.metadata.base import Changes

T = TypeVar("T")
Step = TypeVar("Step", bound=Callable[..., None])
AnyRig = TypeVar("AnyRig", DiskRig, MemoryRig)
# Sampled, not drawn: hypothesis prefers small numbers, and sessions would stay empty.
picks = st.sampled_from(range(60))
parts = st.sampled_from([i / 16 for i in range(17)])
counts = st.sampled_from([0, 1, 3, 60, 64, 65, 100, 128, 150, 200, 250])
block_numbers = st.sampled_from(range(12))
seldom = st.sampled_from([False] * 5 + [True])
BLOCK_SIZES = (500, SLOT_BYTES // 2, SLOT_BYTES - 4096)
CAPACITIES = Capacities(6 * SLOT_BYTES, 4 * SLOT_BYTES)
LONG_TOO = replace(DEFAULT_WATERMARKS, longest=0.34)
"""Segments of 128 tokens fit into such an arena, and none that is longer."""
SETTINGS = settings(max_examples=100, stateful_step_count=50, suppress_health_check=list(HealthCheck))


@dataclass(slots=True)
class Known:
    """The model's view of a session."""

    tokens: list[Token] = field(default_factory=list)
    durable: set[Token] = field(default_factory=set)
    is_pinned: bool = False
    ttl_ns: int = 0
    expire_time_ns: int = 0


@dataclass(slots=True)
class Open:
    """A reservation with what was written into it, committed tokens left out."""

    reservation: Reservation
    name: str
    written: list[Token]


def needs(condition: Callable[["CacheMachine"], Any]) -> Callable[[Step], Step]:
    """A rule that does nothing where the condition does not hold.

    Not hypothesis' precondition: which rules there are would depend on what threads did first, and hypothesis
    takes an example that draws otherwise when it is repeated for a broken test.
    """

    def decorate(step: Step) -> Step:
        @wraps(step)
        def guarded(machine: "CacheMachine", *args: Any, **given: Any) -> None:
            if condition(machine):
                step(machine, *args, **given)

        return cast("Step", guarded)

    return decorate


class CacheMachine(RuleBasedStateMachine):
    """Rules over names s0, s1, ...; subclasses say over which stores."""

    make: Callable[[Path], DiskRig | MemoryRig]

    def __init__(self) -> None:
        super().__init__()
        # Ties are broken by sessions' uids: random ones would make a repeated example another one.
        draw = Random(0)
        self.uids = pytest.MonkeyPatch()
        for module in (blocks, sessions):
            made = SimpleNamespace(uuid4=lambda: UUID(int=draw.getrandbits(128), version=4))
            self.uids.setattr(module, "uuid", made)
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="ctxcache-test-"))
        self.rig = type(self).make(self.directory)
        self.run(self.rig.open())
        self.model: dict[str, Known] = {}
        self.leases: list[tuple[Lease, list[Token]]] = []
        self.open: list[Open] = []
        self.name_count = 0
        self.evicted = 0
        self.is_faulty = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end."""
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    async def matches(self) -> list[Match]:
        """What prefixes find of each session's tokens."""
        return [await self.rig.match(known.tokens) for known in self.model.values()]

    async def commit_nothing(self) -> None:
        """All records so far are durable."""
        await self.rig.metadata.commit(Changes(), is_durable=True)

    def teardown(self) -> None:
        """Close, and leave nothing behind."""
        self.run(self.rig.cache.drain())
        if isinstance(self.rig, DiskRig):
            self.rig.ssd.close()
            self.rig.metadata.close()
        self.rig.arena.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.directory)
        self.uids.undo()

    # -- the model ---------------------------------------------------------------------------------

    def name(self, pick: int) -> str:
        """One of the sessions."""
        names = sorted(self.model)
        return names[pick % len(names)]

    def idle(self) -> list[str]:
        """Sessions without an open reservation."""
        busy = {item.name for item in self.open}
        return sorted(set(self.model) - busy)

    def touch(self, name: str) -> None:
        """Count an access."""
        known = self.model[name]
        known.expire_time_ns = self.rig.clock.now_ns() + known.ttl_ns

    def sync(self) -> None:
        """Learn what was evicted; nothing else may be missing, and nobody else may be there."""
        # What others ask for of an evicted session stays without its name, and is found by its tokens.
        names = {name for name in self.rig.names() if not name.startswith(HIDDEN)}
        counted = self.rig.cache.state.counters.evicted_session_count
        missing = set(self.model) - names
        assert names <= set(self.model), names - set(self.model)
        assert len(missing) <= counted - self.evicted, missing
        for name in missing:
            assert not self.model[name].is_pinned
            assert all(item.name != name for item in self.open)
            del self.model[name]
        self.evicted = counted

    @contextmanager
    def may_lack_room(self) -> Iterator[None]:
        """Room and devices may fail, when there is a reason for it."""
        try:
            yield
        except CapacityExceeded as error:
            is_held = self.leases or self.open or self.rig.cache.appends.held_count
            if error.facts["tier"] == "DRAM" and not is_held:
                raise
        except TooManyRequests:
            if not self.leases and not self.open and not self.rig.cache.appends.held_count:
                raise
        except TierFailure:
            if not self.is_faulty:
                raise

    def forget_holds(self) -> None:
        """Nothing is held any more."""
        self.leases.clear()
        self.open.clear()

    # -- rules -------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Start with sessions that hold something."""
        for count in (20, 100, 300):
            self.create(is_pinned=False, ttl_s=3600)
            self.append(len(self.model) - 1, count, is_durable=False)

    @rule(
        is_pinned=seldom,
        ttl_s=st.sampled_from([400, 3600, 100000]),
        copies=st.sampled_from([1, 1, 2]),
    )
    def create(self, *, is_pinned: bool, ttl_s: int, copies: int = 1) -> None:
        """A new session is empty."""
        name = f"s{self.name_count}"
        self.name_count += 1
        view = self.run(self.rig.create(name, is_pinned=is_pinned, ttl_s=ttl_s, copies=copies))
        assert view.token_count == 0
        self.model[name] = Known(is_pinned=is_pinned, ttl_ns=ttl_s * 10**9)
        self.touch(name)

    @rule(pick=picks, count=counts, is_durable=st.booleans(), is_coming=st.booleans())
    @needs(lambda self: self.idle())
    def append(self, pick: int, count: int, *, is_durable: bool, is_coming: bool = True) -> None:
        """Appended tokens are there, also when they could not be made durable."""
        name = self.idle()[pick % len(self.idle())]
        known, tokens = self.model[name], self.writer(name).make(count)
        with self.may_lack_room():
            view = self.run(self.rig.append(name, tokens, is_durable=is_durable, is_coming=is_coming))
            assert view.token_count == len(known.tokens) + count
            if is_durable:
                assert view.durable_token_count == view.token_count
                known.durable |= {*known.tokens, *tokens}
        self.settle_append(name, tokens)

    def writer(self, name: str) -> Writer:
        """A session's own writer, so that its rows differ from everyone's."""
        writers: dict[str, Writer] = self.__dict__.setdefault("writers", {})
        return writers.setdefault(name, Writer(len(writers) + 1))

    def settle_append(self, name: str, tokens: list[Token]) -> None:
        """All of the tokens or none of them are there."""
        self.touch(name)
        if name not in self.rig.names():
            return
        known, found = self.model[name], self.rig.token_count(name)
        assert found in (len(known.tokens), len(known.tokens) + len(tokens))
        known.tokens += tokens[: found - len(known.tokens)]

    @rule(pick=picks, begin=parts, end=parts)
    @needs(lambda self: self.model)
    def read(self, pick: int, begin: float, end: float) -> None:
        """A stream brings the tokens asked for, whatever else is held."""
        name = self.name(pick)
        tokens = self.model[name].tokens
        low, high = sorted((round(begin * len(tokens)), round(end * len(tokens))))
        with self.may_lack_room():
            assert self.run(self.rig.read(name, low, high)) == expected(tokens[low:high])
        self.touch(name)

    @rule(pick=picks, begin=parts, size=counts)
    @needs(lambda self: self.model and len(self.leases) < 3)
    def acquire(self, pick: int, begin: float, size: int) -> None:
        """A lease shows the tokens asked for."""
        name = self.name(pick)
        tokens = self.model[name].tokens
        low = round(begin * len(tokens))
        leased = tokens[low : low + size]
        with self.may_lack_room():
            lease = self.run(self.rig.acquire(name, low, low + len(leased)))
            self.leases.append((lease, leased))
        self.touch(name)

    @rule(pick=picks)
    @needs(lambda self: self.leases)
    def release(self, pick: int) -> None:
        """A lease ends."""
        lease, _ = self.leases.pop(pick % len(self.leases))
        self.rig.cache.leases.release(lease.lease_id)

    @rule(pick=picks, count=st.sampled_from([1, 40, 64, 100, 150]), is_coming=st.booleans())
    @needs(lambda self: self.idle() and len(self.open) < 2)
    def reserve(self, pick: int, count: int, *, is_coming: bool) -> None:
        """A reservation shows nothing by itself."""
        name = self.idle()[pick % len(self.idle())]
        with self.may_lack_room():
            reservation = self.run(self.rig.reserve(name, count, is_coming=is_coming))
            tokens = self.writer(name).make(count)
            self.rig.place(reservation, reservation.committed, tokens)
            self.open.append(Open(reservation, name, tokens))
        self.touch(name)

    @rule(pick=picks, part=parts, keep_open=st.booleans(), is_durable=st.booleans())
    @needs(lambda self: self.open)
    def commit(self, pick: int, part: float, *, keep_open: bool, is_durable: bool) -> None:
        """A commit shows the tokens up to it."""
        item = self.open[pick % len(self.open)]
        known = self.model[item.name]
        tokens = item.written[: round(part * len(item.written))]
        if not keep_open:
            self.open.remove(item)
        with self.may_lack_room():
            self.run(
                self.rig.cache.appends.commit(
                    item.reservation, len(known.tokens) + len(tokens),
                    is_durable=is_durable, keep_open=keep_open,
                )
            )  # fmt: skip
            if is_durable:
                known.durable |= {*known.tokens, *tokens}
        item.written = item.written[len(tokens) :]
        self.touch(item.name)
        known.tokens += tokens

    @rule(pick=picks, part=parts)
    @needs(lambda self: self.open)
    def mark(self, pick: int, part: float) -> None:
        """Tokens marked as written are on their way to disk, and show nowhere."""
        item = self.open[pick % len(self.open)]
        marked = len(self.model[item.name].tokens) + round(part * len(item.written))
        self.run(self.rig.mark_written(item.reservation, marked))

    @rule(pick=picks, is_abandoned=st.booleans())
    @needs(lambda self: self.open)
    def give_up(self, pick: int, *, is_abandoned: bool) -> None:
        """Rows that were not committed never were."""
        item = self.open.pop(pick % len(self.open))
        self.rig.cache.appends.release(item.reservation, is_abandoned=is_abandoned)

    @rule(pick=picks, cuts=st.lists(st.tuples(parts, parts), max_size=3))
    @needs(lambda self: self.idle())
    def truncate(self, pick: int, cuts: list[tuple[float, float]]) -> None:
        """Dropped tokens are gone, the others move up."""
        name = self.idle()[pick % len(self.idle())]
        known = self.model[name]
        size = len(known.tokens)
        dropped = [tuple(sorted((round(a * size), round(b * size)))) for a, b in cuts]
        self.run(self.rig.truncate(name, *((low, high) for low, high in dropped)))
        gone = {i for low, high in dropped for i in range(low, high)}
        known.tokens = [token for i, token in enumerate(known.tokens) if i not in gone]
        self.touch(name)

    @rule(pick=picks, part=parts)
    @needs(lambda self: self.idle())
    def keep_first(self, pick: int, part: float) -> None:
        """The newest tokens go."""
        name = self.idle()[pick % len(self.idle())]
        known = self.model[name]
        kept = round(part * len(known.tokens))
        self.truncate_to(name, kept)
        known.tokens = known.tokens[:kept]

    def truncate_to(self, name: str, kept: int) -> None:
        """Keep the first tokens."""
        self.run(self.rig.cache.sessions.keep_first("acme", name, None, kept))
        self.touch(name)

    @rule(pick=picks, part=parts)
    @needs(lambda self: self.idle())
    def fork(self, pick: int, part: float) -> None:
        """A fork has the first tokens, for good."""
        name, new_name = self.idle()[pick % len(self.idle())], f"s{self.name_count}"
        self.name_count += 1
        known = self.model[name]
        kept = round(part * len(known.tokens))
        with self.may_lack_room():
            view = self.run(self.rig.fork(name, new_name, kept))
            assert view.token_count == view.durable_token_count == kept
            tokens = known.tokens[:kept]
            self.model[new_name] = Known(tokens, set(tokens), ttl_ns=known.ttl_ns)
            known.durable |= set(known.tokens)
            self.touch(new_name)
            self.touch(name)

    @rule(pick=picks, part=parts, is_copied=seldom)
    @needs(lambda self: self.model)
    def adopt(self, pick: int, part: float, *, is_copied: bool) -> None:
        """Tokens of another session are found and shared; or computed and stored again."""
        wanted = list(self.model[self.name(pick)].tokens)
        wanted = wanted[: max(round(part * len(wanted)), SEGMENT_TOKENS)]
        self.create(is_pinned=False, ttl_s=3600)
        name = f"s{self.name_count - 1}"
        known = self.model[name]
        adopted: list[Token] = []
        if not is_copied:
            with self.may_lack_room():
                count = self.run(self.rig.adopt(name, wanted))
                assert count % SEGMENT_TOKENS == 0
                assert count <= len(wanted)
                adopted = wanted[:count]
        if name in self.rig.names():
            known.tokens, known.durable = list(adopted), set(adopted)
            self.touch(name)
            # The arena has room for six segments at a time.
            rest = wanted[self.rig.token_count(name) :][: 4 * SEGMENT_TOKENS]
            with self.may_lack_room():
                self.run(self.rig.append(name, rest))
            self.settle_append(name, rest)

    @rule(pick=picks, is_meant=seldom)
    @needs(lambda self: self.idle())
    def delete(self, pick: int, *, is_meant: bool) -> None:
        """A deleted session is gone."""
        if not is_meant:
            return
        name = self.idle()[pick % len(self.idle())]
        self.run(self.rig.delete(name))
        del self.model[name]

    @rule(number=block_numbers, count=st.sampled_from([1, 2, 3]), is_durable=st.booleans(), is_child=seldom)
    def put_blocks(self, number: int, count: int, *, is_durable: bool, is_child: bool) -> None:
        """Blocks are put among the sessions; those that were made durable are on SSD."""
        numbers = range(number, number + count)
        parent = (
            number - 1 if is_child and number and look(self.rig, number - 1) == [BlockState.HIT] else None
        )
        size_bytes = BLOCK_SIZES[number % len(BLOCK_SIZES)]
        with self.may_lack_room():
            self.run(put(self.rig, *numbers, is_durable=is_durable, parent=parent, size_bytes=size_bytes))

    @rule(number=block_numbers, count=st.sampled_from([1, 2, 3]))
    def load_blocks(self, number: int, count: int) -> None:
        """A block is there whole or not at all."""
        numbers = range(number, number + count)
        with self.may_lack_room():
            for each, found in zip(numbers, self.run(load(self.rig, *numbers)), strict=True):
                assert found is None or found == data_of(each, len(found))
                assert found is None or len(found) in BLOCK_SIZES

    @rule(number=block_numbers, is_meant=seldom)
    def delete_block(self, number: int, *, is_meant: bool) -> None:
        """A deleted block is gone."""
        if is_meant:
            self.run(self.rig.cache.blocks.delete("acme", BLOCKS_SPACE, [key_of(number)]))
            assert look(self.rig, number) == [BlockState.MISS]

    def durable_blocks(self) -> set[str]:
        """Those that a crash leaves."""
        return {block.session_id for block in self.rig.cache.ledger.blocks() if block.durable_end}

    @rule(pick=picks, is_demoted=st.booleans())
    @needs(lambda self: self.model)
    def flush(self, pick: int, *, is_demoted: bool) -> None:
        """A flushed session is durable."""
        name = self.name(pick)
        with self.may_lack_room():
            work = self.rig.demote(name) if is_demoted else self.rig.flush(name)
            view = self.run(work)
            assert view.durable_token_count == view.token_count
            self.model[name].durable |= set(self.model[name].tokens)

    @rule(pick=picks, copies=st.sampled_from([1, 2, 2]))
    @needs(lambda self: self.model)
    def mark_copies(self, pick: int, copies: int) -> None:
        """A session shall be on both paths, or on one again: as far as there is room it comes to be."""
        name = self.name(pick)
        self.run(self.rig.mark(name, copies))
        self.touch(name)
        with self.may_lack_room():
            self.run(self.rig.cache.copying.turn())

    @rule(pick=picks)
    @needs(lambda self: self.idle())
    def join(self, pick: int) -> None:
        """Short segments of a durable session become long ones, and nobody notices."""
        name = self.idle()[pick % len(self.idle())]
        self.append(pick, 192, is_durable=False, is_coming=False)
        with self.may_lack_room():
            if name not in self.rig.names():
                return
            self.run(self.rig.flush(name))
            self.model[name].durable |= set(self.model[name].tokens)
            assert self.run(self.rig.read(name)) == expected(self.model[name].tokens)
            self.run(self.rig.cache.joining.join(self.rig.cache.ledger.find("acme", name)))
        self.touch(name)

    @rule(
        pick=picks, order=st.sampled_from([None, 1.0, 2.0, 3.0]), wait_s=st.sampled_from([None, 5.0, 500.0])
    )
    @needs(lambda self: self.model)
    def foretell(self, pick: int, order: float | None, wait_s: float | None) -> None:
        """Somebody says who comes when, or that nobody does: true or not, it costs nobody anything."""
        placement = self.rig.cache.placement
        session = self.rig.cache.ledger.find("acme", self.name(pick))
        if order is None:
            placement.withdrawn(session)
            now_s = self.rig.clock.monotonic_ns() / 10**9
            placement.expected(session, None if wait_s is None else now_s + wait_s)
        else:
            placement.hinted(session, order)

    @rule()
    def doze(self) -> None:
        """All fall asleep that may: what is asked of them next is what others would be asked."""
        ledger = self.rig.cache.ledger
        ledger.sleep.awake_count, ledger.sleep.sleep_ns = 0, -(10**18)
        for uid in ledger.sleep._awake:
            ledger.sleep._awake[uid] = 0
        self.run(self.rig.cache.sessions.save_access_times())
        self.run(self.rig.let_go())
        self.run(self.rig.cache.sessions.let_sleep())
        del ledger.sleep.awake_count, ledger.sleep.sleep_ns

    @rule()
    def turn(self) -> None:
        """Upkeep runs."""
        self.run(Upkeep(self.rig.cache).turn())

    @rule(step_s=st.sampled_from([-(10**6), -7200, -1, 0, 7200, 10**8]))
    def set_clock(self, step_s: int) -> None:
        """The wall clock is set: nobody notices."""
        self.rig.clock.jump(to_ns=self.rig.clock.now_ns() + step_s * 10**9)

    @rule(seconds=st.sampled_from([1] * 6 + [40, 40, 70, 350, 3700]))
    def advance(self, seconds: int) -> None:
        """Sessions, leases and reservations end when their time has come."""
        for item in self.open:
            self.rig.cache.appends.release(item.reservation, is_abandoned=True)
        self.open.clear()
        self.run(self.rig.cache.sessions.save_access_times())
        self.run(self.commit_nothing())
        self.rig.clock.advance(seconds=seconds)
        now_ns = self.rig.clock.now_ns()
        self.model = {n: known for n, known in self.model.items() if known.expire_time_ns > now_ns}
        mono_ns = self.rig.clock.monotonic_ns()
        self.leases = [item for item in self.leases if item[0].deadline_ns > mono_ns]
        had_room = self.has_room_for_all()
        self.run(Upkeep(self.rig.cache).turn())
        if had_room:
            self.check_old(seconds)
        assert self.rig.cache.leases.lease_count == len(self.leases)

    def has_room_for_all(self) -> bool:
        """Whether SSD has room for all that is to be written, twice.

        Where it has not, a session that is worth less than what is there is spared. It is looked at again
        when its rows are old anew, also where the next session's write makes more room than it needs.
        """
        ledger = self.rig.cache.ledger
        sessions = (*ledger.sessions(), *ledger.blocks())
        return (
            2 * sum(ledger.unwritten.size_bytes(session) for session in sessions) <= ledger.below.free_bytes
        )

    def check_old(self, seconds: int) -> None:
        """Rows that had the time to be written are on SSD, unless it has no room or failed."""
        cache = self.rig.cache
        if self.is_faulty or seconds * 10**9 < cache.ledger.watermarks.tail_age_ns:
            return
        for session in cache.ledger.sessions():
            sizes_bytes = [segment.size_bytes for segment in cache.ledger.unwritten.segments(session)]
            # Free in all is not free in one piece, which is what the longest of them needs.
            longest_bytes = max(cache.ledger.below.largest_free_bytes_by_path)
            has_room = sum(sizes_bytes) <= cache.ledger.below.free_bytes
            has_room &= max(sizes_bytes, default=0) <= longest_bytes
            assert session.durable_end == session.log_end or not has_room
            if session.durable_end == session.log_end and session.session_id in self.model:
                known = self.model[session.session_id]
                known.durable |= set(known.tokens)

    @rule(is_crash=st.booleans(), is_meant=seldom)
    def restart(self, *, is_crash: bool, is_meant: bool) -> None:
        """After an end in order everything is there; after a crash, everything durable and nothing wrong."""
        if not is_meant:
            return
        is_whole = not is_crash
        for item in self.open:
            self.rig.cache.appends.release(item.reservation)
        for lease, _ in self.leases:
            self.rig.cache.leases.release(lease.lease_id)
        self.forget_holds()
        self.run(self.rig.cache.drain())
        durable = self.durable_blocks()
        if is_crash:
            self.run(self.rig.crash())
            assert self.durable_blocks() == durable
        else:
            try:
                self.run(self.rig.close())
            except (CapacityExceeded, TierFailure) as error:
                if not self.is_faulty and error.facts["tier"] != "SSD":
                    raise
                is_whole = False
            self.sync()
            self.run(self.rig.open())
        self.evicted = 0
        self.learn(is_whole=is_whole)

    def learn(self, *, is_whole: bool) -> None:
        """The sessions after a start are right."""
        for name, known in self.model.items():
            view = self.rig.cache.sessions.get("acme", name)
            least = len(known.tokens)
            if not is_whole:
                least = next((i for i, t in enumerate(known.tokens) if t not in known.durable), least)
            assert least <= view.token_count <= len(known.tokens)
            known.tokens = known.tokens[: view.token_count]
            known.durable |= set(known.tokens)
            assert view.expire_time_ns <= known.expire_time_ns
            known.expire_time_ns = view.expire_time_ns
        for name in sorted(self.model):
            with self.may_lack_room():
                assert self.run(self.rig.read(name)) == expected(self.model[name].tokens)
            self.touch(name)

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def books_add_up(self) -> None:
        """Slots, references and holds are those of what is there; leases show what they did."""
        self.run(self.rig.check())
        self.sync()
        for known, found in zip(self.model.values(), self.run(self.matches()), strict=True):
            assert found.token_count <= len(known.tokens)
            assert found.dram_token_count <= found.token_count
        for name, known in self.model.items():
            assert self.rig.token_count(name) == len(known.tokens)
        for lease, tokens in self.leases:
            assert self.rig.leased(lease) == expected(tokens)


def small(kind: type[AnyRig], directory: Path, policy: str) -> AnyRig:
    """A rig with two SSD paths, six slots in memory, and joins from the second segment on."""
    return kind(
        directory,
        arena_segments=6,
        ssd_segments=(8, 5),
        watermarks=LONG_TOO,
        make_policy=partial(RANKED[policy], CAPACITIES),
        many_segments=1,
    )


class DiskMachine(CacheMachine):
    """Over files and a database: a crash is the death of the process."""

    @staticmethod
    def make(directory: Path) -> DiskRig:
        """Two SSD paths with room for thirteen segments."""
        return small(DiskRig, directory, "value")


class MemoryMachine(CacheMachine):
    """Over memory: a crash is a power cut, and devices fail."""

    @staticmethod
    def make(directory: Path) -> MemoryRig:
        """Two SSD paths with room for thirteen segments."""
        return small(MemoryRig, directory, "look-ahead")

    @rule(operation=st.sampled_from([Operation.READ, Operation.WRITE]), nth=st.integers(1, 3))
    def fail(self, operation: Operation, nth: int) -> None:
        """A device refuses, once."""
        assert isinstance(self.rig, MemoryRig)
        self.rig.ssd.fail(operation, nth=nth)
        self.is_faulty = True


TestOverFiles = DiskMachine.TestCase
TestOverFiles.settings = settings(SETTINGS, max_examples=40)
TestOverMemory = MemoryMachine.TestCase
TestOverMemory.settings = settings(SETTINGS, max_examples=100)
