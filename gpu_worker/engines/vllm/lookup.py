"""Finds what the store has of a prompt, in threads: each rank's session, which is made where there is none.

    named, there      its tokens are read          ─┐
    not there         a session is made            ─┼─► Opened: what all ranks have of the prompt
    made just now     begins with what others have ─┘

An engine that does not save makes no session that others would find. A session that begins with what others
have stands in for theirs, for a minute. Worst case: `timeout_s` for each call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CacheError,
    CorruptSegment,
    ModelFingerprintMismatch,
    SessionAlreadyExists,
    SessionMoved,
    SessionNotFound,
)
from ctxcache.format.streams import Stream
from gpu_worker.engines.link import GONE
from gpu_worker.engines.names import part_of
from gpu_worker.engines.vllm.counts import Misses
from gpu_worker.engines.vllm.plan import Opened
from gpu_worker.engines.vllm.roles import Role
from gpu_worker.engines.vllm.settings import ConnectorSettings, streams_of

UNNAMED_TTL = timedelta(hours=1)
"""How long a session without a name is kept after its last access, where no setting says so."""
STAND_IN_TTL = timedelta(minutes=1)
"""How long a session is kept that an engine loads from and does not save to."""


class Asked(NamedTuple):
    """What is looked up for a request."""

    session_name: str
    """Empty where the request names none."""
    salt: bytes
    prompt: list[int]
    is_shared: bool
    """Whether a new session may begin with what other sessions have."""
    labels: Mapping[str, str]
    """Of a session that is made for it."""


class New(NamedTuple):
    """What a session is made with."""

    ttl: timedelta | None
    salt: bytes
    labels: Mapping[str, str]


class Lookup:
    """Looks sessions up for an engine's ranks. Thread-safe."""

    def __init__(self, settings: ConnectorSettings, role: Role, unit_tokens: int, misses: Misses) -> None:
        """`unit_tokens`: sessions are cut after a multiple of so many tokens."""
        self._saved, self._role, self._unit_tokens, self._misses = settings.saved, role, unit_tokens, misses
        self._ttl = None if settings.ttl_s is None else timedelta(seconds=settings.ttl_s)

    def find(
        self, client: Client, models: Sequence[CallerModel], asked: Asked, missed: Callable[[], None]
    ) -> Opened | None:
        """Each rank's session, and what all of them have; None where nothing is there and nothing is saved.

        Calls `missed` before it makes a session that will have nothing. Raises CacheError.
        """
        sessions: list[SessionInfo] = []
        tokens: list[list[int]] = []
        common = len(asked.prompt)
        for rank, model in enumerate(models):
            name, new = asked.session_name, New(self._ttl, asked.salt, asked.labels)
            if rank:
                # Every rank's part gets the first session's TTL. The store may have named that one.
                first = sessions[0]
                name = f"sessions/{part_of(first.name.removeprefix('sessions/'), rank)}"
                new = new._replace(ttl=first.ttl)
            session = self._existing(client, model, name, asked.salt)
            is_new = session is None
            if session is None:
                layout = streams_of(model, self._saved)
                is_found = asked.is_shared and (
                    client.prefixes.match(model, asked.prompt, salt=asked.salt, layout=layout).token_count > 0
                )
                if not is_found:
                    if not self._role.saves:
                        return None
                    missed()
                session, is_new = self._made(client, model, name, layout, new)
                if is_new and is_found:
                    session = self._adopted(client, session, model, asked.prompt)
            if is_new:
                ids = asked.prompt[: session.token_count]
            else:
                session, ids = self._read(client, model, session)
            sessions.append(session)
            tokens.append(ids)
            common = min(common, _common_count(ids, asked.prompt))
        common -= common % self._unit_tokens
        return Opened(tuple(sessions), common, tuple(tuple(ids[common:]) for ids in tokens))

    def _existing(self, client: Client, model: CallerModel, name: str, salt: bytes) -> SessionInfo | None:
        """The session of this name, where there is one, of this model and salt."""
        if not name:
            return None
        try:
            session = client.sessions.get(name)
            model.check(session)
        except SessionNotFound:
            return None
        except (ModelFingerprintMismatch, SessionMoved) as error:
            self._misses.tell(name, "not used", error)
            return None
        return session if session.salt == salt else None

    def _read(
        self, client: Client, model: CallerModel, session: SessionInfo
    ) -> tuple[SessionInfo, list[int]]:
        """The session as it is now, and its tokens: others may have changed it since it was looked up."""
        while session.token_count:
            try:
                return client.sessions.open(session, model).token_ids()
            except CorruptSegment as error:
                # The store has cut the session before what is damaged, and there may be more before that.
                self._misses.tell(session.name, "damaged", error)
                before, session = session.token_count, client.sessions.get(session.name)
                if session.token_count >= before:
                    raise
        return session, []

    def _made(
        self,
        client: Client,
        model: CallerModel,
        name: str,
        layout: list[Stream],
        new: "New",
    ) -> tuple[SessionInfo, bool]:
        """A session of this name, and whether it was made just now and not by another caller meanwhile.

        The store chooses the name where none is given, or where the session of that name has another model or
        salt, or is written at another host. That session stays as it is.
        """

        def create(ttl: timedelta | None, id_: str = "") -> SessionInfo:
            return client.sessions.create(
                model, id=id_, layout=layout, ttl=ttl, salt=new.salt, labels=new.labels
            ).info

        if not self._role.saves:
            return create(STAND_IN_TTL), True
        if name:
            with suppress(SessionAlreadyExists, SessionMoved):
                return create(new.ttl, name.removeprefix("sessions/")), True
            session = self._existing(client, model, name, new.salt)
            if session is not None:
                return session, False
        return create(new.ttl or UNNAMED_TTL), True

    def _adopted(
        self, client: Client, session: SessionInfo, model: CallerModel, prompt: list[int]
    ) -> SessionInfo:
        """The session with what others have of the prompt, where the store lets it begin with that."""
        try:
            return client.prefixes.adopt(session, model, prompt)
        except GONE:
            raise
        except CacheError as error:
            # What others have may be full, damaged or gone by now. The new session exists, and is saved.
            self._misses.tell(session.name, "not shared", error)
            return session


def _common_count(saved: list[int], prompt: list[int]) -> int:
    count = min(len(saved), len(prompt))
    differing = np.flatnonzero(np.array(saved[:count]) != np.array(prompt[:count]))
    return int(differing[0]) if len(differing) else count
