"""Turns that are known ahead, in real time: whoever was announced early enough waits for nothing.

A server as it is, its loops on, and an engine that publishes the next few jobs of a long queue. How early is
early enough follows from what the run itself reads per second: see `Ahead.needed_s`.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.client.engine_queue import EngineQueue, QueuedJob
from ctxcache.core.placement.policy import Facts, Level
from tests.live.compare import Setting, Sizes
from tests.live.engine import OWN, SLOT_BYTES, Engine
from tests.live.killed import KilledServer
from tests.live.names import name_of

SESSION_SEGMENTS = 64
SESSION_COUNT = 64
MEASURED_COUNT = 16
JOBS_AHEAD = 8
FACTOR = 4.0
"""How many times as long as reading takes by itself is enough beside all else that goes on."""
GRACE_S = 0.1
"""And for threads that have to get their turn."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The outcome of one run. `early` turns were announced at least `needed_s` before they began."""

    policy: str
    turns: int
    ssd_read_bytes_per_s: int
    needed_s: float
    period_s: float
    hits: int
    hits_in_dram: int
    early: int
    early_in_dram: int

    @property
    def is_good(self) -> bool:
        """Whether what is promised held."""
        return self.early_in_dram == self.early > self.turns / 2 and self.hits_in_dram >= 0.99 * self.hits

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def run(policy: str, directory: Path, *, turn_count: int, seed: int) -> Ahead:
    """Play turns of sessions on SSD, a quarter of them in DRAM, in an order that only the queue tells."""
    setting = Setting(
        Sizes(SESSION_COUNT * SESSION_SEGMENTS // 4, 2 * SESSION_COUNT * SESSION_SEGMENTS), policy
    )
    uids = [b"s%d" % number for number in range(SESSION_COUNT)]
    with KilledServer(directory, setting, at=()) as server, ctxcache.connect(server.target) as client:
        engine = Engine(server, client, is_durable=True)
        for uid in uids:
            _turn(engine, uid, SESSION_SEGMENTS)
        bytes_per_s = _measured(engine, client, uids)
        session_bytes = SESSION_SEGMENTS * SLOT_BYTES
        needed_s = FACTOR * JOBS_AHEAD * session_bytes / bytes_per_s + GRACE_S
        period_s = needed_s / (JOBS_AHEAD - 1)
        with client.hints.engine_queue("engine") as queue:
            order = _order(uids, turn_count, seed)
            found = _play(engine, queue, order, period_s)
    hits = [tier for tier, _ in found if tier]
    early = [tier for tier, lead_s in found if tier and lead_s >= needed_s]
    return Ahead(
        policy,
        len(found),
        int(bytes_per_s),
        round(needed_s, 4),
        round(period_s, 4),
        len(hits),
        hits.count(Level.MEMORY),
        len(early),
        early.count(Level.MEMORY),
    )


def _measured(engine: Engine, client: Client, uids: Sequence[bytes]) -> float:
    """Bytes per second of leases, one after the other, of sessions that lie on SSD."""
    # Which of equals a policy leaves on SSD is its own choice.
    below = [uid for uid in uids if engine.tier(uid) is Level.BELOW][:MEASURED_COUNT]
    if len(below) < MEASURED_COUNT:
        raise AssertionError(f"{len(below)} sessions lie where they are to be read from")
    began_s = time.monotonic()
    for uid in below:
        client.sessions.open(name_of(uid), OWN).read().close()
    return len(below) * SESSION_SEGMENTS * SLOT_BYTES / (time.monotonic() - began_s)


def _order(uids: Sequence[bytes], turn_count: int, seed: int) -> list[bytes]:
    """The sessions of the turns; nobody has two of them closer than the queue is long."""
    draw, order = random.Random(seed), list[bytes]()
    while len(order) < turn_count:
        recent = order[-2 * JOBS_AHEAD :]
        order.append(draw.choice([uid for uid in uids if uid not in recent]))
    return order


def _play(
    engine: Engine, queue: EngineQueue, order: Sequence[bytes], period_s: float
) -> list[tuple[Level | None, float]]:
    """A turn each period; where each found its session, and how long before it was announced."""
    announced_s, found, waiting = list[float](), list[tuple[Level | None, float]](), deque[int]()
    began_s = time.monotonic()
    for number, uid in enumerate(order):
        while len(announced_s) < min(number + JOBS_AHEAD, len(order)):
            job = len(announced_s)
            queue.put(QueuedJob(f"job-{job}", name_of(order[job]), position=float(job)))
            queue.flush()
            announced_s.append(time.monotonic())
            waiting.append(job)
        time.sleep(max(began_s + (number + JOBS_AHEAD) * period_s - time.monotonic(), 0))
        lead_s = time.monotonic() - announced_s[number]
        found.append((engine.tier(uid), lead_s))
        engine.arrived(uid, 0)
        queue.started(f"job-{waiting.popleft()}")
        engine.left(uid)
    return found


def _turn(engine: Engine, uid: bytes, segment_count: int) -> None:
    engine.arrived(uid, 0)
    engine.idle(uid, Facts(segment_count * SLOT_BYTES, 1, segment_count * SLOT_BYTES, SLOT_BYTES), 0)
