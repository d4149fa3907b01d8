"""Calls of HintService, as methods. Worst case: one deadline per call.

Names are resource names. What a hint says is the server's to check.
"""

from collections.abc import Sequence
from uuid import uuid4

from ctxcache.client.convert import duration
from ctxcache.client.engine_queue import EngineQueue
from ctxcache.client.wire import Wire
from ctxcache.v1 import hints_pb2
from ctxcache.v1.hints_pb2 import HintAction, HintResult
from ctxcache.v1.session_pb2 import TokenRange


class HintCalls:
    """The rpcs of HintService."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def hint(self, actions: Sequence[HintAction]) -> Sequence[HintResult]:
        """Give hints; each is answered by itself, in order. Raises InvalidArgument for the whole batch."""
        request = hints_pb2.HintRequest(message_id=uuid4().hex, actions=actions)
        return self._wire.call(self._wire.hints.Hint, request).results

    def share(self, session: str, *, token_count: int | None = None) -> HintResult:
        """Make a session, or its first tokens, durable and closed: a fork of it has nothing to wait for."""
        return self._one(_about(session, share=hints_pb2.ShareHint(), range=_prefix(token_count)))

    def prefetch(
        self,
        session: str,
        *,
        token_count: int | None = None,
        budget_bytes: int | None = None,
        ttl_s: float | None = None,
    ) -> HintResult:
        """Bring a session, or its first tokens, to DRAM; without room, as soon as there is within `ttl_s`."""
        action = _about(
            session,
            prefetch=hints_pb2.PrefetchHint(),
            range=_prefix(token_count),
            budget_bytes=budget_bytes,
            ttl=duration(ttl_s),
        )
        return self._one(action)

    def demote(self, session: str) -> HintResult:
        """Give a session's room in DRAM to others."""
        return self._one(_about(session, demote=hints_pb2.DemoteHint()))

    def pin(
        self, session: str, *, ttl_s: float, priority: int = 0, budget_bytes: int | None = None
    ) -> HintResult:
        """Keep a session in DRAM, softly, for a while."""
        kept = _about(session, pin=hints_pb2.PinHint(), ttl=duration(ttl_s), priority=priority)
        if budget_bytes is not None:
            kept.budget_bytes = budget_bytes
        return self._one(kept)

    def retain(
        self, session: str, *, ttl_s: float, priority: int = 0, budget_bytes: int | None = None
    ) -> HintResult:
        """Keep a session in the store, softly, for a while."""
        kept = _about(session, retain=hints_pb2.RetainHint(), ttl=duration(ttl_s), priority=priority)
        if budget_bytes is not None:
            kept.budget_bytes = budget_bytes
        return self._one(kept)

    def release(self, session: str) -> HintResult:
        """End what `pin`, `retain` and a deferred `prefetch` began."""
        return self._one(_about(session, release=hints_pb2.ReleaseHint()))

    def expect(self, session: str, return_in_s: float | None) -> HintResult:
        """Say when an idle session returns; None: it does not."""
        is_over = return_in_s is None
        ends = hints_pb2.ExpectHint(ended=True)
        expected = ends if is_over else hints_pb2.ExpectHint(return_in=duration(return_in_s))
        return self._one(_about(session, expect=expected))

    def engine_queue(
        self, engine: str, *, grace_s: float | None = None, model_fingerprint: bytes = b""
    ) -> EngineQueue:
        """Publish the waiting queue of the engine of that name, empty at first. Waits for nothing.

        `grace_s`: how long the server keeps it when the connection breaks; by default as long as it does for any.
        """
        return EngineQueue(self._wire, engine, grace_s=grace_s, model_fingerprint=model_fingerprint)

    def _one(self, action: HintAction) -> HintResult:
        return self.hint([action])[0]


def _about(session: str, **facts: object) -> HintAction:
    return HintAction(session=session, **facts)  # type: ignore[arg-type]  # the fields of the message


def _prefix(token_count: int | None) -> TokenRange | None:
    return None if token_count is None else TokenRange(begin=0, end=token_count)
