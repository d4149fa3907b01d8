"""The attachments of a worker: which engines are attached, how a name is taken over, and the limits.

```
   attach ──► weights read, memory opened ──► an engine of that name or memory is evicted ──► listed
                └─ fails: all stays as it was      └─ refused: its memory is another engine's
   detach, evict ──► not listed any more ──► threads come to rest ──► memory unmapped
```

Owned by the event loop; weights are read and memory is opened in threads. Worst case: an attach fails, which
leaves the attached engines as they were.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ctxcache.client import Client
from ctxcache.client.convert import model_from_wire, probe_from_wire
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    DeadlineExceeded,
    EngineTakenOver,
    InvalidArgument,
    ModelFingerprintMismatch,
)
from ctxcache.format.model import ModelProbe, ModelSpec
from gpu_worker.errors import RestoreCancelled
from gpu_worker.parallel.ranks import EngineRanks, parse_rendezvous
from gpu_worker.parallel.share import ModelShare
from gpu_worker.sidecar.attachment import Attachment
from gpu_worker.sidecar.cache_layout import CacheLayout, parse_layout
from gpu_worker.sidecar.edge import AdmissionLimit
from gpu_worker.sidecar.errors import AttachmentNotFound, MemoryInUse
from gpu_worker.sidecar.metrics import Attached
from gpu_worker.sidecar.model import AttachedModel, AttachedModels
from gpu_worker.sidecar.regions import Opener, Regions
from gpu_worker.sidecar.settings import MIB, WorkerSettings
from gpu_worker.v1 import attachment_pb2

_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
RANKS_LIMIT = 1024
_MODEL_NAME = re.compile(r"models/[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Attachments:
    """All attached engines. Call `attach`, then `detach`."""

    def __init__(
        self, settings: WorkerSettings, client: Client, models: AttachedModels, opener: Opener
    ) -> None:
        self._settings, self._client, self._models, self._opener = settings, client, models, opener
        # An attachment is in up to three books:
        #
        #     _by_id, _by_engine    listed: requests find it; taken out at once when it ends
        #     _mapped               its memory is mapped: until its threads are at rest
        self._by_id: dict[str, Attachment] = {}
        self._by_engine: dict[str, Attachment] = {}
        self._mapped: list[Attachment] = []
        self._detaching: set[asyncio.Task[None]] = set()
        # An engine that takes another's place is attached before that one is gone.
        self.room = AdmissionLimit("attached engines", settings.max_attachments)
        self._mapped_bytes = 0

    def __iter__(self) -> Iterator[Attachment]:
        return iter(list(self._by_id.values()))

    def get(self, attachment_id: str) -> Attachment:
        """The attachment of an id. Raises AttachmentNotFound."""
        attachment = self._by_id.get(attachment_id)
        if attachment is None:
            raise AttachmentNotFound(attachment_id=attachment_id[:64])
        return attachment

    def seen(self) -> Attached:
        """All attachments together. For any thread."""
        attached, now_s = tuple(self), time.monotonic()
        return Attached(
            sum(each.mapped_bytes for each in attached),
            max((now_s - each.used_s for each in attached), default=0.0),
        )

    def used(self, attachment_id: str) -> Attachment:
        """The attachment of an id, which is used now. Raises AttachmentNotFound."""
        attachment = self.get(attachment_id)
        attachment.used_s = time.monotonic()
        return attachment

    async def attach(self, hello: attachment_pb2.AttachHello) -> Attachment:
        """Attach an engine; another one of that name is detached first. Raises as the proto says."""
        # All that the hello says by itself is checked before a weight is read, which may take minutes.
        spec, directory = _checked(hello)
        share = _share(hello, spec.layer_count)
        self.room.take()
        try:
            async with asyncio.timeout(self._settings.attach_timeout_s):
                model = await asyncio.to_thread(
                    self._known, directory, spec, probe_from_wire(hello.model), share
                )
            # In a thread: comparing the tensors of a large cache
            # takes time, and the loop serves other engines meanwhile.
            layout = await asyncio.to_thread(_layout, hello.kv_cache, model)
            memory, save_area = self._open(hello)
        except TimeoutError:
            self.room.give_back()
            raise DeadlineExceeded(
                target="attach", timeout_s=f"{self._settings.attach_timeout_s:g}"
            ) from None
        except BaseException:
            self.room.give_back()
            raise
        attachment = Attachment(
            attachment_id=secrets.token_hex(16),
            engine=hello.engine,
            model=model,
            layout=layout,
            memory=memory,
            save_area=save_area,
            evicted=asyncio.get_running_loop().create_future(),
            ranks=None if share is None else EngineRanks(share, hello.rank.rendezvous),
        )
        # The bytes count before the wait for another engine: two attaches at once must not see the same room.
        self._mapped_bytes += attachment.mapped_bytes
        try:
            # In a loop: another engine may attach while this one waits for the end of the engine before.
            while (before := self._before(attachment)) is not None:
                await self.evict(before, EngineTakenOver(engine=hello.engine))
        except BaseException:
            self._unmap(attachment)
            raise
        # No await between the last look at the others and here: nobody can come between.
        self._mapped.append(attachment)
        self._by_id[attachment.attachment_id] = self._by_engine[hello.engine] = attachment
        return attachment

    def _before(self, attachment: Attachment) -> Attachment | None:
        """The attachment that must go first: of the same name, or with restores that write to this memory.

        Raises MemoryInUse.
        """
        # Attachments that are not listed too: a restore of an engine that left may still write there.
        sharing = [each for each in self._mapped if attachment.shares_memory(each)]
        for other in sharing:
            if other.attachment_id in self._by_id and other.engine != attachment.engine:
                cannot_tell = (
                    "cuda_vmm too, which cannot be told from this memory:"
                    " pass cuda_ipc, or have a worker for each engine"
                )
                is_told = not attachment.memory.kin & other.memory.kin
                raise MemoryInUse(engine=other.engine, what="the same memory" if is_told else cannot_tell)
        return self._by_engine.get(attachment.engine) or next(iter(sharing), None)

    async def evict(self, attachment: Attachment, error: CacheError) -> None:
        """End an attachment's stream with an error, and wait until nothing is written for it any more."""
        # The first reason stays: an engine that is taken over while the worker drains hears of the takeover.
        if not attachment.evicted.done():
            attachment.evicted.set_result(error)
        # A caller that is cancelled must not stop the unmapping.
        await asyncio.shield(self.detach(attachment))

    def detach(self, attachment: Attachment) -> "asyncio.Task[None]":
        """Forget an attachment at once. A task unmaps its memory when nothing is written to it any more."""
        if self._by_id.pop(attachment.attachment_id, None) is not None:
            del self._by_engine[attachment.engine]
        task = asyncio.get_running_loop().create_task(self._detach(attachment))
        self._detaching.add(task)
        task.add_done_callback(self._detaching.discard)
        return task

    async def settle(self) -> None:
        """Wait until whatever was detached is gone."""
        await asyncio.gather(*self._detaching)

    async def _detach(self, attachment: Attachment) -> None:
        await attachment.end_all(RestoreCancelled())
        # The stream and an eviction both detach: memory is unmapped once.
        if not attachment.is_closed:
            attachment.is_closed = True
            self._mapped.remove(attachment)
            self._unmap(attachment)

    def _unmap(self, attachment: Attachment) -> None:
        self._mapped_bytes -= attachment.mapped_bytes
        attachment.close()
        self.room.give_back()

    def _known(
        self, directory: Path, spec: ModelSpec, probe: ModelProbe | None, share: ModelShare | None
    ) -> AttachedModel:
        """The model, read and registered with the store."""
        # Read the files first: the store learns of a model only when the files are known to be the engine's.
        model = self._models.get(directory, spec, share)
        self._client.models.register(spec, probe)
        return model

    def _open(self, hello: attachment_pb2.AttachHello) -> tuple[Regions, Regions | None]:
        regions = [*hello.kv_cache.regions, *([hello.save_area] if hello.HasField("save_area") else [])]
        needed = sum(max(region.size_bytes, 0) for region in regions)
        limit = self._settings.max_attached_mib * MIB
        if self._mapped_bytes + needed > limit:
            raise CapacityExceeded(
                tier="memory of engines",
                needed_bytes=needed,
                free_bytes=limit - self._mapped_bytes,
                limit_bytes=limit,
            )
        memory = self._opener.open_all(hello.kv_cache.regions, "kv_cache.regions")
        if not hello.HasField("save_area"):
            return memory, None
        try:
            return memory, self._opener.open_all([hello.save_area], "save_area", is_on_host=True)
        except BaseException:
            memory.close()
            raise


def _checked(hello: attachment_pb2.AttachHello) -> tuple[ModelSpec, Path]:
    """The model of a hello, as far as it can be judged by itself. Raises InvalidArgument."""
    if not _ENGINE.fullmatch(hello.engine):
        raise InvalidArgument(field="engine", problem=f"{hello.engine[:128]!r} is no name of an engine")
    if not _MODEL_NAME.fullmatch(hello.model.name):
        raise InvalidArgument(field="model.name", problem=f"{hello.model.name[:128]!r} is no name of a model")
    if hello.weights.WhichOneof("source") is None:
        raise InvalidArgument(field="weights.source", problem="is missing")
    spec = model_from_wire(hello.model)
    if hello.model.fingerprint and hello.model.fingerprint != spec.fingerprint():
        raise ModelFingerprintMismatch(
            f"{hello.model.name} has another fingerprint by its description than the hello names",
            model=hello.model.name,
            actual=spec.fingerprint().hex(),
            expected=hello.model.fingerprint.hex(),
        )
    return spec, Path(hello.weights.safetensors_directory)


def _layout(cache: attachment_pb2.KvCache, model: AttachedModel) -> CacheLayout:
    return parse_layout(
        cache, heads=model.cached, dtype=model.spec.dtype, layer_count=model.share.layer_count
    )


def _share(hello: attachment_pb2.AttachHello, layer_count: int) -> ModelShare | None:
    """The engine's part of the model; None: all of it. Raises InvalidArgument."""
    rank = hello.rank
    tensor_ranks, stages = rank.tensor_ranks or 1, rank.stages or 1
    if not hello.HasField("rank") or (tensor_ranks == stages == 1 and rank.layer_count in {0, layer_count}):
        return None
    if max(tensor_ranks, stages) > RANKS_LIMIT or rank.layer_count < 0:
        raise InvalidArgument(field="rank", problem=f"more than {RANKS_LIMIT} ranks, or fewer than 0 layers")
    parse_rendezvous(rank.rendezvous)
    end_layer = rank.first_layer + rank.layer_count if rank.layer_count else layer_count
    return ModelShare(rank.first_layer, end_layer, rank.tensor_rank, tensor_ranks, rank.stage, stages)
