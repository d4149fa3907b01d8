"""The messages between the scheduler's side and the workers, with each step.

A conversation of several ranks is a session for each: every rank saves and restores its part. Messages name
the session of the first rank, and list all of them where a worker opens or reads its own.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ctxcache.client.types import HintAction, SessionInfo
from gpu_worker.engines.link import Refused

Rank = TypeVar("Rank")
"""A number, or one for each kind of parallelism."""
Writing = Callable[[], AbstractContextManager[None]]
"""Entered around each write to a request's blocks. Raises where they are not to be written to any more."""


# One conversation on 2 ranks, each with a session of its own heads' blocks:
#
#     sessions/alice          rank 0: saved, restored by worker 0        the name in all messages
#     sessions/alice.rank1    rank 1: saved, restored by worker 1
#
# Layers that keep different tokens, some a window and some all, are in different groups, and a request has
# blocks in each group:
#
#     tokens      0 .. 31   32 .. 63   64 .. 95   96 .. 127
#     group 0     7         8          9          12          full attention
#     group 1     ABSENT    ABSENT     10         13          a window of 40 tokens
BlockIds = tuple[tuple[int, ...], ...]
"""By group, in the order of the tokens that they hold."""
ABSENT = -1
"""In the place of a block that the engine does not keep: its tokens are out of the window."""


def first_kept(block_ids: Sequence[int]) -> int | None:
    """The index of the first block that is there: windows keep the last ones. None where all are ABSENT."""
    return next((i for i, block in enumerate(block_ids) if block != ABSENT), None)


class BlockLoad(NamedTuple):
    """Restore tokens `[begin, end)` of a session, into the request's blocks, all of which are listed."""

    request_id: str
    sessions: tuple[SessionInfo, ...]
    """One for each rank."""
    begin: int
    end: int
    block_ids: BlockIds
    answer_s: float
    """How long the store may leave the waiting request without a sign of life."""


class BlockSave(NamedTuple):
    """Save the tokens from `begin` on: when the step has been computed they fill these blocks."""

    session_name: str
    begin: int
    block_ids: BlockIds
    token_ids: tuple[int, ...]


class Opened(NamedTuple):
    """Save what is computed of a request from here on, as far as its session does not have it."""

    sessions: tuple[SessionInfo, ...]
    """One for each rank."""
    token_count: int
    """Tokens of the prompt that all of them have."""
    ahead: tuple[tuple[int, ...], ...]
    """Token ids that each session has behind those. They stay unless the request's tokens differ."""
    restorable_count: int
    """Tokens of the prompt that can be restored: of a hand-over, those of a block that is not full too."""

    @property
    def name(self) -> str:
        """The name by which messages speak of them."""
        return self.sessions[0].name


class Finished(NamedTuple):
    """A session's request ended. `hints`: about it, to be told once it is saved."""

    session_name: str
    hints: tuple[HintAction, ...] = ()


@dataclass
class StepPlan(KVConnectorMetadata):
    """The worker's tasks of a step, in this order."""

    weights: str | None = ""
    """The version of the weights; None: nothing is restored or saved. See `WeightsName`."""
    is_idle: bool = False
    """The step computes nothing, so it may wait for rows."""
    finished: list[Finished] = field(default_factory=list)
    lost_blocks: list[str] = field(default_factory=list)
    """Sessions whose request lost its blocks: it was preempted."""
    opened: list[Opened] = field(default_factory=list)
    blocks: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Blocks that a session's request has now besides those that it had."""
    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
    """To be done behind the pass; none where rows are captured within it."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Sessions whose saves ended, and in how many ranks; and whether a rank's weights changed.

    The first one says whether the engine has no other connector.
    """

    saved: Mapping[str, int] = field(default_factory=dict)
    changed: str | None = None
    """The version of weights that are not loaded any more."""
    is_alone: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both reports in one."""
        if not isinstance(other, StepReport):
            return self
        changed = self.changed if other.changed is None else other.changed
        is_alone = self.is_alone or other.is_alone
        return StepReport(Counter(self.saved) + Counter(other.saved), changed, is_alone)


# Each worker says how its blocks lie in memory, and vLLM brings that to the scheduler. MultiConnector gives
# the message of its first connector to all of them: ours say the same, whichever is first.
#
#     [CtxcacheConnector, CtxcacheOffloadingConnector]    BlockLayout     both hear it
#     [NixlConnector, CtxcacheConnector]                  Nixl's          ours hear of no layout: refused
@dataclass(frozen=True)
class BlockLayout(KVConnectorHandshakeMetadata):
    """How an engine's blocks lie in memory: another layout is another model to the store."""

    row_bytes: tuple[int, ...]
    """Bytes of one block over its tokens, by layer."""
    description: str
    """Everything else that gives these bytes their meaning."""


def hear_layouts(
    layouts: "Future[Mapping[Rank, BlockLayout]]", metadata: Mapping[Rank, KVConnectorHandshakeMetadata]
) -> None:
    """Take the layouts that workers sent. Unless each sent one, the link is refused."""
    heard = {rank: one for rank, one in metadata.items() if isinstance(one, BlockLayout)}
    if heard and len(heard) == len(metadata):
        layouts.set_result(heard)
        return
    problem = "MultiConnector hands on what its first connector says, and that is no layout of blocks"
    layouts.set_exception(Refused(f"{problem}: put this connector first, or save state=kv or hidden"))
