"""The holds that protect rows.

A stream that lives, a deadline that has not passed, and an arena that is the server's.
"""

import os
import stat
import time
from functools import partial
from typing import cast

import pytest

from ctxcache.client.access import AccessStream, Hold
from ctxcache.client.arena import SlotLayout, _check_sums, _is_trusted
from ctxcache.errors import CorruptSegment, LeaseNotFound
from ctxcache.v1.arena_pb2 import ChunkLayout, Operation, RowRange, SegmentLocation
from ctxcache.v1.model_pb2 import STATE_KIND_TOKENS, StreamName

LATER_NS = 10**12


class Gone:
    """A stream whose server went without a word."""

    is_in_doubt = False

    def still_holds(self) -> bool:
        """Ask the system."""
        return False

    def send(self, operations: object) -> None:
        """Nobody is there."""


def test_a_lease_of_a_server_that_is_gone_protects_nothing() -> None:
    """The end of the server is not noticed yet: the check after a copy asks."""
    hold = Hold(
        stream=cast("AccessStream", Gone()),
        deadline_ns=time.monotonic_ns() + LATER_NS,
        release_operation=Operation(),
        ended=partial(LeaseNotFound, lease_id=7),
    )

    hold.check_known()
    with pytest.raises(LeaseNotFound):
        hold.check()


@pytest.mark.parametrize(
    ("owner", "mode", "is_trusted"),
    [(os.geteuid(), 0o600, True), (12345, 0o600, False), (12345, 0o640, False), (12345, 0o644, True)],
)
def test_another_users_file_is_no_arena(owner: int, mode: int, *, is_trusted: bool) -> None:
    """Unless it is meant for everyone: what somebody shares with us alone is not what a server makes."""
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, owner, 4096, 0, 0, 0))

    assert _is_trusted(status) == is_trusted


@pytest.mark.parametrize("checked_count", [9, 10])
def test_rows_without_a_checksum_are_refused(checked_count: int) -> None:
    """A segment's checksums are of all rows that are read of it, or of none."""
    layout = SlotLayout([ChunkLayout(stream=StreamName(layer=-1, kind=STATE_KIND_TOKENS), row_bytes=4)])
    rows = [RowRange(row_begin=0, row_end=10)]
    _check_sums(SegmentLocation(row_capacity=64, token_count=10, checksums=[1], rows=rows), layout, 4096)

    with pytest.raises(CorruptSegment):
        _check_sums(
            SegmentLocation(row_capacity=64, token_count=9, checksums=[1] * (checked_count - 8), rows=rows),
            layout,
            4096,
        )
