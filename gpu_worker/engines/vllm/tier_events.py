"""Events of the store's chunks, for vLLM's publisher.

    store ──SubscribeBlocks──► thread ──► OffloadingEvent ──► vLLM: BlockStored, BlockRemoved ──► ZMQ

Only chunks that this engine has saved or found are told, for it knows the tokens of no others: stored when
the store has the chunk, removed when it was evicted, deleted or has expired there. Where the link breaks, the
next subscription says what is still there. vLLM publishes with its steps: an engine without a request is
woken for one. Memory: some 200 bytes for each such chunk.
"""

import gc
import threading
from collections.abc import Iterable

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey

from ctxcache.client import BlockSpace
from ctxcache.client.blocks import BlockSubscription
from ctxcache.client.types import LookupState
from ctxcache.errors import CacheError
from gpu_worker.engines.link import PAUSE_S, LinkState, StoreLink
from gpu_worker.engines.vllm.versions import storage_medium

OWNER = "ctxcache"
"""The tier that events name."""


# What vLLM's publisher hears of a chunk, by whether this engine has met it and whether the store has it:
#
#     met, there, not told    ──► BlockStored
#     told, not there         ──► BlockRemoved, and forgotten
#     there, never met        nothing: its tokens are not known here
#     met, not there          nothing, until the store has it
class StoreEvents:
    """Events of the chunks that the engine has met. Thread-safe. Close it."""

    def __init__(self, link: StoreLink[BlockSpace]) -> None:
        self._link = link
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._met: dict[bytes, OffloadKey] = {}
        """Chunks that were saved or found, by their keys in the store."""
        self._there: set[bytes] = set()
        """Keys of the space that the store has, met or not."""
        self._told: set[bytes] = set()
        """Keys that were told as stored, and not as removed since."""
        self._waiting: list[OffloadingEvent] = []
        self._subscription: BlockSubscription | None = None
        # vLLM gives a connector neither the engine nor its publisher. Later it hides live objects from `gc`.
        self._engines = [item for item in gc.get_objects() if issubclass(type(item), EngineCoreProc)]
        """The engine of this process, if it waits for requests of other processes."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ctxcache-kv-events", daemon=True)
        self._thread.start()

    def met(self, keys: Iterable[tuple[bytes, OffloadKey]]) -> None:
        """Note chunks that were saved or found. They are told from now on."""
        with self._lock:
            new = dict(keys)
            self._met.update(new)
            self._settle(new)

    @property
    def has_news(self) -> bool:
        """Whether there are events to take."""
        return bool(self._waiting)

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def begin_anew(self) -> None:
        """Subscribe anew, since the space of the chunks has changed."""
        with self._lock:
            if self._subscription is not None:
                self._subscription.close()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with self._lock:
            if self._subscription is not None:
                self._subscription.close()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.is_set():
            used = self._link.use()
            if used is None:
                if self._link.state is LinkState.REFUSED:
                    return
                self._closed.wait(PAUSE_S)
                continue
            client, space = used
            try:
                with client.blocks.subscribe(space) as subscription:
                    self._hear(subscription)
            except CacheError as error:
                self._link.failed(error)
                self._closed.wait(PAUSE_S)

    def _hear(self, subscription: BlockSubscription) -> None:
        with self._lock:
            self._subscription = None if self._closed.is_set() else subscription
            if self._subscription is None:
                return
        # A new subscription tells every chunk that is there, then `is_current`. A chunk that it has not told
        # by then was lost while there was no subscription.
        confirmed: set[bytes] | None = set()
        try:
            for news in subscription:
                with self._lock:
                    keys = {change.key for change in news.changes}
                    there = {change.key for change in news.changes if change.state is LookupState.HIT}
                    self._there.difference_update(keys)
                    self._there |= there
                    if confirmed is not None:
                        confirmed.difference_update(keys)
                        confirmed |= there
                    if confirmed is not None and news.is_current:
                        # Chunks that only the last subscription told of are gone.
                        keys |= self._there - confirmed
                        self._there, confirmed = confirmed, None
                    self._settle(keys)
        finally:
            with self._lock:
                self._subscription = None

    def _settle(self, keys: Iterable[bytes]) -> None:
        """Make events of those chunks of these keys that came or went."""
        stored = [key for key in keys if key in self._there and key in self._met and key not in self._told]
        removed = [key for key in keys if key in self._told and key not in self._there]
        for changed, is_removed in ((stored, False), (removed, True)):
            if changed:
                event = OffloadingEvent(
                    keys=[self._met[key] for key in changed],
                    medium=storage_medium(),
                    removed=is_removed,
                    ownership=OWNER,
                    removal_expected=not is_removed,
                )
                self._waiting.append(event)
        if stored or removed:
            self._wake()
        self._told.update(stored)
        self._told.difference_update(removed)
        for key in removed:
            del self._met[key]

    def _wake(self) -> None:
        """Let an idle engine make a step, in which it finds that its connector has work.

        An engine in its caller's process has no queue to wake it by, and makes steps only for requests.
        """
        for engine in self._engines:
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
