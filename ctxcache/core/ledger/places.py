"""The lives of a segment and of a session, as tables. Nothing else changes a place, a use or a backlog.

A session that was there when the store was opened is recalled then, or, dormant (`dormant.py`), when it is
looked at. One that nobody has used for long falls asleep with all its segments, and what is recalled of it is
another object.

A segment's place. Tiers are an ordered list: the first is memory, where rows are written and read; those
below outlive the process.

              committed          flushed            dropped
    RESERVED ───────────► UNWRITTEN ──────────► BOTH ──────────► BELOW
        │                    │  ▲                │ ▲               │
        │                    │  └── committed ───┘ └── promoted ───┤
        │ abandoned          │ unlisted          │ unlisted        │ unlisted
        │                    ▼                   ▼                 ▼
        │                 LEAVING ◄──────────────┴─────────────────┘
        │                    │ forgotten: its record is gone
        └──────────────────► HELD ──── released: nothing uses its slots ────► GONE

    BELOW ──── fell asleep ────► DORMANT

A session's use.

              read began                  write began
    FRESH ──────────────► READ ◄─┐ ──────────────────► WRITTEN
      │ recalled           │     └── write ended ────────┘ │
      └──────► IDLE ◄──────┴──────── last ended ───────────┘      ended, from anywhere ────► GONE
                └─ fell asleep ─► DORMANT

A session's backlog: whether rows of its log are in memory alone. A spared session that ends is recalled
first.

                committed             taken               settled
    DURABLE ───────────────► DUE ───────────► TAKEN ───────────────► DURABLE
                             │ ▲   put back     │
                      spared │ │ recalled       │ spared
                             ▼ │                │
                            SPARED ◄────────────┘             ended, from elsewhere ────► GONE
"""

import enum
from collections.abc import Mapping


class _Entry(enum.Enum):
    """An entry of the tables below, which are asked at every step: hashed without a call of Python."""

    __hash__ = object.__hash__


class Place(_Entry):
    """Where a segment is in its life."""

    RESERVED = "reserved"
    """A writer has its slot in memory, and no row of it is committed."""
    UNWRITTEN = "unwritten"
    """Memory has committed rows that no tier below has."""
    BOTH = "both"
    """Memory has every committed row, and so has a tier below."""
    BELOW = "below"
    """A tier below has every committed row, and memory has none."""
    LEAVING = "leaving"
    """No session lists it, and its record is being removed."""
    DORMANT = "dormant"
    """Its session is dormant, and it is to be asked for again by its id."""
    HELD = "held"
    """Its record is gone, or it never had one; a reader, a writer or a device still uses its slots."""
    GONE = "gone"
    """Its slots are given back."""


class SegmentEvent(_Entry):
    """An event in a segment's life."""

    COMMITTED = "committed"
    """Rows were committed to it."""
    FLUSHED = "flushed"
    """A tier below has every committed row, and its record says so."""
    OUTGROWN = "outgrown"
    """A flush ended, and rows were committed meanwhile."""
    MOVED = "moved"
    """A tier below has it in another slot."""
    SHORTENED = "shortened"
    """Its last rows were lost; those that are left are below."""
    PROMOTED = "promoted"
    """Memory has it again."""
    DROPPED = "dropped"
    """Its slot in memory was taken away."""
    UNLISTED = "unlisted"
    """The last session that listed it does so no more."""
    FORGOTTEN = "forgotten"
    """Its record is gone."""
    ABANDONED = "abandoned"
    """Its writer ended, and none of its rows was committed."""
    FELL_ASLEEP = "fell asleep"
    """The one session that listed it did."""
    RELEASED = "released"
    """The last of those who used its slots is done."""


class Use(_Entry):
    """The use of a session: none, readers or a writer."""

    FRESH = "fresh"
    """It was made, and its first use has not ended."""
    IDLE = "idle"
    """The session is not in use: it may leave for others."""
    READ = "read"
    """Leases or streams of it are open."""
    WRITTEN = "written"
    """A writer has it, and perhaps readers."""
    DORMANT = "dormant"
    """The session is idle for long: it is there as its record, and is made anew at its next use."""
    GONE = "gone"
    """It was deleted, has expired or was evicted."""


class UseEvent(_Entry):
    """An event in a session's use."""

    READ_BEGAN = "read began"
    READ_ENDED = "read ended"
    """One read ended, and others go on."""
    WRITE_BEGAN = "write began"
    WRITE_ENDED = "write ended"
    """The write ended, and reads go on."""
    LAST_ENDED = "last ended"
    """The last read or write ended."""
    RECALLED = "recalled"
    """The session was there when the store was opened."""
    FELL_ASLEEP = "fell asleep"
    """The session is idle for long, and all of its rows are below."""
    ENDED = "ended"
    """The session is gone."""


class Backlog(_Entry):
    """Whether a session has rows that memory alone has, and what becomes of them."""

    DURABLE = "durable"
    """Every committed token is below, and recorded."""
    DUE = "due"
    """Some are to be written."""
    TAKEN = "taken"
    """Some are being written, unasked."""
    SPARED = "spared"
    """They are not worth their place below: they stay as they are, and may leave with the session."""
    GONE = "gone"


class BacklogEvent(_Entry):
    """An event in a session's backlog."""

    COMMITTED = "committed"
    TAKEN = "taken"
    PUT_BACK = "put back"
    """A write of it ended, and some of it is still unwritten."""
    SETTLED = "settled"
    """All of it is durable."""
    SPARED = "spared"
    RECALLED = "recalled"
    """It is to be written after all."""
    ENDED = "ended"


# Three tables, and nothing else, decide: a pair that is missing here raises and changes nothing. So a row
# that is added by mistake is as dangerous as one that is left out.
_P, _S = Place, SegmentEvent
SEGMENT_TABLE: Mapping[tuple[Place, SegmentEvent], Place] = {
    (_P.RESERVED, _S.COMMITTED): _P.UNWRITTEN,
    # No record ever named an abandoned segment: it skips LEAVING, and waits for its holds alone.
    (_P.RESERVED, _S.ABANDONED): _P.HELD,
    (_P.UNWRITTEN, _S.COMMITTED): _P.UNWRITTEN,
    (_P.UNWRITTEN, _S.FLUSHED): _P.BOTH,
    # Rows that came while a flush was under way are in memory alone, though the flush itself went well.
    (_P.UNWRITTEN, _S.OUTGROWN): _P.UNWRITTEN,
    # MOVED writes what was below already, to another path: rows that only memory has stay unwritten.
    (_P.UNWRITTEN, _S.MOVED): _P.UNWRITTEN,
    # The rows that memory lost are exactly those that were unwritten. Left in UNWRITTEN, the segment would
    # never leave memory, for no flush would come for it.
    (_P.UNWRITTEN, _S.SHORTENED): _P.BOTH,
    (_P.UNWRITTEN, _S.UNLISTED): _P.LEAVING,
    # Only a growing tail takes rows behind its flush. Memory is ahead of the tier below again.
    (_P.BOTH, _S.COMMITTED): _P.UNWRITTEN,
    (_P.BOTH, _S.MOVED): _P.BOTH,
    (_P.BOTH, _S.DROPPED): _P.BELOW,
    (_P.BOTH, _S.UNLISTED): _P.LEAVING,
    (_P.BELOW, _S.PROMOTED): _P.BOTH,
    (_P.BELOW, _S.UNLISTED): _P.LEAVING,
    # No step leads from DORMANT: what comes to be known again is made of the record.
    (_P.BELOW, _S.FELL_ASLEEP): _P.DORMANT,
    # A promotion that was under way when the last session unlisted the segment ends here.
    (_P.LEAVING, _S.PROMOTED): _P.LEAVING,
    (_P.LEAVING, _S.DROPPED): _P.LEAVING,
    (_P.LEAVING, _S.FORGOTTEN): _P.HELD,
    (_P.HELD, _S.PROMOTED): _P.HELD,
    # A reader past memory holds the slot below. The slot in memory goes first, and the segment stays HELD
    # until that reader is done.
    (_P.HELD, _S.DROPPED): _P.HELD,
    (_P.HELD, _S.RELEASED): _P.GONE,
}
"""Every step of a segment's life. A pair that is not here is refused."""

_U, _E = Use, UseEvent
USE_TABLE: Mapping[tuple[Use, UseEvent], Use] = {
    (_U.FRESH, _E.READ_BEGAN): _U.READ,
    (_U.FRESH, _E.WRITE_BEGAN): _U.WRITTEN,
    (_U.FRESH, _E.RECALLED): _U.IDLE,
    # No step leads from WRITTEN to WRITTEN by WRITE_BEGAN: a second writer is refused by the table itself.
    (_U.IDLE, _E.READ_BEGAN): _U.READ,
    (_U.IDLE, _E.WRITE_BEGAN): _U.WRITTEN,
    (_U.IDLE, _E.FELL_ASLEEP): _U.DORMANT,
    (_U.READ, _E.READ_BEGAN): _U.READ,
    (_U.READ, _E.READ_ENDED): _U.READ,
    (_U.READ, _E.WRITE_BEGAN): _U.WRITTEN,
    (_U.READ, _E.LAST_ENDED): _U.IDLE,
    # A writer hides the readers: were the state READ, a second writer would get in beside the first.
    (_U.WRITTEN, _E.READ_BEGAN): _U.WRITTEN,
    (_U.WRITTEN, _E.READ_ENDED): _U.WRITTEN,
    (_U.WRITTEN, _E.WRITE_ENDED): _U.READ,
    (_U.WRITTEN, _E.LAST_ENDED): _U.IDLE,
    # A session may end under its readers: their leases hold segments, not the session.
    **{(use, _E.ENDED): _U.GONE for use in (_U.FRESH, _U.IDLE, _U.READ, _U.WRITTEN)},
}
"""Every step of a session's use. A pair that is not here is refused."""

_B, _W = Backlog, BacklogEvent
BACKLOG_TABLE: Mapping[tuple[Backlog, BacklogEvent], Backlog] = {
    (_B.DURABLE, _W.COMMITTED): _B.DUE,
    (_B.DUE, _W.COMMITTED): _B.DUE,
    (_B.DUE, _W.TAKEN): _B.TAKEN,
    # A flush that somebody waits for does not take the session first. It puts back what it did not write.
    (_B.DUE, _W.PUT_BACK): _B.DUE,
    (_B.DUE, _W.SPARED): _B.SPARED,
    (_B.DUE, _W.SETTLED): _B.DURABLE,
    (_B.TAKEN, _W.COMMITTED): _B.TAKEN,
    (_B.TAKEN, _W.TAKEN): _B.TAKEN,
    (_B.TAKEN, _W.PUT_BACK): _B.DUE,
    (_B.TAKEN, _W.SPARED): _B.SPARED,
    (_B.TAKEN, _W.SETTLED): _B.DURABLE,
    # SPARED has this one way out. Whatever happens to a spared session, it is recalled first, so that its
    # bytes count as claimed again before they are counted otherwise.
    (_B.SPARED, _W.RECALLED): _B.DUE,
    **{(backlog, _W.ENDED): _B.GONE for backlog in (_B.DURABLE, _B.DUE, _B.TAKEN)},
}
"""Every step of a session's backlog. A pair that is not here is refused."""


class IllegalStepError(RuntimeError):
    """An event came that cannot happen in that state: a fault of the program, never of a caller."""


def illegal(what: str, state: enum.Enum, event: enum.Enum) -> IllegalStepError:
    """The error for a pair of state and event that no table has."""
    return IllegalStepError(f"{what} is {state.value}, and cannot be {event.value}")
