"""A day of many users' conversations, drawn: the load of a store that does not run yet.

Pure. Conversations begin as a Poisson process over the busy hours. Each has the same number of turns, which
share its tokens evenly but for the factor of its length; pauses between turns are lognormal. A part of the
conversations stands for all of them: what is measured of it scales, because users do not know each other.
"""

import math
import random
from dataclasses import dataclass

from ctxcache.simulate.rows import TraceTurn

HOUR_S = 3600.0
LENGTH_SIGMA = 0.7
"""Of the logarithm of a conversation's length; CachedAttention's ShareGPT has as much."""
PAUSE_SIGMA = 1.2
"""Of the logarithm of a pause: one in ten is more than twice the mean."""
ANSWER_SHARE = 0.4
"""The part of a turn's tokens that the model writes."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The users of a day. `token_count`: tokens of a conversation at its end, the mean of all."""

    user_count: int
    conversations_per_user: float
    token_count: int
    turn_count: int
    pause_s: float
    busy_s: float

    @property
    def conversation_count(self) -> float:
        """Conversations a day."""
        return self.user_count * self.conversations_per_user

    def sample(self, most: int, *, seed: int = 1) -> tuple[list[TraceTurn], float]:
        """The turns of at most so many of the day's conversations by arrival, and the share that they are."""
        count = max(1, min(most, round(self.conversation_count)))
        chance = random.Random(seed)  # noqa: S311  a load, no secret
        turns: list[TraceTurn] = []
        for number in range(count):
            arrival_s, factor = chance.uniform(0, self.busy_s), around_one(chance, LENGTH_SIGMA)
            tokens = max(2.0, factor * self.token_count / self.turn_count)
            written = max(1, round(tokens * ANSWER_SHARE))
            given = max(1, round(tokens) - written)
            for turn in range(self.turn_count):
                before = turn * (given + written)
                pause_s = self.pause_s * around_one(chance, PAUSE_SIGMA) if turn else None
                arrival_s += pause_s or 0.0
                name = b"%d" % number
                turns.append(TraceTurn(name, arrival_s, given, written, before, turn + 1, think_s=pause_s))
        turns.sort(key=lambda drawn: drawn.arrival_s)
        return turns, count / self.conversation_count


def around_one(chance: random.Random, sigma: float) -> float:
    """A lognormal factor with the mean 1."""
    return math.exp(chance.gauss(-sigma * sigma / 2, sigma))
