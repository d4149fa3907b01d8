"""Opening a data directory with many segments after kill -9, until a session has been read and checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from lab.bench.contexts import check, model_of
from lab.bench.many_segments import SHAPE, Made, make, session_name
from lab.bench.row import Place, Row, Sides, at_most
from lab.bench.server import Server, serving

ARENA_BYTES = 64 << 20
EMPTY_SSD_BYTES = 8 << 20


@contextmanager
def _opening(place: Place) -> Iterator[Sides]:
    made = make(place.directory / "many", place.scale.segment_count)
    with serving(place.directory / "empty", arena_bytes=ARENA_BYTES, ssd_bytes=EMPTY_SSD_BYTES) as empty:
        base_bytes = _resident_bytes(empty)
    notes: dict[str, object] = {"segments": made.segment_count, "sessions": made.session_count}
    _open_once(place, made)

    def ours(_: int) -> float:
        taken, resident_bytes = _open_once(place, made)
        notes["memory per segment, B"] = round((resident_bytes - base_bytes) / made.segment_count)
        return taken

    yield Sides(ours, None, notes)


def _open_once(place: Place, made: Made) -> tuple[float, int]:
    """Seconds from starting the process to the first rows of a session, and the server's memory.

    Then kill -9.
    """
    begin_ns = perf_counter_ns()
    with (
        serving(place.directory / "many", arena_bytes=ARENA_BYTES, ssd_bytes=made.ssd_bytes) as server,
        ctxcache.connect(server.target("tcp"), access="remote") as client,
    ):
        _verify(client, made, made.session_count - 1)
        taken = (perf_counter_ns() - begin_ns) / 1e9
        resident_bytes = _resident_bytes(server)
        _verify(client, made, 0)
        if client.admin.stats().segment_count != made.segment_count:
            raise RuntimeError("segments are missing after opening")
        server.process.kill()
        server.process.wait()
    return taken, resident_bytes


def _verify(client: Client, made: Made, session: int) -> None:
    with client.sessions.open(session_name(session), CallerModel(model_of(SHAPE))).read() as rows:
        found = np.concatenate([piece.rows.reshape(-1) for piece in rows.chunks()])
    check(found, made.data(session), f"session {session} of many")


def _resident_bytes(server: Server) -> int:
    """Memory of its own: anonymous pages, without the arena's."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) * 1024


ROWS = (
    Row(
        "open-1m", "1 M segments: open after kill -9, in seconds", "-", at_most(10), _opening, is_moving=False
    ),
)
