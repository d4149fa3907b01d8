"""Which fault strikes now: kinds, counts and times, and no device.

Everything is bounded: a fault strikes a number of times, for a time, and there are few of them.
"""

import enum
from dataclasses import dataclass, replace

from ctxcache.errors import TooManyRequests
from ctxcache.runtime.clock import Clock

FAULT_LIMIT = 16
"""Faults at a time."""
COUNT_LIMIT = 10_000
DURATION_LIMIT_NS = 3600 * 10**9
DELAY_LIMIT_NS = 10 * 10**9


class FaultKind(enum.Enum):
    """What goes wrong."""

    SSD_READ_DELAY = enum.auto()
    SSD_WRITE_DELAY = enum.auto()
    SSD_READ_ERROR = enum.auto()
    SSD_WRITE_ERROR = enum.auto()
    SSD_READ_BIT_FLIP = enum.auto()
    COMMIT_DELAY = enum.auto()

    @property
    def is_delay(self) -> bool:
        """Whether it takes a time."""
        return self in (FaultKind.SSD_READ_DELAY, FaultKind.SSD_WRITE_DELAY, FaultKind.COMMIT_DELAY)

    @property
    def is_error(self) -> bool:
        """Whether it takes an error number."""
        return self in (FaultKind.SSD_READ_ERROR, FaultKind.SSD_WRITE_ERROR)

    @property
    def is_of_ssd(self) -> bool:
        """Whether it can be of one path."""
        return self is not FaultKind.COMMIT_DELAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that strikes `left_count` times more, before `end_ns` of the monotonic clock.

    `path_index` None: on every path. `delay_ns` and `error_number` are of the kinds that take them.
    """

    fault_id: int = 0
    kind: FaultKind
    left_count: int
    end_ns: int
    path_index: int | None = None
    delay_ns: int = 0
    error_number: int = 0


class Faults:
    """Those of one server, from its start to its end. Owned by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._injected: dict[int, Fault] = {}
        self._last_id = 0

    def active(self) -> list[Fault]:
        """Faults that may strike yet, the oldest first."""
        now_ns = self.clock.monotonic_ns()
        self._injected = {i: fault for i, fault in self._injected.items() if fault.end_ns > now_ns}
        return list(self._injected.values())

    def inject(self, fault: Fault) -> Fault:
        """Let it strike from now on; returns it with its number. Raises TooManyRequests."""
        if len(self.active()) >= FAULT_LIMIT:
            raise TooManyRequests(what="faults", limit=FAULT_LIMIT)
        self._last_id += 1
        fault = self._injected[self._last_id] = replace(fault, fault_id=self._last_id)
        return fault

    def clear(self) -> int:
        """Let none strike any more; returns how many would have."""
        count = len(self.active())
        self._injected.clear()
        return count

    def strike(self, kind: FaultKind, path_index: int | None = None) -> Fault | None:
        """The oldest fault of that kind on that path, which has struck by that; None: all goes well."""
        # Nearly always: there is none at all.
        for fault in self.active() if self._injected else ():
            if fault.kind is kind and fault.path_index in (None, path_index):
                if fault.left_count > 1:
                    self._injected[fault.fault_id] = replace(fault, left_count=fault.left_count - 1)
                else:
                    del self._injected[fault.fault_id]
                return fault
        return None
