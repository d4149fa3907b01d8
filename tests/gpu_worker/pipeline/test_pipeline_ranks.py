"""Ranks as real processes: together they have what one alone has, or all of them have a miss."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import rank_process
import torch
from sessions import RELATIVE_BOUND, saved_session
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from gpu_worker.parallel.share import ModelShare

LAYER_COUNT = 3
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def context() -> Iterator[ForkServerContext]:
    """Processes that have torch imported already."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["rank_process"])
    with pytest.MonkeyPatch.context() as patch:
        # Preloaded modules are looked for where a new interpreter looks.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield found


class Processes:
    """Ranks, each of which says how its rounds end."""

    def __init__(self, context: ForkServerContext, orders: Sequence[rank_process.Order]) -> None:
        self.orders = orders
        self._told: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for order in orders:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=rank_process.run, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            self._told.append(mine)
            self._processes.append(process)

    def reasons(self, rank: int) -> Iterator[str]:
        """How each round of a rank ended, until it is gone."""
        while self._told[rank].poll(PATIENCE_S):
            try:
                yield self._told[rank].recv()
            except EOFError:
                return
        pytest.fail(f"rank {rank} hangs")

    def caches(self) -> list[list[list[Tensor]]]:
        """The content of each rank's cache in the end, [layer][half] [T, H, C]."""
        for process in self._processes:
            process.join(PATIENCE_S)
        return [torch.load(order.result) for order in self.orders]


def orders_of(
    place: Path, tensor_ranks: int, stages: int = 1, *, family: str = "llama", plan: str = "kv:0-2"
) -> list[rank_process.Order]:
    """Ranks of a tiny model, stage by stage."""
    borders = [LAYER_COUNT * stage // stages for stage in range(stages + 1)]
    return [
        rank_process.Order(
            ModelShare(borders[stage], borders[stage + 1], rank, tensor_ranks, stage, stages),
            f"file://{place}/meeting", family, plan, result=place / f"{stage}-{rank}",
        )
        for stage in range(stages)
        for rank in range(tensor_ranks)
    ]  # fmt: skip


def free_url() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def expected(family: str, order: rank_process.Order) -> Iterator[list[Tensor]]:
    """The engine's own cache of a rank's layers and heads."""
    session = saved_session(family)
    for layer in range(order.share.first_layer, order.share.end_layer):
        held = session.kept_cache.layers[layer]
        assert isinstance(held, CacheLayerMixin)
        assert held.keys is not None
        assert held.values is not None
        heads = order.share.heads(held.keys.shape[1])
        yield [half[0, heads, : session.token_count].transpose(0, 1) for half in (held.keys, held.values)]


@pytest.mark.parametrize(
    ("tensor_ranks", "stages", "family", "plan"),
    [
        (2, 1, "llama", "kv:0-2"),
        (4, 1, "llama", "hidden:0,kv:1,hidden:2"),
        (2, 2, "qwen3", "hidden:0-2"),
        (1, 3, "llama", "kv:0,hidden:1,kv:2"),
        (2, 1, "phi3", "hidden:0-2"),
        (2, 1, "deepseek", "latent:0-2"),
    ],
)
def test_all_ranks_together_have_what_one_alone_has(
    context: ForkServerContext, tmp_path: Path, tensor_ranks: int, stages: int, family: str, plan: str
) -> None:
    """Own heads and layers equal the engine's: bit for bit from rows, to rounding from hidden states."""
    ranks = Processes(context, orders_of(tmp_path, tensor_ranks, stages, family=family, plan=plan))

    assert [list(ranks.reasons(rank)) for rank in range(len(ranks.orders))] == [[""]] * len(ranks.orders)

    for order, cache in zip(ranks.orders, ranks.caches(), strict=True):
        for mine, theirs in zip(cache, expected(family, order), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                if "hidden" not in plan:
                    assert torch.equal(one, other)
                assert (one - other).abs().max() <= RELATIVE_BOUND * other.abs().max()


def test_a_killed_rank_is_a_miss_for_all_others(context: ForkServerContext, tmp_path: Path) -> None:
    """Kill -9 in the middle: the others miss, and those of another stage too."""
    orders = orders_of(tmp_path, 2, 2)
    orders[1] = replace(orders[1], rounds=(("first", "kill"),))
    ranks = Processes(context, orders)

    reasons = [list(ranks.reasons(rank)) for rank in range(4)]

    assert reasons[0] == ["RANK_LOST"]
    assert reasons[1] == []
    assert {reason for some in reasons[2:] for reason in some} <= {"RANK_LOST", "RANK_FAILED"}
    assert [len(some) for some in reasons[2:]] == [1, 1]


@pytest.mark.parametrize("fault", ["corrupt", "stale", "other terms"])
def test_what_one_rank_cannot_restore_no_rank_has(
    context: ForkServerContext, tmp_path: Path, fault: str
) -> None:
    """No rank waits for the deadline, and the next round is whole again, over new connections."""
    orders = [replace(each, deadline_s=60.0) for each in orders_of(tmp_path, 2)]
    for rank, mine in enumerate(["", fault]):
        orders[rank] = replace(orders[rank], rounds=(("first", mine), ("second", "")))
    ranks = Processes(context, orders)

    reasons = [list(ranks.reasons(rank)) for rank in range(2)]

    expect = {"corrupt": "CORRUPT_SEGMENT", "stale": "LEASE_NOT_FOUND", "other terms": "RANKS_DISAGREE"}[
        fault
    ]
    assert reasons[1] == [expect, ""]
    assert reasons[0][0] in {"RANK_LOST", "RANK_FAILED"}
    assert reasons[0][1] == ""
    assert all(torch.equal(one, other) for order, cache in zip(orders, ranks.caches(), strict=True)
               for mine, theirs in zip(cache, expected("llama", order), strict=True)
               for one, other in zip(mine, theirs, strict=True))  # fmt: skip


def test_the_first_rank_killed_takes_the_meeting_with_it(context: ForkServerContext, tmp_path: Path) -> None:
    """Kill -9 of the rank that listens: the other misses."""
    url = free_url()
    orders = [replace(each, rendezvous=url) for each in orders_of(tmp_path, 2)]
    orders[0] = replace(orders[0], rounds=(("first", "kill"),))
    ranks = Processes(context, orders)

    assert [list(ranks.reasons(rank)) for rank in range(2)] == [[], ["RANK_LOST"]]


def test_ranks_meet_over_tcp_and_a_rank_that_comes_later_finds_them(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """The first rank listens; two rounds go over one connection."""
    url = free_url()
    rounds = (("first", ""), ("second", ""))
    rank_orders = orders_of(tmp_path, 2)
    orders = [replace(each, rendezvous=url, rounds=rounds, stays_s=60.0) for each in rank_orders]
    ranks = Processes(context, orders[::-1])

    assert [list(ranks.reasons(rank)) for rank in range(2)] == [["", ""]] * 2


def test_a_rank_that_never_comes_is_a_miss_by_the_deadline(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """No rank answers at the meeting: no hang."""
    order = replace(orders_of(tmp_path, 2)[1], deadline_s=0.3)

    assert list(Processes(context, [order]).reasons(0)) == ["RANK_LOST"]


def test_a_used_name_is_refused(context: ForkServerContext, tmp_path: Path) -> None:
    """Messages of an earlier round are never taken for those of a later one."""
    again = (("first", ""), ("first", ""))
    orders = [replace(each, rounds=again, deadline_s=5.0) for each in orders_of(tmp_path, 1, 3)]
    ranks = Processes(context, orders)

    assert [list(ranks.reasons(rank)) for rank in range(3)] == [["", "INVALID_FIELD"]] * 3
