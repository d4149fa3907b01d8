"""The pipeline: lanes and rings of one device, the rows that come in, and the restores that run on them.

```
   lane        read               copy              verify    compute                 announce
               │ staging ring     │ landing ring    │         │ project, rotate,      │ layer usable,
    store ───► │ [s][s][s][s] ──► │ [d][d][d][d] ──►│ sums ──►│ scatter into target ─►│ engine goes on
               ▲                  ▲                           │
               └── free again ────┴──────── free again ◄──────┘   when what consumed a buffer has passed
```

The reading lane drives: it takes a buffer, fills it from the restore's source, and hands it to the lanes
behind. On a GPU its thread issues to those itself, recomputation and reads under way apart. Where the device
reads the host's memory there is no landing ring. Back-pressure is that taking a buffer waits for its oldest
consumer. Each piece of work first looks whether the restore still goes on, so that a failure empties all
lanes at once.

```
   a layer:   INVALID ──fill──► FILLING ──announce──► USABLE
                 ▲                 │                    │
                 └──── a failure of any layer, for good ┘
```

Restores run one behind the other or interleaved. The pipeline is thread-safe, as its lanes are; rings and
sources belong to the reading lane, a source's `abort` apart. Worst case: work that is stuck in a device or
in the store. `drain` says so at its deadline; then the target must not be used, and the pipeline refuses
further restores and is to be replaced. A lease that ended is found by `check` after the copies under it;
what was copied is then not used.
"""

import enum
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from torch import Tensor

from ctxcache.client.wire import Closing
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.layout import SEGMENT_TOKENS
from gpu_worker.errors import LaneStuck, RestoreCancelled, RestoreTooLate
from gpu_worker.pipeline.compute import Compute
from gpu_worker.pipeline.lane import Deadline, Device, Lane, LaneEvent, Work
from gpu_worker.pipeline.sources import Arrival, Cuts, LandingRows, RowSource
from gpu_worker.pipeline.target import Target
from gpu_worker.planning.plan import LayerPart, RestoreSchedule, Stage

# -- rings and restores ------------------------------------------------------------------------------

POISON = 0xFF
"""Byte of poisoned buffers: NaN in every floating type."""


# A buffer's life, between two lanes:
#
#     free ──take──► filled by the reading lane ──bind──► its consumer's ──event has passed──► free
#                      └──────────── drop, where filling failed ────────────────────────────────┘
#
# Taking waits for the oldest consumer: no more than `count` batches are under way, however fast reads are.
class BufferRing:
    """Buffers [size_bytes] uint8, all alike."""

    def __init__(self, buffers: list[Tensor], *, is_poisoned: bool = False) -> None:
        """`is_poisoned`: a buffer is filled with POISON whenever it is free."""
        if not buffers:
            raise InvalidArgument(field="slot_count", problem="a ring has at least one buffer")
        self.size_bytes = int(buffers[0].nbytes)
        self._free = deque(buffers)
        self._in_use: deque[tuple[Tensor, LaneEvent]] = deque()
        self._is_poisoned = is_poisoned
        self._count = len(buffers)
        # NaN spreads through every sum: one element that is read
        # too early shows in the cache (tests of R2 and R3).
        for buffer in buffers:
            self._poison(buffer)

    @property
    def free_count(self) -> int:
        """Buffers that nobody uses, as far as `take` and `sweep` looked."""
        return len(self._free)

    @property
    def count(self) -> int:
        """All buffers."""
        return self._count

    def take(self, deadline: Deadline) -> Tensor:
        """A buffer that nothing reads or writes; pass it to `bind`, or `drop`. Raises RestoreTooLate."""
        if not self._free:
            self._reclaim(deadline)
        return self._free.popleft()

    def bind(self, buffer: Tensor, consumer: LaneEvent) -> None:
        """The buffer belongs to `consumer`'s work until that has passed."""
        self._in_use.append((buffer, consumer))

    def drop(self, buffer: Tensor) -> None:
        """A taken buffer that nobody got to see is free again."""
        self._poison(buffer)
        self._free.append(buffer)

    def sweep(self, deadline: Deadline) -> None:
        """Wait until all buffers are free. Raises RestoreTooLate."""
        while self._in_use:
            self._reclaim(deadline)

    def _reclaim(self, deadline: Deadline) -> None:
        # Consumers are of one lane and end in the order in which they were bound.
        if not self._in_use:
            # All are taken and none is bound: their readers have not returned yet.
            raise RestoreTooLate(what="a staging buffer")
        buffer, consumer = self._in_use[0]
        # A buffer is free when its consumer has passed on the device, not only been issued (R3).
        if not consumer.settle_by(deadline):
            raise RestoreTooLate(what="a staging buffer")
        self._in_use.popleft()
        self.drop(buffer)

    def _poison(self, buffer: Tensor) -> None:
        if self._is_poisoned:
            buffer.fill_(POISON)


DRAIN_TIMEOUT_S = 30.0
TokenShare = Callable[[int, int], tuple[int, int]]
"""(begin, end) -> the part of these tokens that is read here; see gpu_worker/parallel."""


class LayerState(enum.Enum):
    """The state of one layer of a target."""

    INVALID = "invalid"
    FILLING = "filling"
    USABLE = "usable"


class LayerStates:
    """The states of one restore's layers."""

    def __init__(
        self, layer_count: int, *, on_usable: Callable[[int], None], on_failure: Callable[[], None]
    ) -> None:
        """Both are called before waiters hear, one at a time, `on_failure` once; they must not wait."""
        self._states = [LayerState.INVALID] * layer_count
        self._error: CacheError | None = None
        # Called under the condition's lock: `announced` and `failed` of a target never run beside each other.
        self._on_usable, self._on_failure = on_usable, on_failure
        self._changed = threading.Condition()

    @property
    def error(self) -> CacheError | None:
        """Why no layer is usable any more."""
        return self._error

    @property
    def is_whole(self) -> bool:
        """Whether every layer is usable."""
        with self._changed:
            return self._is_whole()

    def of(self, layer: int) -> LayerState:
        """One layer's state."""
        with self._changed:
            return self._states[layer]

    def fill(self, layer: int) -> None:
        """Work on a layer begins."""
        with self._changed:
            if self._error is None:
                self._states[layer] = LayerState.FILLING

    def announce(self, layer: int) -> None:
        """A layer is usable, unless the restore has failed meanwhile."""
        with self._changed:
            if self._error is None:
                # The target first: an engine that sees USABLE must find the layer announced there too.
                self._on_usable(layer)
                self._states[layer] = LayerState.USABLE
                self._changed.notify_all()

    def fail(self, error: CacheError) -> bool:
        """Make no layer usable any more, for `error`; False if all were, or the restore had failed before."""
        with self._changed:
            # The first error wins. A whole restore cannot fail any more: the engine may be using it.
            if self._error is not None or self._is_whole():
                return False
            self._error = error
            self._states = [LayerState.INVALID] * len(self._states)
            self._on_failure()
            self._changed.notify_all()
        return True

    def wait(self, layer: int, deadline: Deadline) -> None:
        """Wait until a layer is usable.

        Raises why it never will be; RestoreTooLate fails the restore for all.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._states[layer] is LayerState.USABLE, deadline.left_s
            )
            if self._error is None and self._states[layer] is LayerState.USABLE:
                return
        # Late for one is late for all: no waiter may use a target that another one gave up.
        self.fail(RestoreTooLate(what=f"layer {layer}"))
        raise self._error or RestoreTooLate(what=f"layer {layer}")

    def _is_whole(self) -> bool:
        return all(state is LayerState.USABLE for state in self._states)


class Lanes(NamedTuple):
    """Lanes in the order in which rows pass them."""

    read: Lane
    copy: Lane
    verify: Lane
    compute: Lane
    announce: Lane


class Rings(NamedTuple):
    """Buffers; both belong to the reading lane. No landing: the device reads the host's memory."""

    staging: BufferRing
    landing: BufferRing | None


class Restoration:
    """Made by Pipeline.start. A context manager: leaving it cancels what is not done, and drains."""

    def __init__(
        self,
        *,
        schedule: RestoreSchedule,
        source: RowSource,
        target: Target,
        compute: Compute,
        token_ids: Tensor | None,
        lanes: Lanes,
        rings: Rings,
        batch_tokens: int,
        deadline: Deadline,
        on_stuck: Callable[[Lane], None],
        share: TokenShare | None = None,
    ) -> None:
        self.schedule, self.target, self.deadline = schedule, target, deadline
        self._source, self._compute, self._token_ids = source, compute, token_ids
        self._lanes, self._rings, self._batch_tokens = lanes, rings, batch_tokens
        self._on_stuck, self._share = on_stuck, share
        # Asked once: to ask a protocol takes as long as to land a batch.
        self._landed = source if isinstance(source, LandingRows) else None
        self._states = LayerStates(target.layer_count, on_usable=target.announced, on_failure=target.failed)
        # Kept to the end for `observed_s`: a device's times are known when all has passed.
        self._events: list[tuple[Stage, LaneEvent]] = []
        # Landed rows that were not compared yet, by layer; the reading lane adds, the announcing lane takes.
        self._arrived: dict[int, list[Arrival]] = defaultdict(list)
        self._fill_s = 0.0
        self._begin_ns = time.perf_counter_ns()
        self._restored_ns = 0

    # -- for the engine ----------------------------------------------------------------------------

    @property
    def error(self) -> CacheError | None:
        """Why the restore failed; None while it goes on and when it is whole."""
        return self._states.error

    @property
    def is_whole(self) -> bool:
        """Whether every layer is usable."""
        return self._states.is_whole

    def state(self, layer: int) -> LayerState:
        """The state of a layer in the target."""
        return self._states.of(layer)

    def wait(self, layer: int, deadline: Deadline | None = None) -> None:
        """Wait until a layer is usable.

        Raises why it never will be; a deadline that passes fails the restore.
        """
        self._states.wait(layer, self.deadline.earlier(deadline))

    def wait_all(self, deadline: Deadline | None = None) -> None:
        """Wait until every layer is usable; see `wait`."""
        for layer in range(self.target.layer_count):
            self.wait(layer, deadline)

    def cancel(self) -> None:
        """Stop; nothing becomes usable any more unless all is. Writes may go on until it is drained."""
        if not self._states.is_whole:
            self._states.fail(RestoreCancelled())

    def drain(self, deadline: Deadline | None = None) -> None:
        """Wait until no lane reads or writes anything of this restore, and all its buffers are free.

        Raises LaneStuck; then the target must not be used, nor the pipeline.
        """
        # Not the restore's own deadline, which may have passed: writes are over only when the lanes are.
        until = deadline or Deadline.after_s(DRAIN_TIMEOUT_S)
        if self._states.error is not None:
            # A source that waits for the store would keep its lane until the deadline.
            self._source.abort()
        # Fenced in this order: a lane submits only to those behind it.
        for lane in self._lanes:
            self._fence(lane, until)
        self._look_at_rest()
        # Swept on the reading lane, which owns the buffers: a fill that is under way is over by then.
        swept = self._lanes.read.submit(lambda: self._sweep(until), deadline=until)
        if not swept.settle_by(until) or swept.error is not None:
            self._on_stuck(self._lanes.read)
            raise LaneStuck(lane=self._lanes.read.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self.drain()

    @property
    def restored_s(self) -> float:
        """Seconds from its begin until the last layer was usable; 0 where that did not happen."""
        return max(0.0, (self._restored_ns - self._begin_ns) / 1e9) if self._states.is_whole else 0.0

    def observed_s(self) -> Mapping[Stage, float]:
        """Seconds of each stage, without waits. For a restore that is whole and drained."""
        seconds: dict[Stage, float] = defaultdict(float)
        # Where rows are used in place, filling a buffer is the copy.
        seconds[Stage.COPY if self._rings.landing is None else Stage.READ] += self._fill_s
        for stage, event in self._events:
            seconds[stage] += event.busy_s
        return dict(seconds)

    # -- on the lanes ------------------------------------------------------------------------------

    def begin(self, *, behind: LaneEvent) -> None:
        """Submit everything; `behind` is what the target's memory must wait for.

        Called once, by the pipeline.
        """
        # Order of submission, for layers r, r + 1, ... that come from rows (R1, R4, R8):
        #
        #     compute   [behind the engine] [recompute 0..r-1] [finish 0] ... [r: project] [finish r] ...
        #     read      [begin computing] [r: batch, batch, check lease] [r+1: batch, ...
        #     announce                                        [0 usable] ...             [r usable] ...
        #
        # Lanes keep this order by themselves; events order what is on different lanes.
        schedule = self.schedule
        # Refusals come before anything is submitted.
        batches = [[(part, self._batch(part)) for part in parts] for parts in schedule.parts]
        if schedule.chained_layers:
            self._compute.chain(schedule.chained_layers)
        # Begun by way of the reading lane: a restore that begins behind this one computes behind it.
        self._submit(self._lanes.read, partial(self._begin_computing, behind))
        for layer in range(schedule.recomputed_layers, self.target.layer_count):
            self._submit(self._lanes.read, partial(self._feed_layer, layer, batches[layer]))

    def _batch(self, part: LayerPart) -> int:
        """Tokens that one buffer takes."""
        row_bytes = self._source.row_bytes(part.stream)
        # Both limits: as many rows as keep the device busy, and no more than a buffer has room for.
        tokens = min(self._batch_tokens, self._rings.staging.size_bytes // row_bytes)
        if tokens > SEGMENT_TOKENS:
            # A chunk that is cut would be read twice, or come in pieces. Chunks have 64 tokens or a power of
            # two times as many: no more than an eighth of a batch is given up for those that are longer.
            tokens -= tokens % max(SEGMENT_TOKENS, 1 << (tokens // 8).bit_length() - 1)
        if not tokens:
            problem = f"{self._rings.staging.size_bytes} B hold no row of {row_bytes} B"
            raise InvalidArgument(field="slot_bytes", problem=problem)
        return tokens

    def _submit(self, lane: Lane, work: Work, *after: LaneEvent, does_wait: bool = False) -> LaneEvent:
        return lane.submit(
            partial(self._do, work),
            after=after,
            deadline=self.deadline,
            on_error=self._states.fail,
            does_wait=does_wait,
        )

    def _do(self, work: Work) -> None:
        """Do a piece of work on its lane, unless the restore has failed or is late."""
        if self._states.error is not None:
            # R9. The first error, whatever this work would have
            # come to: the lane's queue empties without a write.
            raise self._states.error
        self.deadline.check("the restore")
        work()

    def _begin_computing(self, behind: LaneEvent) -> None:
        # Earlier users of the target's memory have ended when the first work writes to it.
        self._submit(self._lanes.compute, lambda: None, behind)
        if self.schedule.needs_token_ids:
            # A pass through the model in Python: rows are copied meanwhile.
            event = self._submit(self._lanes.compute, self._recompute, does_wait=True)
            self._events.append((Stage.RECOMPUTE, event))
        # R8. Layer 0 is announced when all recomputed layers are there:
        # the engine's pass would run the same modules.
        for layer in range(self.schedule.recomputed_layers):
            self._close_layer(layer)

    def _recompute(self) -> None:
        if self._token_ids is None:
            raise InvalidArgument(field="token_ids", problem="the plan recomputes layers")
        for layer in range(self.schedule.recomputed_layers):
            self._states.fill(layer)
        self._compute.recompute(self.schedule, self._token_ids, self.target)

    def _feed_layer(self, layer: int, batches: Sequence[tuple[LayerPart, int]]) -> None:
        """Read a layer's parts, in batches of so many tokens, and hand them on. On the reading lane."""
        for part, most_tokens in batches:
            for begin, end in part.batches(most_tokens):
                self._do(partial(self._feed, part, begin, end))
        self._do(partial(self._end_reading, layer))

    def _feed(self, part: LayerPart, begin: int, end: int) -> None:
        """Read rows [begin, end) and hand them on. On the reading lane."""
        self._states.fill(part.layer)
        row_bytes = self._source.row_bytes(part.stream)
        # With ranks each reads a part of the batch, and `compute` gathers the rest:
        #
        #     batch    begin .............................. end
        #     rank 0   [ reads   )
        #     rank 1             [ reads   )                      all ranks: room for all tokens of the batch
        first, last = (begin, end) if self._share is None else self._share(begin, end)
        if self._rings.landing is not None and self._landed is not None:
            self._land(self._landed, self._rings.landing, part, (begin, end), (first, last))
            return
        slot = self._rings.staging.take(self.deadline)
        try:
            rows = slot[: (last - first) * row_bytes].view(last - first, row_bytes)
            begin_ns = time.perf_counter_ns()
            # On this thread: reading is what the lane is for,
            # and the others work on earlier batches meanwhile.
            self._source.fill(part.stream, first, last, rows.numpy())
            self._fill_s += (time.perf_counter_ns() - begin_ns) / 1e9
            if self._share is not None:
                # Other ranks use these rows: they are known to be the session's before they leave.
                self._source.check()
            self._carry(part, (begin, end), slot, rows)
        except BaseException:
            # A buffer that is bound to no event never comes back: the ring would be short of it.
            self._rings.staging.drop(slot)
            raise

    def _land(
        self,
        source: LandingRows,
        landing: BufferRing,
        part: LayerPart,
        tokens: tuple[int, int],
        mine: tuple[int, int],
    ) -> None:
        """Have rows come straight onto the device: no thread copies them, and nobody waits for them here.

        As many reads are under way as the landing ring has buffers.
        """
        first, last = mine
        # No two pieces of a share of each batch follow one another.
        whole = first, last, last - first
        if self._share is None:
            whole = part.begin, part.end, self._batch(part)
        row_bytes = source.row_bytes(part.stream)
        place = landing.take(self.deadline)
        arrival: Arrival | None = None
        try:
            rows = place[: (last - first) * row_bytes].view(last - first, row_bytes)
            arrival = source.land(part.stream, first, last, rows, Cuts(*whole))
            # Where each piece of work of a batch waits, and for what:
            #
            #     read       land: places ──┐
            #     copy                      └► bring ──┐
            #     verify                               └► sum up ──┐
            #     compute                                          └► project ──┬► the buffer is free
            #     announce   (with shares: check before project)                └► check ──► layer usable
            brought = self._submit_behind(self._lanes.copy, arrival)
            summed = brought
            if arrival.is_verified:
                summed = self._submit(self._lanes.verify, arrival.sum_up, brought)
            if self._share is not None:
                # Other ranks use these rows: they are right, and the session's, before they leave.
                summed = self._submit(self._lanes.announce, partial(self._verify, arrival), summed)
            else:
                # Compared when the layer is announced: until then
                # nothing waits for a checksum to come to the host (R11).
                self._arrived[part.layer].append(arrival)
            # Landing counts as copying: no thread of this process reads the rows.
            self._events.append((Stage.COPY, brought))
            # Behind the sums: they read the buffer too, and `compute` would free it under them.
            landing.bind(place, self._project(part, tokens, rows, summed))
        except BaseException:
            # A driver's read may still be on its way into the buffer, which the next batch gets.
            if arrival is not None:
                arrival.settle()
            landing.drop(place)
            raise

    def _submit_behind(self, lane: Lane, arrival: Arrival) -> LaneEvent:
        """Have rows come, or nothing any more: behind the event the buffer is another batch's."""

        def bring() -> None:
            try:
                self._do(arrival.bring)
            except BaseException:
                arrival.settle()
                raise

        return lane.submit(
            bring, deadline=self.deadline, on_error=self._states.fail, does_wait=arrival.is_awaited
        )

    def _verify(self, arrival: Arrival) -> None:
        arrival.check()
        self._source.check()

    def _carry(self, part: LayerPart, tokens: tuple[int, int], slot: Tensor, rows: Tensor) -> None:
        landing = self._rings.landing
        if landing is None:
            self._rings.staging.bind(slot, self._project(part, tokens, rows))
            return
        place = landing.take(self.deadline)
        landed = place[: rows.nbytes].view(rows.shape)
        # R2. The compute lane waits for this event, and not for the copying lane's queue.
        copied = self._submit(self._lanes.copy, partial(_copy, rows, landed))
        self._events.append((Stage.COPY, copied))
        # The host's buffer is free behind the copy, the device's behind the projection.
        self._rings.staging.bind(slot, copied)
        landing.bind(place, self._project(part, tokens, landed, copied))

    def _project(
        self, part: LayerPart, tokens: tuple[int, int], rows: Tensor, *after: LaneEvent
    ) -> LaneEvent:
        def work() -> None:
            # Made when it is needed: a target may lay out slots on the device, on this lane's stream.
            room = self.target.room(part.layer, *tokens)
            self._compute.restore(part.layer, part.method, rows, tokens[0], room)

        # Ranks gather one another's rows, and wait for them.
        event = self._submit(self._lanes.compute, work, *after, does_wait=self._share is not None)
        self._events.append((Stage.of(part.method), event))
        return event

    def _end_reading(self, layer: int) -> None:
        """Behind a layer's last read: its rows were the session's, or the layer never becomes usable."""
        # R7. Host reads are over here. Rows that the device copies are checked when those copies have passed.
        if layer not in self._arrived:
            self._source.check()
        self._close_layer(layer)

    def _close_layer(self, layer: int) -> None:
        # R6. Behind the layer's last write on the same lane, so that its event covers all of them.
        finished = self._submit(self._lanes.compute, partial(self.target.finish, layer))
        self._submit(self._lanes.announce, partial(self._announce, layer), finished)

    def _announce(self, layer: int) -> None:
        if layer in self._arrived:
            # The layer has passed on the device by now: its copies have ended, and its sums are there.
            for arrival in self._arrived.pop(layer):
                arrival.check()
            self._source.check()
        # The last layer's time stays: each announcement writes over the former one's.
        self._restored_ns = time.perf_counter_ns()
        self._states.announce(layer)

    def _look_at_rest(self) -> None:
        """Compare what landed and was not announced: wrong rows may be why the restore failed.

        Their source hears of them, so that the store looks at them next. The restore's error stays the first.
        """
        for arrivals in self._arrived.values():
            for arrival in arrivals:
                with suppress(CacheError):
                    arrival.check()
        self._arrived.clear()

    def _fence(self, lane: Lane, deadline: Deadline) -> None:
        try:
            lane.fence(deadline)
        except LaneStuck:
            self._on_stuck(lane)
            raise

    def _sweep(self, deadline: Deadline) -> None:
        self._rings.staging.sweep(deadline)
        if self._rings.landing is not None:
            self._rings.landing.sweep(deadline)


def _copy(rows: Tensor, landed: Tensor) -> None:
    landed.copy_(rows, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How much is under way at once.

    `slot_bytes` of each staging buffer, `slot_count` of them, and as many on a device with memory of its own;
    `batch_tokens` at most in one; None: as the device has them. `is_poisoned`: free buffers are NaN, to see
    what reads them (costs a pass).
    """

    slot_bytes: int | None = None
    slot_count: int | None = None
    batch_tokens: int | None = None
    is_poisoned: bool = False


class Pipeline(Closing):
    """Lanes for reading, copying, computing and announcing, and the buffers between them.

    A context manager.
    """

    def __init__(self, device: Device, settings: PipelineSettings | None = None) -> None:
        """Start the lanes and allocate the buffers. Raises InvalidArgument(field="slot_count")."""
        self.device, self.settings = device, settings or PipelineSettings()
        own = self.settings
        count = device.slot_count if own.slot_count is None else own.slot_count
        sizes = [own.slot_bytes or device.slot_bytes] * count
        staging = BufferRing([device.host_buffer(size) for size in sizes], is_poisoned=own.is_poisoned)
        landing = None
        if not device.is_unified:
            landing = BufferRing([device.device_buffer(size) for size in sizes], is_poisoned=own.is_poisoned)
        self.rings = Rings(staging, landing)
        self.lanes = Lanes(
            # Reading and announcing are work of the host on every device.
            read=device.host_lane("read"),
            copy=device.lane("copy"),
            verify=device.lane("verify"),
            compute=device.lane("compute"),
            announce=device.host_lane("announce"),
        )
        self._stuck: Lane | None = None

    def start(
        self,
        schedule: RestoreSchedule,
        source: RowSource,
        target: Target,
        compute: Compute,
        *,
        deadline: Deadline,
        token_ids: Tensor | None = None,
        share: TokenShare | None = None,
    ) -> Restoration:
        """Begin to restore; returns at once. All is done, or has failed, by the deadline.

        Source and target belong to the restore until it is drained. `token_ids` [T] where layers are
        recomputed. `share`: the tokens of [begin, end) that are read here; `compute` is then given their
        rows, and room for all. Raises InvalidArgument, LaneStuck; what goes wrong later is told by the
        restoration.
        """
        if self._stuck is not None:
            raise LaneStuck(lane=self._stuck.name)
        if schedule.needs_token_ids and token_ids is None:
            raise InvalidArgument(field="token_ids", problem="the plan recomputes layers")
        if (len(schedule.parts), schedule.token_count) != (target.layer_count, target.token_count):
            problem = f"{len(schedule.parts)} layers of {schedule.token_count} tokens"
            raise InvalidArgument(field="schedule", problem=f"{problem} are not the target's")
        restoration = Restoration(
            schedule=schedule,
            source=source,
            target=target,
            compute=compute,
            token_ids=token_ids,
            lanes=self.lanes,
            rings=self.rings,
            batch_tokens=self.settings.batch_tokens or self.device.batch_tokens,
            deadline=deadline,
            on_stuck=self._give_up,
            share=share,
        )
        # Work that the engine issued before may still read the blocks that are written to.
        restoration.begin(behind=self.device.mark())
        return restoration

    @property
    def is_stuck(self) -> bool:
        """Whether a lane did not come to rest, so that no restore can begin here any more."""
        return self._stuck is not None

    def close(self, *, timeout_s: float = 30.0) -> None:
        """End every lane behind what is under way. Raises LaneStuck; that lane ends when its work does."""
        deadline = Deadline.after_s(timeout_s)
        errors: list[Exception] = []
        # From read to announce: a lane submits to those behind it, which must run until it has ended.
        for lane in self.lanes:
            try:
                lane.close(deadline)
            except (CacheError, RuntimeError) as error:
                errors.append(error)
        # Every lane is told to end, and then the first trouble is told.
        if errors:
            raise errors[0]

    def _give_up(self, lane: Lane) -> None:
        self._stuck = lane
