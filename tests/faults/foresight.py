"""Foresight: what a scheduler and its agents say of sessions, true or not, beside a load of its own.

One engine's queue, and hints one by one. Worst case: none of it comes true, which must cost nobody a byte.
"""

import random
from collections.abc import Callable

from ctxcache.client import Client, QueuedJob
from ctxcache.client.types import HintOutcome, HintResult, seconds

MOST_JOBS = 16


class Foresight:
    """Says things of sessions over one client, whose end is its own."""

    def __init__(self, client: Client, engine: str, draw: random.Random) -> None:
        self._client, self._draw = client, draw
        self._queue = client.hints.engine_queue(engine, grace=seconds(1))
        self._jobs: list[str] = []
        self._job_count = 0

    def tell(self, name: str) -> bool:
        """Change the queue, then give a hint; whether that made the session durable."""
        self._change(name)
        client, draw = self._client, self._draw
        ttl, priority = seconds(draw.choice((1, 600))), draw.randrange(101)
        hints: dict[str, Callable[[], HintResult]] = {
            "share": lambda: client.hints.share(name),
            "prefetch": lambda: client.hints.prefetch(name, ttl=ttl),
            "demote": lambda: client.hints.demote(name),
            "pin": lambda: client.hints.pin(name, ttl=ttl, priority=priority),
            "retain": lambda: client.hints.retain(name, ttl=ttl, priority=priority),
            "release": lambda: client.hints.release(name),
            "expect": lambda: client.hints.expect(name, draw.choice((None, seconds(1), seconds(10)))),
        }
        kind = draw.choice([*hints])
        return hints[kind]().outcome == HintOutcome.ACCEPTED and kind in ("share", "demote")

    def _change(self, name: str) -> None:
        self._queue.take(timeout_s=0.0)
        if len(self._jobs) == MOST_JOBS or (self._jobs and self._draw.random() < 0.3):
            job_id = self._jobs.pop(self._draw.randrange(len(self._jobs)))
            self._draw.choice((self._queue.started, self._queue.cancelled))(job_id)
            return
        self._job_count += 1
        at = self._draw.uniform(0, 10)
        position, start_in_s = (at, None) if self._draw.random() < 0.5 else (None, at)
        self._jobs.append(f"{self._job_count}")
        self._queue.put(QueuedJob(self._jobs[-1], name, position=position, start_in_s=start_in_s))
