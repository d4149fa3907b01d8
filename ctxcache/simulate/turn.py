"""What a trace is made of."""

from typing import NamedTuple


class Turn(NamedTuple):
    """One request. `history_tokens` and `number` are None where the trace does not say."""

    session: bytes
    arrival_s: float
    input_tokens: int
    output_tokens: int
    history_tokens: int | None
    number: int | None
