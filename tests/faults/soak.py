"""Soak: hundreds of thousands of operations, and the server is as it was before them.

Clients come and go, some in order and some in the middle of a read, with leases or room for rows
in hand. Between rounds everything is deleted; what is then left of memory, descriptors, threads,
files, space in the arena and on SSD must not grow from round to round. Worst case: a leak smaller
than what the allocator keeps for itself, which only the long run shows.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, seconds
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    SessionAlreadyExists,
    SessionNotFound,
    TooManyRequests,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from lab.routes import Route, route_options
from tests.faults.foresight import Foresight
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import command
from tests.faults.rows import first_difference, rows_of
from tests.model_specs import small_model
from tests.server_process import ServerProcess
from tests.stored_model import stored_model

STORED = (TOKENS_SPEC, *(StreamSpec(Stream(i, StateKind.KV), 1024, DType.FLOAT16) for i in range(3)))
WAYS: tuple[Route, ...] = ("local", "remote", "grpc", "local-grpc")
SESSIONS_EACH, MOST_TOKENS, CLIENT_LIFE = 6, 1500, 60
WARM_ROUNDS_SHARE = 0.4
RSS_GROWTH_LIMIT_BYTES, COUNT_GROWTH_LIMIT = 12 << 20, 12
METADATA_FILES_LIMIT = 80
# Refusals that a client that shares an arena may hear.
ALLOWED = (CapacityExceeded, TooManyRequests)


def model(number: int) -> ModelSpec:
    """One of a few models."""
    return small_model(
        *STORED[1:],
        model_id=f"soak-{number}",
        architecture="Soak",
        revision=str(number),
        layer_count=3,
        hidden_size=64,
        head_size=64,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's room, leases, descriptors and threads at rest."""

    rss_bytes: int
    descriptor_count: int
    thread_count: int
    file_count: int
    used_bytes: tuple[int, ...]
    left_over: tuple[int, ...]
    """Sessions, segments, leases, reservations."""


class Churn:
    """One thread: sessions of its own, and clients that live for a few operations each."""

    def __init__(self, server: ServerProcess, owner: int, seed: int, report: Report) -> None:
        self._server, self._owner, self._report = server, owner, report
        self._draw = random.Random(seed)
        self._is_gone = False
        self._foresight: Foresight
        self._steps: list[Callable[[Client, str], object]] = [
            self._append,
            self._append,
            self._append,
            self._read,
            self._read,
            self._read,
            self._half_read,
            self._give_up_writing,
            self._truncate,
            self._fork,
            self._delete,
            self._touch,
            self._flush,
            self._look,
            self._foretell,
            self._foretell,
        ]

    def run(self, operation_count: int) -> int:
        """Do so many operations; returns how many were refused."""
        refused = done = 0
        while done < operation_count:
            self._is_gone, life = False, 0
            with ctxcache.connect(
                self._server.unix_target, **route_options(self._draw.choice(WAYS))
            ) as client:
                self._foresight = Foresight(client, f"soak-{self._owner}", self._draw)
                while done < operation_count and life < CLIENT_LIFE and not self._is_gone:
                    refused += self._one(client)
                    done, life = done + 1, life + 1
        return refused

    def _one(self, client: Client) -> int:
        name = f"sessions/soak-{self._owner}-{self._draw.randrange(SESSIONS_EACH)}"
        try:
            self._draw.choice(self._steps)(client, name)
        except ALLOWED:
            return 1
        except SessionNotFound:
            return self._create(client, name)
        except CacheError as error:
            self._report.find(f"{type(error).__name__}: {error}")
        return 0

    def _create(self, client: Client, name: str) -> int:
        """Create a session that was deleted or has expired; returns 1 where that is refused."""
        try:
            self._create_of_a_model(client, name, self._draw.randrange(3))
        except ALLOWED:
            return 1
        except CacheError as error:
            self._report.find(f"{name} cannot be created: {type(error).__name__}: {error}")
        return 0

    def _create_of_a_model(self, client: Client, name: str, number: int) -> None:
        client.models.register(model(number))
        client.sessions.create(
            CallerModel(model(number)),
            id=name.removeprefix("sessions/"),
            layout=[s.stream for s in STORED[1:]],
            ttl=seconds(self._draw.choice((5, 3600))),
        )

    def _append(self, client: Client, name: str) -> None:
        session = client.sessions.get(name)
        if session.token_count > MOST_TOKENS:
            client.sessions.open(name).keep_first(0)
            return
        count = self._draw.choice((1, 5, 64, 200))
        begin = session.token_count
        rows = {s.stream: rows_of(self._owner, s.stream, begin, begin + count, s.row_bytes) for s in STORED}
        is_durable = self._draw.random() < 0.1
        client.sessions.open(session, stored_model(client, name)).append(
            rows,
            durability=Durability.DISK if is_durable else Durability.MEMORY,
        )

    def _read(self, client: Client, name: str) -> None:
        with client.sessions.open(name, stored_model(client, name)).read() as rows:
            for spec in STORED:
                at = 0
                for piece in rows.pieces(spec.stream):
                    found = np.asarray(piece).view(np.uint8).reshape(len(piece), -1)
                    if first_difference(found, self._owner, spec.stream, at) is not None:
                        self._report.find(f"{name} {spec.stream}: rows from {at} on are not its own")
                    at += len(piece)

    def _half_read(self, client: Client, name: str) -> None:
        """Take the first piece, and let the client be closed with the rest in hand."""
        next(
            iter(client.sessions.open(name, stored_model(client, name)).read().pieces(STORED[1].stream)), None
        )
        self._go(client)

    def _go(self, client: Client) -> None:
        """End with all that is in hand."""
        client.close()
        self._is_gone = True

    def _give_up_writing(self, client: Client, name: str) -> None:
        writer = client.sessions.open(name, stored_model(client, name)).writer(self._draw.choice((1, 100)))
        spec = STORED[1]
        writer.write(spec.stream, 0, rows_of(self._owner, spec.stream, 0, 1, spec.row_bytes))
        if self._draw.random() < 0.2:
            self._go(client)
            return
        with writer:
            return

    def _truncate(self, client: Client, name: str) -> None:
        client.sessions.open(name).keep_first(client.sessions.get(name).token_count // 2)

    def _fork(self, client: Client, name: str) -> None:
        fork = f"{name.removeprefix('sessions/')}-fork"
        try:
            client.sessions.open(name).fork(id=fork)
        except SessionAlreadyExists:
            client.sessions.open(f"sessions/{fork}").delete()

    def _delete(self, client: Client, name: str) -> None:
        client.sessions.open(name).delete()

    def _touch(self, client: Client, name: str) -> None:
        client.sessions.open(name).update(ttl=seconds(self._draw.choice((5, 3600))))

    def _flush(self, client: Client, name: str) -> None:
        if self._draw.random() < 0.3:
            client.admin.demote_session(name)
        else:
            client.sessions.open(name).flush()

    def _foretell(self, _: Client, name: str) -> None:
        self._foresight.tell(name)

    def _look(self, client: Client, name: str) -> None:
        client.sessions.lookup([(name, model(0).fingerprint())])
        list(client.sessions.list(page_size=50))
        client.admin.stats()


# -- the run ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    plants = [f"grace_s:{options.grace_s}", *([options.control] if options.control else [])]
    with tempfile.TemporaryDirectory(prefix="ctxcache-soak-") as folder:
        server = ServerProcess(
            Path(folder) / "data",
            "--arena-size-bytes",
            str(32 << 20),
            "--ssd-size-bytes",
            str(64 << 20),
            program=command(plants),
        )
        with server:
            samples = [_round(options, report, server, number) for number in range(options.rounds)]
            _judge(report, samples, options)


def _round(options: argparse.Namespace, report: Report, server: ServerProcess, number: int) -> Sample:
    each = max(1, options.operations // options.rounds // options.threads)
    churns = [
        Churn(server, owner, options.seed * 1000 + number * options.threads + owner, report)
        for owner in range(options.threads)
    ]
    with ThreadPoolExecutor(options.threads) as pool:
        refused = sum(pool.map(Churn.run, churns, [each] * len(churns)))
    report.count("operation_count", each * options.threads)
    report.count("not_done_count", refused)
    sample = settled(server, options.grace_s + options.settle_s)
    progress(number + 1, options.rounds, "rounds")
    return sample


def settled(server: ServerProcess, patience_s: float) -> Sample:
    """Delete everything and wait until what is left is let go; what there is then."""
    deadline_s = time.monotonic() + patience_s
    with ctxcache.connect(server.target, access="remote") as client:
        while True:
            for session in list(client.sessions.list()):
                _delete(client, session.name)
            sample = _look_at(server, client)
            if not any((*sample.used_bytes, *sample.left_over)) or time.monotonic() > deadline_s:
                return sample
            time.sleep(0.5)


def _delete(client: Client, name: str) -> None:
    try:
        client.sessions.open(name).delete()
    except CacheError:
        return  # expired meanwhile, or somebody's writer is not given up yet: looked at again


def _look_at(server: ServerProcess, client: Client) -> Sample:
    stats = client.admin.stats()
    process = Path(f"/proc/{server.pid}")
    rss_kib = next(
        int(line.split()[1])
        for line in (process / "status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    return Sample(
        rss_kib << 10,
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        sum(1 for _ in server.data_directory.rglob("*")),
        tuple(tier.used_bytes for tier in stats.tiers),
        (stats.session_count, stats.segment_count, stats.lease_count, stats.reservation_count),
    )


def _judge(report: Report, samples: Sequence[Sample], options: argparse.Namespace) -> None:
    warm = samples[int(len(samples) * WARM_ROUNDS_SHARE) :]
    first, last = warm[0], warm[-1]
    report.figures["rss_bytes_by_round"] = [sample.rss_bytes for sample in samples]
    report.figures["descriptors_by_round"] = [sample.descriptor_count for sample in samples]
    report.figures["threads_by_round"] = [sample.thread_count for sample in samples]
    operations = options.operations * (len(warm) - 1) / len(samples)
    slope = np.polyfit(range(len(warm)), [sample.rss_bytes for sample in warm], 1)[0] * (len(warm) - 1)
    report.figures["rss_growth_bytes_per_operation"] = round(float(slope) / operations, 1)
    if slope > RSS_GROWTH_LIMIT_BYTES:
        report.find(f"memory grew by {slope:.0f} B in {operations:.0f} operations after the warm-up")
    for what in ("descriptor_count", "thread_count"):
        if getattr(last, what) > getattr(first, what) + COUNT_GROWTH_LIMIT:
            report.find(f"{what} grew from {getattr(first, what)} to {getattr(last, what)}")
    if last.file_count > METADATA_FILES_LIMIT:
        report.find(f"{last.file_count} files in the data directory")
    for number, sample in enumerate(samples):
        if any((*sample.used_bytes, *sample.left_over)):
            report.find(f"round {number}: left are {sample.used_bytes} B and {sample.left_over}")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operations", type=int, default=8000, help="the long run takes 200000")
    parser.add_argument(
        "--rounds", type=int, default=5, help="with a look at what is left after each; long run 20"
    )
    parser.add_argument("--threads", type=int, default=4, help="clients at a time")
    parser.add_argument(
        "--grace-s", type=int, default=1, help="how long slots of a lost writer are kept; as shipped: 60"
    )
    parser.add_argument(
        "--settle-s", type=float, default=30.0, help="how long all may take to be let go, besides"
    )


HARNESS = Harness(
    "soak",
    "Does everything many times over, and looks at what is left.",
    run,
    {
        "lease_kept_on_cancel": "a read that is given up keeps its lease",
        "reads_remembered": "a dictionary that grows with every read",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
