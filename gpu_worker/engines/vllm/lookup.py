"""Finds what the store has of a prompt, in threads: each rank's session, which is made where there is none.

    named, there      its tokens are read               ─┐
    parts early       goes on in its former rendering    ├─► Opened: what all ranks have of the prompt
    not there         a session is made                  │
    made just now     begins with what others have      ─┘

    handed over          the session of the engine that computed it, as far as its tokens are the prompt's
    still being saved    Coming: ask again, while the caller may wait

An engine that does not save makes no session that others would find. A session that begins with what others
have stands in for theirs, for a minute. Worst case: `timeout_s` for each call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np
from vllm.utils.network_utils import get_ip

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CacheError,
    CorruptSegment,
    InvalidArgument,
    ModelFingerprintMismatch,
    SessionAlreadyExists,
    SessionMoved,
    SessionNotFound,
)
from ctxcache.format.streams import Stream
from gpu_worker.engines.link import GONE
from gpu_worker.engines.names import part_of
from gpu_worker.engines.renderings import Renderings
from gpu_worker.engines.vllm.counts import Misses
from gpu_worker.engines.vllm.handover import HandOver
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
    handed: HandOver | None = None
    """Where another engine put the prompt's rows."""
    source: str = ""
    """The host that a router names for more of the prompt; empty for none."""


class Coming(NamedTuple):
    """The answer while another engine still saves what is asked for."""

    token_count: int
    """Tokens of the prompt that are there, in the rank that has the fewest."""
    is_being_appended: bool


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
        self._renderings = settings.renderings
        self.engine_host = get_ip()
        """As routers call the engine."""
        self._ttl = None if settings.ttl_s is None else timedelta(seconds=settings.ttl_s)

    def find(
        self,
        client: Client,
        models: Sequence[CallerModel],
        asked: Asked,
        missed: Callable[[], None],
        *,
        may_wait: bool = False,
    ) -> Opened | Coming | None:
        """Each rank's session, and what all of them have; None where nothing is there and nothing is saved.

        `may_wait`: answer Coming where more is still being saved. Calls `missed` before it makes a session
        that will have nothing. Raises CacheError.
        """
        # Who restores nothing has nothing to wait for.
        may_wait &= self._role.loads
        handed = self._find_handed(client, models, asked, may_wait=may_wait)
        return handed or self._find(client, models, asked, missed, may_wait=may_wait)

    def _find(
        self,
        client: Client,
        models: Sequence[CallerModel],
        asked: Asked,
        missed: Callable[[], None],
        *,
        may_wait: bool,
    ) -> Opened | Coming | None:
        sessions: list[SessionInfo] = []
        tokens: list[list[int]] = []
        common = len(asked.prompt)
        is_being_appended = False
        for rank, model in enumerate(models):
            name, new = asked.session_name, New(self._ttl, asked.salt, asked.labels)
            if rank:
                # Every rank's part gets the first session's TTL. The store may have named that one.
                first = sessions[0]
                name = f"sessions/{part_of(first.name.removeprefix('sessions/'), rank)}"
                new = new._replace(ttl=first.ttl)
            session, is_new = self._existing(client, model, name, asked.salt), False
            if session is None:
                made = self._new(client, model, name, asked, new, missed)
                if made is None:
                    return None
                session, is_new = made
            if is_new:
                ids = asked.prompt[: session.token_count]
            else:
                is_being_appended |= session.is_being_appended
                session, ids = self._read(client, model, session)
                if asked.is_shared and self._role.saves and not session.is_being_appended:
                    session, ids = self._switched(client, model, session, ids, asked.prompt)
            sessions.append(session)
            tokens.append(ids)
            common = min(common, _common_count(ids, asked.prompt))
        # Only behind tokens that are the prompt's own can more of it come.
        is_its_own = all(len(ids) == common for ids in tokens)
        if may_wait and is_being_appended and is_its_own and common < self._wanted_count(asked.prompt):
            return Coming(common, is_being_appended)
        common -= common % self._unit_tokens
        return _opened(sessions, tokens, common, common)

    def _new(
        self,
        client: Client,
        model: CallerModel,
        name: str,
        asked: Asked,
        new: "New",
        missed: Callable[[], None],
    ) -> tuple[SessionInfo, bool] | None:
        """A session with what others have of the prompt, and whether it was made just now; None as `find`."""
        layout = streams_of(model, self._saved)
        is_found = asked.is_shared and (
            client.prefixes.match(
                model,
                asked.prompt,
                salt=asked.salt,
                layout=layout,
                source=asked.source or self._source_of(asked.handed),
                engine_host=self.engine_host,
            ).token_count
            > 0
        )
        if not is_found:
            if not self._role.saves:
                return None
            missed()
        session, is_new = self._made(client, model, name, layout, new)
        if is_new and is_found:
            session = self._adopted(client, session, model, asked.prompt)
        return session, is_new

    def _find_handed(
        self, client: Client, models: Sequence[CallerModel], asked: Asked, *, may_wait: bool
    ) -> Opened | Coming | None:
        """What another engine has put into its sessions; None where that is of no use here."""
        handed = asked.handed
        if handed is None:
            return None
        try:
            sessions = list(self._handed_sessions(client, models, handed, asked.salt))
        except (SessionNotFound, ModelFingerprintMismatch, SessionMoved, InvalidArgument) as error:
            # A session that another host has just made is known to the fleet within moments.
            if may_wait and isinstance(error, SessionNotFound) and self._is_elsewhere(handed):
                return Coming(0, is_being_appended=False)
            self._misses.tell(handed.session_name, "not handed over", error)
            return None
        there = min(session.token_count for session in sessions)
        if may_wait and there < min(handed.token_count, len(asked.prompt) - 1):
            return Coming(there, any(session.is_being_appended for session in sessions))
        read = [self._read(client, model, session) for model, session in zip(models, sessions, strict=True)]
        tokens = [ids for _, ids in read]
        common = min(_common_count(ids, asked.prompt) for ids in tokens)
        kept = common - common % self._unit_tokens
        # A block that is not full is of use where all of it is there.
        is_there = kept == common or all(len(ids) >= kept + self._unit_tokens for ids in tokens)
        return _opened([session for session, _ in read], tokens, kept, common if is_there else kept)

    def _handed_sessions(
        self, client: Client, models: Sequence[CallerModel], handed: HandOver, salt: bytes
    ) -> Iterator[SessionInfo]:
        """Each rank's session. Raises InvalidArgument where it is of no use here, and what a look raises."""
        if handed.rank_count != len(models):
            ranks = f"{handed.rank_count} ranks computed it, and this engine has {len(models)}"
            problem = f"{ranks}: their blocks hold other heads; state=kv or hidden knows no ranks"
            raise InvalidArgument(field="kv_transfer_params", problem=problem)
        for rank, model in enumerate(models):
            name = handed.session_name
            if rank:
                name = f"sessions/{part_of(name.removeprefix('sessions/'), rank)}"
            session = client.sessions.get(name)
            model.check(session)
            if session.salt != salt:
                raise InvalidArgument(field="cache_salt", problem="the prompt was computed under another")
            yield session

    def _is_elsewhere(self, handed: HandOver) -> bool:
        """Whether an engine of another host handed it over."""
        return handed.engine_host not in ("", self.engine_host)

    def _source_of(self, handed: HandOver | None) -> str:
        return handed.engine_host if handed is not None and self._is_elsewhere(handed) else ""

    def _switched(
        self, client: Client, model: CallerModel, session: SessionInfo, ids: list[int], prompt: list[int]
    ) -> tuple[SessionInfo, list[int]]:
        """The session and its tokens: those of its former rendering, where that has more of the prompt."""
        common = _common_count(ids, prompt)
        renderings = Renderings(client, model, kept=self._renderings)
        if common == min(len(ids), len(prompt)) or not renderings.is_elsewhere(session, prompt, common):
            return session, ids
        return self._read(client, model, renderings.switched(session, prompt, common))

    def _wanted_count(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that can be of use: its last one is computed."""
        count = len(prompt) - 1
        return count - count % self._unit_tokens

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


def _opened(
    sessions: Sequence[SessionInfo], tokens: Sequence[Sequence[int]], kept: int, restorable: int
) -> Opened:
    return Opened(tuple(sessions), kept, tuple(tuple(ids[kept:]) for ids in tokens), restorable)


def _common_count(saved: list[int], prompt: list[int]) -> int:
    count = min(len(saved), len(prompt))
    differing = np.flatnonzero(np.array(saved[:count]) != np.array(prompt[:count]))
    return int(differing[0]) if len(differing) else count
