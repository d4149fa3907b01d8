"""A context window: what of a conversation it still holds. Pure.

Source: CachedAttention, ATC'24, sections 3.4 and 4.1: on overflow the earliest half of the window is dropped.
"""


def dropped_tokens(token_count: int, context_tokens: int) -> int:
    """How many of the earliest tokens go so that the others fit; halves of the window, as few as will do."""
    if token_count <= context_tokens:
        return 0
    half_tokens = (context_tokens + 1) // 2
    return min(-(-(token_count - context_tokens) // half_tokens) * half_tokens, token_count)
