"""The SSD path of a running server, as a client on its host sees it, beside the device.

    python -m ctxcache.bench.ssd_served --directory /var/tmp/ctxcache-bench

Starts a server of its own with an arena of the session's size: the device alone then fills, and is
filled from, the very memory that the server uses. Every function measures one thing once and returns
seconds. Worst case: a disk whose speed drifts within a round, which the spread shows.
"""

import argparse
import json
import mmap
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxcache.bench.device import MIB, Device, best_way
from ctxcache.bench.ssd import SESSION, SHAPES, Shape, summary
from ctxcache.client.client import Client
from ctxcache.errors import SessionNotFound
from ctxcache.format.layout import ALIGN_BYTES, SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import DURABILITY_DISK, Session

NAME = f"sessions/{SESSION}"
Rows = dict[Stream, npt.NDArray[np.uint8]]
Transfer = Callable[[], float]


@contextmanager
def serving(directory: Path, arena_bytes: int, ssd_bytes: int) -> Iterator[dict[str, object]]:
    """A server with tiers of these sizes; gives its line of readiness. What it wrote is removed at the end."""
    command = [
        sys.executable, "-m", "ctxcache.cli.main", "serve", "--output", "json", "--listen", "127.0.0.1:0",
        "--data-directory", str(directory), "--arena-size-bytes", str(arena_bytes),
        "--ssd-size-bytes", str(ssd_bytes), "--log-level", "error",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # ourselves
    try:
        yield json.loads(process.stdout.readline() if process.stdout else "")
    finally:
        process.terminate()
        process.wait()
        if process.stdout:
            process.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)


def make_rows(model: ModelSpec, token_count: int) -> Rows:
    """Random rows of every stream, in warm memory."""
    dice = np.random.default_rng(1)
    specs = model.resolve(tuple(spec.stream for spec in model.streams))
    return {spec.stream: dice.integers(0, 256, (token_count, spec.row_bytes), np.uint8) for spec in specs}


def new_session(client: Client, model: ModelSpec) -> Session:
    """An empty session, in the place of an earlier one."""
    with suppress(SessionNotFound):
        client.delete_session(NAME)
    streams = [spec.stream for spec in model.streams]
    return client.create_session(f"models/{model.model_id}", session_id=SESSION, layout=streams)


def save(client: Client, session: Session, rows: Rows) -> float:
    """Append everything, durable before the answer."""
    begin = time.perf_counter()
    client.append(session, rows, durability=DURABILITY_DISK)
    return time.perf_counter() - begin


def promote(client: Client, session: Session) -> float:
    """Lease everything; of a demoted session, until its rows are in the arena and verified."""
    begin = time.perf_counter()
    rows = client.read(session)
    taken = time.perf_counter() - begin
    rows.close()
    return taken


def compare(directory: Path, shape: Shape, session_bytes: int, *, round_count: int = 15) -> dict[str, object]:
    """Promotion beside O_DIRECT reads, durable save beside O_DIRECT writes with a sync, round by round."""
    model = shape.model()
    layout = SegmentLayout(model.resolve(tuple(spec.stream for spec in model.streams)))
    segment_count = session_bytes // layout.size_bytes
    size_bytes = segment_count * layout.size_bytes
    rows = make_rows(model, segment_count * layout.segment_tokens)
    with (
        serving(directory / "data", size_bytes + ALIGN_BYTES, 2 * size_bytes) as ready,
        Device(directory, size_bytes) as device,
        Client(str(ready["listen_addresses"][0])) as client,  # type: ignore[index]
        Path(ready["arena"]["path"]).open("r+b") as file,  # type: ignore[index]
    ):
        client.register_model(model)
        memory = memoryview(mmap.mmap(file.fileno(), size_bytes + ALIGN_BYTES))[ALIGN_BYTES:]
        session = new_session(client, model)
        save(client, session, rows)
        to_write = best_way(lambda way: device.write(memory, way))
        client.demote_session(NAME)
        to_read = best_way(lambda way: device.read(memory, way))
        times: dict[str, list[float]] = {"read": [], "promote": [], "write": [], "save": []}
        for _ in range(round_count):
            session = new_session(client, model)
            times["save"].append(save(client, session, rows))
            times["write"].append(device.write(memory, to_write))
            session = client.demote_session(NAME)
            times["read"].append(device.read(memory, to_read))
            times["promote"].append(promote(client, session))
    return {
        "session_bytes": size_bytes, "segment_bytes": layout.size_bytes,
        "read": {"way": str(to_read), **summary(times["read"], times["promote"], size_bytes)},
        "save": {"way": str(to_write), **summary(times["write"], times["save"], size_bytes)},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line of JSON per shape and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--mib", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    for name in options.shapes:
        for size in options.mib:
            found = compare(options.directory, SHAPES[name], size * MIB, round_count=options.rounds)
            sys.stdout.write(json.dumps({"shape": name, **found}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
