#!/usr/bin/env python3
"""Time to the first token of a prompt that another vLLM has computed, by its length and what else runs.

    .venv-vllm/bin/python -m lab.engines.handover_times --rounds 3 --json > FILE.jsonl

Two engines of one store, on a model of 12 layers with random weights, 49,152 bytes of K and V a token. The
first engine computes each prompt; the second is asked at once, as a proxy asks it. The ways take turns, so
that what else the machine does disturbs all alike:

    handed over       with the `kv_transfer_params` of the first engine's reply
    by name           with the conversation's name alone
    handed over late  with the `kv_transfer_params`, once all rows are there: what waiting for them costs is
                      the difference
    by prefix         by its tokens, once all rows are there
    computed          from nothing

Replies are compared token for token with the computed one. Times are vLLM's own, from a request's arrival to
its first token; all but the last are of the second engine. Others are so many short requests beside it.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from gpu_worker.engines.vllm.handover import KEY
from lab.bench.machine import load, machine
from lab.bench.server import serving
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine

LARGER = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
COUNT = 8
OTHER_TOKENS = 64
WAYS = ("handed over", "by name", "handed over late", "by prefix", "computed")


class Trial:
    """Two engines, their store, and prompts that nobody has asked."""

    def __init__(self, first: VllmEngine, second: VllmEngine, target: str, draw: random.Random) -> None:
        self._first, self._second, self._target, self._draw = first, second, target, draw
        self._number = 0

    def times(self, token_count: int, others: int) -> dict[str, tuple[float, int]]:
        """Seconds to the first token and restored tokens, by way. Raises ValueError for a wrong reply."""
        found = {}
        for way in WAYS:
            prompt, name = self._words(token_count), self._name()
            said = self._prefilled(prompt, name if way == "by name" else None)
            if way not in ("handed over", "by name"):
                self._until_saved(said)
            says: dict[str, dict[str, Any]] = {
                "handed over": {"says": said},
                "by name": {"session": name},
                "handed over late": {"says": said},
                "by prefix": {},
                "computed": {"salt": f"nobody's {name}"},
            }
            reply = self._asked(prompt, says[way], others)
            found[way] = reply.took_s, reply.cached_count
            computed = self._asked(prompt, {"salt": f"nobody's either {name}"}, 0)
            if reply.token_ids != computed.token_ids:
                raise ValueError(f"{way}, {token_count} tokens: {reply} is not {computed.token_ids}")
        return found

    def _prefilled(self, prompt: list[int], session: str | None) -> dict[str, Any]:
        request = {"prompt": prompt, "session": session, "count": 1, "says": {"do_remote_decode": True}}
        (reply,) = self._first.ask(request)
        return {key: value for key, value in (reply.says or {}).items() if key.startswith(KEY)}

    def _asked(self, prompt: list[int], more: dict[str, Any], other_count: int) -> Reply:
        request = {"prompt": prompt, "session": None, "count": COUNT} | more
        others = [
            {"prompt": self._words(OTHER_TOKENS), "session": None, "count": COUNT, "salt": self._name()}
            for _ in range(other_count)
        ]
        return self._second.ask(request, *others)[0]

    def _until_saved(self, said: dict[str, Any]) -> None:
        (handed,) = said.values()
        with ctxcache.connect(self._target) as cache:
            while True:
                session = cache.sessions.get(handed["session_name"])
                if session.token_count >= handed["token_count"] and not session.is_being_appended:
                    return
                time.sleep(0.01)

    def _words(self, count: int) -> list[int]:
        return [self._draw.randrange(3, 500) for _ in range(count)]

    def _name(self) -> str:
        self._number += 1
        return f"conversation-{self._number}"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024, 1888])
    parser.add_argument("--others", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--state", choices=("blocks", "kv", "hidden"), default="blocks")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each round")
    asked = parser.parse_args()
    options: dict[str, Any] = {
        "extra": {"state": asked.state, "durability": "memory"},
        "max_model_len": 2048,
    }
    figures = defaultdict[tuple[int, int, str], list[tuple[float, int]]](list)
    with tempfile.TemporaryDirectory(prefix="ctxcache-handover-") as folder:
        place = Path(folder)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**SHAPE, **LARGER})).save_pretrained(place / "tiny")
        with (
            serving(place / "data", arena_bytes=1 << 30, ssd_bytes=4 << 30) as store,
            VllmEngine(place / "tiny", store.target("tcp"), place / "first.log", **options) as first,
            VllmEngine(place / "tiny", store.target("tcp"), place / "second.log", **options) as second,
        ):
            trial = Trial(first, second, store.target("tcp"), random.Random(0))  # noqa: S311
            for others in asked.others * asked.rounds:
                for count in asked.tokens:
                    for way, one in trial.times(count, others).items():
                        figures[count, others, way].append(one)
        facts = machine(place) | {"load": load(), "state": asked.state, "rounds": asked.rounds}
    if asked.json:
        sys.stdout.write(json.dumps(facts, default=str) + "\n")
        for (count, others, way), found in figures.items():
            line = {"tokens": count, "others": others, "way": way, "first_token_s": [s for s, _ in found]}
            sys.stdout.write(json.dumps(line | {"restored_tokens": [n for _, n in found]}) + "\n")
        return
    sys.stdout.write(f"{os.cpu_count()} cores, load {load()}; median ms, and restored tokens\n")
    sys.stdout.write(f"{'tokens':>8}{'others':>8}" + "".join(f"{way:>18}" for way in WAYS) + "\n")
    for count in asked.tokens:
        for others in asked.others:
            cells = ""
            for way in WAYS:
                taken = figures[count, others, way]
                cells += f"{1e3 * statistics.median(s for s, _ in taken):>12.0f} {taken[-1][1]:>5}"
            sys.stdout.write(f"{count:>8}{others:>8}{cells}\n")


if __name__ == "__main__":
    main()
