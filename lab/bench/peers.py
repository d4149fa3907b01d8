"""Peers that rows are measured beside. Worst case: NoPeer, which says what to install.

Redis: a server of our own, and redis-py with hiredis. LMCache: its server in shared-memory mode, driven by
its own benchmark. LMCache brings torch along, so it lives in an environment of its own; `LMCACHE_PROGRAM`
names its `lmcache`.
"""

import importlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from lab.bench.contexts import Bytes
from lab.bench.row import NoPeer, Place, WrongBytes

REDIS_START_TIMEOUT_S = 20
_KEEP_FREED = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
_HOW_REDIS = "apt-get install redis-server; pip install './lab[bench]'"


class RedisClient(Protocol):
    """The part of redis.Redis that is used."""

    def ping(self) -> bool:
        """Ask for a sign of life."""

    def get(self, name: str) -> bytes | None:
        """A value."""

    def mget(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values, in one round trip."""

    def exists(self, *names: bytes) -> int:
        """How many of these have a value."""

    def set(self, name: str | bytes, value: memoryview) -> object:
        """Set a value."""

    def delete(self, *names: str) -> object:
        """Remove values."""

    def close(self) -> None:
        """End the connection."""


@contextmanager
def redis_client(place: Place) -> Iterator[RedisClient]:
    """A client of a Redis that persists nothing, over the transport of `place`. Raises NoPeer.

    Its allocator gives no freed memory back, as ours does not.
    """
    program = shutil.which("redis-server")
    try:
        redis = importlib.import_module("redis")
        importlib.import_module("hiredis")
    except ModuleNotFoundError as error:
        raise NoPeer(f"{error.name} is not installed: {_HOW_REDIS}") from error
    if program is None:
        raise NoPeer(f"redis-server is not installed: {_HOW_REDIS}")
    port, path = _free_port(), str(place.directory / "redis.sock")
    is_unix = place.transport == "unix"
    process = subprocess.Popen(  # noqa: S603  a program of the machine's, by its path
        [
            program,
            "--save",
            "",
            "--appendonly",
            "no",
            "--bind",
            "127.0.0.1",
            "--port",
            "0" if is_unix else str(port),
            "--dir",
            str(place.directory),
            *(["--unixsocket", path] if is_unix else []),
        ],
        env={**os.environ, "MALLOC_CONF": _KEEP_FREED, "JE_MALLOC_CONF": _KEEP_FREED},
        stdout=subprocess.DEVNULL,
    )
    make = redis.Redis
    where = {"unix_socket_path": path} if is_unix else {"host": "127.0.0.1", "port": port}
    client = cast("RedisClient", make(**where))  # redis-py is optional: its types are not here
    try:
        _await_redis(client, process)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def values_of(flat: Bytes, value_bytes: int) -> list[memoryview]:
    """A context cut into values; what is left over is the last one's."""
    begins = [i * value_bytes for i in range(max(1, flat.nbytes // value_bytes))]
    ends = [*begins[1:], flat.nbytes]
    return [flat[begin:end].data for begin, end in zip(begins, ends, strict=True)]


def _await_redis(client: RedisClient, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + REDIS_START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            client.ping()
        except Exception as error:  # redis.ConnectionError, whose module is optional
            if type(error).__name__ not in ("ConnectionError", "BusyLoadingError"):
                raise
            time.sleep(0.05)
        else:
            return
    raise NoPeer("redis-server did not start: run it by hand to see why")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


LMCACHE_PROGRAM = "CTXCACHE_BENCH_LMCACHE"
LMCACHE_START_TIMEOUT_S = 90
RUN_TIMEOUT_S = 300
REQUESTS = 6
BLOCK_TOKENS = 16
ELEMENT_BYTES = 2
KV_HEADS = 8
_HOW_LMCACHE = (
    "in an environment of its own: pip install torch, pip install --no-deps lmcache==0.5.6 and what it"
    f" imports; then {LMCACHE_PROGRAM}=/that/environment/bin/lmcache ctxcache bench --rows lmcache"
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
            "bench",
            "server",
            "--mode",
            "cpu",
            "--transfer-mode",
            "lmcache_driven",
            "--rpc-url",
            f"grpc://127.0.0.1:{self.port}",
            "--url",
            f"http://127.0.0.1:{self.http_port}",
            "--kvcache-shape-spec",
            shape,
            "--num-blocks",
            str(blocks),
            "--num-tokens",
            str(scale.token_count),
            "--start",
            str(first),
            "--end",
            str(first + REQUESTS),
            "--interval",
            "0",
            "--format",
            "json",
            "--output",
            str(report),
            "-q",
        )
        found = json.loads(report.read_text())["metrics"]
        if found["results"]["checksum_fail"]:
            raise WrongBytes(f"LMCache: {found['results']['checksum_fail']} checksums fail")
        return found["cold_store"]["cold_store_p50"] / 1e3, found["warm_retrieve"]["warm_retrieve_p50"] / 1e3

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(  # noqa: S603  the program that the user named
            [self.program, *arguments],
            cwd=self.place.directory,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise NoPeer(
                f"lmcache {' '.join(arguments[:2])} failed: {done.stdout[-300:]}{done.stderr[-300:]}"
            )


@contextmanager
def lmcache(place: Place) -> Iterator[Lmcache]:
    """An LMCache server on free ports. Raises NoPeer."""
    program = os.environ.get(LMCACHE_PROGRAM, "")
    if not program or not Path(program).exists():
        raise NoPeer(_HOW_LMCACHE)
    port, http_port = _free_port(), _free_port()
    command = [
        program,
        "server",
        "--transport",
        "grpc",
        "--supported-transfer-mode",
        "auto",
        "--port",
        str(port),
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(http_port),
        "--l1-size-gb",
        "2",
        "--eviction-policy",
        "LRU",
    ]
    with (place.directory / "lmcache.log").open("w") as log:
        process = subprocess.Popen(command, cwd=place.directory, env=_environment(), stdout=log, stderr=log)  # noqa: S603
    try:
        _await_lmcache(process, http_port)
        yield Lmcache(program, port, http_port, place, itertools.count())
    finally:
        process.kill()
        process.wait()


def _await_lmcache(process: "subprocess.Popen[bytes]", http_port: int) -> None:
    deadline_s = time.monotonic() + LMCACHE_START_TIMEOUT_S
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
