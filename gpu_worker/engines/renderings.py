"""Renderings of a conversation: the tokens that its session has, and those that it will have or had.

A template that strips thoughts, an agent that prunes, a user who edits: the next prompt agrees with the
session up to some token, and differs behind it. The rendering that comes is a session of its own until it is
whole. Then it takes the other's place in one step of the store, and what was there before stays for a while.

```
   alice          [ system | question | thought | answer ]            what was computed
   a new session  [ system | question ]                               a fork, or what another session has
                  [ system | question | answer ]                      the rest is computed
   alice          [ system | question | answer ]                      one step: from here on it is the new one
   without a name [ system | question | thought | answer ]            the old rendering, for a while
```

The sessions that a killed engine leaves expire. Former renderings are the store's: it finds them by their
tokens, and ends them with the session. Worst case: what another session has of the history is found by whole
runs of 64 tokens, and up to 63 are computed again.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from ctxcache.client import CallerModel, Client, SessionHandle
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError
from ctxcache.format.streams import TOKENS, Stream

log = logging.getLogger(__name__)

KEPT = 3
"""Former renderings of a conversation that the store keeps."""
MOST_KEPT = 16
WORKING_TTL = timedelta(minutes=2)
"""A rendering that is computed expires so long after its last rows, where its engine dies."""
LEFT_TTL = timedelta(minutes=10)
"""One that gave way to a turn stays so long."""
_LEAST_TTL = timedelta(seconds=1)
PLACE_TOKENS = 32
"""So many are computed in the time in which a conversation changes its place: some calls of the store."""
_MOST_BEGUN = 256
"""Unfinished renderings that are remembered; older ones are left to expire."""


class Renderings:
    """The renderings of one model's conversations in a store.

    `begun`, `leave` and `forget` are for one thread at a time, and the rest for any.
    """

    def __init__(self, client: Client, model: CallerModel, *, kept: int = KEPT) -> None:
        """`kept`: how many former renderings of each conversation stay, 0 for none."""
        self._client, self._model, self._kept = client, model, kept
        self._begun: OrderedDict[str, SessionInfo] = OrderedDict()
        """By the name of the conversation, what was begun and not finished."""

    def is_elsewhere(self, session: SessionInfo, history: Sequence[int], common_count: int) -> bool:
        """Whether another session has so much more of the history that it is worth a change of place."""
        if len(history) - common_count < PLACE_TOKENS:
            return False
        try:
            matched = self._client.prefixes.match(
                self._model, history, salt=session.salt, layout=_layout(session)
            )
        except CacheError as error:
            # The turn goes on with what its own session has.
            log.info("rendering_not_taken session=%a reason=%s error=%s", session.name, error.reason, error)
            return False
        return matched.token_count - common_count >= PLACE_TOKENS

    def begun(self, session: SessionInfo, history: Sequence[int], common_count: int) -> SessionInfo:
        """A session of the store's own making that begins with what is there of the history.

        `common_count`: how many of the session's own tokens are the history's. Raises what the store's calls
        raise.
        """
        found = self._client.prefixes.match(self._model, history, salt=session.salt, layout=_layout(session))
        if found.token_count > common_count:
            working = self._made(session, history).info
        else:
            # A fork keeps single tokens, and keys find whole runs.
            working = self._forked(session, common_count)
        # What an earlier attempt left is shared by now.
        self.forget(session)
        return working

    def leave(self, session: SessionInfo, working: SessionInfo) -> None:
        """A rendering was begun and is not whole: whoever goes on finds it by its tokens."""
        # Else it ends sooner, and is computed again.
        with suppress(CacheError):
            self._client.sessions.open(working.name).update(ttl=_ttl(session, LEFT_TTL))
        self._begun[session.name] = working
        if len(self._begun) > _MOST_BEGUN:
            self._begun.popitem(last=False)

    def forget(self, session: SessionInfo) -> None:
        """Delete what `leave` left of a conversation."""
        working = self._begun.pop(session.name, None)
        if working is not None:
            self.drop(working)

    def take_place(self, working: SessionInfo, session: SessionInfo) -> SessionInfo:
        """Put a whole rendering in its conversation's place. The replaced session becomes a former rendering.

        Raises GenerationMismatch, WriteInProgress, SessionNotFound and SessionInUse where the conversation
        went on, ended or is read meanwhile; then it is as it was.
        """
        made = self._client.sessions.open(working.name, self._model).fork(
            id=session.name.removeprefix("sessions/"),
            replaces_generation=session.generation,
            is_rewrite=True,
            former_count=self._kept,
        )
        self.drop(working)
        return made.info

    def switched(self, session: SessionInfo, history: Sequence[int], common_count: int) -> SessionInfo:
        """Let a conversation go on in the session that has the most of its history. Returns it as it is then.

        Where the store refuses, the conversation stays where it was.
        """
        working: SessionInfo | None = None
        try:
            working = self._made(session, history).info
            if working.token_count > common_count:
                session = self.take_place(working, session)
                self.forget(session)
                return session
        except CacheError as error:
            log.info("rendering_not_taken session=%a reason=%s error=%s", session.name, error.reason, error)
        if working is not None:
            self.drop(working)
        return session

    def cut(self, session: SessionInfo, token_count: int) -> SessionInfo:
        """Keep a conversation's first tokens alone; what it had becomes a former rendering. Returns it then.

        A session that is cut in place goes on behind a gap, and is not found by its tokens from there on:
        that is done where the store refuses this. Returns it as it is then. Raises what `keep_first` raises.
        """
        working: SessionInfo | None = None
        try:
            working = self._forked(session, token_count)
            return self.take_place(working, session)
        except CacheError as error:
            log.info("rendering_not_kept session=%a reason=%s error=%s", session.name, error.reason, error)
            if working is not None:
                self.drop(working)
        handle = self._client.sessions.open(session)
        return handle.keep_first(token_count, if_generation_match=session.generation)

    def parted(self, session: SessionInfo, history: Sequence[int], common_count: int) -> SessionInfo:
        """Let a conversation go on with this history, of which it has so many tokens.

        In what has more of the history, or in its own first tokens. It must not be read meanwhile. Raises
        what `keep_first` raises.
        """
        if self.is_elsewhere(session, history, common_count):
            return self.switched(session, history, common_count)
        return self.cut(session, common_count)

    def drop(self, working: SessionInfo) -> None:
        """Delete a rendering that is not needed."""
        # It expires anyway; the error of the work matters more.
        with suppress(CacheError):
            self._client.sessions.open(working.name).delete()

    def _forked(self, session: SessionInfo, token_count: int) -> SessionInfo:
        """A session with these of its tokens. It is quiet: no user has returned."""
        return (
            self._client.sessions.open(session)
            .fork(
                token_count=token_count,
                ttl=_ttl(session, WORKING_TTL),
                if_generation_match=session.generation,
                is_quiet=True,
            )
            .info
        )

    def _made(self, session: SessionInfo, token_ids: Sequence[int]) -> SessionHandle:
        """A session with what others have of these tokens. Another one's adoption is no access to it."""
        made = self._client.sessions.create(
            self._model,
            layout=_layout(session),
            ttl=_ttl(session, WORKING_TTL),
            salt=session.salt,
            labels=session.labels,
        )
        try:
            made.adopt(token_ids)
        except BaseException:
            self.drop(made.info)
            raise
        return made


def _layout(session: SessionInfo) -> list[Stream]:
    return [stream for stream in session.streams() if stream != TOKENS]


def _ttl(session: SessionInfo, most: timedelta) -> timedelta:
    """At most as long as the session itself is kept after its last access."""
    kept_ns = session.ttl_ns
    if kept_ns is None:
        kept_ns = (session.expire_time_ns or 0) - (session.access_time_ns or 0)
    return max(min(most, timedelta(microseconds=kept_ns // 1000)), _LEAST_TTL)
