"""Budget: how many bytes may be pinned, by everyone, by one tenant and by one client. Pure bookkeeping, never waits.

What several pin is counted once for everyone, and once for each client: a hundred readers of one
prefix pin no more than one. No segment is two tenants'. Cost: two dictionary entries per segment and client that pin it.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

OWN_PER_FREE = 1
"""A tenant may pin at most so many times what it leaves free: so that readers and writers of one, together, leave some."""
K = TypeVar("K")


class Client(NamedTuple):
    """Who pins. `number` None is nobody in particular, whom no client's share binds."""

    tenant: str
    number: int | None = None


class Budget:
    """Pinned segments by id, with their sizes. Owned by the event loop."""

    def __init__(self, *, limit_bytes: int, client_limit_bytes: int, is_divided: bool = False) -> None:
        """`is_divided`: no tenant may pin so much that nothing is left for others."""
        self.limit_bytes = limit_bytes
        self.is_divided = is_divided
        self._tenant_bytes: Counter[str] = Counter()
        self.client_limit_bytes = min(client_limit_bytes, limit_bytes)
        self.used_bytes = 0
        self._pins: Counter[int] = Counter()
        self._client_pins: Counter[tuple[Client, int]] = Counter()
        self._client_bytes: Counter[Client] = Counter()

    def limit_of(self, client: Client) -> int:
        """The most bytes that the client could ever pin."""
        # Alone it may have so much that what is left free is in proportion.
        limit_bytes = self.limit_bytes
        if self.is_divided:
            limit_bytes = limit_bytes * OWN_PER_FREE // (OWN_PER_FREE + 1)
        return limit_bytes if client.number is None else min(limit_bytes, self.client_limit_bytes)

    def used_by(self, client: Client) -> int:
        """Bytes that the client pins; of nobody in particular, all that are pinned."""
        return self.used_bytes if client.number is None else self._client_bytes[client]

    def has_room(self, client: Client, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether these may be pinned now, by segment id. What is pinned already needs no room."""
        new_bytes = sum(size for segment_id, size in sizes_bytes.items() if segment_id not in self._pins)
        free_bytes = self.limit_bytes - self.used_bytes - new_bytes
        if free_bytes < 0:
            return False
        own_bytes = self._tenant_bytes[client.tenant] + new_bytes
        if self.is_divided and new_bytes and own_bytes > OWN_PER_FREE * free_bytes:
            return False
        if client.number is None:
            return True
        own_bytes = sum(size for i, size in sizes_bytes.items() if (client, i) not in self._client_pins)
        return self._client_bytes[client] + own_bytes <= self.client_limit_bytes

    def pin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Count these as pinned once more."""
        for segment_id, size_bytes in sizes_bytes.items():
            if segment_id not in self._pins:
                self._count(client.tenant, size_bytes)
            self._pins[segment_id] += 1
            if client.number is not None:
                self._client_bytes[client] += 0 if (client, segment_id) in self._client_pins else size_bytes
                self._client_pins[client, segment_id] += 1

    def unpin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin` of these."""
        for segment_id, size_bytes in sizes_bytes.items():
            if _count_down(self._pins, segment_id):
                self._count(client.tenant, -size_bytes)
            if client.number is not None and _count_down(self._client_pins, (client, segment_id)):
                self._client_bytes[client] -= size_bytes
        if not self._client_bytes[client]:
            del self._client_bytes[client]

    def _count(self, tenant: str, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._tenant_bytes[tenant] += size_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

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
