"""Shares: what one of an engine's ranks has of its model, and reads of a session. Pure.

Worst case: heads that cannot be shared out evenly, refused.
"""

from dataclasses import dataclass

from ctxcache.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ModelShare:
    """One rank: its place among its stage's `tensor_ranks`, and the layers [first_layer, end_layer)."""

    first_layer: int
    end_layer: int
    tensor_rank: int = 0
    tensor_ranks: int = 1
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_rank < self.tensor_ranks:
            problem = f"{self.tensor_rank} is not within [0, {self.tensor_ranks})"
            raise InvalidArgument(field="tensor_rank", problem=problem)
        if not 0 <= self.stage < self.stages:
            raise InvalidArgument(field="stage", problem=f"{self.stage} is not within [0, {self.stages})")
        if not 0 <= self.first_layer < self.end_layer:
            problem = f"[{self.first_layer}, {self.end_layer}) are no layers"
            raise InvalidArgument(field="first_layer", problem=problem)

    @property
    def layer_count(self) -> int:
        """Layers that the rank has."""
        return self.end_layer - self.first_layer

    @property
    def rank(self) -> int:
        """The rank's number among all ranks of all stages."""
        return self.stage * self.tensor_ranks + self.tensor_rank

    @property
    def rank_count(self) -> int:
        """Ranks of all stages."""
        return self.stages * self.tensor_ranks

    def tokens(self, begin: int, end: int) -> tuple[int, int]:
        """The part of tokens [begin, end) that the rank reads.

        Parts are disjoint, in order of ranks, and equally long but for the last ones.
        """
        # 10 tokens on 4 ranks: [0, 3) [3, 6) [6, 9) [9, 10); 2 tokens: [0, 1) [1, 2) [2, 2) [2, 2).
        most = -(-(end - begin) // self.tensor_ranks)
        first = min(begin + self.tensor_rank * most, end)
        return first, min(first + most, end)

    def heads(self, head_count: int) -> slice:
        """The K/V heads that the rank keeps: its part, or a shared one where heads are fewer than ranks.

        Raises InvalidArgument.
        """
        ranks = self.tensor_ranks
        # 8 heads, 4 ranks: 2 each. 2 heads, 4 ranks: ranks 0 and 1 keep head 0, ranks 2 and 3 head 1.
        if head_count % ranks and ranks % head_count:
            problem = f"{head_count} heads cannot be shared out among {ranks} ranks"
            raise InvalidArgument(field="tensor_ranks", problem=problem)
        first = self.tensor_rank * head_count // ranks
        return slice(first, first + max(head_count // ranks, 1))
