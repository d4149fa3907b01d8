"""Ranks: the processes that restore one engine's parts together, and where they meet.

Connections are made when a round first needs them. Thread-safe; rounds are one at a time. Worst case: a
meeting place that cannot be reached, which is RankLost by the deadline.
"""

import secrets
import threading
from collections import deque
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

from ctxcache.errors import InvalidArgument
from gpu_worker.errors import RankLost, RestoreTooLate
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.lane import Deadline

ROUNDS_KEPT = 64
"""Rounds whose messages are kept, so that a rank that comes late finds them."""
_LEAST_S = 0.001
# torch types hardly anything of these.
_distributed: Any = distributed
_c10d: Any = distributed_c10d
Store = Any


def parse_rendezvous(url: str) -> str:
    """Where ranks meet: `tcp://host:port`, where the first rank listens, or `file:///path`.

    Raises InvalidArgument.
    """
    try:
        parts = urlsplit(url)
        is_known = {"tcp": bool(parts.hostname and parts.port), "file": parts.path.startswith("/")}
    except ValueError:
        is_known = {}
    if not is_known.get(url.partition(":")[0], False):
        raise InvalidArgument(
            field="rendezvous", problem=f"{url[:200]!r} is no tcp://host:port or file:///path"
        )
    return url


# Ranks meet at two places, for two purposes:
#
#     store    small messages: terms, plans, ready, end        one TCPStore or FileStore for all ranks
#     group    rows, all-gathered                              NCCL or Gloo, among one stage's tensor ranks
#
# Rank = stage * tensor_ranks + tensor_rank:
#
#     stage 0 (layers 0..15)     rank 0   rank 1        gather among these two
#     stage 1 (layers 16..31)    rank 2   rank 3        and among these two
class EngineRanks:
    """This rank among the others, as long as its engine is attached."""

    def __init__(self, share: ModelShare, rendezvous: str) -> None:
        """Waits for no other rank before the first round. Raises InvalidArgument."""
        self.share = share
        self._url = parse_rendezvous(rendezvous)
        self._lock = threading.Lock()
        self._store_lock = threading.Lock()
        self._store: Store | None = None
        self._group: ProcessGroup | None = None
        self._group_name = ""
        self._rounds: deque[str] = deque()

    # -- for rounds --------------------------------------------------------------------------------

    def store(self, deadline: Deadline) -> Store:
        """A new connection to the store of messages: a wait on a shared one would hold up other rounds.

        Raises RankLost.
        """
        # Connecting waits for rank 0, and a second restore
        # must not wait longer than its own deadline for that.
        if not self._store_lock.acquire(timeout=deadline.left_s):
            raise RankLost(rank=0, problem="cannot be reached")
        url, timeout = urlsplit(self._url), timeout_of(deadline)
        try:
            if self._store is None:
                if url.scheme == "file":
                    self._store = _distributed.FileStore(url.path, self.share.rank_count)
                else:
                    self._store = _distributed.TCPStore(
                        url.hostname or "",
                        url.port or 0,
                        # The first rank listens. Ranks wait for messages, and not for all connections.
                        is_master=self.share.rank == 0,
                        timeout=timeout,
                        wait_for_workers=False,
                    )
            # torch's client blocks in `wait`: a clone has a connection of its own.
            connection = self._store.clone()
            connection.set_timeout(timeout)
        except RuntimeError as error:
            self._store = None
            raise RankLost(rank=0, problem=f"cannot be reached: {problem_of(error)}") from error
        finally:
            self._store_lock.release()
        return connection

    def enter(self, deadline: Deadline) -> None:
        """Wait until no other round is under way here. Raises RestoreTooLate."""
        if not self._lock.acquire(timeout=deadline.left_s):
            raise RestoreTooLate(what="the restore before it")

    def exit(self) -> None:
        """End the round that entered."""
        self._lock.release()

    def use(self, name: str) -> bool:
        """Take a round's name; False where it was used before."""
        if name in self._rounds:
            return False
        # A name is kept as long as its messages: a second round of that name would find those of the first.
        self._rounds.append(name)
        return True

    def forgotten(self) -> str | None:
        """Forget the oldest round beyond `ROUNDS_KEPT`, and return its name."""
        return self._rounds.popleft() if len(self._rounds) > ROUNDS_KEPT else None

    def group_name(self) -> str:
        """The name of the connections that rows go over, a new one where there are none."""
        return self._group_name or secrets.token_hex(8)

    def connect(self, name: str, device: torch.device, deadline: Deadline) -> ProcessGroup | None:
        """The stage's connections of that name; None for one rank alone. Raises RankLost."""
        share = self.share
        # Connections last over rounds, and a failed round ends them: a name that differs asks for new ones.
        if name != self._group_name:
            self.disconnect()
            if share.tensor_ranks > 1:
                store = _distributed.PrefixStore(f"group/{name}/{share.stage}/", self.store(deadline))
                try:
                    self._group = _connected(store, share, device, timeout_of(deadline))
                except RuntimeError as error:
                    raise RankLost(rank="?", problem=f"no connection: {problem_of(error)}") from error
            self._group_name = name
        return self._group

    def disconnect(self) -> None:
        """End the connections: ranks that wait on them get an error."""
        # The group's sockets close with the last reference to it.
        self._group, self._group_name = None, ""

    def forget_store(self) -> None:
        """The store broke: the next round makes a new connection to it."""
        self._store = None


def _connected(store: Store, share: ModelShare, device: torch.device, timeout: timedelta) -> ProcessGroup:
    # `init_process_group` makes one group for a process. A worker serves several engines, and ranks that
    # failed meet again.
    group: ProcessGroup
    if device.type == "cuda":
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001  its only name
        group = _c10d.ProcessGroupNCCL(store, share.tensor_rank, share.tensor_ranks, options)
    else:
        group = _c10d.ProcessGroupGloo(store, share.tensor_rank, share.tensor_ranks, timeout)
    return group


def timeout_of(deadline: Deadline) -> timedelta:
    """The time that is left, and never none."""
    return timedelta(seconds=max(deadline.left_s, _LEAST_S))


def problem_of(error: BaseException) -> str:
    """An error in one short line."""
    return " ".join(str(error).split())[:160]
