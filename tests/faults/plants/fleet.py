"""Bugs that histories of several stores must find."""

from collections.abc import Iterable
from typing import Any

from ctxcache.fleet.sources import PeerSource
from ctxcache.wire.framed_socket import Part
from tests.faults.planted import plant


@plant
def peer_sums_off(_: int) -> None:
    """Rows of another store are taken whatever their sums say."""
    receive_into = PeerSource.receive_into

    def trusting(self: PeerSource, places: Iterable[Any], parts: Iterable[Part]) -> bool:
        receive_into(self, places, parts)
        return True

    setattr(PeerSource, "receive_into", trusting)  # noqa: B010  # a patch, whatever mypy says
