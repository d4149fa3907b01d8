"""Cutting a session as it was seen: whoever changed it meanwhile wins.

Knows the store's client. Worst case: another engine writes to the same session; nothing of this one's turn is saved then.
"""

from collections.abc import Sequence

from ctxcache.client import CallerModel, Client
from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    GenerationMismatch,
    SessionNotFound,
    TierFailure,
)
from ctxcache.format.streams import TOKENS
from ctxcache.v1.session_pb2 import Session
from gpu_worker.errors import ShapeMismatch, UnsupportedDtype
from gpu_worker.rows import token_ids_of

DAMAGED = (CorruptSegment, TierFailure, ShapeMismatch, UnsupportedDtype)
"""What the store has is not to be used, by anybody: it is written again."""
MISSES = (*DAMAGED, SessionNotFound, CapacityExceeded, GenerationMismatch)
"""What a read may answer for state that cannot be had: a miss, never a failed turn."""


def tokens_of(client: Client, model: CallerModel, session: Session) -> list[int]:
    """Token ids of a session of `model`. Raises what a read raises."""
    with client.read(session, model, streams=[TOKENS]) as rows:
        return token_ids_of(rows.array(TOKENS))


def cut(client: Client, session: Session, token_count: int) -> Session:
    """Keep the first tokens alone. Raises GenerationMismatch unless the session is as it was seen."""
    if token_count == session.token_count:
        return session
    return client.keep_first(session.name, token_count, if_generation_match=session.generation)


def emptied(client: Client, model: CallerModel, session: Session, lost: Sequence[int]) -> Session:
    """Keep nothing of a session that held the tokens `lost`; where it was changed meanwhile, it stays, and takes no rows for this one."""
    try:
        return cut(client, _remains(client, model, session, lost), 0)
    except MISSES:
        # No generation that was is one again: whatever is written for this one is refused.
        gone = Session()
        gone.CopyFrom(session)
        gone.token_count = 0
        return gone


def _remains(client: Client, model: CallerModel, session: Session, lost: Sequence[int]) -> Session:
    """The session as it is now, if all that became of it is that tokens were cut off its end, as a store cuts off damaged ones."""
    now = client.get_session(session.name)
    is_shorter = now.uid == session.uid and now.token_count <= len(lost)
    if now.generation == session.generation or not is_shorter:
        return session
    return now if tokens_of(client, model, now) == list(lost[: now.token_count]) else session
