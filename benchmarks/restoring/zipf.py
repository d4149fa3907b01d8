"""Which session is asked for next, by Zipf's law. Pure but for the generator that is given."""

import numpy as np
from numpy.typing import NDArray


def shares(session_count: int, skew: float) -> NDArray[np.float64]:
    """Each session's share of the requests: of the one of rank r, from 1, in proportion to r ** -skew. Skew 0: all alike."""
    weights = np.arange(1, session_count + 1, dtype=np.float64) ** -skew
    return weights / weights.sum()


def draw(session_count: int, skew: float, request_count: int, generator: np.random.Generator) -> list[int]:
    """Session numbers, each drawn by itself; the most popular is 0."""
    found: list[int] = generator.choice(session_count, request_count, p=shares(session_count, skew)).tolist()
    return found
