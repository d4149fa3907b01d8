"""Budget: how many bytes may be pinned, by everyone and by one client. Pure bookkeeping, never waits.

What several pin is counted once for everyone, and once for each client: a hundred readers of one
prefix pin no more than one. Cost: two dictionary entries per segment and client that pin it.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeVar

K = TypeVar("K")
Client = int | None
"""Who pins; None is nobody in particular, whom no client's share binds."""


class Budget:
    """Pinned segments by id, with their sizes. Owned by the event loop."""

    def __init__(self, *, limit_bytes: int, client_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.client_limit_bytes = min(client_limit_bytes, limit_bytes)
        self.used_bytes = 0
        self._pins: Counter[int] = Counter()
        self._client_pins: Counter[tuple[int, int]] = Counter()
        self._client_bytes: Counter[int] = Counter()

    def limit_of(self, client: Client) -> int:
        """The most bytes that the client could ever pin."""
        return self.limit_bytes if client is None else self.client_limit_bytes

    def used_by(self, client: Client) -> int:
        """Bytes that the client pins; of nobody in particular, all that are pinned."""
        return self.used_bytes if client is None else self._client_bytes[client]

    def has_room(self, client: Client, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether these may be pinned now, by segment id. What is pinned already needs no room."""
        new_bytes = sum(size for segment_id, size in sizes_bytes.items() if segment_id not in self._pins)
        if self.used_bytes + new_bytes > self.limit_bytes:
            return False
        if client is None:
            return True
        own_bytes = sum(size for i, size in sizes_bytes.items() if (client, i) not in self._client_pins)
        return self._client_bytes[client] + own_bytes <= self.client_limit_bytes

    def pin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Count these as pinned once more."""
        for segment_id, size_bytes in sizes_bytes.items():
            self.used_bytes += 0 if segment_id in self._pins else size_bytes
            self._pins[segment_id] += 1
            if client is not None:
                self._client_bytes[client] += 0 if (client, segment_id) in self._client_pins else size_bytes
                self._client_pins[client, segment_id] += 1

    def unpin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin` of these."""
        for segment_id, size_bytes in sizes_bytes.items():
            self.used_bytes -= size_bytes if _count_down(self._pins, segment_id) else 0
            if client is not None and _count_down(self._client_pins, (client, segment_id)):
                self._client_bytes[client] -= size_bytes
        if client is not None and not self._client_bytes[client]:
            del self._client_bytes[client]

    def pinned(self) -> Collection[int]:
        """Ids of what is pinned."""
        return self._pins.keys()


def _count_down(counts: Counter[K], key: K) -> bool:
    """Whether that was the last one."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
