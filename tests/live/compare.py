"""One load through a running store and through the simulator, turn by turn."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.core.placement.policy import Facts, Level
from ctxcache.core.placement.served import RANKED
from ctxcache.settings.config import Settings
from ctxcache.simulate.load import Load, TraceHint
from ctxcache.simulate.replay import Replay, Waiting
from ctxcache.simulate.store import Move
from ctxcache.simulate.study import look
from ctxcache.simulate.tally import HitTally
from ctxcache.simulate.trace import TraceTurn
from tests.live.engine import SLOT_BYTES, TOKEN_BYTES, Engine, Store
from tests.live.running import BUFFER_SHARE, RunningServer, store_settings
from tests.live.scheduler import Hints, Scheduler


@dataclass(frozen=True, slots=True)
class Sizes:
    """Segments that each tier of the store takes. A session in DRAM is on SSD too."""

    dram_segments: int
    ssd_segments: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A load's circumstances. Without slots turns take no time."""

    sizes: Sizes
    policy: str
    slot_count: int | None = None
    path_count: int = 1
    hints: frozenset[TraceHint] = frozenset()

    def load(self) -> Load:
        """The simulator's load. Reads take no time: the store's clock stands still while it works."""
        sizes = self.sizes
        return Load(
            token_bytes=TOKEN_BYTES,
            dram_bytes=sizes.dram_segments * SLOT_BYTES,
            ssd_bytes=(sizes.ssd_segments - sizes.dram_segments) * SLOT_BYTES,
            is_inclusive=True,
            buffer_share=BUFFER_SHARE,
            slot_count=self.slot_count,
            hints=self.hints,
            ssd_read_bytes_per_s=1e18,
        )

    def settings(self, directory: Path) -> Settings:
        """The server's settings: no bound on what turns keep, and a buffer of the simulator's size."""
        return store_settings(
            directory,
            self.policy,
            dram_bytes=self.sizes.dram_segments * SLOT_BYTES,
            ssd_bytes=self.sizes.ssd_segments // self.path_count * SLOT_BYTES,
            ssd_directories=tuple(directory.with_name(f"ssd{path}") for path in range(self.path_count)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where each turn found its session, in the order in which they began, and the counts."""

    found: tuple[tuple[bytes, Level | None], ...]
    waits_s: tuple[float, ...]
    """How long each turn was in the queue."""
    tally: HitTally
    evicted_count: int
    written_bytes: int
    """To SSD."""

    def counts(self) -> dict[str, int]:
        """Turns by what they found, and sessions evicted."""
        tiers = Counter(tier for _, tier in self.found)
        return {
            "turns": len(self.found),
            "in_dram": tiers[Level.MEMORY],
            "on_ssd": tiers[Level.BELOW],
            "missed": tiers[None],
            "evicted": self.evicted_count,
            "written_kib": self.written_bytes >> 10,
        }


class _Noted(Replay):
    """A replay that notes what every turn found."""

    def __init__(self, turns: Sequence[TraceTurn], setting: Setting) -> None:
        next_arrivals_s = look(turns) if setting.hints else None
        super().__init__(
            setting.load(),
            lambda capacities, _: RANKED[setting.policy](capacities),
            next_arrivals_s=next_arrivals_s,
        )
        self.found: list[tuple[bytes, Level | None]] = []
        self.waits_s: list[float] = []

    def _start(self, turn: TraceTurn, since_s: float, now_s: float) -> float:
        self.found.append((turn.session, self.store.tiers.tier(turn.session)))
        self.waits_s.append(now_s - since_s)
        return super()._start(turn, since_s, now_s)

    def outcome(self, turns: Sequence[TraceTurn], counts: Callable[[], tuple[int, int]]) -> Outcome:
        """Play the turns. `counts`: sessions evicted, and bytes written to SSD."""
        tally = self.run(turns)
        return Outcome(tuple(self.found), tuple(self.waits_s), tally, *counts())


def simulated(turns: Sequence[TraceTurn], setting: Setting, *, lost_at: int | None = None) -> Outcome:
    """The simulator's outcome; its queue is lost at the `lost_at`-th job."""
    replay = _Noted(turns, setting)
    idle = replay.store.tiers.idle

    def told(uid: bytes, facts: Facts, now_s: float) -> list[Move]:
        # The engine writes a turn in one commit, which tells nothing of its answer.
        return idle(uid, facts._replace(answer_bytes=0), now_s)

    replay.store.tiers.idle = told  # type: ignore[method-assign]
    if lost_at is not None:
        _lose(replay.waiting, lost_at)
    return replay.outcome(turns, lambda: (replay.tally.evicted_sessions, replay.tally.ssd_written_bytes))


def live(
    turns: Sequence[TraceTurn],
    setting: Setting,
    store: Store,
    client: Client,
    hints: Hints | None = None,
    *,
    goes_on: bool = False,
    is_durable: bool = False,
) -> tuple[Outcome, Engine]:
    """A running store's outcome, and the engine that drove it."""
    replay, engine = (
        _Noted(turns, setting),
        Engine(store, client, hints, goes_on=goes_on, is_durable=is_durable),
    )
    # The same calls, done for real.
    replay.store.tiers = engine  # type: ignore[assignment]
    replay.waiting = engine.policy  # type: ignore[assignment]

    def counts() -> tuple[int, int]:
        stats = client.admin.stats()
        return stats.evicted_session_count, stats.flushed_segment_count * SLOT_BYTES

    return replay.outcome(turns, counts), engine


def live_here(turns: Sequence[TraceTurn], setting: Setting, directory: Path) -> Outcome:
    """The outcome of an undisturbed server in this process; where turns wait, their queue is published."""
    with RunningServer(setting.settings(directory)) as server, ctxcache.connect(server.target) as client:
        if setting.slot_count is None and not setting.hints:
            return live(turns, setting, server, client)[0]
        with client.hints.engine_queue("engine") as queue:
            return live(turns, setting, server, client, Scheduler(client, queue))[0]


def differences(left: Outcome, right: Outcome) -> list[str]:
    """The turns that found something else, one sentence each."""
    return [
        f"turn {number} of {a[0].decode()}: {_word(a[1])}, simulated {_word(b[1])}"
        for number, (a, b) in enumerate(zip(left.found, right.found, strict=True))
        if a != b
    ]


def _lose(waiting: Waiting, at: int) -> None:
    """Forget all that waits when the `at`-th job comes, and hear of none from then on."""
    put, count = waiting.put, 0

    def counted(uid: bytes, position: float, now_s: float) -> None:
        nonlocal count
        count += 1
        if count <= at:
            put(uid, position, now_s)
        elif count == at + 1:
            waiting.lost()

    waiting.put = counted  # type: ignore[assignment,method-assign]


def _word(tier: Level | None) -> str:
    return tier.value if tier else "missed"
