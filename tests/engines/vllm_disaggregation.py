"""One vLLM computes prompts and another goes on from them: every fault of a hand-over, and every reply right.

    .venv-vllm/bin/python -m tests.engines.vllm_disaggregation --times 20
    .venv-vllm/bin/python -m tests.engines.vllm_disaggregation --times 3 --only "store killed in between"
    .venv-vllm/bin/python -m tests.engines.vllm_disaggregation --control rows_stay

Each time a prompt is computed by the first engine and handed over to the second, which answers seven other
requests with it. One thing goes wrong: the hand-over's words, its session, an engine or the store.
Each reply is compared, token for token, with one that the same engine computes beside it from nothing; then
the prompt is asked once more, of the engine's own cache. The table says what came of each fault:

    whole      all tokens but the last were restored       part       some were
    computed   none were                                    no reply   its engine was killed

Run with few by `make engines`. Worst case: an engine that hangs, which is a finding after a minute.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from gpu_worker.engines.vllm.handover import KEY
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.engines.vllm_kills import HANG_S, RESTORED_S, words
from tests.faults.harness import Harness, Report, progress
from tests.server_process import ServerProcess

TIMES = int(os.environ.get("CTXCACHE_HAND_OVERS", "1"))
"""How often a test does each fault."""
COUNT = 16
OTHERS = 7
LONGEST_TOKENS = 600
PIECE_TOKENS = 128
"""Tokens of a step: a long prompt is computed, saved and shown in several."""
ROWS_STAY = "rows_stay"
STALE = """
from gpu_worker.engines.vllm.engine_blocks import EngineBlocks
EngineBlocks.load = lambda *_: None
class Stale:
    pass
"""
"""A connector that says that blocks are restored, and leaves in them what was there."""
Says = Mapping[str, Any]


class Pair:
    """Two engines and their store."""

    def __init__(
        self,
        first: VllmEngine,
        second: VllmEngine,
        store: ServerProcess,
        draw: random.Random,
        report: Report,
    ) -> None:
        self.first, self.second, self.store, self.draw, self._report = first, second, store, draw, report
        self.outcomes: Counter[str] = Counter()
        self._asked_count = 0
        self.turn_s = 0.1
        """How long the last hand-over's reply took."""

    def new_prompt(self) -> list[int]:
        """A prompt that nobody has asked."""
        return words(self.draw, self.draw.randint(70, LONGEST_TOKENS))

    def new_name(self) -> str | None:
        """A conversation's name, or none."""
        self._asked_count += 1
        return f"user-{self._asked_count}" if self._asked_count % 2 else None

    def computed(self, prompt: list[int], name: str | None) -> Says | None:
        """Have the first engine compute a prompt; what it says of it, None where it died."""
        request = {"prompt": prompt, "session": name, "count": 1, "says": {"do_remote_decode": True}}
        replies = self._ask(self.first, [request])
        if not replies:
            return None
        # vLLM counts a prompt by what the first engine says of its cache; here by what is restored.
        return {key: value for key, value in (replies[0].says or {}).items() if key.startswith(KEY)}

    def goes_on(
        self, prompt: list[int], name: str | None, said: Says | None, *, twice: bool = False
    ) -> list[str]:
        """Have the second engine go on, each reply compared. What came of the request, or of both."""
        own = {"prompt": prompt, "session": name, "count": COUNT, "says": dict(said or {})}
        computed = [
            self._from_nothing(prompt),
            *(self._from_nothing(self.new_prompt()) for _ in range(OTHERS)),
        ]
        began_s = time.monotonic()
        replies = self._ask(self.second, [own] * (1 + twice) + computed)
        self.turn_s = time.monotonic() - began_s
        if not replies:
            return ["no reply"]
        for reply in replies[: 1 + twice]:
            self._compare("the reply", prompt, reply, replies[1 + twice])
        # Of the engine's own cache, and of what the store has by now.
        again = self._ask(self.second, [{"prompt": prompt, "session": None, "count": COUNT}])
        for reply in again:
            self._compare("the reply that was asked for again", prompt, reply, replies[1 + twice])
        return [outcome_of(prompt, reply) for reply in replies[: 1 + twice]]

    def until_used(self) -> None:
        """Hand prompts over until one is restored: both engines use the store again."""
        end_s = time.monotonic() + self._report.patience_s(RESTORED_S)
        while True:
            prompt, name = self.new_prompt(), self.new_name()
            if self.goes_on(prompt, name, self.computed(prompt, name)) == ["whole"]:
                return
            if time.monotonic() > end_s:
                self._report.find(f"nothing is handed over any more: {self.second.log[-800:]}")
                self._report.end_if_found()
            time.sleep(0.1)

    def later(self, act: Callable[[], None]) -> threading.Timer:
        """Act within the time of a reply."""
        timer = threading.Timer(self.draw.uniform(0, self.turn_s), act)
        timer.start()
        return timer

    def _from_nothing(self, prompt: list[int]) -> dict[str, Any]:
        """A request that finds nothing anywhere: nobody else has its salt."""
        self._asked_count += 1
        return {"prompt": prompt, "session": None, "count": COUNT, "salt": f"nobody's {self._asked_count}"}

    def _compare(self, what: str, prompt: list[int], reply: Reply, computed: Reply) -> None:
        self._report.count("reply_count")
        if (reply.token_ids, reply.finish_reason) != (computed.token_ids, "length"):
            restored = f"{len(prompt)} tokens of which {reply.cached_count} were restored"
            self._report.find(f"{what} to {restored}: {reply} is not {computed.token_ids}")

    def _ask(self, engine: VllmEngine, requests: list[dict[str, Any]]) -> list[Reply]:
        """The replies; none where the engine was killed. Raises TimeoutError for one that hangs."""
        watch = threading.Timer(HANG_S, engine.kill)
        watch.start()
        began_s = time.monotonic()
        try:
            return engine.ask(*requests)
        except RuntimeError:
            if time.monotonic() - began_s >= HANG_S:
                raise TimeoutError(f"no reply in {HANG_S:.0f} s: {engine.log[-2000:]}") from None
            return []
        finally:
            watch.cancel()


def outcome_of(prompt: list[int], reply: Reply) -> str:
    """What was restored of a prompt."""
    if reply.cached_count == len(prompt) - 1:
        return "whole"
    return "part" if reply.cached_count else "computed"


def again(engine: VllmEngine) -> None:
    """Start an engine that was killed."""
    engine.__exit__(None, None, None)
    engine.__enter__()


def _words(change: Mapping[str, Any]) -> Callable[[Pair], list[str]]:
    """A hand-over that says something else."""

    def do(pair: Pair) -> list[str]:
        prompt, name = pair.new_prompt(), pair.new_name()
        said = pair.computed(prompt, name) or {}
        return pair.goes_on(prompt, None, {key: parts | change for key, parts in said.items()})

    return do


def nothing(pair: Pair) -> list[str]:
    """A hand-over as it should be."""
    prompt, name = pair.new_prompt(), pair.new_name()
    return pair.goes_on(prompt, name, pair.computed(prompt, name))


def consumed_twice(pair: Pair) -> list[str]:
    """In two requests at once."""
    prompt, name = pair.new_prompt(), pair.new_name()
    return pair.goes_on(prompt, name, pair.computed(prompt, name), twice=True)


def stale_after_reuse(pair: Pair) -> list[str]:
    """Its session has another conversation by now."""
    prompt, name = pair.new_prompt(), f"reused-{pair.draw.getrandbits(40)}"
    said = pair.computed(prompt, name)
    pair.computed(pair.new_prompt(), name)
    return pair.goes_on(prompt, None, said)


def lease_run_out(pair: Pair) -> list[str]:
    """Its session has expired by now, which deletion stands for."""
    prompt, name = pair.new_prompt(), pair.new_name()
    said = pair.computed(prompt, name) or {}
    with ctxcache.connect(pair.store.target) as cache:
        for parts in said.values():
            session = cache.sessions.open(parts["session_name"])
            while session.refresh().is_being_appended:
                time.sleep(0.005)
            session.delete()
    return pair.goes_on(prompt, name, said)


def another_prompts(pair: Pair) -> list[str]:
    """It was said of other tokens, of which some are the same."""
    prompt = pair.new_prompt()
    other = [*prompt[: len(prompt) // 2], *pair.new_prompt()]
    return pair.goes_on(prompt, None, pair.computed(other, None))


def first_killed_before(pair: Pair) -> list[str]:
    """The proxy has no hand-over."""
    prompt, name = pair.new_prompt(), pair.new_name()
    pair.first.kill()
    said = pair.computed(prompt, name)
    outcomes = pair.goes_on(prompt, name, said)
    again(pair.first)
    return outcomes


def first_killed_during(pair: Pair) -> list[str]:
    """Or just after it: the timer knows no better."""
    prompt, name = pair.new_prompt(), pair.new_name()
    timer = pair.later(pair.first.kill)
    said = pair.computed(prompt, name)
    outcomes = pair.goes_on(prompt, name, said)
    timer.join()
    again(pair.first)
    return outcomes


def first_killed_after(pair: Pair) -> list[str]:
    """Its rows may be on their way."""
    prompt, name = pair.new_prompt(), pair.new_name()
    said = pair.computed(prompt, name)
    pair.first.kill()
    outcomes = pair.goes_on(prompt, name, said)
    again(pair.first)
    return outcomes


def second_killed(pair: Pair) -> list[str]:
    """In the middle of its answer; the proxy asks again with the same hand-over."""
    prompt, name = pair.new_prompt(), pair.new_name()
    said = pair.computed(prompt, name)
    timer = pair.later(pair.second.kill)
    outcomes = pair.goes_on(prompt, name, said)
    timer.join()
    again(pair.second)
    return [*outcomes, *pair.goes_on(prompt, name, said)]


def _store(act: str, moment: str) -> Callable[[Pair], list[str]]:
    """The store is killed or stopped at a moment, and goes on after the reply."""

    def do(pair: Pair) -> list[str]:
        prompt, name = pair.new_prompt(), pair.new_name()

        def end() -> None:
            if act == "killed":
                pair.store.kill9()
            else:
                pair.store.signal(signal.SIGSTOP)

        if moment == "before":
            end()
        said = pair.computed(prompt, name)
        if moment == "in between":
            end()
        timer = pair.later(end) if moment == "during" else None
        outcomes = pair.goes_on(prompt, name, said)
        if timer is not None:
            timer.join()
        if act == "killed":
            pair.store.start()
        else:
            pair.store.signal(signal.SIGCONT)
        pair.until_used()
        return outcomes

    return do


FAULTS: dict[str, Callable[[Pair], list[str]]] = {
    "none": nothing,
    "unknown id": _words({"session_name": "sessions/nobody"}),
    "out of range": _words({"token_count": 1 << 40}),
    "other ranks": _words({"rank_count": 2}),
    "consumed twice": consumed_twice,
    "stale after reuse": stale_after_reuse,
    "lease run out": lease_run_out,
    "another prompt's": another_prompts,
    "prefill engine killed before": first_killed_before,
    "prefill engine killed during": first_killed_during,
    "prefill engine killed after": first_killed_after,
    "decode engine killed": second_killed,
    **{
        f"store {act} {moment}": _store(act, moment)
        for act in ("killed", "stopped")
        for moment in ("before", "in between", "during")
    },
}


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    draw = random.Random(options.seed)
    faults = [name for name in FAULTS if options.only in name]
    with tempfile.TemporaryDirectory(prefix="ctxcache-disaggregation-") as folder:
        place = Path(folder)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / "tiny")
        arguments: dict[str, Any] = {
            "extra": {"state": options.state, "durability": "memory"},
            "enable_prefix_caching": True,
            "max_num_batched_tokens": PIECE_TOKENS,
        }
        if options.control == ROWS_STAY:
            (place / "stale.py").write_text(STALE)
            arguments |= {"worker_extension_cls": "stale.Stale", "packages": folder}
        with ServerProcess(place / "data", "--ssd-size-bytes", str(256 << 20)) as store:
            engines = [
                VllmEngine(place / "tiny", store.target, place / f"{one}.log", **arguments)
                for one in ("first", "second")
            ]
            for engine in engines:
                engine.__enter__()
            pair = Pair(engines[0], engines[1], store, draw, report)
            try:
                for number, name in enumerate(faults * options.times):
                    outcomes = FAULTS[name](pair)
                    pair.outcomes.update(f"{name}: {outcome}" for outcome in outcomes)
                    report.end_if_found()
                    progress(number + 1, len(faults) * options.times, "hand-overs")
            finally:
                for engine in engines:
                    engine.__exit__(*sys.exc_info())
    for name in faults:
        counts = {
            key.partition(": ")[2]: count
            for key, count in pair.outcomes.items()
            if key.startswith(f"{name}: ")
        }
        sys.stderr.write(f"{name:32}{' '.join(f'{key} {counts[key]}' for key in sorted(counts))}\n")
    for outcome in ("whole", "part", "computed", "no reply"):
        total = sum(n for key, n in pair.outcomes.items() if key.endswith(f": {outcome}"))
        report.count(f"{outcome.replace(' ', '_')}_count", total)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=1, help="how often each; a long run has 20")
    parser.add_argument("--only", default="", help="faults with these words in their name")
    parser.add_argument("--state", choices=("blocks", "kv", "hidden"), default="blocks", help="what is saved")


HARNESS = Harness(
    "vllm_disaggregation",
    "Hands prompts over from one vLLM to another while something goes wrong, and looks at the replies.",
    run,
    {ROWS_STAY: "the connector says that blocks are restored, and leaves them as they were"},
    _options,
    package="tests.engines",
)


@pytest.mark.timeout(120 + 300 * TIMES)
@pytest.mark.parametrize("state", ["blocks", "kv"])
def test_every_fault_of_a_hand_over_leaves_right_replies(state: str) -> None:
    """Each once; the long run is a command."""
    report = HARNESS.execute(["--times", str(TIMES), "--state", state])
    assert report.is_good, report


@pytest.mark.timeout(300)
def test_a_planted_bug_is_found() -> None:
    """A wrong reply is found."""
    report = HARNESS.execute(["--only", "none", "--control", ROWS_STAY])
    assert report.is_good, report


if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
