"""Blocks of a run over one data directory: whose bytes follow from their numbers, and which must be there.

Knows the client and no server. Blocks are few, and each takes the slot of a session's segment.
"""

import hashlib
import random
import threading
from dataclasses import dataclass, field

import numpy as np

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import Durability, LookupState
from ctxcache.format.layout import block_layout

COUNT, CONTESTED = 12, 3
"""How many there are, and how many of them anybody puts, loads and deletes at any time."""
SPACE = BlockSpace(model_fingerprint=bytes(32), layout_tag="crash")


@dataclass(slots=True)
class KeptBlocks:
    """The known state of blocks, by number. Thread-safe where clients share it: each takes one at a time.

    A contested one is nobody's alone: what a put or a load says of it counts unless a deletion was under way.
    """

    slot_bytes: int
    there: set[int] = field(default_factory=set)
    """Those that were put and not deleted, as far as anybody was told."""
    durable: set[int] = field(default_factory=set)
    """Those of which that was acknowledged."""
    _free: set[int] = field(default_factory=lambda: set(range(COUNT)))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _deletions: list[int] = field(default_factory=lambda: [0] * COUNT)
    """Puts that began and puts that ended, summed by block: an odd sum is of one that is under way."""

    def key(self, number: int) -> bytes:
        """A block's key."""
        return hashlib.sha256(b"block %d" % number).digest()

    def data(self, number: int) -> bytes:
        """All bytes of a block."""
        return np.random.default_rng(number).bytes(self.slot_bytes - block_layout((1,)).header_bytes)

    def take(self, rng: random.Random) -> int | None:
        """A block that nobody else works on, until it is given back; None where there is none."""
        with self._lock:
            if not self._free:
                return None
            number = rng.choice(sorted(self._free))
            if number >= CONTESTED:
                self._free.discard(number)
            return number

    def give_back(self, number: int) -> None:
        """Let others have it."""
        with self._lock:
            self._free.add(number)

    def put(self, client: Client, number: int, durability: Durability) -> None:
        """Put a block, and note it once that is acknowledged: by whomever it was put, it is there then."""
        before = self._deletions[number]
        [found] = client.blocks.look_up(SPACE, [self.key(number)])
        count = client.blocks.put(SPACE, {self.key(number): self.data(number)}, durability=durability)
        with self._lock:
            # Otherwise another one writes it still, or a deletion may have come after the put.
            if (count or found.state is LookupState.HIT) and self._is_unchanged(number, before):
                self.there.add(number)
                if durability is Durability.DISK:
                    self.durable.add(number)

    def delete(self, client: Client, number: int) -> None:
        """Delete a block, which may be gone from now on."""
        with self._lock:
            if number < CONTESTED and self._deletions[number] % 2:
                return
            self._deletions[number] += 1
            self.there.discard(number)
            self.durable.discard(number)
        client.blocks.delete(SPACE, [self.key(number)])
        with self._lock:
            self._deletions[number] += 1

    def _is_unchanged(self, number: int, before: int) -> bool:
        return before % 2 == 0 and self._deletions[number] == before

    def flushed(self) -> None:
        """The server has ended in order."""
        self.durable |= self.there

    def judge(self, client: Client, number: int, *, may_be_lost: bool) -> str | None:
        """Load a block; what is wrong with what came."""
        before, was_there = self._deletions[number], number in self.there
        [loaded] = client.blocks.load(SPACE, [self.key(number)])
        if loaded is None:
            is_lost = was_there and self._is_unchanged(number, before) and not may_be_lost
            return f"block {number} is lost" if is_lost else None
        if b"".join(part.tobytes() for part in loaded) != self.data(number):
            return f"block {number} has other bytes than were put"
        return None

    def compare(self, client: Client, *, may_be_lost: bool) -> list[str]:
        """After a restart: what is wrong. Blocks that are there are expected from now on."""
        self._free, self._deletions = set(range(COUNT)), [0] * COUNT
        self.there = set(self.durable)
        keys = [self.key(number) for number in range(COUNT)]
        states = [found.state for found in client.blocks.look_up(SPACE, keys)]
        problems = [self.judge(client, number, may_be_lost=may_be_lost) for number in range(COUNT)]
        if LookupState.PENDING in states:
            problems.append("a block is being written right after a start")
        self.there = {number for number, state in enumerate(states) if state is LookupState.HIT}
        self.durable = set(self.there)
        return [problem for problem in problems if problem]

    def delete_all(self, client: Client) -> None:
        """At the end of a run."""
        client.blocks.delete(SPACE, [self.key(number) for number in range(COUNT)])
