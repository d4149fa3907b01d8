#!/usr/bin/env python3
"""LMCache's own bench of its second tier: the store beside LMCache's files and Redis, verified by the bench.

    .venv-lmcache/bin/python -m lab.engines.l2                      # 16 chunks of 1 MiB, and of 4 MiB
    .venv-lmcache/bin/python -m lab.engines.l2 --turns 9 --json

Each contender is measured in each turn, one after the other, by `lmcache bench l2`. The figures are medians
over turns of the bench's own medians over rounds, with the least and the most. Redis is measured where
`redis-server` is installed.
"""

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.bench.server import serving, wait_for_port

KEYS = 16
SIZES_KIB = (1024, 4096)
OPERATIONS = ("store", "lookup", "load")
OURS, FILES, REDIS = "ctxcache", "files", "redis"
LMCACHE = Path(sys.executable).with_name("lmcache")

Figures = dict[tuple[str, int, str], list[float]]
"""Milliseconds of each turn, by contender, KiB, and operation."""


def adapter_of_store(target: str, **params: Any) -> dict[str, Any]:
    """LMCache's configuration with the store as its second tier."""
    return {
        "type": "plugin",
        "module_path": "ctxcache.engines.lmcache",
        "class_name": "CtxcacheL2",
        "adapter_params": {"target": target, **params},
    }


def bench(adapter: Mapping[str, Any], size_kib: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each operation of 16 keys, the bench's median. Raises where its bytes are wrong."""
    command = [str(LMCACHE), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify"]
    command += ["--num-keys", str(KEYS), "--data-size-kb", str(size_kib), "--rounds", str(rounds)]
    command += ["--lookup-max-hit-rate", "1", "--format", "json"]
    # Beside the package's own directory its modules would stand in for Python's.
    done = subprocess.run(  # noqa: S603  our own command
        command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir()
    )
    if done.returncode or "ailed" in done.stdout or "mismatch" in done.stdout:
        raise RuntimeError(f"lmcache bench: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    begin, end = done.stdout.index("{\n"), done.stdout.rindex("}") + 1
    measured = json.loads(done.stdout[begin:end])["metrics"]
    rows = [row for row in measured.values() if isinstance(row, dict) and "operation" in row]
    if any(row["total_success"] != row["total_keys"] for row in rows):
        raise RuntimeError(f"not all keys went through: {rows}")
    return {row["operation"].lower(): row["duration_p50_ms"] for row in rows}


@contextmanager
def redis(place: Path) -> Iterator[int]:
    """A Redis that writes nothing to disk; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(place)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603  our own command
    try:
        wait_for_port(port)
        yield port
    finally:
        server.terminate()
        server.wait()


def measure(turns: int, rounds: int, place: Path) -> Figures:
    """All contenders, in turns."""
    figures: Figures = {}
    has_redis = shutil.which("redis-server") is not None
    for turn in range(turns):
        for size_kib in SIZES_KIB:
            for contender in (OURS, FILES, *((REDIS,) if has_redis else ())):
                own = place / f"{turn}-{size_kib}-{contender}"
                own.mkdir(mode=0o700)
                for operation, took_ms in _measured(contender, own, size_kib, rounds).items():
                    figures.setdefault((contender, size_kib, operation), []).append(took_ms)
                shutil.rmtree(own)
        sys.stderr.write(f"\rturn {turn + 1} of {turns}")
    sys.stderr.write("\r" + " " * 20 + "\r")
    return figures


def _measured(contender: str, place: Path, size_kib: int, rounds: int) -> dict[str, float]:
    if contender == FILES:
        return bench({"type": "fs", "base_path": str(place)}, size_kib, rounds)
    if contender == REDIS:
        with redis(place) as port:
            return bench({"type": "resp", "host": "127.0.0.1", "port": port}, size_kib, rounds)
    with serving(place / "data", arena_bytes=1 << 30, ssd_bytes=4 << 30) as server:
        return bench(adapter_of_store(server.target("tcp")), size_kib, rounds)


def table_of(figures: Figures) -> str:
    """Milliseconds for 16 chunks, with ours over each other one's."""
    contenders = list(dict.fromkeys(contender for contender, _, _ in figures))
    others = contenders[1:]
    heads = [f"{KEYS} chunks", *(f"{one}, ms" for one in contenders), *(f"over {one}" for one in others)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for size_kib in SIZES_KIB:
        for operation in OPERATIONS:
            rows = [figures[one, size_kib, operation] for one in contenders]
            cells = [f"{statistics.median(row):.2f} [{min(row):.2f}, {max(row):.2f}]" for row in rows]
            ratios = [
                f"{statistics.median(a / b for a, b in zip(rows[0], row, strict=True)):.2f}"
                for row in rows[1:]
            ]
            lines.append(f"| {operation}, {size_kib // 1024} MiB | " + " | ".join([*cells, *ratios]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print a table, or a line of JSON for each figure."""
    parser = argparse.ArgumentParser(prog="lab.engines.l2", description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="of each contender")
    parser.add_argument("--rounds", type=int, default=5, help="of each operation in a turn")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ctxcache-l2-") as directory:
        figures = measure(options.turns, options.rounds, Path(directory))
    if options.json:
        for (contender, size_kib, operation), took_ms in figures.items():
            facts = {"contender": contender, "size_kib": size_kib, "operation": operation, "took_ms": took_ms}
            print(json.dumps(facts))
    else:
        print(table_of(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
