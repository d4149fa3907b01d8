"""LMCache as a peer: its server in shared-memory mode, driven by its own benchmark. Worst case: NoPeer.

It brings torch along, so it lives in an environment of its own; `LMCACHE_PROGRAM` names its `lmcache`.
"""

import itertools
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ctxcache.bench.row import NoPeer, Place, WrongBytes

LMCACHE_PROGRAM = "CTXCACHE_BENCH_LMCACHE"
START_TIMEOUT_S = 90
RUN_TIMEOUT_S = 300
REQUESTS = 6
BLOCK_TOKENS = 16
ELEMENT_BYTES = 2
KV_HEADS = 8
_HOW = (
    "in an environment of its own: pip install torch, pip install --no-deps lmcache==0.5.6 and what it imports; "
    f"then {LMCACHE_PROGRAM}=/that/environment/bin/lmcache ctxcache bench --rows lmcache"
)


@dataclass(frozen=True, slots=True)
class Lmcache:
    """A running LMCache server. Use `lmcache` below."""

    program: str
    port: int
    http_port: int
    place: Place
    runs: Iterator[int]
    """Numbers of the runs: each stores contexts of its own."""

    def medians(self) -> tuple[float, float]:
        """Seconds in the median to store one context, and to retrieve it into paged KV; its checksums hold.

        Raises WrongBytes, NoPeer.
        """
        scale = self.place.scale
        head_size = scale.row_bytes // (2 * KV_HEADS * ELEMENT_BYTES)
        blocks = 2 * scale.token_count // BLOCK_TOKENS
        shape = f"(2,{blocks},{BLOCK_TOKENS},{KV_HEADS},{head_size}):float16:{scale.layer_count}"
        first = next(self.runs) * REQUESTS
        report = self.place.directory / "lmcache.json"
        # Not the directory that has its modules: one of them is called like Python's own.
        self._run(
            "bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven", "--rpc-url",
            f"grpc://127.0.0.1:{self.port}", "--url", f"http://127.0.0.1:{self.http_port}",
            "--kvcache-shape-spec", shape, "--num-blocks", str(blocks), "--num-tokens", str(scale.token_count),
            "--start", str(first), "--end", str(first + REQUESTS), "--interval", "0", "--format", "json", "--output", str(report), "-q",
        )  # fmt: skip
        found = json.loads(report.read_text())["metrics"]
        if found["results"]["checksum_fail"]:
            raise WrongBytes(f"LMCache: {found['results']['checksum_fail']} checksums fail")
        return found["cold_store"]["cold_store_p50"] / 1e3, found["warm_retrieve"]["warm_retrieve_p50"] / 1e3

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(  # noqa: S603  the program that the user named
            [self.program, *arguments], cwd=self.place.directory, env=_environment(), capture_output=True,
            text=True, timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoPeer(
                f"lmcache {' '.join(arguments[:2])} failed: {done.stdout[-300:]}{done.stderr[-300:]}"
            )


@contextmanager
def lmcache(place: Place) -> Iterator[Lmcache]:
    """An LMCache server on free ports. Raises NoPeer."""
    program = os.environ.get(LMCACHE_PROGRAM, "")
    if not program or not Path(program).exists():
        raise NoPeer(_HOW)
    port, http_port = _free_port(), _free_port()
    command = [
        program, "server", "--transport", "grpc", "--supported-transfer-mode", "auto", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", "2", "--eviction-policy", "LRU",
    ]  # fmt: skip
    with (place.directory / "lmcache.log").open("w") as log:
        process = subprocess.Popen(command, cwd=place.directory, env=_environment(), stdout=log, stderr=log)  # noqa: S603
    try:
        _wait(process, http_port)
        yield Lmcache(program, port, http_port, place, itertools.count())
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", http_port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/status", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise NoPeer("the LMCache server did not start: run `lmcache server` by hand to see why")


def _environment() -> dict[str, str]:
    # Its own modules, not those that are on our path.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"LMCACHE_DISABLE_BANNER": "1"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
