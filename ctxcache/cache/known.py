"""Known: what placement keeps of one session, and the turns that it counts of it. Facts; decides nothing."""

from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts, Tier
from ctxcache.core.session import Session


class Ghost(NamedTuple):
    """What is remembered of one that was evicted. The time is of the monotonic clock."""

    turn_count: int = 0
    token_count: int = 0
    evict_time_s: float = 0.0


NOBODY = Ghost()


@dataclass(slots=True)
class Known:
    """One session. Owned by the event loop."""

    name: bytes
    turn_count: int = 0
    rested_end: int = 0
    """Where its log ended when it last rested."""
    use_count: int = 0
    has_rested: bool = False
    coming_count: int = 0
    is_order_used: bool = False
    """Whether it was accessed since its job came."""
    is_leaving: bool = False
    """Something of it has left DRAM since it was last used: half of it hastens no turn that waits for all."""
    has_fallen: bool = False
    """Its rank may be lower than when somebody looked, once it rests, and nobody was told."""
    is_set_aside: bool = False
    """Not to be promoted ahead of need before its next hint or rest: that failed."""
    tier: Tier | None = None
    rank: Key | None = None
    """As the policy last said; None where something has happened since."""
    order: float | None = None
    """When its next job starts, while one waits."""
    dram_since_s: float | None = None
    """Since when all of it is in DRAM, while it is."""

    @property
    def is_in_use(self) -> bool:
        """Whether nothing of it leaves while others can."""
        return bool(self.use_count or self.coming_count or not self.has_rested)

    def recall(self, session: Session) -> Facts:
        """It was there when the store was opened: all that it has came in one turn."""
        self.turn_count, self.rested_end = 1, session.log_end
        return _facts(session, 1, session.log_end)

    def rest(self, session: Session) -> Facts:
        """The session rests; a turn is over if something was appended."""
        appended = session.log_end - self.rested_end
        if appended < 0:
            # Made anew, and shorter than it was when it was evicted.
            appended = session.log_end
        self.turn_count += appended > 0
        self.rested_end = session.log_end
        self.has_rested, self.is_set_aside = True, False
        return _facts(session, self.turn_count, appended)


def _facts(session: Session, turn_count: int, appended_tokens: int) -> Facts:
    slot_bytes = session.layout.size_bytes
    appended_bytes = appended_tokens * slot_bytes // session.layout.segment_tokens
    return Facts(len(session.segments) * slot_bytes, turn_count, appended_bytes)
