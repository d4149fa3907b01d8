"""Prefixes that several sessions have in common, and a memory of what was given up. Pure.

A block's name stands for the block and for all blocks before it. Two sessions that begin with the same blocks
have a prefix in common; it is found when the second one asks for what the first one has, or had: names of
blocks that were given up are remembered, else a popular prefix that does not stay until its next request
would teach nothing.

    session A    b0 b1 b2 b3          given up: b3, b2 are remembered as A's
    session B    b0 b1 b2 b4          begins with b0 b1 b2: the prefix that ends in b2 was used twice
    session A    b0 b1 b2 b3 b5       finds its own b2, b3 again: no sign of a prefix
    session C    b0 b1 b2 b3 b5 b6    goes on where A ended: as good as a return of A

Memory: MOST_REMEMBERED blocks that were given up, a quarter as many ends of sessions and prefixes each,
REMEMBERED_BYTES a name: 63 MB where all are full. All of it may be lost. Worst case: more is given up between
two requests for a prefix than is remembered. Then it is new each time.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

MOST_REMEMBERED = 1 << 17
REMEMBERED_BYTES = 320
"""What a name of 32 bytes takes at most, with its entry: tests/core/test_prefixes.py measures it."""


@dataclass(slots=True)
class Prefix:
    """A prefix in common. `uid` is its name to a policy, `use_count` how many requests began with it."""

    uid: bytes
    use_count: int = 0


class Prefixes:
    """The prefixes in common, by the block that each ends in. Owned by whoever holds the blocks."""

    def __init__(self, most_remembered: int = MOST_REMEMBERED) -> None:
        self._most_blocks, self._most = most_remembered, most_remembered // 4
        self._by_end: OrderedDict[bytes, Prefix] = OrderedDict()
        self._ends: OrderedDict[bytes, bytes] = OrderedDict()
        """By the last block of a session, the session."""
        self._given_up: OrderedDict[bytes, bytes] = OrderedDict()
        """By block, what held it last; the one given up first comes first."""

    def used(
        self, session: bytes, asked: Sequence[bytes], own_count: int, found_count: int, held: Container[bytes]
    ) -> tuple[list[tuple[int, Prefix]], bytes | None]:
        """The prefixes that a request begins with, each with its number of blocks, the shortest first.

        The session held the first `own_count` of the blocks itself, `found_count` are held by somebody. With
        them, the session that ended where the request goes on, as the first to do so; None where that is no
        other session.
        """
        given_up, count = self._given_up, found_count
        while count < len(asked):
            block = asked[count]
            # What the session itself gave up is no sign of a common prefix.
            if block not in held and given_up.get(block, session) == session:
                break
            count += 1
        by_end = self._by_end
        found = [
            (number, by_end[block])
            for number, block in enumerate(asked[own_count:count], own_count + 1)
            if block in by_end
        ]
        before = None
        # Only the longest is new; a shorter one is used again where it is known.
        if count > own_count and (not found or found[-1][0] < count):
            end = asked[count - 1]
            prefix = by_end[end] = Prefix(b"prefix " + end)
            found.append((count, prefix))
            before = self._ends.get(end)
            if len(by_end) > self._most:
                by_end.popitem(last=False)
        for number, prefix in found:
            prefix.use_count += 1
            by_end.move_to_end(asked[number - 1])
        return found, None if before == session else before

    def ended(self, session: bytes, last_block: bytes) -> None:
        """A turn of the session is over, which ends in that block."""
        ends = self._ends
        ends[last_block] = session
        if len(ends) > self._most:
            ends.popitem(last=False)

    def given_up(self, holder: bytes, blocks: Iterable[bytes]) -> None:
        """Nobody holds these blocks any more; that session, or prefix, was the last."""
        names = self._given_up
        for block in blocks:
            names[block] = holder
            names.move_to_end(block)
        while len(names) > self._most_blocks:
            names.popitem(last=False)
