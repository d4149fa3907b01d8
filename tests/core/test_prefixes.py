"""Prefixes in common: what two sessions begin with, though it was given up between them."""

import hashlib
import tracemalloc

from ctxcache.core.placement.policy import Capacities, Facts, Level
from ctxcache.core.placement.prefixes import REMEMBERED_BYTES, Prefixes
from ctxcache.core.placement.value import ReturnValue

DOCUMENT = (b"d0", b"d1", b"d2")
ALL = frozenset(DOCUMENT)


def used(
    prefixes: Prefixes, session: bytes, asked: tuple[bytes, ...], found: int, held: frozenset[bytes] = ALL
) -> tuple[list[tuple[int, int]], bytes | None]:
    """The prefixes of a request: how long each is and how often it was used; who is continued."""
    found_ones, before = prefixes.used(session, asked, 0, found, held)
    return [(count, prefix.use_count) for count, prefix in found_ones], before


def test_what_a_second_session_finds_is_a_prefix_and_a_shorter_one_is_used_again() -> None:
    """Only the longest one is new."""
    prefixes = Prefixes()
    assert used(prefixes, b"A", (*DOCUMENT, b"a"), 0, frozenset()) == ([], None)
    assert used(prefixes, b"B", (*DOCUMENT, b"b"), 3) == ([(3, 1)], None)
    assert used(prefixes, b"C", (*DOCUMENT[:2], b"c"), 2) == ([(2, 1)], None)
    assert used(prefixes, b"D", (*DOCUMENT, b"c"), 3) == ([(2, 2), (3, 2)], None)


def test_what_was_given_up_is_remembered_of_others_and_not_of_oneself() -> None:
    """A document that did not stay until its second request is a prefix all the same."""
    prefixes = Prefixes()
    prefixes.given_up(b"A", reversed(DOCUMENT))

    assert used(prefixes, b"A", (*DOCUMENT, b"a"), 0, frozenset()) == ([], None)
    assert used(prefixes, b"B", (*DOCUMENT, b"b"), 0, frozenset()) == ([(3, 1)], None)
    assert used(prefixes, b"C", (*DOCUMENT, b"c"), 1, frozenset((b"d0", b"d2"))) == ([(3, 2)], None)


def test_going_on_where_another_session_ended_is_told_once() -> None:
    """The second one finds a prefix; a session that goes on by itself continues nobody."""
    prefixes = Prefixes()
    prefixes.ended(b"A", DOCUMENT[-1])

    assert used(prefixes, b"A", (*DOCUMENT, b"a"), 3)[1] is None
    prefixes = Prefixes()
    prefixes.ended(b"A", DOCUMENT[-1])
    assert used(prefixes, b"B", (*DOCUMENT, b"b"), 3)[1] == b"A"
    assert used(prefixes, b"C", (*DOCUMENT, b"c"), 3)[1] is None


def test_what_is_remembered_is_bounded_and_takes_what_is_said() -> None:
    """Of names of 32 bytes: the oldest are forgotten, and a name takes so many bytes at most."""
    most = 1 << 12
    prefixes = Prefixes(most)
    names = [hashlib.sha256(b"%d" % number).digest() for number in range(2 * most)]
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    for name in names:
        # As a store names them: anew, from what was asked for.
        prefixes.given_up(name[:20], [bytes(bytearray(name))])
        prefixes.ended(bytes(bytearray(name[:20])), bytes(bytearray(name)))
        prefixes.used(b"B", [bytes(bytearray(name))], 0, 1, ())
    grown_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()

    assert most < grown_bytes / 128
    assert grown_bytes / (1.5 * most) <= REMEMBERED_BYTES
    assert prefixes.used(b"B", [names[-1]], 0, 1, ())[0][0][1].use_count == 2
    assert prefixes.used(b"B", [names[0]], 0, 1, ())[0][0][1].use_count == 1, "forgotten, and new"


def test_of_two_prefixes_the_one_that_is_asked_for_more_often_stays() -> None:
    """Their last uses are equally long ago: how long they were away on average tells them apart."""
    policy = ReturnValue(Capacities(100, 300))
    for second in range(0, 4001, 10):
        for uid, every_s in ((b"often", 20), (b"seldom", 400)):
            if second % every_s == 0:
                policy.arrived(uid, float(second))
                policy.idle(uid, Facts(100, 6, 0, 1, is_prefix=True), float(second))
                policy.placed(uid, Level.BELOW)
    policy.passed(4010.0)
    often, seldom = policy.rank(b"often") or (), policy.rank(b"seldom") or ()

    assert often > seldom


def test_a_session_that_another_goes_on_from_counts_as_returned_once() -> None:
    """Its class is worth more; a return of its own after that counts no second time."""

    def learned(*, is_continued: bool, returns: bool = False) -> float:
        policy = ReturnValue(Capacities(100, 300))
        for number in range(300):
            uid, at_s = b"%d" % number, 100.0 * number
            policy.arrived(uid, at_s)
            policy.idle(uid, Facts(100, 1, 100, 1), at_s)
            policy.passed(at_s + 15)
            if is_continued:
                policy.continued(uid)
            if returns:
                policy.arrived(uid, at_s + 15)
        policy.arrived(b"new", 30_000.0)
        policy.idle(b"new", Facts(100, 1, 100, 1), 30_000.0)
        policy.placed(b"new", Level.BELOW)
        return (policy.rank(b"new") or (0.0,))[0]

    assert learned(is_continued=True) > 2 * learned(is_continued=False)
    assert learned(is_continued=True, returns=True) == learned(is_continued=False, returns=True)
