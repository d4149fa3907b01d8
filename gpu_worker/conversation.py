"""Which tokens a turn reuses, prefills and drops: arithmetic over token ids, no model and no store."""

from collections.abc import Sequence
from dataclasses import dataclass

from ctxcache.errors import InvalidArgument

SINK_TOKENS = 4
"""First tokens that truncation keeps: without them real models lose half their quality."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep the first `sink_count` and the last `recent_count` of `token_count` tokens."""

    token_count: int
    sink_count: int
    recent_count: int

    @property
    def kept_count(self) -> int:
        """Tokens that stay."""
        return min(self.token_count, self.sink_count + self.recent_count)

    def apply(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that stay."""
        begin = max(self.token_count - self.recent_count, self.sink_count)
        return [*token_ids[: self.sink_count], *token_ids[begin:]]


def fit(
    history_count: int, new_count: int, *, window: int, sink_count: int = SINK_TOKENS
) -> Truncation | None:
    """How to truncate a history so that `new_count` more tokens fit into the context window.

    None: they fit as it is. Else the oldest half behind the sinks goes, again and again until the
    rest fits. Raises InvalidArgument when not even the sinks leave room.
    Source: CachedAttention, section 3.4 (ratio 0.5); sinks: docs/architecture.md.
    """
    if history_count + new_count <= window:
        return None
    if sink_count + new_count > window:
        problem = f"{new_count} tokens and {sink_count} sinks do not fit into a window of {window}"
        raise InvalidArgument(field="new_token_ids", problem=problem)
    recent = history_count - history_count // 2
    while sink_count + recent + new_count > window:
        recent -= max(recent // 2, 1)
    return Truncation(history_count, min(sink_count, history_count), recent)
