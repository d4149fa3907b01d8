"""Prefixes: what some session has is found by its tokens, and shared. The calls of PrefixService.

On the server's host they go over the control socket. Worst case: one deadline per call.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ctxcache.client.convert import contents_to_wire, from_wire, ranges_to_wire, session_from_wire
from ctxcache.client.models import CallerModel
from ctxcache.client.routes import RowRoutes
from ctxcache.client.types import ModelInfo, PrefixMatch, SessionInfo, SharedPrefix
from ctxcache.client.wire import Wire
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Content, Stream
from ctxcache.v1.arena_pb2 import Operation
from ctxcache.v1.prefix_pb2 import (
    AdoptPrefixRequest,
    ListSharedPrefixesRequest,
    MatchPrefixRequest,
    Prefix,
)

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class PrefixCalls:
    """The calls about prefixes."""

    def __init__(self, wire: Wire, routes: RowRoutes) -> None:
        self._wire, self._routes = wire, routes

    def match(
        self,
        model: CallerModel | ModelInfo,
        token_ids: TokenIds,
        *,
        keys: Sequence[bytes] = (),
        contents: Iterable[Content] = (),
        salt: bytes = b"",
        layout: Iterable[Stream] | None = None,
    ) -> PrefixMatch:
        """How many of the first tokens a session of `model` has that stores exactly these streams.

        `layout`: by default all of the model's, as a session is made. `keys` of 64 tokens each stand for
        token ids, where there are none. `contents`: what lies behind the tokens. `salt`: the sessions'.
        Counts as no access. Raises ModelNotFound, InvalidArgument.
        """
        if layout is None:
            layout = _streams(model)
        prefix = _prefix(token_ids, contents, keys)
        request = MatchPrefixRequest(
            model=model.name, layout=ranges_to_wire(layout), prefix=prefix, salt=salt
        )
        attachment = self._routes.attach()
        if attachment is None:
            return from_wire(PrefixMatch, self._wire.call(self._wire.prefixes.MatchPrefix, request))
        result = attachment.stream.carry_out(Operation(match_prefix=request))
        return from_wire(PrefixMatch, result.matched)

    def most_shared(self, *, limit: int = 0) -> list[SharedPrefix]:
        """What several sessions begin with, most saved bytes first; at most `limit`, by default 50."""
        request = ListSharedPrefixesRequest(page_size=limit)
        found = self._wire.call(self._wire.prefixes.ListSharedPrefixes, request).prefixes
        return [from_wire(SharedPrefix, one) for one in found]

    def adopt(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        token_ids: TokenIds,
        *,
        contents: Iterable[Content] = (),
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Let a new session begin with as many of these tokens as another one has.

        See SessionHandle.adopt.
        """
        request = AdoptPrefixRequest(
            session=session if isinstance(session, str) else session.name,
            model_fingerprint=model.fingerprint,
            if_generation_match=if_generation_match,
            prefix=_prefix(token_ids, contents),
        )
        attachment = self._routes.attach()
        if attachment is None:
            return session_from_wire(self._wire.call(self._wire.prefixes.AdoptPrefix, request).session)
        result = attachment.stream.carry_out(Operation(adopt_prefix=request))
        return session_from_wire(result.adopted.session)


def _streams(model: CallerModel | ModelInfo) -> Iterable[Stream]:
    """All of a model's."""
    if isinstance(model, CallerModel):
        return [spec.stream for spec in model.spec.streams]
    return chain.from_iterable(stored.streams.streams() for stored in model.streams)


def _prefix(token_ids: TokenIds, contents: Iterable[Content], keys: Sequence[bytes] = ()) -> Prefix:
    return Prefix(token_ids=_packed(token_ids), keys=keys, contents=contents_to_wire(contents))


def _packed(token_ids: TokenIds) -> bytes:
    """As int32, little endian. Raises InvalidArgument for what is none."""
    given = np.asarray(token_ids)
    if given.ndim != 1 or not (given.size == 0 or np.issubdtype(given.dtype, np.integer)):
        raise InvalidArgument(field="token_ids", problem="are not a list of integers")
    packed = given.astype("<i4")
    if not np.array_equal(packed, given):
        raise InvalidArgument(field="token_ids", problem="are not all within 32 bits")
    return packed.tobytes()
