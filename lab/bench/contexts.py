"""Contexts in a server, and their bytes: every 8 bytes follow from owner and place.

Worst case: WrongBytes, or an error of the client's.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast, get_args

import numpy as np
import numpy.typing as npt

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.client import Verify
from ctxcache.client.rows import SessionRows
from ctxcache.client.types import SessionInfo
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from lab.bench.row import NoPeer, Place, Scale, WrongBytes, bench_model
from lab.bench.server import Server, serving
from lab.routes import Route, route_options

Bytes = npt.NDArray[np.uint8]
_WORD_BYTES = 8


def warm(size_bytes: int) -> Bytes:
    """Memory whose pages are all there."""
    return np.ones(size_bytes, np.uint8)


def content(owner: int, size_bytes: int) -> Bytes:
    """`size_bytes`, a multiple of 8, that belong to `owner`."""
    words = np.arange(size_bytes // _WORD_BYTES, dtype=np.uint64)
    with np.errstate(over="ignore"):
        # SplitMix64 (Steele, Lea, Flood 2014): neighbours share nothing.
        words += np.uint64((owner + 1) * 0x9E3779B97F4A7C15 % 2**64)
        words ^= words >> np.uint64(30)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(27)
        words *= np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
    return words.view(np.uint8)


def check(found: npt.NDArray[np.uint8], expected: Bytes, what: str) -> None:
    """Raise WrongBytes unless all bytes are the same."""
    found = found.reshape(-1)
    if found.nbytes != expected.nbytes or not np.array_equal(found, expected.reshape(-1)):
        raise WrongBytes(f"{what}: {_difference(found, expected.reshape(-1))}")


def _difference(found: Bytes, expected: Bytes) -> str:
    if found.nbytes != expected.nbytes:
        return f"{found.nbytes} B where {expected.nbytes} B were saved"
    return f"byte {int(np.flatnonzero(found != expected)[0])} is another"


MODEL = "models/bench"
POPULATED_S = 30.0
"""How long at most is waited for the arena's pages."""
_ROOM = 3
"""Contexts beside those that are kept for which an arena has room."""


def model_of(scale: Scale) -> ModelSpec:
    """A model with one stream of K/V per layer."""
    streams = tuple(
        StreamSpec(Stream(layer, StateKind.KV), scale.row_bytes, DType.FLOAT16)
        for layer in range(scale.layer_count)
    )
    return bench_model(f"{scale.layer_count} layers of {scale.row_bytes} B", scale.layer_count, streams)


def layout_of(scale: Scale) -> SegmentLayout:
    """How a segment of such a session lies in a slot."""
    model = model_of(scale)
    return SegmentLayout(model.resolve(spec.stream for spec in model.streams))


def slots_bytes(scale: Scale, context_count: int) -> int:
    """The bytes that so many contexts take in slots."""
    layout = layout_of(scale)
    return context_count * -(-scale.token_count // layout.segment_tokens) * layout.size_bytes


def arena_bytes_of(scale: Scale) -> int:
    """An arena with room for all contexts and a few more."""
    return slots_bytes(scale, scale.context_count + _ROOM)


@dataclass(frozen=True, slots=True)
class Contexts:
    """A client, and the contexts' bytes: `data[i]` is all of one, flat, `rows[i]` by stream.

    `out` is where a read goes, by stream; it is the same memory for all, and warm.
    """

    server: Server
    client: Client
    model: CallerModel
    data: Sequence[Bytes]
    rows: Sequence[Mapping[Stream, Bytes]]
    whole: Bytes
    out: Mapping[Stream, Bytes]
    sessions: Sequence[SessionInfo]

    def walk(self, step: Callable[[int], float]) -> float:
        """Call `step` for every context; the sum of what it returns."""
        return sum(step(index) for index in range(len(self.data)))

    def read(self, index: int) -> None:
        """Bring all rows of a context to the destination."""
        with self.client.sessions.open(self.sessions[index], self.model).read() as rows:
            copy_out(rows, self.out)

    def verify(self, index: int, what: str) -> None:
        """Check that the destination has context `index`. The one before was another's."""
        check(self.whole, self.data[index], what)

    def wait_populated(self) -> None:
        """Wait until the pages of the arena are there, which come in the background."""
        attachment = self.client.routes.attach()
        if attachment is not None:
            attachment.arena.wait_populated(POPULATED_S)

    def create(self, name: str) -> SessionInfo:
        """A new empty session."""
        return self.client.sessions.create(self.model, id=name, layout=self.out).info


def by_stream(scale: Scale, flat: Bytes) -> dict[Stream, Bytes]:
    """A flat context as rows per stream, copying nothing."""
    rows, begin = {}, 0
    for spec in layout_of(scale).specs:
        end = begin + scale.token_count * spec.row_bytes
        rows[spec.stream] = flat[begin:end].reshape(scale.token_count, spec.row_bytes)
        begin = end
    return rows


def has_access(name: str) -> bool:
    """Whether this version's client knows the access."""
    return name in get_args(Route)


def access(*names: str) -> Route:
    """The first of these that this version has. Raises NoPeer."""
    for name in names:
        if has_access(name):
            return cast("Route", name)  # just looked up
    raise NoPeer(f"this version has no access `{names[0]}`")


@contextmanager
def contexts(
    place: Place,
    way: Route,
    *,
    is_filled: bool = True,
    room_bytes: int = 0,
    options: Sequence[str] = (),
    verify: Verify = "always",
) -> Iterator[Contexts]:
    """A server with `scale.context_count` contexts in DRAM, when `is_filled`, and a client of that access.

    `room_bytes`: what the arena has room for beside a few contexts. `options` are the server's, and
    `verify` the client's.
    """
    scale = place.scale
    arena_bytes = arena_bytes_of(scale) + room_bytes
    with (
        serving(
            place.directory / "data", arena_bytes=arena_bytes, ssd_bytes=2 * arena_bytes, options=options
        ) as server,
        ctxcache.connect(server.target(place.transport), verify=verify, **route_options(way)) as client,
    ):
        model = client.models.register(model_of(scale))
        data = [content(owner, scale.context_bytes) for owner in range(scale.context_count)]
        rows = [by_stream(scale, flat) for flat in data]
        whole = warm(scale.context_bytes)
        sessions = []
        for index in range(scale.context_count if is_filled else 0):
            empty = client.sessions.create(model, id=f"context{index}", layout=rows[index])
            sessions.append(empty.append(rows[index]))
        yield Contexts(server, client, model, data, rows, whole, by_stream(scale, whole), sessions)


def copy_out(reading: SessionRows, out: Mapping[Stream, Bytes]) -> None:
    """Bring all rows to `out`."""
    for stream, target in out.items():
        reading.array(stream, out=target)


def seconds(action: Callable[[], object]) -> float:
    """The seconds that an action takes."""
    begin_ns = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - begin_ns) / 1e9
