"""The recorder: what a cache hears, as parts of a recording.

Names become hashes here, and their key is forgotten.

Bounded: what waits for the reader is what `Listening` keeps and one part of it. One at a time.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby

from ctxcache.cache import Cache
from ctxcache.cache.state import Call, Heard, Listening
from ctxcache.errors import TooManyRequests
from ctxcache.format.layout import SegmentLayout
from ctxcache.service import convert
from ctxcache.v1 import recording_pb2

INTERVAL_S = 0.25
CALLS_PER_PART = 256
"""A millisecond of the event loop."""
KEY_BYTES = 32
HASHES = 1 << 14
"""Kept, of the sessions and tenants heard of last."""
_KINDS = {call: recording_pb2.RecordedKind.Value(f"RECORDED_KIND_{call.name}") for call in Call}


class Recorder:
    """One recording."""

    def __init__(self, begun_ns: int) -> None:
        """`begun_ns`: of the monotonic clock."""
        self._begun_ns = begun_ns
        # The key is forgotten with the recorder: hashes of two recordings cannot be compared.
        self._key = os.urandom(KEY_BYTES)
        self._hash = lru_cache(HASHES)(self._hashed)
        self._layouts: dict[tuple[bytes, int, int], int] = {}
        """Numbers of those that were told; no more than models and what of them is stored."""

    def part(self, heard: list[Heard]) -> recording_pb2.RecordResponse:
        """The calls, and the layouts that nobody was told of before."""
        layouts: list[recording_pb2.RecordedLayout] = []
        calls = [self._call(one, layouts) for one in heard]
        return recording_pb2.RecordResponse(layouts=layouts, calls=calls)

    def _call(self, heard: Heard, layouts: list[recording_pb2.RecordedLayout]) -> recording_pb2.RecordedCall:
        facts = dict(heard.facts)
        if "source" in facts:
            facts["source"] = self._hash(heard.tenant, str(facts["source"]))
        if heard.layout is not None:
            facts["layout"] = self._number(heard.fingerprint, heard.layout, layouts)
        return recording_pb2.RecordedCall(
            at_ns=heard.at_ns - self._begun_ns,
            kind=_KINDS[heard.call],
            session=self._hash(heard.tenant, heard.name),
            tenant=self._hash(heard.tenant, ""),
            session_tokens=heard.session_tokens,
            **facts,  # type: ignore[arg-type]  # fields of the message, by the callers of `Accesses`
        )

    def _number(
        self, fingerprint: bytes, layout: SegmentLayout, layouts: list[recording_pb2.RecordedLayout]
    ) -> int:
        # Comparing all of their streams would take longer than the call.
        key = fingerprint, layout.size_bytes, len(layout.specs)
        number = self._layouts.get(key)
        if number is None:
            number = self._layouts[key] = len(self._layouts)
            layouts.append(_layout(number, layout))
        return number

    def _hashed(self, tenant: str, name: str) -> int:
        # The tenant is part of the name: two tenants' sessions of one name are two.
        digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=8, key=self._key)
        return int.from_bytes(digest.digest(), "little")


async def recorded(
    cache: Cache, store: recording_pb2.RecordedStore, *, duration_ns: int, is_over: Callable[[], bool]
) -> AsyncGenerator[recording_pb2.RecordResponse]:
    """All parts of a recording, until its time or the server's `is_over`. Raises TooManyRequests."""
    accesses, clock = cache.state.journal, cache.state.clock
    if accesses.listening is not None:
        raise TooManyRequests(what="recordings", limit=1)
    begun_ns = clock.monotonic_ns()
    recorder, listening = Recorder(begun_ns), Listening()
    accesses.listening = listening
    try:
        yield recording_pb2.RecordResponse(store=store)
        elapsed_ns = 0
        while elapsed_ns < duration_ns and not is_over():
            await asyncio.sleep(INTERVAL_S)
            elapsed_ns = clock.monotonic_ns() - begun_ns
            heard, lost_count = listening.take()
            *parts, last = _parts(heard)
            for part in parts:
                yield recorder.part(part)
            answer = recorder.part(last)
            answer.lost_count = lost_count
            answer.elapsed.CopyFrom(convert.duration(elapsed_ns))
            yield answer
    finally:
        accesses.listening = None


def _parts(heard: list[Heard]) -> Iterator[list[Heard]]:
    """At least one."""
    for begin in range(0, max(len(heard), 1), CALLS_PER_PART):
        yield heard[begin : begin + CALLS_PER_PART]


def _layout(number: int, layout: SegmentLayout) -> recording_pb2.RecordedLayout:
    # The token ids come first, and are always there.
    sizes = [spec.row_bytes for spec in layout.specs[1:]]
    return recording_pb2.RecordedLayout(
        layout=number,
        token_bytes=layout.token_bytes,
        segment_bytes=layout.size_bytes,
        segment_tokens=layout.segment_tokens,
        streams=[
            recording_pb2.RecordedStreams(row_bytes=size_bytes, count=sum(1 for _ in same))
            for size_bytes, same in groupby(sizes)
        ],
    )
