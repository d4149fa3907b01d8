"""Cuts of a session in the store, to the tokens that a turn can go on from.

Every cut names the generation that was seen, so that it takes away no tokens of another engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    GenerationMismatch,
    ModelFingerprintMismatch,
    SessionMoved,
    SessionNotFound,
    TierFailure,
)
from ctxcache.format.streams import Stream, ranges_of
from gpu_worker.errors import ShapeMismatch, UnsupportedDtype

# Sorts of misses, and the fate of the session's rows:
#
#     DAMAGED          cut, and written again: nobody could use them
#     other misses     kept: the next turn, or another engine, may still have them
DAMAGED = (CorruptSegment, TierFailure, ShapeMismatch, UnsupportedDtype)
"""No engine can use the store's rows: they are written again."""
MISSES = (
    *DAMAGED,
    SessionNotFound,
    SessionMoved,
    CapacityExceeded,
    GenerationMismatch,
    ModelFingerprintMismatch,
)
"""Errors of a read that make a miss, and never a failed turn."""


def tokens_of(client: Client, model: CallerModel, session: SessionInfo) -> list[int]:
    """Token ids of a session of `model`. Raises what a read raises."""
    return client.sessions.open(session, model).token_ids()[1]


def cut(client: Client, session: SessionInfo, token_count: int) -> SessionInfo:
    """Keep the first tokens alone. Raises GenerationMismatch unless the session is as it was seen."""
    # A cut of no token makes no call: the generation stays, and with it others' conditions.
    if token_count == session.token_count:
        return session
    return client.sessions.open(session.name).keep_first(token_count, if_generation_match=session.generation)


def stand_in(session: SessionInfo, model: CallerModel, layout: Iterable[Stream]) -> SessionInfo:
    """A session of `model` without tokens, in place of `session`, which is another model's or another host's.

    The store refuses every write for it: it has no such session at this generation.
    """
    return replace(
        session,
        model=model.name,
        model_fingerprint=model.fingerprint,
        layout=tuple(ranges_of(layout)),
        token_count=0,
        salt=b"",
    )


def emptied(client: Client, model: CallerModel, session: SessionInfo, lost: Sequence[int]) -> SessionInfo:
    """Drop all of a session that held the tokens `lost`.

    A session that another engine changed meanwhile stays as it is, and takes no rows of this turn.
    """
    try:
        return cut(client, _remains(client, model, session, lost), 0)
    except MISSES:
        # No later generation equals this one: every write for this session is refused.
        return replace(session, token_count=0)


def _remains(client: Client, model: CallerModel, session: SessionInfo, lost: Sequence[int]) -> SessionInfo:
    """The present session, if it only lost tokens at its end: a store cuts damaged ones off."""
    now = client.sessions.get(session.name)
    # It is the same session, and not longer: tokens that were appended meanwhile are another engine's.
    is_shorter = now.uid == session.uid and now.token_count <= len(lost)
    if now.generation == session.generation or not is_shorter:
        return session
    return now if tokens_of(client, model, now) == list(lost[: now.token_count]) else session
