"""Redis as a peer: a server of our own, and redis-py with hiredis. Worst case: NoPeer, saying what to install."""

import importlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from ctxcache.bench.content import Bytes
from ctxcache.bench.row import NoPeer, Place

START_TIMEOUT_S = 20
_KEEP_FREED = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
_HOW = "apt-get install redis-server; pip install 'ctxcache[bench]'"


class RedisClient(Protocol):
    """What is used of redis.Redis."""

    def ping(self) -> bool:
        """Ask for a sign of life."""

    def get(self, name: str) -> bytes | None:
        """A value."""

    def set(self, name: str, value: memoryview) -> object:
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
        raise NoPeer(f"{error.name} is not installed: {_HOW}") from error
    if program is None:
        raise NoPeer(f"redis-server is not installed: {_HOW}")
    port, path = _free_port(), str(place.directory / "redis.sock")
    is_unix = place.transport == "unix"
    process = subprocess.Popen(  # noqa: S603  a program of the machine's, by its path
        [
            program, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", "0" if is_unix else str(port),
            "--dir", str(place.directory), *(["--unixsocket", path] if is_unix else []),
        ],
        env={**os.environ, "MALLOC_CONF": _KEEP_FREED, "JE_MALLOC_CONF": _KEEP_FREED}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    make = redis.Redis
    where = {"unix_socket_path": path} if is_unix else {"host": "127.0.0.1", "port": port}
    client = cast("RedisClient", make(**where))  # redis-py is optional: its types are not here
    try:
        _wait(client, process)
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


def _wait(client: RedisClient, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
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
