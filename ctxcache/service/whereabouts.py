"""Whereabouts: where a session goes on, in a fleet of hosts. A store that is alone has them all.

The services ask before they look a session up by its name. A session that another host has comes here then,
or stays there and is refused.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ctxcache.cache.state import Pace
from ctxcache.errors import FleetNotFound
from ctxcache.format.streams import Content, StreamRange


class Wanted(NamedTuple):
    """A prompt that is looked for by its tokens: see MatchPrefixRequest."""

    model_id: str
    layout: Sequence[StreamRange]
    asked: bytes | Sequence[bytes]
    salt: bytes
    contents: Sequence[Content]
    source: str
    """The host that a router names; empty for none."""
    engine_host: str = ""
    """The host of the engine that asks; empty for none."""


class Whereabouts(Protocol):
    """What the services ask about sessions' names."""

    def is_here(self, tenant: str, session_id: str) -> bool:
        """Whether a session, or the absence of one, is known here with nothing to wait for."""

    async def come(self, tenant: str, session_id: str) -> None:
        """Have a session come here that another host has. Whether there is one, the store says then.

        Raises SessionMoved while another host is writing it.
        """

    async def all_come(self, tenant: str, session_ids: Iterable[str]) -> None:
        """As `come`, for many; those that stay elsewhere are not here then, and nothing is raised."""

    async def created(self, tenant: str, session_id: str) -> None:
        """A session was created here. Raises SessionMoved where another host has its name."""

    async def ending(self, tenant: str, session_id: str) -> None:
        """A session is about to be deleted: it ends elsewhere first. Raises Unavailable."""

    def deleted(self, tenant: str, session_id: str) -> None:
        """A session was deleted here."""

    async def prefix_comes(self, tenant: str, wanted: Wanted, pace: Pace) -> None:
        """Have more of a prompt come that another host has, where that is sooner than to compute it.

        Raises ModelNotFound, InvalidArgument.
        """

    def check_shares(self) -> None:
        """Raise FleetNotFound in a store that has no bucket to share a session in."""

    async def share(self, tenant: str, session_id: str) -> None:
        """Have the bucket keep what a session is now. Raises Unavailable, SessionMoved, SessionNotFound."""


class _Alone:
    """No other host has anything."""

    def is_here(self, tenant: str, session_id: str) -> bool:  # noqa: ARG002  the protocol's
        """See Whereabouts."""
        return True

    async def come(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""

    async def all_come(self, tenant: str, session_ids: Iterable[str]) -> None:
        """See Whereabouts."""

    async def created(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""

    async def ending(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""

    def deleted(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""

    async def prefix_comes(self, tenant: str, wanted: Wanted, pace: Pace) -> None:
        """See Whereabouts."""

    def check_shares(self) -> None:
        """See Whereabouts."""
        raise FleetNotFound

    async def share(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""


ALONE: Whereabouts = _Alone()
