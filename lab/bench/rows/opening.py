"""Opening a data directory with many segments after kill -9, until a session has been read and checked."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from lab.bench.contexts import check, model_of
from lab.bench.many_segments import SESSION_SEGMENTS, Made, make, session_name
from lab.bench.row import Place, Row, Sides, at_most
from lab.bench.server import Server, serving

ARENA_BYTES = 64 << 20
EMPTY_SSD_BYTES = 8 << 20


def _opening(share: float, session_segments: int) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: `share` of a full run's segments, so many in each session."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        yield from _opened(place, int(share * place.scale.segment_count), session_segments)

    return setup


def _opened(place: Place, segment_count: int, session_segments: int) -> Iterator[Sides]:
    made = make(place.directory / "many", segment_count, session_segments=session_segments)
    with serving(place.directory / "empty", arena_bytes=ARENA_BYTES, ssd_bytes=EMPTY_SSD_BYTES) as empty:
        base_bytes = _resident_bytes(empty)
    notes: dict[str, object] = {"segments": made.segment_count, "sessions": made.session_count}
    _open_once(place, made)

    def ours(_: int) -> float:
        taken, resident_bytes = _open_once(place, made)
        notes["memory per segment, B"] = round((resident_bytes - base_bytes) / made.segment_count)
        notes["memory per session, B"] = round((resident_bytes - base_bytes) / made.session_count)
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
    with client.sessions.open(session_name(session), CallerModel(model_of(made.shape))).read() as rows:
        found = np.concatenate([piece.rows.reshape(-1) for piece in rows.chunks()])
    check(found, made.data(session), f"session {session} of many")


def _resident_bytes(server: Server) -> int:
    """Memory of its own: anonymous pages, without the arena's."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) * 1024


ROWS = (
    Row(
        "open-1m",
        "1 M segments: open after kill -9, in seconds",
        "-",
        at_most(10),
        _opening(1, SESSION_SEGMENTS),
        is_moving=False,
    ),
    *(
        Row(
            f"open-sessions-{name}",
            f"{name} sessions of one segment: open after kill -9, in seconds",
            "-",
            at_most(10 * share),
            _opening(share, 1),
            is_moving=False,
        )
        for name, share in (("10k", 0.01), ("100k", 0.1), ("1m", 1))
    ),
)
