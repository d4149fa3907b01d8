"""WorkerService: validation, admission, and conversion around what is done in threads.

Owned by the event loop. Worst case: a restore that cannot be brought to an end, at which the process ends.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

import torch
from google.protobuf.duration_pb2 import Duration

from ctxcache.client import Client
from ctxcache.client.convert import kind_to_wire
from ctxcache.client.messages import write_session_info
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.wire.status import message_of
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.errors import LaneStuck, RestoreCancelled, RestoreFailed
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.planning.adaptive import stage_seconds
from gpu_worker.planning.assignment import PREFILL
from gpu_worker.planning.explain import reason
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import Profile
from gpu_worker.profiling.measure import hardware_name, measure_restoring
from gpu_worker.profiling.profile_file import Measured
from gpu_worker.sidecar import asking, restoring
from gpu_worker.sidecar.attachment import Attachment, End, RestoreControl, Running
from gpu_worker.sidecar.attachments import Attachments
from gpu_worker.sidecar.edge import AdmissionLimit, Context
from gpu_worker.sidecar.errors import TokensDiffer
from gpu_worker.sidecar.metrics import LEFT, LOST, Counts
from gpu_worker.sidecar.model import AttachedModel
from gpu_worker.sidecar.restoring import Pipelines
from gpu_worker.sidecar.settings import WorkerSettings
from gpu_worker.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.v1.attachment_pb2 import AttachHello

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 10.0
P = ParamSpec("P")
R = TypeVar("R")


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """See proto/gpu_worker/v1/worker.proto."""

    def __init__(
        self,
        settings: WorkerSettings,
        client: Client,
        direct: DirectStorage,
        pipelines: Pipelines,
        attachments: Attachments,
        on_stuck: Callable[[LaneStuck], None],
        *,
        spans: Spans = NO_SPANS,
    ) -> None:
        """`on_stuck` ends the process: an engine's memory may still be written to."""
        self._settings, self._client, self._direct, self._pipelines = settings, client, direct, pipelines
        self._attachments, self._on_stuck, self._spans = attachments, on_stuck, spans
        self.counts = Counts()
        self.restores = AdmissionLimit("restores under way", settings.max_concurrent_restores)
        self.saves = AdmissionLimit("saves under way", settings.max_concurrent_saves)
        # One at a time: two measurements on one device would measure each other.
        self._measuring = AdmissionLimit("measurements", 1)
        # Each admitted restore and save has a thread: none of them waits for one.
        self._restorers = ThreadPoolExecutor(settings.max_concurrent_restores, "ctxcache-restore")
        self._savers = ThreadPoolExecutor(settings.max_concurrent_saves, "ctxcache-save")

    def close(self) -> None:
        """End the threads; what is under way in them is not waited for."""
        self._restorers.shutdown(wait=False)
        self._savers.shutdown(wait=False)

    # -- attachments -------------------------------------------------------------------------------

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """See the proto."""
        del context
        hello = await _hello(request_iterator)
        attachment = await self._attachments.attach(hello)
        log.info("attached engine=%s attachment=%s", attachment.engine, attachment.attachment_id)
        # Requests are read all along: their end shows the engine's end.
        ended = asyncio.ensure_future(_has_left(request_iterator))
        how = LOST
        try:
            # Within the try: an engine that goes before it hears of the welcome is detached as well.
            yield self._welcome(attachment)
            ends: set[asyncio.Future[Any]] = {ended, attachment.evicted}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if attachment.evicted.done():
                error = attachment.evicted.result()
                how = error.reason
                raise error
            if not ended.result():
                raise InvalidArgument(field="farewell", problem="is missing")
            how = LEFT
        finally:
            ended.cancel()
            self.counts.ended_attachments[how] += 1
            self._attachments.detach(attachment)
            log.info(
                "detached engine=%s attachment=%s how=%s", attachment.engine, attachment.attachment_id, how
            )
        yield worker_pb2.AttachResponse(farewell=worker_pb2.Farewell())

    def _welcome(self, attachment: Attachment) -> worker_pb2.AttachResponse:
        return worker_pb2.AttachResponse(
            attachment_id=attachment.attachment_id,
            restore_limit=self._settings.max_concurrent_restores,
            longest_restore=_duration(self._settings.longest_restore_s),
            kinds=[kind_to_wire(kind) for kind in attachment.model.kinds],
        )

    # -- restoring ---------------------------------------------------------------------------------

    async def Restore(  # noqa: N802
        self, request: worker_pb2.RestoreRequest, context: Context
    ) -> AsyncIterator[worker_pb2.RestoreResponse]:
        """See the proto."""
        del context
        begin_ns = time.monotonic_ns()
        # A restore's life in the event loop:
        #
        #     checked ─► admitted (restores.take) ─► blocks and name taken (attachment.begin) ─► thread
        #     thread ends ─► place, name and blocks are given back ─► End ─► result
        #
        # Once a restore writes, its blocks are free when its thread has ended, not when its stream has.
        attachment = self._attachments.used(request.attachment_id)
        asked, timeout_s = asking.restore(request, attachment, self._settings.longest_restore_s)
        touched = asking.touched_blocks(asked, attachment.layout.block_tokens)
        running = Running(RestoreControl(Deadline.after_s(timeout_s)), touched)
        outcome = restoring.RestoreOutcome()
        self._begin(attachment, request.restore_id, asked, running, outcome)
        try:
            while not isinstance(event := await running.next(), End):
                if request.announces_layers:
                    usable = worker_pb2.LayerUsable(layer=event)
                    yield worker_pb2.RestoreResponse(layer_usable=usable)
        finally:
            # A broken stream ends here too. A restore that is over already is not changed by this.
            running.stop(RestoreCancelled())
            # Nothing was written and nothing will be: the blocks are free before the thread has ended.
            if not running.control.is_writing:
                attachment.over(request.restore_id, running)
        self._count(asked, outcome, event.error)
        # Before the first write blocks are as they were, and the engine may keep them.
        invalid = touched if event.error and running.control.is_writing else ()
        result = _result(outcome, event.error, invalid)
        result.actual.FromNanoseconds(time.monotonic_ns() - begin_ns)
        yield worker_pb2.RestoreResponse(result=result)

    def _begin(
        self,
        attachment: Attachment,
        restore_id: str,
        asked: restoring.RestoreOrder,
        running: Running,
        outcome: restoring.RestoreOutcome,
    ) -> None:
        """Restore in a thread.

        Its place is given back when the thread has ended, also if no stream listens any more.
        """
        loop = asyncio.get_running_loop()
        self.restores.take()
        try:
            attachment.begin(restore_id, running)
        except CacheError:
            self.restores.give_back()
            raise

        def tell(layer: int) -> None:
            # The restore's thread owns nothing of the loop's.
            loop.call_soon_threadsafe(running.layer, layer)

        restore = self._traced("restore", asked.end - asked.begin, restoring.restore)
        work = loop.run_in_executor(
            self._restorers,
            restore,
            self._client,
            self._direct,
            self._pipelines,
            attachment,
            asked,
            running.control,
            outcome,
            tell,
        )

        def over(done: "asyncio.Future[None]") -> None:
            self.restores.give_back()
            attachment.over(restore_id, running)
            running.over(self._known(done.exception()))

        work.add_done_callback(over)

    def _known(self, error: BaseException | None) -> CacheError | None:
        """An error as the engine may see it; an unknown one is logged."""
        if isinstance(error, LaneStuck):
            self._on_stuck(error)
        if error is None or isinstance(error, CacheError):
            return error
        log.error("restore_broke", exc_info=error)
        return RestoreFailed(problem=type(error).__name__)

    def _traced(self, name: str, token_count: int, work: Callable[P, R]) -> Callable[P, R]:
        """Work for a thread as a part of the rpc that asks for it: with its trace, and a span of its own."""
        if not self._spans.is_on:
            return work
        # Threads of a pool have no context of the rpc: the span would have no parent.
        context = copy_context()

        def spanned(*arguments: P.args, **named: P.kwargs) -> R:
            with self._spans.span(name, token_count=token_count):
                return work(*arguments, **named)

        return lambda *arguments, **named: context.run(spanned, *arguments, **named)

    def _count(
        self, asked: restoring.RestoreOrder, outcome: restoring.RestoreOutcome, error: CacheError | None
    ) -> None:
        if error is None:
            self.counts.restored += 1
            self.counts.restored_tokens += asked.end - asked.begin
            self.counts.read_bytes += outcome.read_bytes
            if outcome.plan is not None:
                predicted = stage_seconds(outcome.plan)
                for stage, seconds in outcome.observed_s.items():
                    self.counts.predicted_s[stage.value] += predicted[stage]
                    self.counts.observed_s[stage.value] += seconds
        else:
            self.counts.missed[error.reason] += 1

    async def Cancel(  # noqa: N802
        self, request: worker_pb2.CancelRequest, context: Context
    ) -> worker_pb2.CancelResponse:
        """See the proto."""
        del context
        running = self._attachments.get(request.attachment_id).running.get(request.restore_id)
        if running is None:
            return worker_pb2.CancelResponse()
        # The restore writes: the answer is owed when nothing of it is written any more.
        if not running.stop(RestoreCancelled()):
            await asyncio.shield(running.ended)
        return worker_pb2.CancelResponse(was_running=True)

    # -- saving ------------------------------------------------------------------------------------

    async def Save(  # noqa: N802
        self, request: worker_pb2.SaveRequest, context: Context
    ) -> worker_pb2.SaveResponse:
        """See the proto."""
        del context
        attachment = self._attachments.used(request.attachment_id)
        asking.check_save(request)
        self.saves.take()
        loop = asyncio.get_running_loop()
        # A save's thread reads the save area, which is unmapped only behind it.
        ended: asyncio.Future[None] = loop.create_future()
        attachment.threads.add(ended)
        ended.add_done_callback(attachment.threads.discard)
        save = self._traced("save", request.token_count, restoring.save)
        work = loop.run_in_executor(self._savers, save, self._client, attachment, request)

        def over(done: "asyncio.Future[SessionInfo]") -> None:
            # The rows are read until here, also if the engine no longer waits for the save.
            self.saves.give_back()
            ended.set_result(None)
            error = done.exception()
            if error is None:
                self.counts.saved += 1
                self.counts.saved_tokens += request.token_count
            else:
                self.counts.failed_saves[getattr(error, "reason", CacheError.reason)] += 1

        work.add_done_callback(over)
        # An engine that gives up must not stop a save between its reservation and its commit.
        return worker_pb2.SaveResponse(session=write_session_info(await asyncio.shield(work)))

    # -- planning ----------------------------------------------------------------------------------

    async def Plan(  # noqa: N802
        self, request: worker_pb2.PlanRequest, context: Context
    ) -> worker_pb2.PlanResponse:
        """See the proto."""
        del context
        model = self._attachments.get(request.attachment_id).model
        held = model.streams(asking.plan_kinds(request))
        plan = await asyncio.to_thread(model.plan, held, request.token_count, request.new_token_count)
        return worker_pb2.PlanResponse(
            predicted=_duration(plan.restored_s),
            methods=methods_of(plan),
            layers=[
                worker_pb2.LayerPlan(
                    method="/".join(piece.method.value for piece in pieces if piece.method),
                    reason=reason(plan, layer),
                    size_bytes=round(sum(piece.size_bytes for piece in pieces)),
                    usable=_duration(plan.timeline.restored_s(layer, besides=PREFILL)),
                )
                for layer, pieces in enumerate(plan.layers)
            ],
        )

    async def Profile(  # noqa: N802
        self, request: worker_pb2.ProfileRequest, context: Context
    ) -> worker_pb2.ProfileResponse:
        """See the proto."""
        del context
        model = self._attachments.get(request.attachment_id).model
        lengths = asking.lengths(request)
        if lengths:
            with self._measuring.entered():
                await asyncio.to_thread(measure, model, self._pipelines.device, lengths)
        profile = model.profile
        return worker_pb2.ProfileResponse(
            name=profile.name,
            is_measured=profile.is_measured,
            copy_bytes_per_s=profile.copy.bytes_per_s,
            factors={stage.value: factor for stage, factor in profile.factors.items()},
        )

    async def GetStats(  # noqa: N802
        self, request: worker_pb2.GetStatsRequest, context: Context
    ) -> worker_pb2.Stats:
        """See the proto."""
        del request, context
        counts = self.counts
        return worker_pb2.Stats(
            version=version("ctxcache"),
            store=self._settings.store,
            device=self._settings.device,
            restored_count=counts.restored,
            missed_counts=counts.missed,
            restored_token_count=counts.restored_tokens,
            read_bytes=counts.read_bytes,
            saved_count=counts.saved,
            saved_token_count=counts.saved_tokens,
            failed_save_counts=counts.failed_saves,
            direct_path=self._direct.live.path,
            direct_reason=self._direct.live.reason,
            direct_read_bytes=self._direct.read_bytes,
            direct_failed_counts=self._direct.failures,
            arena_pinned_bytes=self._direct.pins.pinned_bytes,
            arena_reason=self._direct.pins.problem,
            attachments=[
                worker_pb2.AttachmentStats(
                    attachment_id=attachment.attachment_id,
                    engine=attachment.engine,
                    model=f"models/{attachment.model.spec.model_id}",
                    mapped_bytes=attachment.mapped_bytes,
                    weight_bytes=attachment.model.weights.loaded_bytes,
                    restore_count=len(attachment.running),
                )
                for attachment in self._attachments
            ],
        )


def measure(model: AttachedModel, device: torch.device, lengths: Sequence[int]) -> Profile:
    """Measure at these lengths, ascending, and plan by the measured profile from here on."""
    for layer in range(model.spec.layer_count):
        # Measured layers are projected: their weights must be there.
        model.weights.load(layer)
    measured: Measured = measure_restoring(
        model.weights.adapter, model.weights.shape, hardware=hardware_name(device), lengths=lengths
    )
    model.measured(measured.profile)
    return measured.profile


def _result(
    outcome: restoring.RestoreOutcome, error: CacheError | None, invalid: Sequence[int]
) -> worker_pb2.RestoreResult:
    result = worker_pb2.RestoreResult(is_restored=error is None, invalid_block_ids=invalid)
    if error is not None:
        result.reason, result.message = error.reason, message_of(error)
    if isinstance(error, TokensDiffer):
        result.common_token_count = int(error.facts["common_token_count"])
    if outcome.plan is not None:
        result.methods = methods_of(outcome.plan)
        result.predicted.CopyFrom(_duration(outcome.plan.restored_s))
        result.read_bytes = outcome.read_bytes
    return result


def methods_of(plan: Plan) -> str:
    """A plan in its compact form."""
    return str(plan.restore_plan())


async def _hello(requests: AsyncIterator[worker_pb2.AttachRequest]) -> AttachHello:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        raise DeadlineExceeded(target="hello", timeout_s=f"{HELLO_TIMEOUT_S:g}") from None
    if first is None or not first.HasField("hello"):
        raise InvalidArgument(field="hello", problem="is missing")
    return first.hello


async def _has_left(requests: AsyncIterator[worker_pb2.AttachRequest]) -> bool:
    """Wait for a farewell, or for an end without one: gRPC shows a broken connection as an end too.

    Raises InvalidArgument for a second hello.
    """
    async for request in requests:
        if request.HasField("hello"):
            raise InvalidArgument(field="hello", problem="came before")
        if request.HasField("farewell"):
            return True
    return False


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
