"""Rounds: one restore as one of an engine's ranks sees it, and how all ranks come to one end.

```
   rank 0 says which session, at which generation;  each stage's first rank says how
      │
   each rank: agree ──► read own tokens' rows ──► ready ──► exchange rows ──► compute own heads ──► whole
      └────── a rank fails, or is gone: RankFailed, RankLost on every other one; nobody's part is used
```

A rank restores its stage's layers: it reads the rows of some tokens, and projects the rows of all tokens
into its heads. That runs on the computing lane, in the order of the schedule, which all ranks share. The
restore is whole for all ranks or for none. Waits end at the restore's deadline. A round that fails ends
the connections that rows went over, so that every rank which waits on them is told; the next round makes
new ones.

Worst case: a rank is gone, and every restore is a miss until it is back.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.errors import RankFailed, RankLost, RanksDisagree
from gpu_worker.parallel.ranks import EngineRanks, Store, problem_of, timeout_of
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.compute import Compute
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.target import LayerRoom, Target
from gpu_worker.planning.plan import Method, RestoreSchedule, Stage


class Gather(Protocol):
    """The means by which ranks exchange rows."""

    def gather(self, own: Tensor, count: int) -> Tensor:
        """This rank's rows [t, row_bytes] uint8 -> all ranks' [count, row_bytes], in order.

        Raises RankLost.
        """
        ...


# One batch of 10 tokens on 4 ranks, rows of one layer:
#
#     rank 0 reads 0..2    rank 1 reads 3..5    rank 2 reads 6..8    rank 3 reads 9 (and 2 rows of zeros)
#                     all-gather: [4 * 3, row_bytes], cut to 10
#     each rank projects all 10 rows into its own heads
#
# Each byte is read from the store once in all, and goes over the links between devices to the others.
class Gathering:
    """A Compute that works on the rows of all ranks."""

    def __init__(self, compute: Compute, gather: Gather) -> None:
        self._compute, self._gather = compute, gather
        self._seconds: dict[Stage, float] = defaultdict(float)

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: LayerRoom) -> None:
        """See Compute; `data` are this rank's rows of the tokens that `room` is for."""
        began_ns = time.perf_counter_ns()
        rows = self._gather.gather(data, len(room.pages.slots))
        self._seconds[Stage.of(method)] += (time.perf_counter_ns() - began_ns) / 1e9
        self._compute.restore(layer, method, rows, begin, room)

    def chain(self, layers: frozenset[int]) -> None:
        """See Compute."""
        self._compute.chain(layers)

    def recompute(self, schedule: RestoreSchedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        self._compute.recompute(schedule, token_ids, target)

    def apart(self, observed_s: Mapping[Stage, float]) -> Mapping[Stage, float]:
        """Seconds of the stages, with gathering as a stage of its own."""
        # The pipeline times a gather within the stage that it ran in.
        within = {stage: max(0.0, observed_s.get(stage, 0.0) - part) for stage, part in self._seconds.items()}
        return {**observed_s, **within, Stage.GATHER: sum(self._seconds.values())}


# A stage with layers 16 to 31 of 32 runs a schedule of all 32:
#
#     model's layer   0 .. 15          16 .. 31
#     parts           none             from rows
#     own target      .                0 .. 15
#
# The schedule keeps the model's numbers, by which streams are named.
class StageTarget(Target):
    """The model's layers, of which `own` has those of the share."""

    def __init__(self, own: Target, share: ModelShare, layer_count: int) -> None:
        self._own, self._share = own, share
        self.token_count, self.layer_count, self.is_by_layer = own.token_count, layer_count, own.is_by_layer

    def first_token(self, layer: int) -> int:
        """See Target."""
        own = self._index(layer)
        return 0 if own is None else self._own.first_token(own)

    def room(self, layer: int, begin: int, end: int) -> LayerRoom:
        """See Target."""
        own = self._index(layer)
        if own is None:
            raise IndexError(layer)
        return self._own.room(own, begin, end)

    def finish(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.finish(own)

    def announced(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.announced(own)

    def failed(self) -> None:
        """See Target."""
        self._own.failed()

    def _index(self, layer: int) -> int | None:
        share = self._share
        return layer - share.first_layer if share.first_layer <= layer < share.end_layer else None


_WHOLE = b"whole"
# torch types hardly anything of these.
_c10d: Any = distributed_c10d


class Round(Protocol):
    """One restore, as one rank sees it."""

    def agree(self, terms: Mapping[str, Any], pieces: Sequence[Any]) -> Sequence[Any]:
        """Check that all ranks were asked for the same, and return the pieces of the stage's first rank.

        Both are of what JSON holds. Raises RanksDisagree, RankFailed, RankLost, RestoreTooLate.
        """
        ...

    def ready(self) -> None:
        """Wait until all ranks hold what they read. Raises RankFailed, RankLost."""
        ...

    def whole(self) -> None:
        """Wait until all ranks have restored their parts. Raises RankFailed, RankLost."""
        ...


class SharedRound:
    """A round that this rank shares with others. Also gathers rows: see Gather."""

    def __init__(self, ranks: EngineRanks, name: str, deadline: Deadline) -> None:
        self._ranks, self._name, self._deadline, self._share = ranks, name, deadline, ranks.share
        self._connection: Store | None = None
        self._group: ProcessGroup | None = None
        self._group_name = ""
        self._is_entered = self._is_whole = self._is_foreign = False
        self._said: set[str] = set()

    def agree(self, terms: Mapping[str, Any], pieces: Sequence[Any]) -> Sequence[Any]:
        """See Round."""
        # Messages of a round, left in the store under its name:
        #
        #     terms            by rank 0            which session, generation, range; the group's name
        #     pieces/STAGE     by a stage's first   the plan
        #     ready/RANK       by each              it holds its lease
        #     end/RANK         by each              its part is whole
        #
        # A rank that fails leaves {"failed": reason} in place of each message that it has not left yet.
        if self._share.rank == 0:
            self._enter()
            self._take_name(is_said=self._store.check([self._key("terms")]))
            # The group's name goes with the terms, so that all ranks make new connections in the same round.
            self._group_name = self._ranks.group_name()
            self._say("terms", _encode({"group": self._group_name, "terms": terms}))
        else:
            # Enter by the first rank's word: it has one round at a time, which orders rounds for all ranks.
            heard = self._hear("terms", 0)
            self._enter()
            self._take_name()
            self._compare(terms, heard)
        if self._share.tensor_rank == 0:
            self._say(f"pieces/{self._share.stage}", _encode({"pieces": pieces}))
            return pieces
        # One plan per stage: drift may have taught ranks
        # different ones, and gathering needs the same batches.
        first = self._share.stage * self._share.tensor_ranks
        heard = self._hear(f"pieces/{self._share.stage}", first)
        theirs: Sequence[Any] = heard["pieces"]
        return theirs

    def ready(self) -> None:
        """See Round."""
        self._meet("ready")

    def connect(self, device: torch.device) -> None:
        """Take the connections to gather over. Raises RankLost."""
        self._group = self._ranks.connect(self._group_name, device, self._deadline)

    def whole(self) -> None:
        """See Round."""
        self._meet("end")
        self._is_whole = True

    def gather(self, own: Tensor, count: int) -> Tensor:
        """See Gather. On the computing lane."""
        group, ranks = self._group, self._share.tensor_ranks
        if group is None:
            raise RankLost(rank=self._share.rank, problem="the round is over")
        # All-gather wants equal parts: a shorter one is filled up with zeros, which are cut off behind.
        most = -(-count // ranks)
        if len(own) < most:
            own = torch.cat((own, own.new_zeros(most - len(own), own.shape[1])))
        gathered = own.new_empty(most * ranks, own.shape[1])
        options = _c10d.AllgatherOptions()
        options.timeout = timeout_of(self._deadline)
        try:
            group._allgather_base(gathered, own.contiguous(), options).wait()  # noqa: SLF001  its only name
        except RuntimeError as error:
            raise RankLost(rank="?", problem=problem_of(error)) from error
        return gathered[:count]

    def check_whole(self) -> None:
        """Raise RankLost for a round that was left before all said that it is whole."""
        if not self._is_whole:
            raise RankLost(rank=self._share.rank, problem="left the round")

    def fail(self, error: BaseException) -> None:
        """Tell the others, as far as they can be told, and end the connections."""
        self._group = None
        # A round that never entered would end another round's connections.
        if self._is_entered:
            self._ranks.disconnect()
        problem = _encode({"failed": error.reason if isinstance(error, CacheError) else type(error).__name__})
        own = [f"pieces/{self._share.stage}"] if self._share.tensor_rank == 0 else []
        first = ["terms"] if self._share.rank == 0 else []
        # Messages of that name belong to the round that used it first.
        if self._is_foreign:
            return
        # Messages that are not left yet become the failure: each rank hears of it at its next wait.
        for what in (*first, *own, self._mine("ready"), self._mine("end")):
            try:
                self._say(what, problem)
            except CacheError:
                return

    def leave(self) -> None:
        """End the round for this rank."""
        if not self._is_entered:
            return
        self._group = None
        old = self._ranks.forgotten()
        if old is not None and self._share.rank == 0:
            self._delete(old)
        self._ranks.exit()

    # -- messages ----------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        if self._connection is None:
            self._connection = self._ranks.store(self._deadline)
        return self._connection

    def _broke(self) -> None:
        """The store broke: the next round makes a new connection to it."""
        self._connection = None
        self._ranks.forget_store()

    def _enter(self) -> None:
        self._ranks.enter(self._deadline)
        self._is_entered = True

    def _take_name(self, *, is_said: bool = False) -> None:
        if is_said or not self._ranks.use(self._name):
            self._is_foreign = True
            raise InvalidArgument(field="restore_id", problem="was used before")

    def _key(self, what: str, name: str = "") -> str:
        return f"round/{name or self._name}/{what}"

    def _mine(self, what: str) -> str:
        return f"{what}/{self._share.rank}"

    def _say(self, what: str, message: bytes) -> None:
        """Leave a message, once."""
        # A rank that said `ready` cannot take it back: its failure is told by `end`.
        if what in self._said:
            return
        try:
            self._store.set(self._key(what), message)
        except RuntimeError as error:
            self._broke()
            raise RankLost(rank=0, problem=f"cannot be reached: {problem_of(error)}") from error
        self._said.add(what)

    def _hear(self, what: str, rank: int) -> Mapping[str, Any]:
        """Wait for a rank's message. Raises RankFailed where it says so, RankLost where it says nothing."""
        try:
            self._store.wait([self._key(what)], timeout_of(self._deadline))
            message = self._store.get(self._key(what))
        except RuntimeError as error:
            # A wait that timed out is the other rank's fault, one that broke earlier the store's.
            if self._deadline.left_s:
                self._broke()
            raise RankLost(rank=rank, problem=f"says nothing: {problem_of(error)}") from error
        if message == _WHOLE:
            return {}
        reply: Mapping[str, Any] = json.loads(message)
        if "failed" in reply:
            raise RankFailed(rank=rank, problem=reply["failed"])
        return reply

    def _meet(self, what: str) -> None:
        self._say(self._mine(what), _WHOLE)
        for rank in range(self._share.rank_count):
            if rank != self._share.rank:
                self._hear(f"{what}/{rank}", rank)

    def _compare(self, terms: Mapping[str, Any], heard: Mapping[str, Any]) -> None:
        self._group_name = heard["group"]
        theirs = heard["terms"]
        for what, mine in terms.items():
            if theirs.get(what) != mine:
                raise RanksDisagree(what=what, actual=mine, expected=theirs.get(what))

    def _delete(self, name: str) -> None:
        share = self._share
        stages = [f"pieces/{stage}" for stage in range(share.stages)]
        ends = [f"{what}/{rank}" for what in ("ready", "end") for rank in range(share.rank_count)]
        try:
            for what in ("terms", *stages, *ends):
                self._store.delete_key(self._key(what, name))
        except RuntimeError:
            self._broke()


class Alone:
    """A round of a single rank, which has nobody to agree with."""

    def agree(self, terms: Mapping[str, Any], pieces: Sequence[Any]) -> Sequence[Any]:
        """See Round."""
        del terms
        return pieces

    def ready(self) -> None:
        """See Round."""

    def whole(self) -> None:
        """See Round."""


@contextmanager
def taking_part(ranks: EngineRanks, name: str, deadline: Deadline) -> Iterator[SharedRound]:
    """Take part in the round of that name, which all ranks know and nobody used before.

    Leaving it by an error tells the other ranks. Raises RankLost, RestoreTooLate, InvalidArgument.
    """
    shared_round = SharedRound(ranks, name, deadline)
    try:
        yield shared_round
        shared_round.check_whole()
    except BaseException as error:
        shared_round.fail(error)
        raise
    finally:
        shared_round.leave()


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()
