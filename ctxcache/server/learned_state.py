"""Lessons: what the placement policy has learned, kept in the data directory for the next run.

    LESSONS   {"version": 1, "policy": "value", "time_ns": ..., "lessons": {...}, "checksum": "..."}

Written now and then, by a thread, and at the end, as a whole. Nothing rests on it: where it is not there, or is of another
policy or version, or cannot be read, everything is learned anew. Worst case: a device that refuses it; the next turn tries again.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from ctxcache.core.placement.policy import Policy
from ctxcache.errors import CorruptMetadata
from ctxcache.runtime.facts_file import read_facts, write_facts
from ctxcache.runtime.pools import started_pool

LESSONS = "LESSONS"
VERSION = 1
INTERVAL_S = 60.0
log = logging.getLogger(__name__)


class Lessons:
    """The file of one policy. Owned by the event loop. `now_ns` is the store's time."""

    def __init__(self, directory: Path, name: str, policy: Policy, now_ns: Callable[[], int]) -> None:
        self._path = directory / LESSONS
        self._name, self._policy, self._now_ns = name, policy, now_ns
        self._kept: dict[str, object] = {}
        """What the file has."""
        self._writer = started_pool(1, "lessons")

    def recall(self) -> None:
        """Let the policy go on from what the file says, if it can; called before the policy hears of anything."""
        try:
            facts = read_facts(self._path)
            if facts["version"] == VERSION and facts["policy"] == self._name:
                age_ns = max(self._now_ns() - int(facts["time_ns"]), 0)
                self._policy.relearn(facts["lessons"], age_ns / 10**9)
        except FileNotFoundError:
            pass
        except (OSError, CorruptMetadata, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("lessons_unreadable path=%s error=%r", self._path, error)

    async def run(self) -> None:
        """Keep what is new, once in a while, until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.keep()

    async def keep(self) -> None:
        """Write down what was learned, if that is something new; a refusal is logged."""
        lessons = self._policy.lessons()
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
