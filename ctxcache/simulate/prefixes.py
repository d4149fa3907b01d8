"""Sessions of requests that say which prefixes of 512 tokens they hold, as Mooncake's traces do.

A request continues the one that last held its longest known prefix, if it holds all full blocks of that one;
one that was continued before is forked: another session that begins with a later turn. Blocks of answers are
not named, so a history is what the predecessor held and answered, as far as the input goes.
Memory: the MOST_BLOCKS blocks seen last, and their requests.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ctxcache.simulate.row import Row
from ctxcache.simulate.turn import Turn

BLOCK_TOKENS = 512
MOST_BLOCKS = 1 << 20
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(slots=True)
class _Request:
    session: int
    number: int
    input_tokens: int
    output_tokens: int
    is_continued: bool = False


class Conversations:
    """Requests in order of arrival; an id stands for a block and for all that are before it."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._holders: OrderedDict[int, _Request] = OrderedDict()
        self._session_count = 0

    def turn(self, row: Row) -> Turn:
        """Read the next request. Raises InvalidTrace."""
        input_tokens, output_tokens = row.count("input_length"), row.count("output_length")
        blocks = row.whole_numbers("hash_ids")
        if len(blocks) != -(-input_tokens // BLOCK_TOKENS):
            row.refuse("hash_ids", f"{len(blocks)} blocks of {BLOCK_TOKENS} for {input_tokens} tokens")
        request, history_tokens = self._placed(blocks, input_tokens, output_tokens)
        for block in blocks:
            self._holders[block] = request
            self._holders.move_to_end(block)
        while len(self._holders) > self._most_blocks:
            self._holders.popitem(last=False)
        return Turn(
            b"%d" % request.session, row.time_ms("timestamp") / 1000, input_tokens - history_tokens,
            output_tokens, history_tokens, request.number,
        )  # fmt: skip

    def _placed(self, blocks: list[int], input_tokens: int, output_tokens: int) -> tuple[_Request, int]:
        """The request in its session, and how many tokens of history it has."""
        shared = next((n for n, block in enumerate(blocks) if block not in self._holders), len(blocks))
        shared_tokens = min(shared * BLOCK_TOKENS, input_tokens)
        # The first block is a system prompt that everyone has.
        before = self._holders[blocks[shared - 1]] if shared > 1 else None
        is_later = before is not None and shared >= before.input_tokens // BLOCK_TOKENS
        if before is None or not is_later:
            return self._begun(1, input_tokens, output_tokens), shared_tokens
        if before.is_continued:
            return self._begun(before.number + 1, input_tokens, output_tokens), shared_tokens
        before.is_continued = True
        held_tokens = min(before.input_tokens + before.output_tokens, input_tokens - 1)
        request = _Request(before.session, before.number + 1, input_tokens, output_tokens)
        return request, max(held_tokens, shared_tokens)

    def _begun(self, number: int, input_tokens: int, output_tokens: int) -> _Request:
        self._session_count += 1
        return _Request(self._session_count - 1, number, input_tokens, output_tokens)
