"""Bugs that the client harness must find."""

from collections.abc import AsyncIterator
from typing import Any

from ctxcache.cache import appends
from ctxcache.cache.reservations import Reservation
from ctxcache.client import grpc_access
from ctxcache.service.sessions import SessionService
from tests.faults.planted import plant


@plant
def append_outlives_stream(_: int) -> None:
    """A writer that stops half-way keeps the room, and the session's turn to write."""
    release = appends.Appends.release

    def forgetful(self: appends.Appends, reservation: Reservation, **how: bool) -> None:
        if reservation.committed == reservation.end:
            release(self, reservation, **how)

    setattr(appends.Appends, "release", forgetful)  # noqa: B010  # a patch, whatever mypy says


@plant
def rows_before_commit(_: int) -> None:
    """Each chunk is committed as it comes."""
    place = SessionService._place

    async def eager(self: SessionService, append: Any, chunk: Any) -> None:
        await place(self, append, chunk)
        end = min(append.received.values())
        await self._writing.commit(append.reservation, end, is_durable=False, keep_open=True)

    setattr(SessionService, "_place", eager)  # noqa: B010


@plant
def readers_unbounded(_: int) -> None:
    """All messages of a read are made before the first is sent."""
    messages = SessionService._messages

    async def greedy(self: SessionService, request: Any, tenant: str) -> AsyncIterator[Any]:
        made = [message async for message in messages(self, request, tenant)]
        for message in made:
            yield message

    setattr(SessionService, "_messages", greedy)  # noqa: B010


@plant
def lease_believed(_: int) -> None:
    """An answer proves for good that the server knows its client: what one that was frozen knows."""
    grpc_access.SURE_FOR_NS = 1 << 62
