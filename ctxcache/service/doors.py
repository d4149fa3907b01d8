"""Doors: whether the server takes work, as health says it and as rpcs meet it. Owned by the event loop.

Worst case: they are opened while the server ends, which nothing does any more.
"""

from ctxcache.service.admission import Admissions
from ctxcache.service.health import Health


class Doors:
    """Closed at first."""

    def __init__(self, admissions: Admissions, health: Health) -> None:
        self.admissions = admissions
        self._health = health
        self.is_over = False
        """Whether the server ends."""

    def open(self) -> None:
        """Take work."""
        if not self.is_over:
            for admission in self.admissions.of_clients:
                admission.resume()
            self._health.tell(is_serving=True)

    def close(self) -> None:
        """Take no more of clients; operators are answered."""
        self._health.tell(is_serving=False)
        for admission in self.admissions.of_clients:
            admission.drain()

    def close_for_good(self) -> None:
        """Take no more of anybody."""
        self.is_over = True
        self._health.tell(is_serving=False)
        self.admissions.drain()
