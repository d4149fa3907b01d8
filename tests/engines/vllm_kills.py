"""vLLM and the store killed at random: every reply is right, and nothing is left behind.

    .venv-vllm/bin/python -m tests.engines.vllm_kills --kills 50
    .venv-vllm/bin/python -m tests.engines.vllm_kills --kills 10 --seed 3 --state kv
    .venv-vllm/bin/python -m tests.engines.vllm_kills --control slot_leaked

Conversations are held side by side, half of them with a session's name. SIGKILL comes for the engine, the
store or both, at any moment from a turn's requests until its rows are saved; what died is started again, and
every conversation goes on until it is restored. Each reply that comes is compared, token for token, with that
of an engine that has no store. At the end nothing may be left: no lease and no reservation of an engine that
died, no pinned byte, no byte on SSD that is nobody's, no second arena, no half-written file.

Run with a few kills by `make engines`, with fifty by `make engines-all`. Worst case: an engine that hangs,
which is a finding after a minute.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from ctxcache.client import Client
from lab.engines.families import SHAPE
from lab.engines.vllm_process import SHARED_MEMORY, Reply, VllmEngine
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import forked
from tests.faults.soak import settled
from tests.server_process import ServerProcess

KILLS = int(os.environ.get("CTXCACHE_KILLS", "6"))
"""How many a test does for each kind of state."""
COUNT = 24
USERS = 4
LONGEST_TOKENS = 800
GRACE_S = 1
"""How long the store keeps slots of a writer that disappeared from others; as shipped: 60."""
RESTORED_S = 30.0
SETTLE_S = 30.0
HANG_S = 60.0
BLOCKS_STAY = "blocks_stay"
STALE = """
from gpu_worker.engines.vllm.engine_blocks import EngineBlocks
EngineBlocks.load = lambda *_: None
class Stale:
    pass
"""
"""A connector that says that blocks are restored, and leaves in them what was there."""


def words(draw: random.Random, count: int) -> list[int]:
    """Token ids of a user."""
    return [draw.randrange(3, 500) for _ in range(count)]


class Crowd:
    """Users whose conversations go on, whatever is killed. Each odd one names its session."""

    def __init__(self, plain: VllmEngine, draw: random.Random, report: Report) -> None:
        self._plain, self._draw, self._report = plain, draw, report
        self._begun_count = 0
        self.turn_s = 0.0
        """How long the last turn took that was not cut off."""
        self._names: list[str | None] = [None] * USERS
        self._prompts: list[list[int]] = [[] for _ in range(USERS)]
        for user in range(USERS):
            self._begin(user)

    def ask(self, engine: VllmEngine) -> bool:
        """One turn of all at once, each reply compared; whether the engine lived to give it.

        Raises TimeoutError for an engine that hangs, which is killed.
        """
        requests = [
            {"prompt": prompt, "session": name, "count": COUNT}
            for prompt, name in zip(self._prompts, self._names, strict=True)
        ]
        watch = threading.Timer(HANG_S, engine.kill)
        watch.start()
        began_s = time.monotonic()
        try:
            replies = engine.ask(*requests)
        except RuntimeError:
            if time.monotonic() - began_s >= HANG_S:
                raise TimeoutError(f"no reply in {HANG_S:.0f} s: {engine.log[-2000:]}") from None
            return False
        finally:
            watch.cancel()
        self.turn_s = time.monotonic() - began_s
        for user, reply in enumerate(replies):
            self._take(user, reply)
        return True

    def until_restored(self, engine: VllmEngine) -> None:
        """Go on until the engine finds something of every conversation in the store."""
        end_s = time.monotonic() + self._report.patience_s(RESTORED_S)
        for user in range(USERS):
            while True:
                reply = engine.turn(self._prompts[user], self._names[user], COUNT)
                self._take(user, reply)
                if reply.cached_count:
                    break
                if time.monotonic() > end_s:
                    self._report.find(f"conversation {user} is not restored any more: {engine.log[-500:]}")
                    break
                time.sleep(0.1)

    def _take(self, user: int, reply: Reply) -> None:
        prompt = self._prompts[user]
        expected = self._plain.turn(prompt, None, COUNT).token_ids
        self._report.count("reply_count")
        self._report.count("restored_reply_count", int(reply.cached_count > 0))
        if reply.token_ids != expected:
            self._report.find(
                f"conversation {user}, {len(prompt)} tokens of which {reply.cached_count} were restored: "
                f"{reply.token_ids} is not {expected}"
            )
        # The computed reply: one that is wrong is found once.
        self._prompts[user] = [*prompt, *expected, *words(self._draw, 20)]
        if len(self._prompts[user]) > LONGEST_TOKENS:
            self._begin(user)

    def _begin(self, user: int) -> None:
        """A user begins another conversation."""
        self._begun_count += 1
        self._prompts[user] = words(self._draw, 97)
        self._names[user] = f"user-{user}-{self._begun_count}" if user % 2 else None


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    draw = random.Random(options.seed)
    is_stores = options.control not in (None, BLOCKS_STAY)
    plants = [f"grace_s:{GRACE_S}", *([options.control] if is_stores else [])]
    with (
        tempfile.TemporaryDirectory(prefix="ctxcache-kills-") as folder,
        tempfile.TemporaryDirectory(prefix="ctxcache-kills-", dir=SHARED_MEMORY) as memory,
    ):
        place = Path(folder)
        model = place / "tiny"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
        arguments: dict[str, Any] = {"extra": {"state": options.state}}
        if options.control == BLOCKS_STAY:
            (place / "stale.py").write_text(STALE)
            arguments |= {"worker_extension_cls": "stale.Stale", "packages": folder}
        store = ServerProcess(place / "data", "--arena-directory", memory, program=forked(plants))
        with store, VllmEngine(model, None, place / "plain.log") as plain:
            engine = VllmEngine(model, store.target, place / "engine.log", **arguments)
            engine.__enter__()
            try:
                crowd = Crowd(plain, draw, report)
                _kill_all(options.kills, engine, store, crowd, draw, report)
                _look_at_what_is_held(engine, store, crowd, report)
            finally:
                engine.__exit__(*sys.exc_info())
            _look_at_what_is_left(store, Path(memory), report)


def _kill_all(
    kill_count: int,
    engine: VllmEngine,
    store: ServerProcess,
    crowd: Crowd,
    draw: random.Random,
    report: Report,
) -> None:
    crowd.ask(engine)
    for number in range(kill_count):
        crowd.until_restored(engine)
        report.end_if_found()
        victims = draw.choice(["engine", "store", "both"])

        def kill(victims: str = victims) -> None:
            if victims != "engine":
                store.kill9()
            if victims != "store":
                engine.kill()

        # Two of three come while the turn runs, the others while its rows are saved, or after that.
        killer = threading.Timer(draw.uniform(0, 1.5 * crowd.turn_s), kill)
        killer.start()
        report.count("cut_off_turn_count", int(not crowd.ask(engine)))
        killer.join()
        report.count(f"{victims}_kill_count")
        if victims != "engine":
            store.start()
        if victims != "store":
            engine.__exit__(None, None, None)
            engine.__enter__()
        progress(number + 1, kill_count, "kills")


def _look_at_what_is_held(engine: VllmEngine, store: ServerProcess, crowd: Crowd, report: Report) -> None:
    """Leases, reservations and pins of an engine that has no request."""
    # More reads than the ten of which a planted bug forgets one.
    for _ in range(3):
        crowd.until_restored(engine)
        report.end_if_found()
    end_s = time.monotonic() + report.patience_s(SETTLE_S)
    with ctxcache.connect(store.target, access="remote") as cache:
        while True:
            held = held_by(cache)
            if not any(held.values()):
                return
            if time.monotonic() > end_s:
                report.find(f"the engine has no request, and there are {held}")
                return
            time.sleep(0.1)


def held_by(cache: Client) -> dict[str, float]:
    """What of the store's is held by somebody."""
    stats = cache.admin.stats()
    return {
        "leases": stats.lease_count,
        "reservations": stats.reservation_count,
        "pinned bytes": sum(lease.pinned_bytes for lease in cache.admin.list_leases()),
        "pinned sessions": sum(one.is_pinned for one in cache.sessions.list()),
    }


def _look_at_what_is_left(store: ServerProcess, memory: Path, report: Report) -> None:
    """Bytes and files of a store whose last engine has ended."""
    sample = settled(store, report.patience_s(SETTLE_S))
    if any((*sample.used_bytes, *sample.left_over)):
        report.find(f"every session was deleted, and {sample.used_bytes} B and {sample.left_over} are left")
    arenas = [path.name for path in memory.iterdir()]
    if len(arenas) > 1:
        report.find(f"arenas of stores that died: {arenas}")
    store.terminate()
    kept = store.data_directory.rglob("*")
    left = [path.name for path in kept if path.is_socket() or path.suffix == ".partial"]
    left += [path.name for path in memory.iterdir()]
    if left:
        report.find(f"the store has ended, and left {left}")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=6, help="a long run has 50")
    parser.add_argument("--state", choices=("blocks", "kv", "hidden"), default="blocks", help="what is saved")


HARNESS = Harness(
    "vllm_kills",
    "Kills vLLM and the store at random, and looks at replies and at what is left.",
    run,
    {
        BLOCKS_STAY: "the connector says that blocks are restored, and leaves them as they were",
        "lease_kept_on_release": "the store keeps one lease in ten that a reader gives back",
        "slot_leaked": "the store does not give back every tenth slot",
    },
    _options,
    package="tests.engines",
)


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("state", ["blocks", "kv", "hidden"])
def test_kills_at_random_leave_right_replies_and_nothing_else(state: str) -> None:
    """SIGKILL for the engine or the store in the middle of turns: nobody notices but by the time it takes."""
    report = HARNESS.execute(["--kills", str(KILLS), "--state", state])
    assert report.is_good, report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_a_planted_bug_is_found(control: str) -> None:
    """A wrong reply, a lease and a slot that are left: each is found."""
    report = HARNESS.execute(["--kills", "2", "--control", control])
    assert report.is_good, report


if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
