"""Models: registered once, never changed, but that a probe is added once."""

import hashlib
from bisect import bisect_right
from dataclasses import replace

from ctxcache.cache.state import STEP_BY_STEP, Pace, State
from ctxcache.errors import ModelInUse, TooManyRequests
from ctxcache.format.model import ModelProbe, ModelSpec, mismatch
from ctxcache.storage.metadata.base import Changes, MetadataStore, ModelRecord, streams_texts

Registered = ModelRecord
"""A model, as services see it."""


async def _write_down(record: ModelRecord, pace: Pace) -> None:
    """Make the long part of a record before it is anybody's: its commit must follow at once then."""
    pieces = []
    for piece in streams_texts(record.spec):
        pieces.append(piece)
        if pace.is_over:
            await pace.rest()
    record.keep_streams_text(",".join(pieces))


class Models:
    """The use cases of models."""

    def __init__(self, state: State, metadata: MetadataStore) -> None:
        self._state = state
        self._metadata = metadata
        self._unrecorded: set[tuple[str, str]] = set()
        """Models whose record is being written, or could not be."""

    async def register(
        self, tenant: str, spec: ModelSpec, probe: ModelProbe | None = None, *, pace: Pace = STEP_BY_STEP
    ) -> ModelRecord:
        """Register a model, or return it when it is the same, with the probe that was sent first.

        Raises ModelFingerprintMismatch, CapacityExceeded, TierFailure.
        """
        # In this order, so that a large model holds up nobody and two engines that register it at once make
        # one:
        #
        #     fingerprint and text of the record    a part at a time, others run between
        #     known? room? does metadata take it?   one step without a wait, from here to the commit's begin
        #     in memory, and `_unrecorded`          sessions of it may be made
        #     commit, durable                       acknowledged; a crash before leaves no model and no answer
        made = ModelRecord(tenant, spec, self._state.clock.wall_ns(), probe)
        digest = hashlib.sha256()
        for part in spec.encoded_parts():
            digest.update(part)
            if pace.is_over:
                await pace.rest()
        made.keep_fingerprint(fingerprint := digest.digest())
        await _write_down(made, pace)
        known = self._state.models.get((tenant, spec.model_id))
        if known is None:
            # Counted only for a new one: a known model may be registered again at the limit.
            limit = self._state.limits.model_count
            own = len(self._state.model_ids.get(tenant, ()))
            if self._state.limits.bound(limit).is_reached(len(self._state.models), own):
                raise TooManyRequests(what="models", limit=limit)
            self._check_streams(tenant, len(spec.streams))
            self._metadata.check()
            known = made
            self._state.add_model(known)
            self._unrecorded.add((tenant, spec.model_id))
        elif known.fingerprint != fingerprint:
            raise mismatch(known.spec, spec, f"models/{spec.model_id} is registered as another model")
        elif known.probe is None and probe is not None:
            self._metadata.check()
            known = replace(known, probe=probe)
            known.keep_fingerprint(fingerprint)
            known.keep_streams_text(made.streams_text)
            self._state.models[tenant, spec.model_id] = known
            self._unrecorded.add((tenant, spec.model_id))
        # Also when it was known: another call may still be waiting for its commit, or have waited in vain.
        if (tenant, spec.model_id) in self._unrecorded:
            await self._metadata.commit(Changes(models=[known]), is_durable=True)
            # It may have been deleted meanwhile, and made anew.
            if self._state.models.get((tenant, spec.model_id)) is known:
                self._unrecorded.discard((tenant, spec.model_id))
            # Hundreds of KiB of a large model, of use for this one commit.
            known.keep_streams_text("")
        return known

    def _check_streams(self, tenant: str, more: int) -> None:
        limit, counts = self._state.limits.model_stream_count, self._state.model_streams
        # As if one stream were added to what the others of this model make it already.
        taken, own = sum(counts.values()) + more - 1, counts[tenant] + more - 1
        if self._state.limits.bound(limit).is_reached(taken, own):
            raise TooManyRequests(what="streams of models", limit=limit)

    def get(self, tenant: str, model_id: str) -> ModelRecord:
        """One model. Raises ModelNotFound."""
        return self._state.model(tenant, model_id)

    async def delete(self, tenant: str, model_id: str) -> None:
        """Forget a model that no session is of. Raises ModelNotFound, ModelInUse, TierFailure."""
        self._state.model(tenant, model_id)
        # In one step with the removal: a session of it cannot be made between.
        if count := self._state.ledger.names.model_count(tenant, model_id):
            sessions = "session" if count == 1 else "sessions"
            raise ModelInUse(model=f"models/{model_id}", session_count=count, sessions=sessions)
        # Deleting needs no room, and is what makes some.
        self._metadata.check(is_growing=False)
        self._state.remove_model(tenant, model_id)
        self._unrecorded.discard((tenant, model_id))
        await self._metadata.commit(Changes(deleted_models=[(tenant, model_id)]), is_durable=True)

    def list(self, tenant: str, *, after: str, limit: int) -> list[ModelRecord]:
        """Up to `limit` models with ids greater than `after`, by id."""
        ids = self._state.model_ids.get(tenant, [])
        begin = bisect_right(ids, after)
        return [self._state.models[tenant, i] for i in ids[begin : begin + limit]]
