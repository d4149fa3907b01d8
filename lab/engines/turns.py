#!/usr/bin/env python3
"""Time to first token of conversations that evict each other, by where vLLM keeps their state.

    .venv-vllm/bin/python -m lab.engines.turns --model DIR                 # a directory of transformers
    .venv-vllm/bin/python -m lab.engines.turns --model DIR --conversations 4 --turns 4 --json

Every way has an engine process of its own, one after the other, with room for about one conversation. Replies
are compared token for token with those of an engine that computes every prompt. `again` is a new engine
process on what the one before it left. The turns of conversations alternate, so that each finds its state
evicted. Prompts are random token ids. Times are vLLM's own, from a request's arrival to its first token.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.server import serving
from lab.engines.vllm_process import VllmEngine

Replies = dict[tuple[int, int], tuple[int, ...]]
"""The tokens of each reply, by turn and conversation."""

WAYS = (
    "nothing",
    "prefix cache",
    "offload",
    "ctxcache",
    "ctxcache again",
    "file tier",
    "file tier again",
    "ctxcache tier",
    "ctxcache tier again",
)
AGAIN = " again"
HOST_BYTES = 2 << 30
TIERED_HOST_BYTES = 128 << 20
"""Bytes of host memory with a tier behind it: less than the conversations need."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way: milliseconds to the first token by turn, medians over conversations, and the rate of all."""

    way: str
    first_token_ms: list[float]
    low_ms: list[float]
    high_ms: list[float]
    prompt_tokens_per_s: float
    reused_share: float
    is_equal: bool


@contextmanager
def engine_for(way: str, options: argparse.Namespace, target: str, log: Path) -> Iterator[VllmEngine]:
    """The engine of a way, with blocks for about one conversation."""
    arguments: dict[str, Any] = {
        "max_model_len": options.length,
        "num_gpu_blocks_override": options.length // 32 + 8,
        "enable_prefix_caching": way != "nothing",
    }
    kind = way.removesuffix(AGAIN)
    if kind in {"offload", "file tier", "ctxcache tier"}:
        arguments["kv_transfer_config"] = offloading(kind, target, log.parent)
    # Blocks that one process leaves are found by another under the same hashes.
    environment = {"PYTHONHASHSEED": "0"}
    is_ours = kind == "ctxcache"
    with VllmEngine(
        options.model, target if is_ours else None, log, environment=environment, **arguments
    ) as engine:
        yield engine


def offloading(kind: str, target: str, place: Path) -> dict[str, Any]:
    """VLLM's own connector, with files or the store behind host memory where the way has that."""
    is_tiered = kind != "offload"
    extra: dict[str, Any] = {
        "spec_name": "TieringOnCpu" if is_tiered else "OffloadOnCpu",
        "spec_module_path": "lab.engines.offload_on_cpu",
        "cpu_bytes_to_use": TIERED_HOST_BYTES if is_tiered else HOST_BYTES,
        "block_size": 32,
    }
    if kind == "file tier":
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(place / "files")}]
    if kind == "ctxcache tier":
        extra["target"] = target
    return {
        "kv_connector": "CtxcacheOffloadingConnector" if kind == "ctxcache tier" else "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def measure(way: str, options: argparse.Namespace, target: str, log: Path, expected: Replies) -> Row:
    """Hold all conversations in turn. `expected`: what replies must be; filled where it is empty."""
    draw = random.Random(7)  # noqa: S311  the same questions in every run
    questions = {
        (turn, number): [draw.randrange(100, 10_000) for _ in range(options.question)]
        for turn in range(options.turns)
        for number in range(options.conversations)
    }
    is_first = not expected
    prompts: dict[int, list[int]] = {number: [] for number in range(options.conversations)}
    first_ms: list[list[float]] = []
    prompt_count = reused_count = 0
    is_equal = True
    with engine_for(way, options, target, log) as engine:
        began_s = time.perf_counter()
        for turn in range(options.turns):
            took_ms = []
            for number, prompt in prompts.items():
                prompt.extend(questions[turn, number])
                reply = engine.turn(prompt, f"conversation-{number}", options.answer)
                if is_first:
                    expected[turn, number] = reply.token_ids
                is_equal = is_equal and reply.token_ids == expected[turn, number]
                took_ms.append(1e3 * reply.took_s)
                prompt_count += len(prompt)
                reused_count += reply.cached_count
                prompt.extend(expected[turn, number])
            first_ms.append(took_ms)
        seconds = time.perf_counter() - began_s
    return Row(
        way,
        [round(statistics.median(times), 1) for times in first_ms],
        [round(min(times), 1) for times in first_ms],
        [round(max(times), 1) for times in first_ms],
        round(prompt_count / seconds, 1),
        round(reused_count / prompt_count, 3),
        is_equal,
    )


def table_of(rows: Sequence[Row]) -> str:
    """Rows as text: medians with the least and the most of each turn."""
    turns = len(rows[0].first_token_ms)
    heads = "".join(f"{f'turn {turn + 1}':>22}" for turn in range(turns))
    lines = [f"{'ms to the first token':<24}{heads}{'prompt tokens/s':>18}{'reused':>9}  replies"]
    for row in rows:
        times = "".join(
            f"{f'{median:.0f} [{low:.0f}, {high:.0f}]':>22}"
            for median, low, high in zip(row.first_token_ms, row.low_ms, row.high_ms, strict=True)
        )
        equal = "equal" if row.is_equal else "DIFFER"
        lines.append(f"{row.way:<24}{times}{row.prompt_tokens_per_s:>18.0f}{row.reused_share:>9.0%}  {equal}")
    return "\n".join(lines)


def main() -> int:
    """Measure the ways that are asked for; exits with 1 where a reply differs."""
    parser = argparse.ArgumentParser(prog="lab.engines.turns", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a directory of transformers")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--question", type=int, default=330, help="tokens of each question")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a conversation")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each way")
    options = parser.parse_args()
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} not among {', '.join(WAYS)}")
    if options.turns * (options.question + options.answer) > options.length:
        parser.error("--length: conversations would be longer")
    expected: Replies = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ctxcache-turns-") as directory:
        place = Path(directory)
        with serving(place / "data", arena_bytes=1 << 30, ssd_bytes=8 << 30) as server:
            for way in dict.fromkeys(["nothing", *ways]):
                log = place / f"{way.replace(' ', '-')}.log"
                rows.append(measure(way, options, server.target("tcp"), log, expected))
                if options.json:
                    print(json.dumps(asdict(rows[-1])), flush=True)
                else:
                    sys.stderr.write(f"{way}: done\n")
    if not options.json:
        print(table_of(rows))
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
