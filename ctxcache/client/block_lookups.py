"""Look-ups of blocks over an access stream: which blocks are there, and holds of those in DRAM.

An engine looks blocks up once for each request that it schedules, more often than it makes any other call.
Its message is put together from bytes made before:

    | tag LookupBlocks, length | space (made once per space) | tag, 32 | key | tag, 32 | key | …

Answers of the same bytes are the same, so that small ones are kept decoded.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from ctxcache.client.access import AccessStream, Begun, ClockPair, Hold
from ctxcache.client.block_leases import block_hold
from ctxcache.client.convert import SPACES_KEPT, space_to_wire, ttl_to_wire
from ctxcache.client.types import BlockSpace, FoundBlock, LookupState
from ctxcache.v1 import block_pb2
from ctxcache.v1.arena_pb2 import AccessResponse, Operation, OperationError
from ctxcache.wire.frames import LENGTH_DELIMITED, varint

KEYS_PER_CALL = 4096
"""The most keys of one call: the server's own bound."""
ANSWERS_KEPT, REMEMBERED_BYTES = 256, 512
"""Answers that are kept decoded, and the longest such one.

Blocks of an engine have few sizes, and the first ones of a prompt are mostly there.
"""
KEY_BYTES = 32
_LOOKUP = bytes((Operation.LOOKUP_BLOCKS_FIELD_NUMBER << 3 | LENGTH_DELIMITED,))
"""The beginning of a look-up as an operation, before its length."""
_KEY = bytes((block_pb2.LookupBlocksRequest.KEYS_FIELD_NUMBER << 3 | LENGTH_DELIMITED, KEY_BYTES))
"""The bytes in front of each key of a message."""
STATES: dict[int, LookupState] = {state.value: state for state in LookupState}


def look_up(stream: AccessStream, space: BlockSpace, keys: Sequence[bytes]) -> list[FoundBlock]:
    """The block under each key, at most KEYS_PER_CALL of them."""
    request = _lookup(space, keys)
    encoded = stream.ask(_LOOKUP + varint(len(request)) + request)
    # `__wrapped__` is the function without its cache: long answers would fill it, and hardly come again.
    read = _answer if len(encoded) <= REMEMBERED_BYTES else _answer.__wrapped__
    answer = read(encoded)
    if isinstance(answer, OperationError):
        raise stream.error_of(answer)
    return answer


class HoldingLookUp:
    """A look-up under way, whose first keys were sent. One thread waits for it, or gives it up."""

    def __init__(self, stream: AccessStream, space: BlockSpace, keys: Sequence[bytes], ttl_s: float) -> None:
        self._stream, self._space = stream, space
        self._hold_field = _hold_field(ttl_s)
        self._parts = [keys[begin : begin + KEYS_PER_CALL] for begin in range(0, len(keys), KEYS_PER_CALL)]
        self._found, self._holds = list[FoundBlock](), list[Hold]()
        self._begun: Begun | None = None
        self._begin()

    def result(self) -> tuple[list[FoundBlock], list[Hold]]:
        """See `look_up_and_hold`."""
        self.is_over(math.inf)
        return self._found, self._holds

    def is_over(self, within_s: float) -> bool:
        """Whether `result` has nothing to wait for, now or after so long. Raises as `look_up_and_hold`."""
        try:
            while self._begun is not None:
                answer = self._begun.answer(within_s)
                if answer is None:
                    return False
                self._take(answer)
                self._begin()
        except BaseException:
            self._begun = None
            self.give_up()
            raise
        return True

    def give_up(self) -> None:
        """End the look-up and its holds, without waiting for an answer."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.give_up()
        for hold in self._holds:
            hold.release_soon()

    def _begin(self) -> None:
        self._begun = None
        if self._parts:
            # Encoded messages in a row are one message.
            request = _lookup(self._space, self._parts.pop(0)) + self._hold_field
            self._sent = ClockPair.now()
            self._begun = self._stream.begin(_LOOKUP + varint(len(request)) + request)

    def _take(self, encoded: bytes) -> None:
        [result] = AccessResponse.FromString(encoded).results
        if result.HasField("error"):
            raise self._stream.error_of(result.error)
        answer = result.found_blocks
        if answer.token:
            self._holds.append(block_hold(self._stream, self._sent, answer))
        self._found += blocks_of(answer)


def blocks_of(answer: block_pb2.LookupBlocksResponse) -> list[FoundBlock]:
    """The blocks of an answer, in the order of the keys."""
    facts = list(zip(answer.states, answer.size_bytes, answer.are_in_dram, strict=True))
    # Most blocks are alike, and share one object.
    made = {fact: FoundBlock(STATES[fact[0]], *fact[1:]) for fact in {*facts}}
    return [made[fact] for fact in facts]


@lru_cache(ANSWERS_KEPT)
def _answer(encoded: bytes) -> list[FoundBlock] | OperationError:
    """The blocks of an encoded answer. The list must not be changed: other callers get the same one."""
    [result] = AccessResponse.FromString(encoded).results
    return result.error if result.HasField("error") else blocks_of(result.found_blocks)


@lru_cache(SPACES_KEPT)
def _hold_field(ttl_s: float) -> bytes:
    return block_pb2.LookupBlocksRequest(hold=ttl_to_wire(ttl_s)).SerializeToString()


@lru_cache(SPACES_KEPT)
def _lookup_head(space: BlockSpace) -> bytes:
    return block_pb2.LookupBlocksRequest(space=space_to_wire(space)).SerializeToString()


def _lookup(space: BlockSpace, keys: Sequence[bytes]) -> bytes:
    """An encoded LookupBlocksRequest, as protobuf would make it."""
    # Only keys of the usual length have the prepared bytes in front.
    if {*map(len, keys)} == {KEY_BYTES}:
        return _lookup_head(space) + _KEY.join((b"", *keys))
    return block_pb2.LookupBlocksRequest(space=space_to_wire(space), keys=keys).SerializeToString()
