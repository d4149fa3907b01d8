"""Worth: whether to ask other hosts for a prefix, and how long to wait for it.

    lacking tokens ÷ prefill rate                   computing them takes so long: nobody waits longer
    lacking bytes ÷ rate of former arrivals         bringing them takes so long, as far as is known
    chance that the bucket knows of them            learned, and tried again now and then

Pure: times are told. Leaf.
"""

from dataclasses import dataclass, field

LEAST_TOKENS = 256
"""Fewer are computed sooner than anybody is asked."""
FIRST_BOUNDARY = 1024
"""The shortest prefix that the bucket knows of; the next ones are twice as long each."""
BOUNDARIES_AT_ONCE = 4
LEAST_PROMPT_TOKENS = 2 * FIRST_BOUNDARY
FOUND_PART = 4
"""A prompt of which one part in so many is here asks the bucket for no more."""
FIRST_BYTES_PER_S = 400e6
FIRST_LOOK_S = 0.02
FIRST_CHANCE = 0.5
WEIGHT = 0.2
"""The last measurement's part in an average."""
TRY_AGAIN = 32
"""One in so many questions that are not worth it is asked all the same: the averages may be outdated."""


def boundaries(token_count: int) -> list[int]:
    """The lengths at which the bucket knows prefixes of so many tokens, the shortest first."""
    lengths, length = list[int](), FIRST_BOUNDARY
    while length <= token_count:
        lengths.append(length)
        length *= 2
    return lengths


@dataclass(slots=True)
class Gain:
    """Questions of one sort, that are asked where they gain time."""

    unasked_count: int = 0
    """Questions that were not worth it, one after the other."""

    def is_worth(self, gain_s: float) -> bool:
        """Whether to ask; one question in `TRY_AGAIN` whatever it gains."""
        if gain_s > 0:
            self.unasked_count = 0
            return True
        self.unasked_count += 1
        return self.unasked_count % TRY_AGAIN == 0


@dataclass(slots=True)
class Worth:
    """What asking has cost and brought. `prefill_tokens_per_s`: the engines' own."""

    prefill_tokens_per_s: float
    bytes_per_s: float = FIRST_BYTES_PER_S
    look_s: float = FIRST_LOOK_S
    chance: float = FIRST_CHANCE
    moves: Gain = field(default_factory=Gain)
    looks: Gain = field(default_factory=Gain)

    def patience_s(self, lacking_tokens: int, token_bytes: int) -> float:
        """How long a prefix may take to come from a host that has it; 0 where it is not to be asked for."""
        saved_s = self._saved_s(lacking_tokens, token_bytes)
        is_worth = lacking_tokens >= LEAST_TOKENS and self.moves.is_worth(saved_s)
        # Whatever was expected: no user waits longer than computing takes.
        return lacking_tokens / self.prefill_tokens_per_s if is_worth else 0.0

    def is_worth_looking(self, asked_tokens: int, found_tokens: int, token_bytes: int) -> bool:
        """Whether the bucket is to be asked who has a prompt of which a part was found here."""
        if asked_tokens < LEAST_PROMPT_TOKENS or found_tokens * FOUND_PART >= asked_tokens:
            return False
        saved_s = self._saved_s(asked_tokens - found_tokens, token_bytes)
        return self.looks.is_worth(self.chance * saved_s - self.look_s)

    def _saved_s(self, lacking_tokens: int, token_bytes: int) -> float:
        computed_s = lacking_tokens / self.prefill_tokens_per_s
        return computed_s - lacking_tokens * token_bytes / self.bytes_per_s

    def looked(self, seconds: float, *, is_known: bool) -> None:
        """The bucket was asked who has a prefix."""
        self.look_s += WEIGHT * (seconds - self.look_s)
        self.chance += WEIGHT * (is_known - self.chance)

    def came(self, size_bytes: int, seconds: float) -> None:
        """Rows of a prefix came, and took so long with all that was asked before."""
        if size_bytes and seconds > 0:
            self.bytes_per_s += WEIGHT * (size_bytes / seconds - self.bytes_per_s)
