"""Blocks of a run over one data directory: whose bytes follow from their numbers, and which must be there.

Knows the client and no server. Blocks are few, and each takes the slot of a session's segment.
"""

import hashlib
import random
import threading
from dataclasses import dataclass, field

import numpy as np

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.format.layout import block_layout

COUNT = 12
SPACE = BlockSpace(model_fingerprint=bytes(32), layout_tag="crash")


@dataclass(slots=True)
class KeptBlocks:
    """What is known of blocks by number. Thread-safe where clients share it: each takes one at a time."""

    slot_bytes: int
    there: set[int] = field(default_factory=set)
    """Those that were put and not deleted, as far as anybody was told."""
    durable: set[int] = field(default_factory=set)
    """Those of which that was acknowledged."""
    _free: set[int] = field(default_factory=lambda: set(range(COUNT)))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def key(self, number: int) -> bytes:
        """Of a block."""
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
            self._free.discard(number)
            return number

    def give_back(self, number: int) -> None:
        """Let others have it."""
        with self._lock:
            self._free.add(number)

    def was_put(self, number: int, *, is_durable: bool) -> None:
        """A put was acknowledged."""
        self.there.add(number)
        if is_durable:
            self.durable.add(number)

    def is_deleted(self, number: int) -> None:
        """It may be gone from now on."""
        self.there.discard(number)
        self.durable.discard(number)

    def flushed(self) -> None:
        """The server has ended in order."""
        self.durable |= self.there

    def judge(self, client: Client, number: int, *, may_be_lost: bool) -> str | None:
        """Load a block; what is wrong with what came."""
        [loaded] = client.blocks.load(SPACE, [self.key(number)])
        if loaded is None:
            is_lost = number in self.there and not may_be_lost
            return f"block {number} is lost" if is_lost else None
        if b"".join(part.tobytes() for part in loaded) != self.data(number):
            return f"block {number} has other bytes than were put"
        return None

    def compare(self, client: Client, *, may_be_lost: bool) -> list[str]:
        """After a restart: what is wrong. What is there is expected from now on."""
        self._free = set(range(COUNT))
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
