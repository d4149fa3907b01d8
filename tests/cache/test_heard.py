"""Calls as a listener hears them: bounded, and what is lost is counted; a recording says where."""

import io
import json

from ctxcache.cache.state import Call, Heard, Listening
from ctxcache.client.messages import read_recording_part
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.recordings import Lines
from ctxcache.service.recorder import Recorder

LAYOUT = SegmentLayout(
    (
        TOKENS_SPEC,
        *(StreamSpec(Stream(layer, StateKind.KV), 64 + layer // 2, DType.INT8) for layer in range(3)),
    )
)


def heard(name: str, at_ns: int = 5_000_000) -> Heard:
    """A session that was opened."""
    return Heard(Call.OPEN, at_ns, "acme", name, 0, LAYOUT, b"f" * 32, {"ttl_ms": 60_000})


def test_who_does_not_listen_in_time_loses_the_last_and_is_told() -> None:
    """The kept calls are whole, and after they are taken there is room."""
    listening = Listening(limit=2)
    for name in ("a", "b", "c", "d"):
        listening.hear(heard(name))
    first, lost_count = listening.take()
    listening.hear(heard("e"))

    assert ([one.name for one in first], lost_count) == (["a", "b"], 2)
    assert ([one.name for one in listening.take()[0]], listening.take()) == (["e"], ([], 0))


def test_a_file_has_the_gap_at_its_place() -> None:
    """Between the calls before and after; the end counts both."""
    recorder, file = Recorder(begun_ns=4_000_000), io.StringIO()
    lines = Lines(file)
    for name, lost_count in (("a", 2), ("b", 0)):
        part = recorder.part([heard(name)])
        part.lost_count = lost_count
        part.elapsed.FromMilliseconds(1500)
        lines.write(read_recording_part(part))
    lines.end()
    layout, first, gap, second, end = map(json.loads, file.getvalue().splitlines())

    assert layout["streams"] == [[64, 2], [65, 1]]
    assert (layout["token_bytes"], layout["segment_bytes"]) == (LAYOUT.token_bytes, LAYOUT.size_bytes)
    assert gap == {"lost": 2, "at_ms": 1500}
    assert first | {"session": ""} == second | {"session": ""}
    assert first["session"] != second["session"]
    assert (first["at_ms"], first["layout"], first["ttl_ms"]) == (1, 0, 60_000)
    assert end == {"end": True, "calls": 2, "lost_calls": 2, "elapsed_ms": 1500}


def test_no_other_recording_has_the_same_hashes() -> None:
    """Each draws its key; within one a session is the same throughout."""
    one, other = Recorder(0), Recorder(0)
    first, again = (one.part([heard("a")]).calls[0] for _ in range(2))
    elsewhere = other.part([heard("a")]).calls[0]

    assert (first.session, first.tenant) == (again.session, again.tenant)
    assert first.session != elsewhere.session
    assert first.tenant != elsewhere.tenant
