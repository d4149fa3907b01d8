"""Ranked: policies that say of each session by itself where it stands, whoever else there is.

The running store places by these: it asks for the rank of whoever comes up, and hears of those that fall.
"""

from collections.abc import Callable

from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Policy

Fallen = Callable[[bytes], None]


class Ranked(Policy):
    """A policy whose `evict` names the lowest rank of those that are accepted."""

    def __init__(self) -> None:
        self._fallen: Fallen = lambda _: None

    def rank(self, uid: bytes) -> Key | None:
        """Where the session stands now: the lowest leaves first. None for one that was never idle, or left."""
        raise NotImplementedError

    def gives_way(self, uid: bytes, comer: bytes) -> bool:
        """See Policy: it does if it is worth less."""
        rank, comers_rank = self.rank(uid), self.rank(comer)
        return rank is None or comers_rank is None or rank < comers_rank

    def watch(self, fallen: Fallen) -> None:
        """Let `fallen` hear of every session whose rank may have fallen. A rise needs no word."""
        self._fallen = fallen
