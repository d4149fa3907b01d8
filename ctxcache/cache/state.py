"""State: a cache's models, ledger and counts, and the tasks that end although their caller is gone.

Owned by the event loop; the state does no I/O. `loading.py` fills it from the records. A move between tiers
must not stop half-way: a device may still write to its slot. So a caller waits for a move with
`asyncio.shield`, and a cancelled caller leaves the move running. Worst case: a move that a device never
answers, for which `drain` waits.
"""

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from ctxcache.cache.journal import Journal
from ctxcache.core.history import Event
from ctxcache.core.ledger.ledger import Below, Ledger
from ctxcache.core.ledger.segment import Segment, Shelf
from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import DEFAULT_LIMITS, DEFAULT_WATERMARKS, Limits, Watermarks
from ctxcache.core.observations import Observations
from ctxcache.core.placement.policy import Ranked
from ctxcache.core.placement.shares import NO_SHARES, Shares
from ctxcache.errors import ModelNotFound
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_RANGE, StreamRange
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.storage.metadata.base import ModelRecord

GENERATION_BITS = 32
"""Changes that one session can see in one run before its generations reach those after the next crash."""


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    appended_token_count: int = 0
    read_token_count: int = 0
    dram_hit_token_count: int = 0
    expired_session_count: int = 0
    evicted_session_count: int = 0
    unadmitted_session_count: int = 0
    corrupt_segment_count: int = 0
    mended_segment_count: int = 0
    flushed_segment_count: int = 0
    promoted_segment_count: int = 0
    joined_segment_count: int = 0
    uncopied_segment_count: int = 0
    mended_copy_count: int = 0
    delayed_write_count: int = 0


class State:
    """Models, the ledger, counters and clocks, shared by the parts of the cache."""

    def __init__(
        self,
        clock: Clock,
        policy: Ranked,
        memory: Shelf,
        below: Shelf,
        devices: Below,
        *,
        crash_count: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        shares: Shares = NO_SHARES,
        watermarks: Watermarks = DEFAULT_WATERMARKS,
        spans: Spans = NO_SPANS,
        copies: int = 1,
    ) -> None:
        """`crash_count`: how many runs over these records were cut off before this one.

        `copies`: how many SSD paths the segments of new sessions and blocks are on, unless a session says.
        """
        self.copies = copies
        self.clock = clock
        self.spans = spans
        self.limits = limits
        self.least_generation = crash_count << GENERATION_BITS
        """Where generations begin: a crash took back commits that had some too, and none may come again."""
        self.counters, self.seen = Counters(), Observations()
        self.is_prefetch_wanted = asyncio.Event()
        """Set when a session may have come to be worth promoting ahead of need."""
        self.unstage: Callable[[Segment], None] = lambda _: None
        """Forgets what is staged of a segment; staging sets it."""
        self.is_pressed = asyncio.Event()
        """Set when more is to be written than shall wait."""
        self.ledger = Ledger(
            clock,
            policy,
            memory,
            below,
            devices,
            limits=limits,
            shares=shares,
            watermarks=watermarks,
            seen=self.seen,
            wishes=self,
        )
        self.journal = Journal(clock, self.ledger.named)
        self.models: dict[tuple[str, str], ModelRecord] = {}
        self.model_ids: dict[str, list[str]] = {}
        """Model ids of each tenant, in order."""
        self.model_streams: Counter[str] = Counter()
        """Streams of each tenant's models."""
        self._layouts: WeakValueDictionary[tuple[bytes, tuple[StreamRange, ...]], SegmentLayout] = (
            WeakValueDictionary()
        )

    # -- models ------------------------------------------------------------------------------------

    def model(self, tenant: str, model_id: str) -> ModelRecord:
        """A tenant's model. Raises ModelNotFound."""
        try:
            return self.models[tenant, model_id]
        except KeyError:
            raise ModelNotFound(model=f"models/{model_id}") from None

    def layout(self, model: ModelRecord, ranges: Sequence[StreamRange]) -> SegmentLayout:
        """Where streams and token ids lie in a slot: one object for all sessions with these streams.

        Raises KeyError(stream) for a stream that the model does not have.
        """
        key = model.fingerprint, tuple(sorted({TOKENS_RANGE, *ranges}))
        found = self._layouts.get(key)
        if found is None:
            streams = (stream for item in ranges for stream in item.streams())
            found = self._layouts[key] = SegmentLayout(model.spec.resolve(streams))
        return found

    def add_model(self, model: ModelRecord) -> None:
        """Make a model known."""
        self.models[model.tenant, model.spec.model_id] = model
        insort(self.model_ids.setdefault(model.tenant, []), model.spec.model_id)
        self.model_streams[model.tenant] += len(model.spec.streams)

    def remove_model(self, tenant: str, model_id: str) -> None:
        """Make a model unknown that no session is of."""
        self.model_streams[tenant] -= len(self.models.pop((tenant, model_id)).spec.streams)
        self.model_ids[tenant].remove(model_id)

    # -- what the ledger wishes --------------------------------------------------------------------

    def prefetch_wanted(self) -> None:
        """See Wishes."""
        self.is_prefetch_wanted.set()

    def write_wanted(self) -> None:
        """See Wishes."""
        self.is_pressed.set()

    def segment_gone(self, segment: Segment) -> None:
        """See Wishes."""
        self.unstage(segment)

    def tokens_withheld(self, session: Session, token_count: int) -> None:
        """See Wishes."""
        paths = ", ".join(self.ledger.lost_paths_of(session))
        self.journal.happened(session, Event.DEVICE_LOST, detail=paths, token_count=token_count)


T = TypeVar("T")


class Background:
    """The moves under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, move: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin a move; its failure is for whoever waits for it, and for nobody else."""
        task = asyncio.get_running_loop().create_task(move)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def drain(self) -> None:
        """Wait for every move under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, move: "asyncio.Task[Any]") -> None:
        self._tasks.discard(move)
        # Looked at, so that asyncio does not complain when whoever wanted it has stopped waiting.
        if not move.cancelled():
            move.exception()


async def in_window(moves: Iterable[Callable[[], "asyncio.Task[None]"]], count: int) -> None:
    """Start moves in order, never more than `count` under way, and raise the first failure.

    After a failure none is started any more; those under way end first. A cancellation leaves them to it.
    """
    pending: set[asyncio.Task[None]] = set()
    failure: BaseException | None = None
    waiting = iter(moves)
    while True:
        if len(pending) >= count:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failure = _failure(done)
        # The next one is asked for when it can start: what it rests on may have changed in the meantime.
        move = next(waiting, None) if failure is None else None
        if move is None:
            break
        pending.add(move())
    if pending:
        done, _ = await asyncio.wait(pending)
        failure = failure or _failure(done)
    if failure is not None:
        raise failure


def _failure(done: Iterable["asyncio.Task[None]"]) -> BaseException | None:
    return next(filter(None, (task.exception() for task in done)), None)


class Pace(Protocol):
    """When it is time to rest."""

    @property
    def is_over(self) -> bool:
        """Whether others should have their turn now."""

    async def rest(self) -> None:
        """Let others have their turn."""


class StepByStep:
    """Rests whenever it is asked, for one turn of the loop: for work that nobody waits for."""

    is_over = True

    async def rest(self) -> None:
        """See Pace."""
        await asyncio.sleep(0)


STEP_BY_STEP = StepByStep()
