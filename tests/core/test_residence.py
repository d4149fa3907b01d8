"""Residence and kin: whoever shares segments finds the others, in whatever order they came."""

from itertools import permutations

import pytest

from ctxcache.core.ledger.residence import Kin, Residence
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.format.layout import SegmentLayout, Slot
from ctxcache.format.streams import TOKENS_SPEC

LAYOUT = SegmentLayout((TOKENS_SPEC,), 8)
LISTED = {b"a": (0, 1), b"b": (1, 2), b"c": (2, 3), b"d": (3, 4), b"e": (5,)}
"""A chain of four sessions, each of which shares with the next alone, and one of its own."""


@pytest.mark.parametrize("order", list(permutations(LISTED)), ids=lambda order: b"".join(order).decode())
def test_kin_is_found_in_any_order(order: tuple[bytes, ...]) -> None:
    """Records are read in no order of theirs: those that share come together, and count what they have."""
    segments = [
        Segment(
            segment_id=i, tenant="t", writer_uid=bytes(16), generation=1, begin=8 * i,
            model_fingerprint=bytes(32), layout=LAYOUT, use=Usage(NO_SHARES).of("t"),
        )
        for i in range(6)
    ]  # fmt: skip
    for i, segment in enumerate(segments):
        segment.recorded(Slot(0, i, 10 + i), 8, 0)
    residences = {uid: Residence(uid) for uid in order}
    for uid in order:
        for i in LISTED[uid]:
            segments[i].list_in(residences[uid])
            residences[uid].amounts([])
    segments[3].promoted(Slot(0, 0, 7))

    kin = {residences[uid].kin for uid in b"a b c d".split()}
    assert [set(found.uids) for found in kin if found] == [{b"a", b"b", b"c", b"d"}]
    assert residences[b"e"].kin is None
    for uid, listed in LISTED.items():
        own = [segments[i] for i in listed]
        in_dram = 3 in listed
        assert residences[uid].amounts(own) == (in_dram, 7 * in_dram, sum(10 + i for i in listed))
    homes = [segment.home for segment in segments]
    assert [isinstance(home, Kin) for home in homes] == [False, True, True, True, False, False]
