"""Forgetting a version of a model's weights: sessions, blocks, what prefixes find of them, then the models.

    looked for ──► none is being written ──► a few at a time, each few one commit ──► none is left: models go

Owned by the event loop. Others have their turn all the while, and may make more of the same: that goes too,
unless it is being written when all else is gone. Worst case: a look at every session and block of the store.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from ctxcache.cache.eviction import Departures
from ctxcache.cache.models import Models
from ctxcache.cache.state import STEP_BY_STEP, Pace, State
from ctxcache.core.history import Event
from ctxcache.core.ledger.session import Session, block_model
from ctxcache.errors import ModelNotFound, WriteInProgress
from ctxcache.format.model import has_version
from ctxcache.storage.metadata.base import MetadataStore, ModelRecord

AT_A_TIME = 64
"""Sessions and blocks of one commit."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Ids of models, and counts, of what was forgotten, or would be."""

    model_ids: tuple[str, ...]
    session_count: int = 0
    token_count: int = 0
    block_count: int = 0


class Forgetting:
    """The use case of forgetting."""

    def __init__(self, state: State, metadata: MetadataStore, departures: Departures, models: Models) -> None:
        self._state, self._ledger, self._metadata = state, state.ledger, metadata
        self._departures, self._models = departures, models

    async def forget(
        self, tenant: str, model_id: str, version: str, *, is_trial: bool, pace: Pace = STEP_BY_STEP
    ) -> Forgotten:
        """Forget all of a version of a model's weights. `is_trial`: nothing goes, and the answer is the same.

        Raises ModelNotFound, WriteInProgress, TierFailure.
        """
        models = [*self._of_version(tenant, model_id, version)]
        if not models:
            raise ModelNotFound(model=f"models/{model_id}")
        ids = tuple(sorted(model.spec.model_id for model in models))
        owners = {*ids, *(block_model(model.fingerprint) for model in models)}
        done = Forgotten(ids)
        owned = await self._all_of(tenant, owners, pace)
        if is_trial:
            return _with(done, owned)
        # Deleting needs no room, and is what makes some.
        self._metadata.check(is_growing=False)
        if writing := [session for session in owned if session.is_writing]:
            raise WriteInProgress(session=writing[0].name)
        while owned:
            done = _with(done, await self._remove(owned))
            # Sessions may have come meanwhile. Only sessions that are being written end the loop: the caller
            # is told.
            owned = await self._all_of(tenant, owners, pace)
            if owned and all(session.is_writing for session in owned):
                raise WriteInProgress(session=owned[0].name)
        for known_id in ids:
            # `delete` looks for sessions in the same step. Another caller may have forgotten the model.
            if (tenant, known_id) in self._state.models:
                await self._models.delete(tenant, known_id)
        return done

    def _of_version(self, tenant: str, model_id: str, version: str) -> Iterator[ModelRecord]:
        for known_id in self._state.model_ids.get(tenant, ()):
            # Ranks, layouts and versions of one model have ids that go on behind a dot.
            if known_id == model_id or known_id.startswith(f"{model_id}."):
                record = self._state.models[tenant, known_id]
                if has_version(record.spec.weights_digest, version):
                    yield record

    async def _all_of(self, tenant: str, owners: Collection[str], pace: Pace) -> list[Session]:
        """The tenant's sessions and blocks of these models. A dormant session is one for this look."""
        owned: list[Session] = []
        for name in [*self._ledger.names.ids(tenant)]:
            if pace.is_over:
                await pace.rest()
            session = self._ledger.glance(tenant, name)
            if session is not None and session.model_id in owners:
                owned.append(session)
        # Former renderings first: each goes by itself, and is counted. Their owners would take them along.
        owned.sort(key=attrgetter("is_former"), reverse=True)
        for block in [*self._ledger.blocks()]:
            if pace.is_over:
                await pace.rest()
            if block.tenant == tenant and block.model_id in owners and not block.is_gone:
                owned.append(block)
        return [session for session in owned if not session.is_gone]

    async def _remove(self, owned: list[Session]) -> list[Session]:
        """Remove these sessions and blocks. Returns those that went."""
        gone: list[Session] = []
        for begin in range(0, len(owned), AT_A_TIME):
            # Each is looked up by its name after the await. A dormant session has to be known to go.
            named = (
                (session, self._ledger.named(session.tenant, session.session_id))
                for session in owned[begin : begin + AT_A_TIME]
            )
            some = [
                now
                for session, now in named
                if now is not None and now.uid == session.uid and not now.is_writing
            ]
            for session in some:
                self._state.seen.deleted_session_count += not session.is_block
                self._state.journal.happened(
                    session, Event.DELETED, detail="its model's", token_count=session.token_count
                )
            gone += some
            await self._departures.remove(some)
        return gone


def _with(done: Forgotten, more: list[Session]) -> Forgotten:
    sessions = [session for session in more if not session.is_block]
    return replace(
        done,
        session_count=done.session_count + len(sessions),
        token_count=done.token_count + sum(session.token_count for session in sessions),
        block_count=done.block_count + len(more) - len(sessions),
    )
