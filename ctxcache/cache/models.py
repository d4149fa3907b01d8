"""Models: registered once, never changed."""

from ctxcache.cache.state import State
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch, TooManyRequests
from ctxcache.format.model import ModelSpec
from ctxcache.metadata.base import Changes, MetadataStore, ModelRecord


class Models:
    """The use cases of models."""

    def __init__(self, state: State, metadata: MetadataStore) -> None:
        self._state = state
        self._metadata = metadata

    async def register(self, tenant: str, spec: ModelSpec) -> ModelRecord:
        """Register a model, or return it when it is the same.

        Raises ModelFingerprintMismatch, CapacityExceeded, TierFailure.
        """
        known = self._state.models.get((tenant, spec.model_id))
        if known is None:
            limit = self._state.limits.model_count
            own = sum(owner == tenant for owner, _ in self._state.models)
            if self._state.limits.bound(limit).is_reached(len(self._state.models), own):
                raise TooManyRequests(what="models", limit=limit)
            self._metadata.check()
            known = ModelRecord(tenant, spec, self._state.clock.wall_ns())
            self._state.models[tenant, spec.model_id] = known
        elif known.spec.fingerprint() != spec.fingerprint():
            raise ModelFingerprintMismatch(
                model=f"models/{spec.model_id}",
                actual=known.spec.fingerprint().hex(),
                expected=spec.fingerprint().hex(),
            )
        # Also when it was known: another call may still be waiting for its commit.
        await self._metadata.commit(Changes(models=[known]), is_durable=True)
        return known

    def get(self, tenant: str, model_id: str) -> ModelRecord:
        """One model. Raises ModelNotFound."""
        return self._state.model(tenant, model_id)

    async def delete(self, tenant: str, model_id: str) -> None:
        """Forget a model that no session is of. Raises ModelNotFound, InvalidArgument, TierFailure."""
        self._state.model(tenant, model_id)
        if count := self._state.model_sessions[tenant, model_id]:
            raise InvalidArgument(field="name", problem=f"{count} sessions are of models/{model_id}")
        self._metadata.check(is_growing=False)
        del self._state.models[tenant, model_id]
        await self._metadata.commit(Changes(deleted_models=[(tenant, model_id)]), is_durable=True)

    def list(self, tenant: str, *, after: str, limit: int) -> list[ModelRecord]:
        """Up to `limit` models with ids greater than `after`, by id."""
        ids = sorted(model_id for owner, model_id in self._state.models if owner == tenant)
        return [self._state.models[tenant, i] for i in ids if i > after][:limit]
