#!/usr/bin/env python3
"""Time to first token of conversations that evict each other, by where vLLM keeps their state.

    .venv-vllm/bin/python -m lab.engines.turns --model DIR                 # a directory of transformers
    .venv-vllm/bin/python -m lab.engines.turns --model DIR --conversations 4 --turns 4 --json
    .venv-vllm/bin/python -m lab.engines.turns --model DIR --lmcache .venv-lmcache/bin/python --write PAGE

Every way has an engine process of its own, with room for about one conversation. The ways take turns, one
turn of all conversations at a time, so that what else the machine does disturbs all alike. Replies are
compared token for token with those of an engine that computes every prompt. `again` is a new engine process
on what the one before it left. The turns of conversations alternate, so that each finds its state evicted.
Prompts are random token ids. Times are vLLM's own, from a request's arrival to its first token.
LMCache is measured, as its server beside the engine, where `--lmcache` names a Python that has it.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.server import serving, wait_for_port
from lab.engines.families import write_rows
from lab.engines.vllm_process import VllmEngine

Replies = dict[tuple[int, int], tuple[int, ...]]
"""The tokens of each reply, by turn and conversation."""

WAYS = {
    "nothing": "nothing",
    "prefix cache": "vLLM's prefix cache",
    "offload": "vLLM's offloading to host memory",
    "lmcache": "LMCache's server",
    "ctxcache": "ctxcache, found by session",
    "ctxcache again": "a new vLLM process on those sessions, from their first turn",
    "by prefix": "ctxcache, found by prefix",
    "by prefix again": "a new vLLM process on those prefixes",
    "file tier": "vLLM's offloading, 128 MiB, files behind it",
    "file tier again": "a new vLLM process on those files",
    "ctxcache tier": "vLLM's offloading, 128 MiB, ctxcache behind it",
    "ctxcache tier again": "a new vLLM process on that ctxcache tier",
}
"""Each way, and who keeps the state in it."""
AGAIN = " again"
RATIOS = (
    ("ctxcache", "nothing"),
    ("ctxcache", "prefix cache"),
    ("ctxcache", "offload"),
    ("ctxcache", "lmcache"),
    ("ctxcache", "file tier"),
    ("by prefix", "offload"),
    ("ctxcache again", "file tier again"),
    ("by prefix again", "file tier again"),
    ("ctxcache tier", "file tier"),
    ("ctxcache tier again", "file tier again"),
)
"""The ways that are compared, the first over the second."""
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
    if kind == "lmcache":
        with (
            lmcache(options.lmcache, log.parent) as wanted,
            VllmEngine(options.model, None, log, **arguments, **wanted) as engine,
        ):
            yield engine
        return
    is_ours = kind in {"ctxcache", "by prefix"}
    with VllmEngine(options.model, target if is_ours else None, log, **arguments) as engine:
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


@contextmanager
def lmcache(python: Path, place: Path) -> Iterator[dict[str, Any]]:
    """LMCache's server; what an engine takes to use it."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, http_port = free.getsockname()[1], other.getsockname()[1]
    size_gb = str(HOST_BYTES >> 30)
    python = python.absolute()  # its processes have another working directory
    command = [str(python.with_name("lmcache")), "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-port", str(http_port)]
    command += ["--l1-size-gb", size_gb, "--chunk-size", "256"]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    # Beside its own package: a module of it would hide one of Python's.
    asked = [str(python), "-c", "import importlib.util as u; print(u.find_spec('lmcache').origin)"]
    found = subprocess.run(asked, cwd=place, capture_output=True, text=True, check=True)  # noqa: S603
    packages = Path(found.stdout.strip()).parents[1]
    with (place / "lmcache-server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=place, stdout=log, stderr=log)  # noqa: S603  the user's own
        try:
            wait_for_port(port)
            transfer = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
            yield {
                "packages": str(packages),
                "disable_hybrid_kv_cache_manager": True,
                "kv_transfer_config": transfer,
            }
        finally:
            server.terminate()
            server.wait()


class Conversations:
    """All conversations as one way holds them. `expected`: what replies must be; filled where it is empty."""

    def __init__(self, way: str, options: argparse.Namespace, expected: Replies) -> None:
        self._way, self._answer, self._expected = way, options.answer, expected
        draw = random.Random(7)  # noqa: S311  the same questions in every run
        self._questions = {
            (turn, number): [draw.randrange(100, 10_000) for _ in range(options.question)]
            for turn in range(options.turns)
            for number in range(options.conversations)
        }
        self._prompts: dict[int, list[int]] = {number: [] for number in range(options.conversations)}
        self._first_ms: list[list[float]] = []
        self._prompt_count = self._reused_count = 0
        self._took_s = 0.0
        self._is_equal = True

    def hold(self, engine: VllmEngine) -> None:
        """One turn more of all of them."""
        turn, took_ms = len(self._first_ms), list[float]()
        began_s = time.perf_counter()
        for number, prompt in self._prompts.items():
            prompt.extend(self._questions[turn, number])
            name = None if self._way.startswith("by prefix") else f"conversation-{number}"
            reply = engine.turn(prompt, name, self._answer)
            expected = self._expected.setdefault((turn, number), reply.token_ids)
            self._is_equal = self._is_equal and reply.token_ids == expected
            took_ms.append(1e3 * reply.took_s)
            self._prompt_count += len(prompt)
            self._reused_count += reply.cached_count
            prompt.extend(expected)
        self._took_s += time.perf_counter() - began_s
        self._first_ms.append(took_ms)

    def row(self) -> Row:
        """The way's row of the table, of all turns that were held."""
        return Row(
            self._way,
            [round(statistics.median(times), 1) for times in self._first_ms],
            [round(min(times), 1) for times in self._first_ms],
            [round(max(times), 1) for times in self._first_ms],
            round(self._prompt_count / self._took_s, 1),
            round(self._reused_count / self._prompt_count, 3),
            self._is_equal,
        )


def measure(ways: Sequence[str], options: argparse.Namespace, place: Path, expected: Replies) -> list[Row]:
    """Hold all conversations in these ways by turns, each with a store of its own in `place`."""
    with ExitStack() as open_now:
        held = []
        for way in ways:
            kind, target = way.removesuffix(AGAIN), ""
            if kind in {"ctxcache", "by prefix", "ctxcache tier"}:
                # A store of its own: what one way saved, another would find by its prefix.
                data = place / "data" / kind.replace(" ", "-")
                store = serving(data, arena_bytes=1 << 30, ssd_bytes=8 << 30)
                target = open_now.enter_context(store).target("tcp")
            log = place / f"{way.replace(' ', '-')}.log"
            engine = open_now.enter_context(engine_for(way, options, target, log))
            held.append((Conversations(way, options, expected), engine))
        for turn in range(options.turns):
            # The first one has no advantage of its place: each is before each other in as many turns.
            for conversations, engine in held if turn % 2 == 0 else held[::-1]:
                conversations.hold(engine)
            sys.stderr.write(f"\r{', '.join(ways)}: turn {turn + 1} of {options.turns}")
    sys.stderr.write("\n")
    return [conversations.row() for conversations, _ in held]


def table_of(rows: Sequence[Row]) -> list[str]:
    """Milliseconds to the first token in Markdown: medians with the least and the most of each turn."""
    heads = [f"turn {turn + 1}" for turn in range(len(rows[0].first_token_ms))]
    header = _line("state is kept by", *heads, "prompt tokens/s", "reused", "replies")
    lines = [header, "|---" * (len(heads) + 4) + "|"]
    for row in rows:
        times = [
            f"{median:,.0f} [{low:,.0f}, {high:,.0f}]"
            for median, low, high in zip(row.first_token_ms, row.low_ms, row.high_ms, strict=True)
        ]
        equal = "equal" if row.is_equal else "**differ**"
        rates = f"{row.prompt_tokens_per_s:,.0f}", f"{row.reused_share:.0%}"
        lines.append(_line(WAYS[row.way], *times, *rates, equal))
    return lines


def ratios_of(rows: Sequence[Row]) -> list[str]:
    """Ratios of medians in Markdown, of the ways that are compared."""
    by_way = {row.way: row for row in rows}
    heads = [f"turn {turn + 1}" for turn in range(len(rows[0].first_token_ms))]
    lines = [_line("ratio", *heads, "prompt tokens/s"), "|---" * (len(heads) + 2) + "|"]
    for way, other in RATIOS:
        if way in by_way and other in by_way:
            one, two = by_way[way], by_way[other]
            times = [f"{a / b:.2f}" for a, b in zip(one.first_token_ms, two.first_token_ms, strict=True)]
            rate = f"{one.prompt_tokens_per_s / two.prompt_tokens_per_s:.2f}"
            lines.append(_line(f"{way} / {other}", *times, rate))
    return lines


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


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
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON", help="a Python that has LMCache")
    parser.add_argument("--write", type=Path, help="a page of Markdown that gets the rows")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each way")
    options = parser.parse_args()
    ways = [way for way in options.ways.split(",") if way != "lmcache" or options.lmcache]
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} not among {', '.join(WAYS)}")
    if options.turns * (options.question + options.answer) > options.length:
        parser.error("--length: conversations would be longer")
    expected: Replies = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ctxcache-turns-") as directory:
        place = Path(directory)
        asked = dict.fromkeys(["nothing", *ways])
        again = [way for way in asked if way.endswith(AGAIN)]
        for together in ([way for way in asked if way not in again], again):
            rows += measure(together, options, place, expected)
    rows.sort(key=lambda row: list(WAYS).index(row.way))
    if options.json:
        for row in rows:
            print(json.dumps(asdict(row)))
    tables = {"turns": table_of(rows), "ratios": ratios_of(rows)}
    if not options.json:
        print("\n\n".join("\n".join(lines) for lines in tables.values()))
    if options.write:
        for name, lines in tables.items():
            write_rows(options.write, name, lines)
    return 0 if all(row.is_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
