#!/usr/bin/env python3
"""Loading prompts from the tier behind vLLM's host memory: its own files beside the store.

    .venv-vllm/bin/python -m lab.engines.tier_loads --model DIR
    .venv-vllm/bin/python -m lab.engines.tier_loads --model DIR --prompts 12 --write lab/notes/vllm.md

An engine computes prompts of 1,697 tokens, and ends. New engines of the same name ask for them again, and
compute one token of each: once with the files in the page cache and the store's blocks in its DRAM, once
from disk, when the files' pages were dropped and the store was started anew. Both tiers are asked by turns.
The time of a load is that of the first token, less that of the same prompt at once again, which lies in
vLLM's own blocks then. Replies are compared.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ctxcache
from lab.bench.server import Server, serving
from lab.engines.families import write_rows
from lab.engines.turns import engine_for
from lab.engines.vllm_process import VllmEngine

FILES, OURS = "file tier", "ctxcache tier"
BLOCK_TOKENS = 32
BLOCKS = 53
STOP_S = 60
SAVED_S = 60.0
PLACES = {"memory": "from memory", "disk": "from disk"}

Loads = dict[str, list[float]]
"""Milliseconds of each prompt's load, by tier."""


@contextmanager
def tiers(options: argparse.Namespace, place: Path, server: Server) -> Iterator[dict[str, VllmEngine]]:
    """An engine on each tier, with room for one prompt in its own blocks."""
    with ExitStack() as stack:
        yield {
            way: stack.enter_context(
                engine_for(way, options, server.target("tcp"), place / f"{way.replace(' ', '-')}.log")
            )
            for way in (FILES, OURS)
        }


def drop_pages(directory: Path) -> None:
    """Let the page cache forget the files of a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_until_saved(engines: dict[str, VllmEngine], server: Server, place: Path, count: int) -> None:
    """Wait until both tiers have so many blocks: what host memory has no room for is not saved.

    An engine saves in steps, and makes none without a request.
    """
    deadline_s = time.monotonic() + SAVED_S
    with ctxcache.connect(server.target("tcp")) as cache:
        while True:
            counts = cache.admin.stats().segment_count, sum(1 for _ in (place / "files").rglob("*.bin"))
            if min(counts) >= count:
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{counts} blocks of {count} are saved")
            for engine in engines.values():
                engine.turn([5, 6, 7], None, 1)


def stop(server: Server) -> None:
    """Let it write what is unwritten."""
    server.process.terminate()
    server.process.wait(STOP_S)


def ask(engines: dict[str, VllmEngine], prompts: Sequence[list[int]], expected: list[int]) -> Loads:
    """Load each prompt in each engine, the first one as often as the other. Raises ValueError for a miss."""
    loads: Loads = {way: [] for way in engines}
    for number, prompt in enumerate(prompts):
        order = list(engines) if number % 2 else list(reversed(engines))
        for way in order:
            first, again = (engines[way].turn(prompt, None, 1) for _ in range(2))
            for reply in (first, again):
                if reply.cached_count < BLOCKS * BLOCK_TOKENS or reply.token_ids[0] != expected[number]:
                    raise ValueError(f"{way}, prompt {number}: {reply}: {engines[way].log[-2000:]}")
            loads[way].append(1e3 * (first.took_s - again.took_s))
    return loads


def measure(options: argparse.Namespace, place: Path) -> dict[str, Loads]:
    """Loads from memory and from disk."""
    draw = random.Random(5)  # noqa: S311  the same prompts in every run
    prompts = [
        [draw.randrange(100, 10_000) for _ in range(BLOCKS * BLOCK_TOKENS + 1)]
        for _ in range(options.prompts)
    ]
    with serving(place / "data", arena_bytes=1 << 30, ssd_bytes=4 << 30) as server:
        with tiers(options, place, server) as engines:
            expected = []
            for number, prompt in enumerate(prompts):
                expected.append(engines[FILES].turn(prompt, None, 1).token_ids[0])
                engines[OURS].turn(prompt, None, 1)
                wait_until_saved(engines, server, place, BLOCKS * (number + 1))
        with tiers(options, place, server) as engines:
            loads = {"memory": ask(engines, prompts, expected)}
        stop(server)
    with (
        serving(place / "data", arena_bytes=1 << 30, ssd_bytes=4 << 30) as server,
        tiers(options, place, server) as engines,
    ):
        drop_pages(place)
        loads["disk"] = ask(engines, prompts, expected)
    return loads


def table_of(loads: dict[str, Loads]) -> list[str]:
    """Medians with the least and the most in Markdown, and the median of ratios by prompt."""
    lines = ["| a prompt's load | vLLM's files, ms | ctxcache, ms | over files |", "|---|---|---|---|"]
    for where, found in loads.items():
        cells = [
            f"{statistics.median(found[way]):.0f} [{min(found[way]):.0f}, {max(found[way]):.0f}]"
            for way in (FILES, OURS)
        ]
        ratios = [ours / theirs for theirs, ours in zip(found[FILES], found[OURS], strict=True)]
        lines.append(f"| {PLACES[where]} | {' | '.join(cells)} | {statistics.median(ratios):.2f} |")
    return lines


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="lab.engines.tier_loads", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a directory of transformers")
    parser.add_argument("--prompts", type=int, default=8, help="prompts that each tier loads")
    parser.add_argument("--write", type=Path, help="a page of Markdown that gets the rows")
    options = parser.parse_args()
    options.length = (BLOCKS + 1) * BLOCK_TOKENS
    with tempfile.TemporaryDirectory(prefix="ctxcache-loads-") as directory:
        lines = table_of(measure(options, Path(directory)))
    print("\n".join(lines))
    if options.write:
        write_rows(options.write, "loads", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
