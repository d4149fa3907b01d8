"""PrefixService, and the same operations for local clients: sessions' prefixes are found by their tokens."""

from collections.abc import Iterable, Sequence

from ctxcache.cache import Cache
from ctxcache.cache.prefixes import Found
from ctxcache.cache.state import Pace
from ctxcache.core.prefix.keys import BLOCK_BYTES, BLOCK_TOKENS, KEY_BYTES, TOKENS_LIMIT_BYTES
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import TOKEN_ROW_BYTES, Content
from ctxcache.service import convert, validate
from ctxcache.service.blocks import lease_ttl_ns
from ctxcache.service.callers import Context, current
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.whereabouts import ALONE, Wanted, Whereabouts
from ctxcache.v1 import prefix_pb2, prefix_pb2_grpc, session_pb2

KEYS_LIMIT = TOKENS_LIMIT_BYTES // BLOCK_BYTES
SECOND_NS = 10**9
HOST_LIMIT = 255
_STATES = {
    Found.MISS: session_pb2.LOOKUP_STATE_MISS,
    Found.HIT: session_pb2.LOOKUP_STATE_HIT,
    Found.PENDING: session_pb2.LOOKUP_STATE_PENDING,
}


class PrefixService(prefix_pb2_grpc.PrefixServiceServicer):
    """See proto/ctxcache/v1/prefix.proto."""

    def __init__(self, cache: Cache, turns: Turns, whereabouts: Whereabouts = ALONE) -> None:
        """`turns` bound look-ups of long prompts."""
        self._cache, self._turns, self._whereabouts = cache, turns, whereabouts

    async def MatchPrefix(
        self, request: prefix_pb2.MatchPrefixRequest, context: Context
    ) -> prefix_pb2.MatchPrefixResponse:
        """See the proto."""
        pace = LoopSlice(self._turns)
        return await match(self._cache, request, current().tenant, pace, self._whereabouts)

    async def AdoptPrefix(
        self, request: prefix_pb2.AdoptPrefixRequest, context: Context
    ) -> prefix_pb2.AdoptPrefixResponse:
        """See the proto."""
        pace = LoopSlice(self._turns)
        return await adopt(self._cache, request, current().tenant, pace, self._whereabouts)

    async def ListSharedPrefixes(
        self, request: prefix_pb2.ListSharedPrefixesRequest, context: Context
    ) -> prefix_pb2.ListSharedPrefixesResponse:
        """See the proto."""
        limit = validate.page_size(request.page_size)
        pace = LoopSlice(self._turns)
        prefixes = await self._cache.prefixes.most_shared(current().tenant, limit, pace=pace)
        return prefix_pb2.ListSharedPrefixesResponse(
            prefixes=[
                prefix_pb2.SharedPrefix(
                    session=prefix.session_name,
                    key=prefix.key,
                    token_count=prefix.token_count,
                    session_count=prefix.session_count,
                    saved_bytes=prefix.saved_bytes,
                )
                for prefix in prefixes
            ]
        )


async def match(
    cache: Cache,
    request: prefix_pb2.MatchPrefixRequest,
    tenant: str,
    pace: Pace,
    whereabouts: Whereabouts,
) -> prefix_pb2.MatchPrefixResponse:
    """See the proto. Raises InvalidArgument, ModelNotFound."""
    if request.salt and request.prefix.keys and not request.prefix.token_ids:
        raise InvalidArgument(field="salt", problem="is in the keys already")
    wanted = Wanted(
        validate.model_id(request.model, "model"),
        validate.stream_ranges(request.layout, "layout"),
        _prefix(request.prefix),
        validate.salt(request.salt),
        _contents(request.prefix),
        _host(request.source, "source"),
        _host(request.engine_host, "engine_host"),
    )
    ttl_ns = lease_ttl_ns(request.lease_ttl, "lease_ttl") if request.HasField("lease_ttl") else 0
    await whereabouts.prefix_comes(tenant, wanted, pace)
    prefix = await cache.prefixes.match(
        tenant,
        wanted.model_id,
        wanted.layout,
        wanted.asked,
        token_count=request.prefix.token_count or None,
        salt=wanted.salt,
        contents=wanted.contents,
        offered=request.prefix.keys,
        lease_ttl_ns=ttl_ns,
        pace=pace,
    )
    response = prefix_pb2.MatchPrefixResponse(
        state=_STATES[prefix.found],
        token_count=prefix.token_count,
        dram_token_count=prefix.dram_token_count,
        reason=prefix.shortfall.name if prefix.shortfall else "",
    )
    if prefix.lease is not None:
        response.lease_token = prefix.lease.token
        expire_time_ns = convert.wall_time_ns(cache.state.clock, prefix.lease.deadline_ns)
        response.lease_expire_time.FromNanoseconds(expire_time_ns)
    if prefix.found is not Found.MISS:
        ready_in_s = cache.promotions.throughput.time_s(prefix.missing_bytes)
        response.ready_in.CopyFrom(convert.duration(int(ready_in_s * SECOND_NS)))
    return response


async def adopt(
    cache: Cache,
    request: prefix_pb2.AdoptPrefixRequest,
    tenant: str,
    pace: Pace,
    whereabouts: Whereabouts,
) -> prefix_pb2.AdoptPrefixResponse:
    """See the proto. Raises as Prefixes.adopt does, SessionMoved."""
    session_id = validate.session_id(request.session, "session")
    fingerprint = validate.fingerprint(request.model_fingerprint)
    asked, contents, source = (
        _prefix(request.prefix),
        _contents(request.prefix),
        _host(request.source, "source"),
    )
    await whereabouts.come(tenant, session_id)
    session = cache.ledger.find(tenant, session_id)
    # One that has tokens adopts nothing, and is refused below.
    if not session.token_count:
        layout = session.layout.outline.ranges
        wanted = Wanted(session.model_id, layout, asked, session.salt, contents, source)
        await whereabouts.prefix_comes(tenant, wanted, pace)
    adopted = await cache.prefixes.adopt(
        tenant,
        session_id,
        fingerprint,
        request.if_generation_match if request.HasField("if_generation_match") else None,
        asked,
        contents=contents,
        offered=request.prefix.keys,
        pace=pace,
    )
    response = prefix_pb2.AdoptPrefixResponse()
    convert.fill_session(response.session, adopted.view, cache.state.clock)
    return response


def _host(given: str, field: str) -> str:
    if len(given) > HOST_LIMIT:
        raise InvalidArgument(field=field, problem=f"has more than {HOST_LIMIT} characters")
    return given


def _contents(given: prefix_pb2.Prefix) -> Sequence[Content]:
    if given.contents and given.keys and not given.token_ids:
        raise InvalidArgument(field="prefix.contents", problem="are in the keys already")
    return validate.contents(given.contents, 0, "prefix.contents")


def checked_keys(given: Iterable[bytes], field: str) -> list[bytes]:
    """Keys of a prompt's tokens. Raises InvalidArgument."""
    # The keys are made a list once: protobuf's own list makes an object of a key at each look.
    keys = list(given)
    validate.within(len(keys), 1, KEYS_LIMIT, field)
    # Keys have one length: a shorter key would never be found, and nothing would say why.
    if {*map(len, keys)} != {KEY_BYTES}:
        i, length = next((i, len(key)) for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(field=f"{field}[{i}]", problem=f"{KEY_BYTES} bytes expected, {length} given")
    return keys


def _prefix(given: prefix_pb2.Prefix) -> bytes | Sequence[bytes]:
    """The token ids, or the keys where there are none, with their lengths checked."""
    if given.keys:
        keys = checked_keys(given.keys, "prefix.keys")
        # Keys beside token ids are an offer, which is compared with the ids.
        if not given.token_ids:
            _check_count(given, len(keys), given.token_count // BLOCK_TOKENS)
            return keys
    size_bytes = validate.within(
        len(given.token_ids), TOKEN_ROW_BYTES, TOKENS_LIMIT_BYTES, "prefix.token_ids"
    )
    if size_bytes % TOKEN_ROW_BYTES:
        problem = f"{size_bytes} bytes are no whole number of {TOKEN_ROW_BYTES}"
        raise InvalidArgument(field="prefix.token_ids", problem=problem)
    _check_count(given, size_bytes // TOKEN_ROW_BYTES, given.token_count)
    return given.token_ids


def _check_count(given: prefix_pb2.Prefix, actual: int, told: int) -> None:
    if given.token_count and told != actual:
        problem = (
            f"{given.token_count} are not those of {len(given.token_ids)} B of ids, {len(given.keys)} keys"
        )
        raise InvalidArgument(field="prefix.token_count", problem=problem)
