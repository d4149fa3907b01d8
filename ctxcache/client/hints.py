"""Calls of HintService, as methods. Worst case: one deadline per call.

Names are resource names. The server checks what a hint says.
"""

from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

from ctxcache.client.convert import duration
from ctxcache.client.engine_queue import EngineQueue
from ctxcache.client.messages import read_hint_result
from ctxcache.client.types import HintAction, HintKind, HintResult
from ctxcache.client.wire import Wire
from ctxcache.v1 import hints_pb2
from ctxcache.v1.session_pb2 import TokenRange


class HintCalls:
    """The rpcs of HintService."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def give(self, actions: Sequence[HintAction]) -> list[HintResult]:
        """Give hints; each is answered by itself, in order. Raises InvalidArgument for the whole batch."""
        request = hints_pb2.HintRequest(message_id=uuid4().hex, actions=map(_to_wire, actions))
        results = self._wire.call(self._wire.hints.Hint, request).results
        return [read_hint_result(result) for result in results]

    def share(self, session: str, *, token_count: int | None = None) -> HintResult:
        """Make a session, or its first tokens, durable and closed: a fork of it has nothing to wait for."""
        return self._one(HintAction(HintKind.SHARE, session, token_count=token_count))

    def prefetch(
        self,
        session: str,
        *,
        token_count: int | None = None,
        budget_bytes: int | None = None,
        ttl: timedelta | None = None,
    ) -> HintResult:
        """Bring a session, or its first tokens, to DRAM; without room, as soon as there is within `ttl`."""
        return self._one(
            HintAction(
                HintKind.PREFETCH, session, token_count=token_count, budget_bytes=budget_bytes, ttl=ttl
            )
        )

    def demote(self, session: str) -> HintResult:
        """Give a session's room in DRAM to others."""
        return self._one(HintAction(HintKind.DEMOTE, session))

    def pin(
        self, session: str, *, ttl: timedelta, priority: int = 0, budget_bytes: int | None = None
    ) -> HintResult:
        """Keep a session in DRAM, softly, for a while."""
        return self._one(
            HintAction(HintKind.PIN, session, ttl=ttl, priority=priority, budget_bytes=budget_bytes)
        )

    def retain(
        self, session: str, *, ttl: timedelta, priority: int = 0, budget_bytes: int | None = None
    ) -> HintResult:
        """Keep a session in the store, softly, for a while."""
        return self._one(
            HintAction(HintKind.RETAIN, session, ttl=ttl, priority=priority, budget_bytes=budget_bytes)
        )

    def release(self, session: str) -> HintResult:
        """End what `pin`, `retain` and a deferred `prefetch` began."""
        return self._one(HintAction(HintKind.RELEASE, session))

    def expect(self, session: str, return_in: timedelta | None) -> HintResult:
        """Say when an idle session returns; None: it does not."""
        return self._one(HintAction(HintKind.EXPECT, session, return_in=return_in))

    def ahead(
        self,
        session: str,
        *,
        computed_token_count: int = 0,
        used_token_count: int = 0,
        wasted_token_count: int = 0,
    ) -> HintResult:
        """Have counted what was computed ahead of a session's turns since the last such hint."""
        return self._one(
            HintAction(
                HintKind.AHEAD,
                session,
                computed_token_count=computed_token_count,
                used_token_count=used_token_count,
                wasted_token_count=wasted_token_count,
            )
        )

    def engine_queue(
        self, engine: str, *, grace: timedelta | None = None, model_fingerprint: bytes = b""
    ) -> EngineQueue:
        """Publish the waiting queue of the engine of that name, empty at first. Waits for nothing.

        `grace`: how long the server keeps it when the connection breaks; by default as long as it does for
        any.
        """
        return EngineQueue(self._wire, engine, grace=grace, model_fingerprint=model_fingerprint)

    def _one(self, action: HintAction) -> HintResult:
        return self.give([action])[0]


def _to_wire(action: HintAction) -> hints_pb2.HintAction:
    message = hints_pb2.HintAction(
        action_id=action.action_id,
        session=action.session,
        ttl=duration(action.ttl),
        priority=action.priority,
        budget_bytes=action.budget_bytes,
        range=None if action.token_count is None else TokenRange(begin=0, end=action.token_count),
    )
    asked = getattr(message, action.kind.value)
    # A kind without fields of its own still has to be chosen.
    asked.SetInParent()
    if action.kind is HintKind.EXPECT and action.return_in is None:
        asked.ended = True
    elif action.kind is HintKind.EXPECT:
        asked.return_in.CopyFrom(duration(action.return_in))
    elif action.kind is HintKind.AHEAD:
        asked.computed_token_count = action.computed_token_count
        asked.used_token_count = action.used_token_count
        asked.wasted_token_count = action.wasted_token_count
    return message
