"""Prefixes: what some session has is found by its tokens, and shared. The calls of PrefixService.

On the server's host they go over the control socket. Worst case: one deadline per call.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import chain

import numpy as np
import numpy.typing as npt

from ctxcache.client.convert import (
    checked_token,
    duration,
    ranges_to_wire,
)
from ctxcache.client.futures import Completions
from ctxcache.client.messages import read_prefix_match, read_session_info, read_shared_prefix, write_content
from ctxcache.client.routes import RowRoutes
from ctxcache.client.rows import SessionRows
from ctxcache.client.types import CallerModel, ModelInfo, PrefixMatch, SessionInfo, SharedPrefix
from ctxcache.client.wire import Wire
from ctxcache.core.prefix.keys import BLOCK_BYTES, TOKEN_BYTES, TOKENS_LIMIT_BYTES, scope_of
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import SALT_LIMIT_BYTES, Content, Stream, ranges_of
from ctxcache.v1.arena_pb2 import AcquireLease, Operation
from ctxcache.v1.block_pb2 import ReleaseBlocksRequest
from ctxcache.v1.prefix_pb2 import (
    AdoptPrefixRequest,
    ListSharedPrefixesRequest,
    MatchPrefixRequest,
    Prefix,
)

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class PrefixCalls:
    """The calls about prefixes."""

    def __init__(self, wire: Wire, routes: RowRoutes, completions: Completions) -> None:
        self._wire, self._routes, self._completions = wire, routes, completions

    def match(
        self,
        model: CallerModel | ModelInfo,
        token_ids: TokenIds,
        *,
        keys: Sequence[bytes] = (),
        contents: Iterable[Content] = (),
        salt: bytes = b"",
        layout: Iterable[Stream] | None = None,
        lease_ttl: timedelta | None = None,
        source: str = "",
        engine_host: str = "",
    ) -> PrefixMatch:
        """How many of the first tokens a session of `model` has that stores exactly these streams.

        `layout`: by default all of the model's, as a session is made. `keys` of 64 tokens each stand for
        token ids, where there are none. `contents`: what lies behind the tokens. `salt`: the sessions'.
        `lease_ttl`: bring what is found into DRAM and hold it for so long, at most 300 s, for `leased` by the
        answer's token. `source`: which other host of the fleet has more of the prompt, as routers say it:
        it comes here first, where that is sooner than to compute it. `engine_host`: how routers call the
        caller's engine, so that other stores find this one by it. Counts as no access without a lease.
        Raises ModelNotFound, InvalidArgument, and with a lease CapacityExceeded, TooManyRequests,
        TierFailure.
        """
        layout = list(dict.fromkeys(_streams(model) if layout is None else layout))
        attachment, prefix = self._routes.attach(), _prefix(token_ids, contents, keys)
        tenant = "" if attachment is None else attachment.stream.tenant
        # Keys are an eighth of the ids. Made here they take the caller's time, and not that of the loop.
        # Keys that the server would refuse go there as they are.
        is_plain = (
            BLOCK_BYTES <= len(prefix.token_ids) <= TOKENS_LIMIT_BYTES and len(salt) <= SALT_LIMIT_BYTES
        )
        if tenant and is_plain and not prefix.keys and not prefix.contents:
            scope = scope_of(tenant, model.fingerprint, tuple(ranges_of(layout)), salt)
            token_ids, salt = prefix.token_ids, b""
            prefix = Prefix(keys=scope.keys(token_ids), token_count=len(token_ids) // TOKEN_BYTES)
        request = MatchPrefixRequest(
            model=model.name,
            layout=ranges_to_wire(layout),
            prefix=prefix,
            salt=salt,
            lease_ttl=duration(lease_ttl),
            source=source,
            engine_host=engine_host,
        )
        # The same question by two ways; over the control socket no gRPC call stands between.
        if attachment is None:
            return read_prefix_match(self._wire.call(self._wire.prefixes.MatchPrefix, request))
        result = attachment.stream.carry_out(Operation(match_prefix=request))
        return read_prefix_match(result.matched)

    def match_async(
        self,
        model: CallerModel | ModelInfo,
        token_ids: TokenIds,
        *,
        keys: Sequence[bytes] = (),
        contents: Iterable[Content] = (),
        salt: bytes = b"",
        layout: Iterable[Stream] | None = None,
        lease_ttl: timedelta | None = None,
        source: str = "",
        engine_host: str = "",
    ) -> Future[PrefixMatch]:
        """As `match`, on the client's thread.

        Raises TooManyRequests, Unavailable; what `match` raises is the future's.
        """
        return self._completions.submit(
            self.match,
            model,
            token_ids,
            keys=keys,
            contents=contents,
            salt=salt,
            layout=layout,
            lease_ttl=lease_ttl,
            source=source,
            engine_host=engine_host,
        )

    def leased(self, token: bytes, model: CallerModel, *, streams: Iterable[Stream] = ()) -> SessionRows:
        """The rows that a match of this tenant holds, by its token, whoever made it: a context manager.

        All streams by default. A lease of its own: neither the end of the token nor what becomes of the
        session ends it. Raises LeaseNotFound, ModelFingerprintMismatch, InvalidArgument (also where this
        process cannot map the arena), CapacityExceeded, TooManyRequests.
        """
        request = AcquireLease(token=checked_token(token), model_fingerprint=model.fingerprint)
        rows = self._routes.lease(request, tuple(streams))
        if rows is None:
            raise InvalidArgument(
                field="lease", problem="needs the server's arena, which is not on this host or has no room"
            )
        return rows

    def release(self, token: bytes) -> None:
        """End what a match holds. Raises LeaseNotFound."""
        request = ReleaseBlocksRequest(token=token)
        attachment = self._routes.attach()
        if attachment is None:
            self._wire.call(self._wire.blocks.ReleaseBlocks, request)
        else:
            attachment.stream.carry_out(Operation(release_blocks=request))

    def most_shared(self, *, limit: int = 0) -> list[SharedPrefix]:
        """Prefixes of several sessions, most saved bytes first; at most `limit`, by default 50."""
        request = ListSharedPrefixesRequest(page_size=limit)
        found = self._wire.call(self._wire.prefixes.ListSharedPrefixes, request).prefixes
        return [read_shared_prefix(one) for one in found]

    def adopt(
        self,
        session: str | SessionInfo,
        model: CallerModel,
        token_ids: TokenIds,
        *,
        contents: Iterable[Content] = (),
        if_generation_match: int | None = None,
        source: str = "",
    ) -> SessionInfo:
        """Let a new session begin with as many of these tokens as another one has.

        See SessionHandle.adopt.
        """
        request = AdoptPrefixRequest(
            session=session if isinstance(session, str) else session.name,
            model_fingerprint=model.fingerprint,
            if_generation_match=if_generation_match,
            prefix=_prefix(token_ids, contents),
            source=source,
        )
        attachment = self._routes.attach()
        if attachment is None:
            return read_session_info(self._wire.call(self._wire.prefixes.AdoptPrefix, request).session)
        result = attachment.stream.carry_out(Operation(adopt_prefix=request))
        return read_session_info(result.adopted.session)


def _streams(model: CallerModel | ModelInfo) -> Iterable[Stream]:
    """All of a model's."""
    if isinstance(model, CallerModel):
        return [spec.stream for spec in model.spec.streams]
    return chain.from_iterable(stored.streams.streams() for stored in model.streams)


def _prefix(token_ids: TokenIds, contents: Iterable[Content], keys: Sequence[bytes] = ()) -> Prefix:
    return Prefix(
        token_ids=_packed(token_ids), keys=keys, contents=[write_content(part) for part in contents]
    )


def _packed(token_ids: TokenIds) -> bytes:
    """As int32, little endian. Raises InvalidArgument for what is none."""
    # Compared after the conversion: numpy cuts what does not fit, and a cut id is another token's.
    given = np.asarray(token_ids)
    if given.ndim != 1 or not (given.size == 0 or np.issubdtype(given.dtype, np.integer)):
        raise InvalidArgument(field="token_ids", problem="are not a list of integers")
    packed = given.astype("<i4", copy=False)
    if packed is not given and not np.array_equal(packed, given):
        raise InvalidArgument(field="token_ids", problem="are not all within 32 bits")
    return packed.tobytes()
