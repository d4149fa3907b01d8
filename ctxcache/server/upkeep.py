"""Upkeep: what happens unasked. Expiry, deadlines, write-behind, free room, access times, learned facts.

Ten loops, so that a slow device delays neither a deadline nor the room that clean segments give:

    end_what_is_over    leases, reservations, sessions, keys   every half second
    reopen_metadata     records whose device has returned      every half second
    write_behind        what is full, old or too much          when pressed
    join                short segments of long sessions        every half second
    copy                second copies on another SSD path      every half second
    make_room           free room in the arena                 when short
    look_after_devices  lost paths                             every half second
    give_up_overdue     callers that wait for a hung device    every half second
    prefetch            promotion ahead of need                when wanted
    scrub               verifies all that there is             a pass every 10 minutes at most

A step that fails is logged and tried again at the next turn. Worst case between two turns: of write_behind a
flush of everything that is dirty, of end_what_is_over one commit.

`Lessons` keeps what the placement policy has learned, for the next run, in the data directory's file LESSONS:

    {"version": 1, "policy": "value", "time_ns": ..., "lessons": {...}, "checksum": "..."}

Nothing rests on that file: one that is missing, unreadable or of another policy means that everything is
learned anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVarTuple

from ctxcache.cache import Cache
from ctxcache.core.ledger.work import at_work
from ctxcache.core.placement.policy import Policy
from ctxcache.errors import CacheError, CorruptMetadata, SessionNotFound
from ctxcache.runtime.files import read_facts, write_facts
from ctxcache.runtime.threads import started_pool

log = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")

INTERVAL_S = 0.5
LEAST_PAUSE_S = 0.01
"""Between two turns of a loop that was woken."""


class Upkeep:
    """The background loops. Owned by the server."""

    def __init__(self, cache: Cache, *, interval_s: float = INTERVAL_S) -> None:
        self._cache = cache
        self._interval_s = interval_s
        self._told: dict[str, tuple[str, str]] = {}
        """The last failure that was logged, by step: a device that stays broken is reported once."""

    async def run(self) -> None:
        """Turn for ever; ends by cancellation."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._repeat(self.end_what_is_over, asyncio.Event()))
            loops.create_task(self._repeat(self.reopen_metadata, asyncio.Event()))
            loops.create_task(self._repeat(self.write_behind, self._cache.state.is_pressed))
            loops.create_task(self._repeat(self.join, asyncio.Event()))
            loops.create_task(self._repeat(self.copy, asyncio.Event()))
            loops.create_task(self._repeat(self.make_room, self._cache.memory_room.is_short))
            loops.create_task(self._repeat(self.look_after_devices, asyncio.Event()))
            loops.create_task(self._repeat(self.give_up_overdue, asyncio.Event()))
            loops.create_task(self._repeat(self.prefetch, self._cache.state.is_prefetch_wanted))
            loops.create_task(self._repeat(self.scrub, asyncio.Event()))

    async def turn(self) -> None:
        """Do everything once."""
        await self.reopen_metadata()
        await self.end_what_is_over()
        await self.write_behind()
        await self.join()
        await self.copy()
        await self.make_room()
        await self.give_up_overdue()
        await self.look_after_devices()
        await self.prefetch()

    async def end_what_is_over(self) -> bool:
        """End leases, reservations and sessions whose time has come; write down accesses; tidy the index."""
        steps = (
            self._deadlines,
            self._cache.queues.end_overdue,
            self._cache.sessions.expire_due,
            self._cache.sessions.save_access_times,
            self._cache.sessions.let_sleep,
            self._cache.prefixes.forget_gone,
        )
        return all([await self._try(step) for step in steps])

    async def reopen_metadata(self) -> bool:
        """Take changes again, once the device of the records has returned."""
        # A device that hangs while RocksDB replays its log is waited for: no deadline may stand behind it.
        return await self._try(self._cache.departures.reopen_metadata)

    async def write_behind(self) -> bool:
        """Write behind their writers' backs what is full, old or too much."""
        # One work for the whole turn: it hands sessions from one step to the next.
        return await at_work(self._cache.write_behind.turn(self._try))

    async def join(self) -> bool:
        """Make one long segment of many short ones."""
        return await self._try(self._cache.joining.turn)

    async def copy(self) -> bool:
        """Make the second copies that are lacking on SSD."""
        return await self._try(self._cache.copying.turn)

    async def make_room(self) -> bool:
        """Keep some of the arena free."""
        return await self._try(self._cache.memory_room.keep_free)

    async def look_after_devices(self) -> bool:
        """Find out which SSD paths are lost, and write elsewhere what DRAM has of them."""
        return await self._try(self._cache.devices.look)

    async def give_up_overdue(self) -> bool:
        """Answer those who wait for a device that hangs."""
        return await self._try(self._cache.devices.give_up_overdue)

    async def prefetch(self) -> bool:
        """Promote ahead of need whom the policy wants in memory."""
        return await self._try(self._cache.prefetching.prefetch)

    async def scrub(self) -> bool:
        """Verify what nobody has asked for, at a bounded rate: a pass may last for hours."""
        return await self._try(self._cache.scrubbing.verify_unasked)

    # One loop. After a success it turns again as soon as it is wanted, after a failure only when time is
    # over:
    #
    #     pause 10 ms ──► wait for `wanted`, at most half a second ──► turn ──► went well
    #                                                                       └─► failed: half a second
    #
    # The short pause is there even where it is wanted all the time: others have the event loop meanwhile.
    async def _repeat(self, turn: Callable[[], Awaitable[bool]], wanted: asyncio.Event) -> NoReturn:
        """Turn by turn, at once where `wanted` is set; after a failure only when the interval is over."""
        is_well = True
        while True:
            await asyncio.sleep(min(LEAST_PAUSE_S, self._interval_s) if is_well else self._interval_s)
            if is_well:
                with suppress(TimeoutError):
                    # `wanted` is cleared by the turn that does what was wanted, not here: a wish during the
                    # turn is kept.
                    async with asyncio.timeout(self._interval_s):
                        await wanted.wait()
            is_well = await self._try_turn(turn)

    async def _try_turn(self, turn: Callable[[], Awaitable[bool]]) -> bool:
        """Turn; what breaks outside of a step is no end of the loop either."""
        try:
            return await turn()
        except Exception:  # the supervisor, as in `_try`
            log.exception("upkeep_turn_broken turn=%s", turn.__name__)
            return False

    async def _try(self, step: Callable[[*Ts], Awaitable[None]], *arguments: *Ts) -> bool:
        """Do it; returns whether it went well."""
        name = step.__name__
        try:
            await at_work(step(*arguments))
        except SessionNotFound:
            # It was deleted meanwhile, or evicted to make room.
            return True
        except CacheError as error:
            # A failure by its reason and place: of the same one the log has a line, the counter every time.
            what = (error.reason, str(error.facts.get("path", error.facts.get("tier", error))))
            if self._told.get(name) != what:
                log.warning("upkeep_step_failed step=%s reason=%s error=%s", name, error.reason, error)
            self._told[name] = what
            self._cache.state.seen.upkeep_failures[name] += 1
            return False
        except Exception:  # the supervisor: upkeep that ended for good would be noticed by nobody
            log.exception("upkeep_step_broken step=%s", name)
            self._cache.state.seen.upkeep_failures[name] += 1
            return False
        self._told.pop(name, None)
        return True

    async def _deadlines(self) -> None:
        self._cache.appends.end_overdue()
        self._cache.leases.end_overdue()
        self._cache.tokens.forget_ended()
        self._cache.hints.drop_overdue()
        self._cache.placement.passed()


# -- what a policy has learned -----------------------------------------------------------------------

LESSONS = "LESSONS"
VERSION = 1
LESSONS_INTERVAL_S = 60.0


class Lessons:
    """The file of one policy. Owned by the event loop. `now_ns` is the store's time."""

    def __init__(self, directory: Path, name: str, policy: Policy, now_ns: Callable[[], int]) -> None:
        self._path = directory / LESSONS
        self._name, self._policy, self._now_ns = name, policy, now_ns
        self._kept: dict[str, object] = {}
        """The contents of the file."""
        self._writer = started_pool(1, "lessons")

    def recall(self) -> None:
        """Let the policy go on from what the file says; called before the policy hears of anything."""
        try:
            facts = read_facts(self._path)
            if facts["version"] == VERSION and facts["policy"] == self._name:
                # Lessons count less the older they are.
                age_ns = max(self._now_ns() - int(facts["time_ns"]), 0)
                self._policy.relearn(facts["lessons"], age_ns / 10**9)
        except FileNotFoundError:
            pass
        except (OSError, CorruptMetadata, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("lessons_unreadable path=%s error=%r", self._path, error)

    async def run(self) -> None:
        """Keep what is new, once in a while, until it is cancelled."""
        while True:
            await asyncio.sleep(LESSONS_INTERVAL_S)
            await self.keep()

    async def keep(self) -> None:
        """Write down what was learned, if that is something new; a refusal is logged."""
        lessons = self._policy.lessons()
        # A file that says the same is not written again each minute.
        if lessons == self._kept:
            return
        facts = {"version": VERSION, "policy": self._name, "time_ns": self._now_ns(), "lessons": lessons}
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, write_facts, self._path, facts)
        except OSError as error:
            log.warning("lessons_not_kept path=%s error=%s", self._path, error.strerror)
        else:
            self._kept = lessons

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()
