"""Replay: a recording played against another store, in its own time or faster, and what came of it.

Calls of one session, and of its forks, follow one another; those of others are made beside them by as many
threads as are allowed. Bounded: each thread's queue. Worst case: the store is slower than the recorded one;
then calls are made late, which is told, and none is left out.
"""

import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import TypeAlias

from ctxcache.cli.call import CtrlC
from ctxcache.client import Client
from ctxcache.simulate.recorded import Called, RecordingContents, calls, contents
from ctxcache.simulate.tally import FineHistogram
from lab.replay.player import NOT_PLAYED, MadeUp, Player
from lab.replay.tally import Figures, Tally, Watch, quantiles

QUEUE_CALLS = 256
PROGRESS_CALLS = 64
Connect: TypeAlias = "Callable[[], AbstractContextManager[Client]]"
Step: TypeAlias = Callable[[str, int, int], None]
"""Hears what is done, how much of it, and of how much."""


@dataclass(slots=True)
class Outcome:
    """The recorded calls, those of them that were played, and their outcome."""

    contents: RecordingContents
    recorded: Tally = field(default_factory=Tally)
    replayed: Tally = field(default_factory=Tally)
    latencies: dict[str, FineHistogram] = field(default_factory=dict)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    uncounted_calls: int = 0
    took_s: float = 0.0
    most_late_s: float = 0.0

    def figures(self) -> Figures:
        """All of it; durations of calls are what their caller waited."""
        errors: dict[str, dict[str, int]] = {}
        for (kind, reason), count in sorted(self.errors.items()):
            errors.setdefault(kind, {})[reason] = count
        recorded = {"elapsed_s": round(self.contents.elapsed_s, 3), "lost_calls": self.contents.lost_count}
        replayed = {"elapsed_s": round(self.took_s, 3), "lost_calls": self.uncounted_calls}
        return {
            "recorded": recorded | self.recorded.figures(),
            "replayed": replayed | self.replayed.figures(),
            "latencies": {kind: quantiles(took) for kind, took in sorted(self.latencies.items())},
            "errors": errors,
            "primed_sessions": len(self.contents.before),
            "most_late_s": round(self.most_late_s, 3),
            "is_whole": self.contents.is_whole,
        }


class Due:
    """When calls are due: their own times, `speed` times as fast; with 0 at once."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._begun_s = time.monotonic()

    def wait(self, call: Called) -> None:
        """Until a call is due."""
        if self.speed:
            time.sleep(max(self._begun_s + call.at_s / self.speed - time.monotonic(), 0.0))

    def late_s(self, at_s: float) -> float:
        """How long it is due already."""
        return time.monotonic() - self._begun_s - at_s / self.speed if self.speed else 0.0


def replay(
    path: Path,
    connect: Connect,
    *,
    speed: float = 1.0,
    concurrency: int = 1,
    step: Step = lambda *_: None,
    make_due: Callable[[float], Due] = Due,
) -> Outcome:
    """Play a recording against the store that `connect` reaches; Ctrl-C ends it early, and well.

    Raises InvalidTrace, TooManyRequests, PermissionDenied (only operators see what a store is asked),
    Unavailable.
    """
    outcome = Outcome(contents(path))
    with ExitStack() as opened:
        client = opened.enter_context(connect())
        made_up = {number: MadeUp(layout) for number, layout in outcome.contents.layouts.items()}
        for one in made_up.values():
            client.models.register(one.model.spec)
        players = _players(concurrency, connect, opened, made_up, speed)
        for number, before in enumerate(outcome.contents.before):
            step("preparing", number, len(outcome.contents.before))
            players.of(before.session).prime(before)
        with Watch(client) as watch:
            begun_s = time.monotonic()
            with CtrlC() as ctrl_c:
                _play(path, outcome, players, make_due(speed), step, ctrl_c)
            outcome.took_s = time.monotonic() - begun_s
            watch.settle()
        outcome.replayed, outcome.uncounted_calls = watch.tally, watch.lost_count
        outcome.most_late_s = players.most_late_s
        for player in players:
            outcome.errors.update(player.errors)
            for kind, took in player.latencies.items():
                outcome.latencies.setdefault(kind, FineHistogram()).merge(took)
    return outcome


class _Players:
    """The player of each session."""

    def __init__(self, players: list[Player]) -> None:
        self._players = players
        self._forked: dict[str, int] = {}
        self.most_late_s = 0.0

    def __iter__(self) -> Iterator[Player]:
        return iter(self._players)

    def number(self, session: str) -> int:
        """The number of a session's player."""
        return self._forked.get(session, zlib.crc32(session.encode()) % len(self._players))

    def of(self, session: str) -> Player:
        """A session's player."""
        return self._players[self.number(session)]

    def heard(self, call: Called) -> None:
        """A fork comes behind what its source is asked."""
        if call.kind == "fork" and len(self._players) > 1:
            self._forked[call.session] = self.number(call.text("source"))


def _players(
    concurrency: int,
    connect: Connect,
    opened: ExitStack,
    made_up: Mapping[int, MadeUp],
    speed: float,
) -> _Players:
    prefix = f"replay-{secrets.token_hex(4)}-"
    players = []
    for _ in range(concurrency):
        player = Player(opened.enter_context(connect()), made_up, prefix, speed)
        opened.callback(player.close)
        players.append(player)
    return _Players(players)


def _play(path: Path, outcome: Outcome, players: _Players, due: Due, step: Step, ctrl_c: CtrlC) -> None:
    """Play every call; with one player in this very thread. Raises the first failure that ends it."""
    workers = [_Worker(player, due) for player in players] if len(list(players)) > 1 else []
    total = outcome.contents.call_count
    try:
        for number, call in enumerate(calls(path)):
            due.wait(call)
            if ctrl_c.was_pressed:
                break
            outcome.recorded.add(call)
            if call.kind not in NOT_PLAYED:
                players.heard(call)
                if workers:
                    workers[players.number(call.session)].put(call)
                else:
                    players.most_late_s = max(players.most_late_s, due.late_s(call.at_s))
                    players.of(call.session).play(call)
            if number % PROGRESS_CALLS == 0:
                step("playing", number, total)
    finally:
        for worker in workers:
            worker.end()
        players.most_late_s = max([players.most_late_s, *(worker.most_late_s for worker in workers)])
    for worker in workers:
        worker.check()


class _Worker:
    """A player in a thread of its own."""

    def __init__(self, player: Player, due: Due) -> None:
        self.most_late_s = 0.0
        self._player, self._due = player, due
        self._queue: Queue[Called | None] = Queue(QUEUE_CALLS)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="player", daemon=True)
        self._thread.start()

    def put(self, call: Called) -> None:
        """Play it when its turn comes. Raises what ended the player."""
        self.check()
        self._queue.put(call)

    def end(self) -> None:
        """Wait until all is played."""
        self._queue.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the player."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._failure is None:
                self.most_late_s = max(self.most_late_s, self._due.late_s(call.at_s))
                try:
                    self._player.play(call)
                except BaseException as error:  # noqa: BLE001  whoever puts the next one raises it
                    self._failure = error
