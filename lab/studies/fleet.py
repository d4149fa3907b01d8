"""What many hosts cost: a turn that stays, a turn that moves, rows on their way, and a host that dies.

    python -m lab.studies.fleet                           stores of this machine, a directory as bucket
    python -m lab.studies.fleet --bucket s3://fleet/x     with AWS_ENDPOINT_URL and credentials
    python -m lab.studies.fleet --json

    stay         lease and release at the owner, pairs with a store that is alone: ratio of the medians
    move         look-up to answer of a one-token session at another store: head, yield, change, arrival
    rows         a session of 64 MiB, and of 1 GiB with --large, beside a bare TCP socket on the same machine
    prefix       64 MiB of a prompt without a name, by a router's word, beside a bare socket; and a look-up of
                 4,096 tokens that no store has, beside one of as many where the bucket is not asked
    shared       64 MiB committed as SHARED, and back from the bucket, beside the same bytes put and read bare
    killed       the next turn's added wait, when the owner refuses connections
    frozen       the same, when it takes them and says nothing
    requests     reads and changes of heads for a session that is made, and of one that moves

Every figure is a median with its spread. Nothing is asserted. The stores share this machine's processors.
"""

import argparse
import asyncio
import json
import secrets
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from ctxcache.client import OPAQUE, TOKENS, CallerModel, Durability, ModelSpec
from ctxcache.errors import SessionNotFound
from ctxcache.fleet.sharing import MOST_BYTES
from ctxcache.storage.objects import open_objects
from lab.demo.embedded_store import EmbeddedStore

MIB = 1 << 20
SMALL = ModelSpec.opaque("small", row_bytes=512)
LARGE = ModelSpec.opaque("large", row_bytes=64 << 10)
PAIRS, LEASES = 9, 300
MOVES, LOSSES = 100, 20


class Hosts:
    """Some stores of one fleet, and one that is alone."""

    def __init__(self, directory: Path, bucket: str, size_bytes: int, held: ExitStack) -> None:
        secret = directory / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        self.fleet_options = {
            "--fleet-bucket": bucket or f"file://{directory}/bucket",
            "--fleet-secret-file": str(secret),
            "--fleet-beat-s": "1",
            # Prefixes come whatever they take: the time is what is measured.
            "--prefill-tokens-per-s": "100",
        }
        self._directory, self._size_bytes, self._held = directory, size_bytes, held
        self._count = 0
        self.models: dict[EmbeddedStore, dict[str, CallerModel]] = {}

    def one(self, *, is_alone: bool = False) -> EmbeddedStore:
        """Another store."""
        self._count += 1
        data, arena = self._directory / f"d{self._count}", self._directory / f"a{self._count}"
        data.mkdir()
        arena.mkdir()
        options = {} if is_alone else self.fleet_options
        store = EmbeddedStore(data, arena, size_bytes=self._size_bytes, options=options)
        self._held.callback(store.close)
        self.start(store)
        return store

    def start(self, store: EmbeddedStore) -> None:
        """Start it, again."""
        store.start()
        register = store.client.models.register
        self.models[store] = {spec.model_id: register(spec) for spec in (SMALL, LARGE)}


def spread(values: Sequence[float], unit: str) -> dict[str, object]:
    """Median, tenth and ninetieth percentile, and the largest."""
    ordered = sorted(values)
    p10, p90, p99 = (ordered[min(int(at * len(ordered)), len(ordered) - 1)] for at in (0.1, 0.9, 0.99))
    return {
        "median": round(statistics.median(ordered), 3),
        "p10": round(p10, 3),
        "p90": round(p90, 3),
        "p99": round(p99, 3),
        "most": round(ordered[-1], 3),
        "count": len(ordered),
        "unit": unit,
    }


def made(hosts: Hosts, store: EmbeddedStore, token_count: int, spec: ModelSpec = SMALL) -> str:
    """A session of so many tokens, announced to the others; its name."""
    model = hosts.models[store][spec.model_id]
    session = store.client.sessions.create(model, id=f"s{secrets.token_hex(6)}")
    row_bytes = next(one.row_bytes for one in spec.streams)
    step = max(1, (32 * MIB) // row_bytes)
    for begin in range(0, token_count, step):
        count = min(step, token_count - begin)
        tokens = np.arange(begin, begin + count, dtype=np.int32)
        rows = np.full((count, row_bytes), begin % 251, np.uint8)
        session.append({TOKENS: tokens, OPAQUE: rows})
    return session.name


def announced(store: EmbeddedStore) -> None:
    """Wait until all that was made here has its head."""
    while store.client.admin.fleet().private_session_count:
        time.sleep(0.01)


def stay(hosts: Hosts) -> dict[str, object]:
    """Leases at the owner, with a fleet and without one, in turns."""
    pair = [hosts.one(is_alone=True), hosts.one()]
    names = [made(hosts, store, 64) for store in pair]
    announced(pair[1])
    ratios, seconds = [], []
    before = pair[1].client.admin.fleet().head_read_count
    for _ in range(PAIRS):
        took = []
        for store, name in zip(pair, names, strict=True):
            handle = store.client.sessions.open(store.client.sessions.get(name), hosts.models[store]["small"])
            begun = time.perf_counter()
            for _ in range(LEASES):
                handle.read().close()
            took.append((time.perf_counter() - begun) / LEASES)
        ratios.append(took[1] / took[0])
        seconds.append(took[1] * 1e6)
    reads = pair[1].client.admin.fleet().head_read_count - before
    for store in pair:
        store.close()
    return {
        "lease, of one without a fleet": spread(ratios, "times"),
        "lease": spread(seconds, "us"),
        "head reads": reads,
    }


def move(hosts: Hosts, first: EmbeddedStore, second: EmbeddedStore) -> dict[str, object]:
    """Sessions of one token, found at the other store."""
    names = [made(hosts, first, 1) for _ in range(MOVES)]
    announced(first)
    before = second.client.admin.fleet()
    took = []
    for name in names:
        begun = time.perf_counter()
        second.client.sessions.get(name)
        took.append((time.perf_counter() - begun) * 1e3)
    after = second.client.admin.fleet()
    return {
        "look-up of a session that moves": spread(took, "ms"),
        "head reads for one": (after.head_read_count - before.head_read_count) / MOVES,
        "head changes for one": (after.head_change_count - before.head_change_count) / MOVES,
    }


def rows(hosts: Hosts, first: EmbeddedStore, second: EmbeddedStore, size_bytes: int) -> dict[str, object]:
    """A large session comes, beside as many bytes over a socket."""
    rates, bare = [], []
    for _ in range(5):
        name = made(hosts, first, size_bytes // (64 << 10), LARGE)
        announced(first)
        begun = time.perf_counter()
        second.client.sessions.get(name)
        rates.append(size_bytes / (time.perf_counter() - begun) / 1e9)
        bare.append(size_bytes / _bare_socket_s(size_bytes) / 1e9)
        second.client.sessions.open(name).delete()
    ratios = [rate / other for rate, other in zip(rates, bare, strict=True)]
    return {
        f"{size_bytes >> 20} MiB come": spread(rates, "GB/s"),
        f"{size_bytes >> 20} MiB come, of a bare socket": spread(ratios, "times"),
    }


def prefix(hosts: Hosts, first: EmbeddedStore, second: EmbeddedStore, size_bytes: int) -> dict[str, object]:
    """A prompt without a name comes, beside as many bytes over a socket; and one that nobody has."""
    rates, bare, draw = [], [], np.random.default_rng(1)
    count, model = size_bytes // (64 << 10), hosts.models[second]["large"]
    source = next(node.address for node in first.client.admin.fleet().nodes if node.is_self)
    for _ in range(5):
        tokens = draw.integers(1, 1 << 30, count, dtype=np.int32)
        session = first.client.sessions.create(hosts.models[first]["large"])
        session.append({TOKENS: tokens, OPAQUE: np.zeros((count, 64 << 10), np.uint8)})
        begun = time.perf_counter()
        found = second.client.prefixes.match(model, tokens, source=source)
        rates.append(size_bytes / (time.perf_counter() - begun) / 1e9)
        assert found.token_count == count  # noqa: S101  what is measured
        bare.append(size_bytes / _bare_socket_s(size_bytes) / 1e9)
        session.delete()
    small, took = hosts.models[second]["small"], {4096: list[float](), 2000: list[float]()}
    for _ in range(MOVES):
        for asked, times in took.items():
            tokens = draw.integers(1, 1 << 30, asked, dtype=np.int32)
            begun = time.perf_counter()
            second.client.prefixes.match(small, tokens)
            times.append((time.perf_counter() - begun) * 1e3)
    return {
        f"{size_bytes >> 20} MiB of a prompt come": spread(rates, "GB/s"),
        f"{size_bytes >> 20} MiB of a prompt, of a bare socket": spread(
            [rate / other for rate, other in zip(rates, bare, strict=True)], "times"
        ),
        "look-up of 4,096 tokens that nobody has": spread(took[4096], "ms"),
        "the same of 2,000, which asks no bucket": spread(took[2000], "ms"),
    }


def shared(hosts: Hosts, store: EmbeddedStore, bucket: str, size_bytes: int) -> dict[str, object]:
    """A large session is put into the bucket, leaves its host, and comes back."""
    model, put, back = hosts.models[store]["large"], [], []
    bare = [asyncio.run(_bare_objects_s(bucket, size_bytes)) for _ in range(5)]
    for _ in range(5):
        count = size_bytes // (64 << 10)
        session = store.client.sessions.create(model, id=f"s{secrets.token_hex(6)}")
        tokens, row = np.arange(count, dtype=np.int32), np.zeros((count, 64 << 10), np.uint8)
        begun = time.perf_counter()
        session.append({TOKENS: tokens, OPAQUE: row}, durability=Durability.SHARED)
        put.append(size_bytes / (time.perf_counter() - begun) / 1e9)
        store.client.admin.evict_session(session.name)
        begun = time.perf_counter()
        assert store.client.sessions.get(session.name).token_count == count  # noqa: S101  what is measured
        back.append(size_bytes / (time.perf_counter() - begun) / 1e9)
        session.delete()
    put_bare, back_bare = ([size_bytes / took / 1e9 for took in column] for column in zip(*bare, strict=True))
    return {
        f"{size_bytes >> 20} MiB committed as SHARED": spread(put, "GB/s"),
        f"{size_bytes >> 20} MiB back from the bucket": spread(back, "GB/s"),
        "of objects put bare": spread([statistics.median(put) / one for one in put_bare], "times"),
        "of objects read bare": spread([statistics.median(back) / one for one in back_bare], "times"),
    }


async def _bare_objects_s(bucket: str, size_bytes: int) -> tuple[float, float]:
    """Seconds in which as many bytes are put as objects, one by one, and read again, four at a time."""
    objects, body = open_objects(bucket), bytes(MOST_BYTES)
    paths = [f"bare/{secrets.token_hex(8)}" for _ in range(size_bytes // MOST_BYTES)]

    async def all_of(work: Callable[[str], Awaitable[object]], at_once: int) -> float:
        begun = time.perf_counter()
        for begin in range(0, len(paths), at_once):
            await asyncio.gather(*map(work, paths[begin : begin + at_once]))
        return time.perf_counter() - begun

    put_s = await all_of(lambda path: objects.put(path, body), 1)
    read_s = await all_of(lambda path: objects.get(path, MOST_BYTES), 4)
    await objects.remove(paths)
    return put_s, read_s


def _bare_socket_s(size_bytes: int) -> float:
    """Seconds in which a thread receives so many bytes from another, over TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    block = memoryview(bytearray(MIB))

    def send() -> None:
        with socket.create_connection(listener.getsockname()) as out:
            for _ in range(size_bytes // MIB):
                out.sendall(block)

    sender = threading.Thread(target=send)
    sender.start()
    connected, _ = listener.accept()
    room, begun = memoryview(bytearray(size_bytes)), time.perf_counter()
    filled = 0
    while filled < size_bytes:
        filled += connected.recv_into(room[filled:])
    took = time.perf_counter() - begun
    sender.join()
    connected.close()
    listener.close()
    return took


def lost(
    hosts: Hosts,
    first: EmbeddedStore,
    second: EmbeddedStore,
    end: Callable[[], object],
    again: Callable[[], object],
) -> dict[str, object]:
    """The wait of a turn whose owner is gone, less that of a turn of a session that never was."""
    took, plain = [], []
    for _ in range(LOSSES // 4):
        names = [made(hosts, first, 1) for _ in range(4)]
        announced(first)
        end()
        for name in names:
            plain.append(_absent_ms(second, f"sessions/n{secrets.token_hex(6)}"))
            took.append(_absent_ms(second, name))
        again()
        # A host that did not answer is left alone for a while.
        time.sleep(5.5)
    usual = statistics.median(plain)
    return {"added wait": spread([one - usual for one in took], "ms")}


def _absent_ms(store: EmbeddedStore, name: str) -> float:
    begun = time.perf_counter()
    with suppress(SessionNotFound):
        store.client.sessions.get(name)
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bucket", default="")
    parser.add_argument("--large", action="store_true", help="also a session of 1 GiB")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    size_bytes = (1400 if asked.large else 256) * MIB
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-fleet-"))
    with ExitStack() as held:
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        hosts = Hosts(directory, asked.bucket, size_bytes, held)
        results["stay"] = stay(hosts)
        first, second = hosts.one(), hosts.one()
        results["move"] = move(hosts, first, second)
        results["rows"] = rows(hosts, first, second, 64 * MIB)
        if asked.large:
            results["rows"] = {
                **rows(hosts, first, second, 64 * MIB),
                **rows(hosts, first, second, 1024 * MIB),
            }
        results["prefix"] = prefix(hosts, first, second, 64 * MIB)
        results["shared"] = shared(hosts, first, hosts.fleet_options["--fleet-bucket"], 64 * MIB)
        results["killed"] = lost(hosts, first, second, first.kill, lambda: hosts.start(first))
        results["frozen"] = lost(
            hosts, first, second, lambda: first.send(signal.SIGSTOP), lambda: first.send(signal.SIGCONT)
        )
    if asked.json:
        sys.stdout.write(json.dumps(results) + "\n")
        return
    for part, figures in results.items():
        for what, value in figures.items():
            shown = str(value)
            if isinstance(value, dict):
                between = f"{value['p10']} to {value['p90']}, p99 {value['p99']}"
                shown = f"{value['median']} {value['unit']}  ({between})"
            print(f"{part:8} {what:45} {shown}")


if __name__ == "__main__":
    main()
