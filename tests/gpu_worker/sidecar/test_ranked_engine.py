"""An engine of several ranks beside a worker: two attachments, one session, whole on both or on none."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from attached import BLOCKS, Later, leave, saved_case
from paged_engine import BLOCK_COUNT, BLOCK_TOKENS, PROMPT_TOKENS, SharedMemory, conversation, write_weights
from server_process import ServerProcess

from ctxcache.errors import InvalidArgument
from gpu_worker.sidecar.client import AttachedEngine, WorkerClient
from gpu_worker.v1 import attachment_pb2, worker_pb2

KEY_BYTES = BLOCK_COUNT * BLOCK_TOKENS * 4


def hello_of(
    whole: attachment_pb2.AttachHello,
    rank: attachment_pb2.Rank,
    heads: int,
    layers: int,
    memory: SharedMemory,
) -> attachment_pb2.AttachHello:
    """A rank's hello: its heads of its layers, one tensor behind the other."""
    found = attachment_pb2.AttachHello()
    found.CopyFrom(whole)
    found.engine = f"rank-{rank.stage}-{rank.tensor_rank}"
    found.rank.CopyFrom(rank)
    found.ClearField("save_area")
    cache = found.kv_cache
    cache.head_count = heads
    half = KEY_BYTES * heads * cache.key_size
    del cache.layers[:], cache.regions[:]
    cache.regions.append(memory.region())
    for layer in range(layers):
        keys, values = (
            attachment_pb2.CacheTensor(offset_bytes=(2 * layer + each) * half) for each in range(2)
        )
        cache.layers.append(attachment_pb2.LayerCache(keys=keys, values=values))
    return found


@pytest.mark.parametrize("reads_files", [False, True])
@pytest.mark.parametrize("is_tensor_parallel", [True, False])
def test_ranks_restore_one_session_together(
    request: pytest.FixtureRequest,
    store: ServerProcess,
    weights: Path,
    tmp_path: Path,
    *,
    is_tensor_parallel: bool,
    reads_files: bool,
) -> None:
    """Each rank's cache has its heads of its layers, as the engine's own has; a miss is all ranks' miss.

    From the store's memory, and from its files.
    """
    name = f"ranked-{is_tensor_parallel}-{reads_files}"
    client: WorkerClient = (
        request.getfixturevalue("direct_client")[1] if reads_files else request.getfixturevalue("client")
    )
    with ExitStack() as stack:
        case = stack.enter_context(saved_case(client, weights, name))
        if reads_files:
            leave(store, case.session)
        before = client.stats().direct_read_bytes
        whole = case.engine.hello(write_weights("llama", weights))
        head_count, layer_count = case.engine.heads, len(whole.kv_cache.layers)
        memories, attached = [], []
        for index in range(2):
            rank = attachment_pb2.Rank(rendezvous=f"file://{tmp_path}/meeting")
            if is_tensor_parallel:
                rank.tensor_rank, rank.tensor_ranks = index, 2
                heads, layers = head_count // 2, layer_count
            else:
                rank.stage, rank.stages = index, 2
                rank.first_layer, rank.layer_count = index, 1 if index == 0 else 0
                heads, layers = head_count, 1 if index == 0 else layer_count - 1
            size = layers * 2 * KEY_BYTES * heads * case.engine.key_size
            memory = SharedMemory(size)
            stack.callback(memory.path.unlink)
            memory.data.fill_(0xFF)
            attached.append(stack.enter_context(client.attach(hello_of(whole, rank, heads, layers, memory))))
            memories.append(memory.data.view(torch.float32).view(layers, 2, -1, heads, case.engine.key_size))

        both = [_later(each, case.session, "together") for each in attached]
        results = [each.result() for each in both]

        assert [(result.is_restored, result.reason) for result in results] == [(True, "")] * 2
        assert (client.stats().direct_read_bytes > before) == reads_files
        case.engine.put(conversation("llama")[2], BLOCKS, PROMPT_TOKENS)
        expected = torch.stack(case.engine.rows(BLOCKS, PROMPT_TOKENS)).view(
            layer_count, 2, PROMPT_TOKENS, head_count, -1
        )
        at = torch.arange(PROMPT_TOKENS)
        slots = torch.tensor(BLOCKS)[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        found = torch.cat([memory[:, :, slots] for memory in memories], dim=3 if is_tensor_parallel else 0)
        assert torch.equal(found, expected)

        lost = [_later(attached[0], case.session, "lost"), _later(attached[1], "sessions/none", "lost")]
        assert [each.result().reason for each in lost] == ["RANK_FAILED", "SESSION_NOT_FOUND"]
        assert not any(each.result().invalid_block_ids for each in lost)


def test_a_rank_that_cannot_be_is_refused(client: WorkerClient, weights: Path) -> None:
    """Its numbers, and where it meets the others."""
    refused = {
        "rendezvous": attachment_pb2.Rank(tensor_ranks=2, rendezvous="http://somewhere"),
        "tensor_rank": attachment_pb2.Rank(tensor_rank=2, tensor_ranks=2, rendezvous="file:///tmp/meeting"),
        "rank.layer_count": attachment_pb2.Rank(
            first_layer=1, layer_count=99, stages=2, rendezvous="tcp://h:1"
        ),
        "kv_cache.head_count": attachment_pb2.Rank(tensor_ranks=2, rendezvous="tcp://h:1"),
    }
    with saved_case(client, weights, "refused-ranks") as case:
        for field, rank in refused.items():
            hello = case.engine.hello(write_weights("llama", weights), engine="refused")
            hello.rank.CopyFrom(rank)
            with pytest.raises(InvalidArgument) as caught:
                client.attach(hello)
            assert caught.value.facts["field"] == field


def _later(attached: AttachedEngine, session: str, name: str) -> Later:
    def restore() -> worker_pb2.RestoreResult:
        return attached.restore(session, BLOCKS, token_end=PROMPT_TOKENS, restore_id=name, timeout_s=20.0)

    return Later(restore)
