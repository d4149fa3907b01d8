"""One order explains what many clients of the same sessions are told."""

import sys

import pytest

from tests.faults.harness import Report, Unsupported
from tests.faults.history import HARNESS
from tests.faults.history_check import Op, check
from tests.faults.sizes import sized


def execute(given: list[str]) -> Report:
    """Run the harness, or skip so that nobody overlooks it."""
    try:
        return HARNESS.execute(given)
    except Unsupported as reason:
        sys.__stderr__.write(f"\nNOTICE: histories over power cuts are NOT tested here: {reason}\n")  # type: ignore[union-attr]
        pytest.skip(f"NOTICE: histories over power cuts are not tested here: {reason}")


@sized(short=["--acts", "8"], long=["--acts", "60"])
def test_one_order_explains_what_everyone_was_told(size: list[str]) -> None:
    """Kills and pauses of server and clients."""
    report = HARNESS.execute(size)

    assert report.findings == []
    assert report.figures["history_count"] == 3 * int(size[1])


@sized(short=["--acts", "4", "--power"], long=["--acts", "30", "--power"])
def test_one_order_explains_it_over_power_cuts(size: list[str]) -> None:
    """Metadata and two SSD directories on disks of their own, which lose different things."""
    report = execute(size)

    assert report.findings == []
    assert report.figures["cut_count"]


Fact = tuple[str, int, int, dict[str, object]]


def ops(*facts: Fact) -> list[Op]:
    """Operations by kind and times; one without a return is not known to have ended."""
    return [
        Op(kind, begin, end or 1 << 62, is_known=bool(end), **more)  # type: ignore[arg-type]
        for kind, begin, end, more in facts
    ]


FIVE: dict[str, object] = {"runs": ((1, 5),)}
CREATED: Fact = ("create", 0, 1, {"uid": "u"})
APPENDED: Fact = ("append", 2, 3, {**FIVE, "is_durable": True})
CRASHED: Fact = ("crash", 4, 5, {})
HISTORIES: dict[str, tuple[bool, list[Fact]]] = {
    "a read before its append": (False, [CREATED, ("read", 1, 2, FIVE), ("append", 3, 4, FIVE)]),
    "a read beside its append": (True, [CREATED, ("read", 2, 4, FIVE), ("append", 3, 5, FIVE)]),
    "seen and unseen": (False, [CREATED, APPENDED, ("read", 4, 5, FIVE), ("read", 6, 7, {})]),
    "a durable loss": (False, [CREATED, APPENDED, CRASHED, ("read", 6, 7, {})]),
    "a loss of memory": (True, [CREATED, ("append", 2, 3, FIVE), CRASHED, ("read", 6, 7, {})]),
    "half of a commit": (
        False,
        [CREATED, ("append", 2, 3, FIVE), CRASHED, ("read", 6, 7, {"runs": ((1, 3),)})],
    ),
    "no answer, then there": (
        True,
        [CREATED, ("append", 2, 0, FIVE), ("read", 4, 5, {}), ("read", 6, 7, FIVE)],
    ),
    "no answer, there and gone": (
        False,
        [CREATED, ("append", 2, 0, FIVE), ("read", 4, 5, FIVE), ("read", 6, 7, {})],
    ),
    "a truncation taken back": (
        False,
        [
            CREATED,
            APPENDED,
            ("keep_first", 4, 5, {"count": 2}),
            ("crash", 6, 7, {}),
            ("read", 8, 9, FIVE),
        ],
    ),
    "an unanswered one taken back": (
        True,
        [
            CREATED,
            APPENDED,
            ("keep_first", 4, 0, {"count": 2}),
            ("read", 5, 6, {"runs": ((1, 2),)}),
            ("crash", 7, 8, {}),
            ("read", 9, 10, FIVE),
        ],
    ),
    "deleted and back": (False, [CREATED, ("delete", 2, 3, {}), ("crash", 4, 5, {}), ("present", 6, 7, {})]),
    "a generation again": (
        False,
        [
            CREATED,
            APPENDED,
            ("append", 4, 5, {"runs": ((9, 1),), "begin": 5}),
            ("seen", 6, 7, {"generation": 7}),
            ("crash", 8, 9, {}),
            ("seen", 10, 11, {"count": 5, "generation": 7}),
        ],
    ),
    "gone too early": (
        False,
        [
            ("create", 0, 1, {"due": (10**9, 10**9)}),
            ("absent", 2, 3, {}),
        ],
    ),
    "appended to behind its end": (
        False,
        [
            ("create", 0, 1, {"ttl_ns": 10**9}),
            ("absent", 2 * 10**9, 3 * 10**9, {}),
            ("append", 4 * 10**9, 5 * 10**9, FIVE),
        ],
    ),
    "appended to in time": (
        True,
        [
            ("create", 0, 1, {"ttl_ns": 10**9}),
            ("append", 10**9 // 2, 10**9, FIVE),
            ("read", 2 * 10**9 - 1, 2 * 10**9, FIVE),
            ("absent", 4 * 10**9, 5 * 10**9, {}),
        ],
    ),
    "there too late": (
        False,
        [
            ("create", 0, 1, {"due": (10**9, 10**9)}),
            ("present", 2 * 10**9, 3 * 10**9, {}),
        ],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_the_checker_knows_what_may_be(name: str) -> None:
    """Small histories whose verdict is plain."""
    is_linearizable, facts = HISTORIES[name]

    assert check(ops(*facts)).is_linearizable == is_linearizable
