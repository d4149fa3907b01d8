"""An engine whose paged KV cache others can map: a tiny random model of transformers.

The cache is shared memory, or, where there is a GPU, memory of the GPU that CUDA IPC leads to.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import save_file
from tiny_models import VOCABULARY_SIZE, build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ctxcache.client.convert import model_to_wire
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, continue_greedy, prefill
from gpu_worker.forms.rows import pack_rows
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.sidecar.client import cuda_region
from gpu_worker.v1 import attachment_pb2

BLOCK_TOKENS = 16
BLOCK_COUNT = 24
PROMPT_TOKENS = 90
SAVE_AREA_BYTES = 1 << 20
NEW_TOKENS = 8
WORKER_DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
"""Where the worker computes, and engines' caches lie. The engine's model is on the CPU in any case."""


@cache
def model_of(family: str) -> PreTrainedModel:
    """The tiny model of a family."""
    torch.set_num_threads(1)
    return build(family)


@cache
def adapter_of(family: str) -> Adapter:
    """Its adapter."""
    return adapt(model_of(family))


@cache
def spec_of(family: str) -> ModelSpec:
    """Its description."""
    return model_spec(model_of(family), model_id=f"sidecar-{family}")


@cache
def probe_made_by(family: str) -> ModelProbe:
    """The probe of the family's engine."""
    adapter = adapter_of(family)
    return probe_of(
        adapter,
        spec_of(family),
        lambda ids: prefill(adapter.model, DynamicCache(config=adapter.model.config), ids),
    )


def write_weights(family: str, directory: Path) -> Path:
    """Its checkpoint, in a directory of its own."""
    place = directory / family
    if not place.exists():
        model_of(family).config.save_pretrained(place)
        tensors = {name: value.clone() for name, value in model_of(family).state_dict().items()}
        save_file(tensors, place / "model.safetensors")
    return place


class SharedMemory:
    """POSIX shared memory of this process's own. `data` is [size] uint8."""

    def __init__(self, size_bytes: int) -> None:
        self.name = f"/ctxcache-test-{uuid4().hex}"
        self.path = Path("/dev/shm" + self.name)  # noqa: S108  where shm_open keeps it
        with self.path.open("wb") as file:
            file.truncate(size_bytes)
        self.data = torch.from_file(str(self.path), shared=True, size=size_bytes, dtype=torch.uint8)

    def region(self) -> attachment_pb2.MemoryRegion:
        """As a handle names it."""
        return attachment_pb2.MemoryRegion(size_bytes=self.data.nbytes, shared_memory_name=self.name)


class GpuMemory:
    """Memory of the GPU, of this process's own. `data` is [size] uint8."""

    def __init__(self, size_bytes: int) -> None:
        self.data = torch.empty(size_bytes, dtype=torch.uint8, device=WORKER_DEVICE)

    def region(self) -> attachment_pb2.MemoryRegion:
        """As a handle names it."""
        # What was written before is there when another process looks.
        torch.cuda.synchronize()
        return cuda_region(self.data.data_ptr(), self.data.nbytes)


class PagedEngine:
    """One model, one paged cache, one save area. The cache is all that it keeps."""

    def __init__(self, family: str, *, order: str = "tokens_first") -> None:
        self.family, self.adapter, self.spec = family, adapter_of(family), spec_of(family)
        keys, values = self._shape()
        self.heads, self.key_size, self.value_size = keys[0], keys[1], values[1]
        self.order = order
        size = self.adapter.model.dtype.itemsize
        self._halves = [
            BLOCK_COUNT * BLOCK_TOKENS * self.heads * each * size for each in (keys[1], values[1])
        ]
        cache_bytes = len(self.adapter.layers) * sum(self._halves)
        self.cache = SharedMemory(cache_bytes) if WORKER_DEVICE == "cpu" else GpuMemory(cache_bytes)
        self.save_area = SharedMemory(SAVE_AREA_BYTES)
        self.poison()

    def close(self) -> None:
        """Remove the memory: it is the engine's."""
        for memory in (self.cache, self.save_area):
            if isinstance(memory, SharedMemory):
                memory.path.unlink(missing_ok=True)

    def hello(self, weights: Path, *, engine: str = "engine") -> attachment_pb2.AttachHello:
        """The hello that attaches the engine."""
        per_layer = sum(self._halves)
        orders = {
            "tokens_first": attachment_pb2.CACHE_ORDER_TOKENS_FIRST,
            "heads_first": attachment_pb2.CACHE_ORDER_HEADS_FIRST,
        }
        return attachment_pb2.AttachHello(
            engine=engine,
            model=model_to_wire(self.spec, probe_made_by(self.family)),
            weights=attachment_pb2.Weights(safetensors_directory=str(weights)),
            save_area=self.save_area.region(),
            kv_cache=attachment_pb2.KvCache(
                regions=[self.cache.region()],
                dtype=attachment_pb2.KvCache(dtype=int(self.spec.dtype)).dtype,  # type: ignore[arg-type]
                block_count=BLOCK_COUNT,
                block_tokens=BLOCK_TOKENS,
                head_count=self.heads,
                key_size=self.key_size,
                value_size=self.value_size,
                order=orders[self.order],
                layers=[
                    attachment_pb2.LayerCache(
                        keys=attachment_pb2.CacheTensor(offset_bytes=i * per_layer),
                        values=attachment_pb2.CacheTensor(offset_bytes=i * per_layer + self._halves[0]),
                    )
                    for i in range(len(self.adapter.layers))
                ],
            ),
        )

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [blocks, tokens, heads, elements] of each layer, views of the memory."""
        per_layer = sum(self._halves)
        for i in range(len(self.adapter.layers)):
            begin = i * per_layer
            yield (
                self._view(begin, self._halves[0], self.key_size),
                self._view(begin + self._halves[0], self._halves[1], self.value_size),
            )

    def poison(self) -> None:
        """Lose the cache: NaN everywhere."""
        self.cache.data.fill_(0xFF)
        self._settle()

    def put(self, held: DynamicCache, block_ids: Sequence[int], token_count: int) -> None:
        """Lay a session's keys and values into blocks."""
        page, row = self._places(block_ids, token_count)
        for layer, (keys, values) in enumerate(self.layers()):
            source = _contents(held, layer)
            first = token_count - source[0].shape[2]
            keys[page[first:], row[first:]] = source[0][0].transpose(0, 1).to(WORKER_DEVICE)
            values[page[first:], row[first:]] = source[1][0].transpose(0, 1).to(WORKER_DEVICE)
        self._settle()

    def take(self, block_ids: Sequence[int], token_count: int) -> DynamicCache:
        """A session out of its blocks, as the model continues from it."""
        page, row = self._places(block_ids, token_count)
        held = DynamicCache(config=self.adapter.model.config)
        for layer, (keys, values) in enumerate(self.layers()):
            first, second = (
                half[page, row].cpu().transpose(0, 1).unsqueeze(0).clone() for half in (keys, values)
            )
            held.update(first, second, layer)
        return held

    def rows(self, block_ids: Sequence[int], token_count: int) -> list[Tensor]:
        """The blocks' keys and values of these tokens, layer by layer."""
        page, row = self._places(block_ids, token_count)
        return [half[page, row].cpu() for halves in self.layers() for half in halves]

    def stage(self, rows: Mapping[Stream, Tensor], token_ids: Sequence[int]) -> dict[Stream, int]:
        """Lay rows into the save area; where each stream begins."""
        offsets, at = {}, 0
        for stream, part in {TOKENS: torch.tensor(token_ids, dtype=torch.int32)[:, None], **rows}.items():
            (spec,) = (each for each in self.spec.resolve([stream]) if each.stream == stream)
            data = torch.frombuffer(bytearray(pack_rows(part, spec)), dtype=torch.uint8)
            self.save_area.data[at : at + len(data)] = data
            offsets[stream] = at
            at += len(data)
        return offsets

    def _settle(self) -> None:
        """Have in place what was written: the worker's kernels know no stream of this process."""
        if WORKER_DEVICE != "cpu":
            torch.cuda.synchronize()

    def _places(self, block_ids: Sequence[int], token_count: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(token_count)
        return torch.tensor(block_ids)[at // BLOCK_TOKENS], at % BLOCK_TOKENS

    def _shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        held = DynamicCache(config=self.adapter.model.config)
        prefill(self.adapter.model, held, [1, 2])
        keys, values = _contents(held, 0)
        return (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])

    def _view(self, begin: int, size_bytes: int, size: int) -> Tensor:
        data = self.cache.data[begin : begin + size_bytes].view(self.adapter.model.dtype)
        if self.order == "tokens_first":
            return data.view(BLOCK_COUNT, BLOCK_TOKENS, self.heads, size)
        return data.view(BLOCK_COUNT, self.heads, BLOCK_TOKENS, size).transpose(1, 2)


@contextmanager
def running_engine(family: str, *, order: str = "tokens_first") -> Iterator[PagedEngine]:
    """An engine whose memory is removed at the end."""
    engine = PagedEngine(family, order=order)
    try:
        yield engine
    finally:
        engine.close()


@cache
def conversation(family: str) -> tuple[list[int], dict[Stream, Tensor], DynamicCache, list[int]]:
    """A prompt, its rows as capture saw them, the cache after it, and what the model says next."""
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(VOCABULARY_SIZE, (PROMPT_TOKENS,), generator=generator).tolist()
    adapter = adapter_of(family)
    held = DynamicCache(config=adapter.model.config)
    rows: dict[Stream, Tensor] = {}

    def sink(layer: int, kind: StateKind, part: Tensor) -> None:
        rows[Stream(layer, kind)] = part.clone()

    streams = [
        Stream(i, kind) for i in range(len(adapter.layers)) for kind in (StateKind.HIDDEN, adapter.kind)
    ]
    with Capture(adapter, streams, sink):
        prefill(adapter.model, held, prompt)
    return prompt, rows, held, generate(family, clone(held))


def generate(family: str, held: DynamicCache) -> list[int]:
    """The tokens that the model generates on a cache, which it extends."""
    return continue_greedy(model_of(family), held, [5, 3], max_new_tokens=NEW_TOKENS).token_ids


def clone(held: DynamicCache) -> DynamicCache:
    """A cache of the same contents."""
    return copy.deepcopy(held)


def _contents(held: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    one = held.layers[layer]
    assert isinstance(one, CacheLayerMixin)
    assert one.keys is not None
    assert one.values is not None
    return one.keys, one.values
