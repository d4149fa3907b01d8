"""Ages: sessions by since when something waits. Every operation takes amortised logarithmic time."""

from heapq import heapify, heappop, heappush

from ctxcache.core.eviction import SLACK


class Ages:
    """Some sessions, the one that waits for longest first. Owned by the event loop."""

    def __init__(self) -> None:
        self._since_ns: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._since_ns

    def put(self, uid: bytes, since_ns: int) -> None:
        """Add the session, or let it wait since another time."""
        if self._since_ns.get(uid) == since_ns:
            return
        self._since_ns[uid] = since_ns
        heappush(self._heap, (since_ns, uid))
        if len(self._heap) > 2 * len(self._since_ns) + SLACK:
            self._heap = [(since_ns, uid) for uid, since_ns in self._since_ns.items()]
            heapify(self._heap)

    def discard(self, uid: bytes) -> None:
        """It waits no more."""
        self._since_ns.pop(uid, None)

    def take(self, until_ns: int) -> bytes | None:
        """The one that waits for longest, if since `until_ns` or before; it is none of them any more."""
        while self._heap and self._heap[0][0] <= until_ns:
            since_ns, uid = heappop(self._heap)
            if self._since_ns.get(uid) == since_ns:
                del self._since_ns[uid]
                return uid
        return None
