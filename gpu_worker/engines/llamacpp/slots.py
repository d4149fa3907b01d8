"""Which request has which of llama.cpp's slots, and which session's tokens are in it.

Requests come first. A pass ahead has a slot while nobody is served; who comes meanwhile waits until it has
given way, so that a session is never in two slots because of it. Worst case: a request waits for one step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MOST_WAITING = 64
"""Requests that wait for a slot; more are refused."""


@dataclass(slots=True)
class Slot:
    """One of llama.cpp's slots. `session`: the one whose tokens it has, as far as the proxy knows."""

    number: int
    session: str | None = None
    kept: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The tokens that were last restored or saved of this session."""
    is_taken: bool = False
    last_use: int = 0


class NoSlot(Exception):
    """Too many requests wait for a slot."""


# A request with a session, from its slot's view:
#
#     taken ─► has it the session? ── no ──► restore from the store ─┐
#                      │ yes                                         │
#                      └─────────────────────────────────────────────┴─► run
#     a reply of 200    the slot has the session's tokens, and is saved unless the store has more
#     anything else     nothing is known of the slot
class Slots:
    """Which request has which slot. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._changed = threading.Condition()
        self._waiting_count = self._use_count = 0
        self._unknown_count = 0
        """Requests in slots of llama.cpp's choice."""
        self._is_ahead = self._is_closed = False

    @contextmanager
    def taken(self, session: str | None) -> Iterator[Slot]:
        """A slot for one request: the session's own if it has one, else the one unused for longest."""
        with self._changed:
            if self._waiting_count >= MOST_WAITING:
                raise NoSlot
            self._wait(lambda: not self._is_ahead and not all(slot.is_taken for slot in self._slots))
            slot = self._chosen(session)
            self._use_count += 1
            slot.is_taken, slot.last_use = True, self._use_count
        with self._given_back(slot):
            yield slot

    @contextmanager
    def ahead(self, session: str) -> Iterator[Slot | None]:
        """A slot as `taken`, as soon as nobody is served; None once the slots are closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_idle)
            if self._is_closed:
                slot = None
            else:
                slot = self._chosen(session)
                slot.is_taken = self._is_ahead = True
        if slot is None:
            yield None
            return
        with self._given_back(slot):
            yield slot

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits: a pass ahead gives way."""
        return self._waiting_count > 0

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """Around a request in a slot of llama.cpp's choice: none is known to have what it had."""
        with self._changed:
            self._wait(lambda: not self._is_ahead)
            self._unknown_count += 1
            self._forget()
        try:
            yield
        finally:
            with self._changed:
                self._unknown_count -= 1
                # Slots are forgotten once more: a slot's own request may have ended meanwhile.
                self._forget()
                self._changed.notify_all()

    def close(self) -> None:
        """No pass ahead begins from here on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no request has a slot, or the time is over; whether none has."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(slot.is_taken for slot in self._slots), timeout_s)

    @property
    def _is_idle(self) -> bool:
        is_any_taken = any(slot.is_taken for slot in self._slots)
        return not is_any_taken and not self._waiting_count and not self._unknown_count

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._waiting_count += 1
        try:
            self._changed.wait_for(condition)
        finally:
            self._waiting_count -= 1

    def _chosen(self, session: str | None) -> Slot:
        """The session's own slot if it is free, else the one whose conversation is likeliest to be over."""
        free = [slot for slot in self._slots if not slot.is_taken]
        return min(free, key=lambda one: (one.session != session or session is None, one.last_use))

    @contextmanager
    def _given_back(self, slot: Slot) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                slot.is_taken = self._is_ahead = False
                self._changed.notify_all()

    def _forget(self) -> None:
        for slot in self._slots:
            slot.session = None
