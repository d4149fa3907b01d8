"""One turn of an engine: what it begins with, how it goes on, and what came of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from transformers import Cache

from ctxcache.client.types import Durability, SessionInfo
from ctxcache.format.packing import loss_nats
from gpu_worker.engines.transformers_restoring import Restoring
from gpu_worker.families.generation import PREFILL_PIECE_TOKENS
from gpu_worker.forms.snapshots import GRAIN_TOKENS, Snapshots


@dataclass(slots=True)
# A turn's tokens, by where they come from:
#
#     history known to the caller │ new tokens │ generated
#     ├─ reused ─┼─ prefilled ────┴────────────┤
#     the store's rows              computed, and saved as it goes
#
#     reused      the prefix that session and history have in common, if its restore is whole
#     dropped     tokens between the sinks and the recent ones, where the context would be too long
class Turn:
    """The result of one turn. Times in nanoseconds from its begin.

    `miss_reason` says why the store had less than it should: the reason of the error that a read met, that
    truncation met, or that stopped an earlier turn's saves. Empty for a hit. `history_token_count` tokens
    came before the turn, after `dropped_token_count` were truncated; `reused_token_count` of them were
    restored, and `prefilled_token_count` were computed. Prefill began after `restore_ns`; the last layer
    was usable `restored_ns` after the restore's begin, and a planner thought it would be after
    `predicted_ns` (0 where the plan was the caller's). States of `snapshot_token_count` tokens came from a
    snapshot, and were brought forward from there. `loss_nats`: how far the reply's predictions may be from
    those of exact rows, because rows in few bits were restored: KL divergence, the mean of a passage's
    tokens; 0 where they were exact. `ahead_token_count` of the reused tokens were computed by `rerendered`.
    """

    token_ids: list[int] = field(default_factory=list)
    history_token_count: int = 0
    dropped_token_count: int = 0
    reused_token_count: int = 0
    prefilled_token_count: int = 0
    snapshot_token_count: int = 0
    restore_ns: int = 0
    restored_ns: int = 0
    predicted_ns: int = 0
    first_token_ns: int = 0
    miss_reason: str = ""
    loss_nats: float = 0.0
    ahead_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Rerendered:
    """What became of a rendering that was to be there before its turn.

    Of `token_count` tokens of the history, `common_token_count` were the conversation's already, and
    `computed_token_count` were computed. `is_in_place`: the conversation has all of them now. `gave_way`: a
    turn came, and what was computed is found by its tokens. `reason`: of the error that ended it; empty where
    none did, and where there was nothing to do.
    """

    token_count: int = 0
    common_token_count: int = 0
    computed_token_count: int = 0
    is_in_place: bool = False
    gave_way: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """How new tokens go through the model: in passes of at most `tokens`.

    `begins` is called with the size of each before it runs. `durability`: of what is saved; None for the
    engine's.
    """

    tokens: int = PREFILL_PIECE_TOKENS
    begins: Callable[[int], None] = lambda _count: None
    durability: Durability | None = None


FAST = Steps()


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a turn: a session that holds `saved`, and a cache that holds its KV or is about to.

    Where `is_missing` the cache is empty, and the session's tokens are computed without being saved again.
    `lost`: tokens of a session of which only the ids were worth keeping.
    """

    session: SessionInfo
    saved: list[int]
    cache: Cache
    restoring: Restoring | None = None
    is_missing: bool = False
    lost: Sequence[int] = ()

    @property
    def reused_count(self) -> int:
        """Tokens that are restored."""
        return 0 if self.is_missing else len(self.saved)

    def note(self, turn: Turn, known: Sequence[int] | None, new_count: int) -> list[int]:
        """Tell a turn how it starts. Returns the history's tokens behind `saved`, which are to be computed.

        `known`: the history as the caller knows it; without one, tokens that were read are known though
        their rows are lost. `new_count`: how many tokens follow the history.
        """
        missing = list(self.lost) if known is None else list(known[len(self.saved) :])
        turn.history_token_count = len(self.saved) + len(missing)
        turn.reused_token_count, turn.loss_nats = self.reused_count, self.loss_nats
        turn.snapshot_token_count = 0 if self.restoring is None else self.restoring.snapshot_tokens
        turn.prefilled_token_count = turn.history_token_count - self.reused_count + new_count
        return missing

    def note_times(self, turn: Turn) -> None:
        """Tell a turn how long its restore took, when every layer is there."""
        if self.restoring is not None:
            turn.restored_ns = self.restoring.restored_ns
            turn.predicted_ns = int(self.restoring.choice.predicted_s * 1e9)

    @property
    def loss_nats(self) -> float:
        """The cost in predictions of the restored rows' kinds; 0 where the rows are exact."""
        # A restore on the host has no plan, and only exact rows.
        streams = self.restoring.choice.streams() if self.restoring is not None and self.reused_count else ()
        return loss_nats(stream.kind for stream in streams)


class Taking:
    """Snapshots of one turn: one every so many tokens, and one at its end."""

    def __init__(self, snapshots: Snapshots, start: Start, every: int) -> None:
        self._snapshots, self._every, self._cache = snapshots, every, start.cache
        self._salt, ttl_ns = start.session.salt, start.session.ttl_ns
        self._ttl_s = None if ttl_ns is None else ttl_ns / 1e9
        self._last = 0 if start.restoring is None else start.restoring.snapshot_tokens
        self._token_ids = list(start.saved)

    @contextmanager
    def around(self, passing: AbstractContextManager[None], token_ids: Sequence[int]) -> Iterator[None]:
        """Run a pass over these tokens within `passing`. A snapshot may follow it."""
        with passing:
            yield
        self._token_ids.extend(token_ids)
        # Passes end at these counts (`Stops`), so that a pass never runs over one.
        if len(self._token_ids) % self._every == 0:
            self._take()

    def ended(self) -> None:
        """Take the last snapshot: as a rule the next turn goes on from here."""
        # A turn that is shorter is cheaper to run again than a copy of all states.
        if len(self._token_ids) - self._last >= GRAIN_TOKENS:
            self._take()

    def _take(self) -> None:
        if self._snapshots.take(self._cache, self._token_ids, self._salt, self._ttl_s):
            self._last = len(self._token_ids)
