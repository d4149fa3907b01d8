"""A session's arithmetic over segments that overlap, and what its commits tell of a turn."""

import pytest

from ctxcache.core.ledger.feed import Standing
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

LAYOUT = SegmentLayout((StreamSpec(Stream(0, StateKind.HIDDEN), 96, DType.FLOAT16),))


def segment(segment_id: int, begin: int, row_count: int) -> Segment:
    """So many rows from a position on."""
    made = Segment(
        segment_id=segment_id, tenant="a", writer_uid=bytes(16), generation=1, begin=begin,
        model_fingerprint=bytes(32), layout=LAYOUT, use=Usage(NO_SHARES).of("a"),
    )  # fmt: skip
    made.row_count = row_count
    return made


def test_a_position_is_its_last_writers() -> None:
    """Rows that an earlier segment holds behind the begin of a later one are nobody's."""
    first, second = segment(1, 0, 50), segment(2, 40, 20)
    session = Session(
        uid=bytes(16), tenant="a", session_id="s", model_id="m", model_fingerprint=bytes(32), layout=LAYOUT,
        expiration=Expiration(None), create_time_ns=0, access_time_ns=0, expire_time_ns=0,
        segments=[first, second], live=((0, 60),), log_end=60,
    )  # fmt: skip
    pieces = [(p.segment, p.row_begin, p.row_end, p.token_begin) for p in session.pieces(10, 60)]

    assert pieces == [(first, 10, 40, 10), (second, 0, 20, 40)]


@pytest.mark.parametrize(
    ("commits", "answer"),
    [
        ((300,), 0),
        ((300, 20, 1, 1), 2),
        ((512, 512, 300, 1, 1, 1), 3),
        ((512, 512, 1, 512), 512),
        ((1, 1, 1), 0),
        ((), 0),
    ],
)
def test_commits_tell_the_answer_from_the_input(commits: tuple[int, ...], answer: int) -> None:
    """Turn after turn: what is committed behind the input's rest is the answer, and the policy hears."""
    session = Session(
        uid=bytes(16), tenant="a", session_id="s", model_id="m", model_fingerprint=bytes(32), layout=LAYOUT,
        expiration=Expiration(None), create_time_ns=0, access_time_ns=0, expire_time_ns=0,
    )  # fmt: skip
    standing, token_bytes = Standing(session, b"s"), LAYOUT.size_bytes / LAYOUT.segment_tokens
    for _ in range(2):
        for count in commits:
            session.append_rows(session.log_end + count)
        facts = standing.rest()

        assert facts.answer_bytes == int(answer * token_bytes)
        assert facts.appended_bytes == int(sum(commits) * token_bytes)
