"""What a reader asks for, and what that means for the session as it is at the moment. Never waits."""

from dataclasses import dataclass

from ctxcache.cache.state import State
from ctxcache.core.budget import Budget, Client
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, Session
from ctxcache.format.slot import Slot


@dataclass(frozen=True, slots=True)
class Request:
    """What a reader asks for: tokens `[begin, end)`, `end` None for all, of a session of that model.

    `client` is whose share of the arena the rows are counted in. `leaves_on_ssd`: what is not in DRAM is read
    where it lies. `is_summed`: the answer says what its rows must be. `is_rechecked`: what is in DRAM is verified
    before it.
    """

    tenant: str
    session_id: str
    fingerprint: bytes
    generation: int | None
    begin: int = 0
    end: int | None = None
    client: int | None = None
    leaves_on_ssd: bool = False
    is_summed: bool = False
    is_rechecked: bool = False

    @property
    def owner(self) -> Client:
        """In whose budget it is counted."""
        return Client(self.tenant, self.client)


class Asked:
    """What a request means for the session as it is now; `look` again after every await."""

    session: Session
    end: int
    pieces: tuple[Piece, ...]
    sizes_bytes: dict[int, int]

    def __init__(self, state: State, request: Request) -> None:
        self.request = request
        self._state = state

    def look(self) -> dict[int, int]:
        """Bytes to be pinned, by segment id. Raises what is wrong with the request."""
        request = self.request
        session = self._state.ledger.find(request.tenant, request.session_id)
        session.check_fingerprint(request.fingerprint)
        session.check_generation(request.generation)
        self.end = session.token_count if request.end is None else request.end
        session.check_range(request.begin, self.end)
        self.session, self.pieces = session, tuple(session.pieces(request.begin, self.end))
        segment_ids = (p.segment.segment_id for p in self.pieces if not self._stays(p.segment))
        self.sizes_bytes = dict.fromkeys(segment_ids, session.layout.size_bytes)
        return self.sizes_bytes

    def _stays(self, segment: Segment) -> bool:
        return self.request.leaves_on_ssd and segment.memory is None and segment.durable is not None

    def left_on_ssd(self) -> dict[int, Slot]:
        """Where what stays on SSD lies, by segment id. Of the moment of the last `look`."""
        if not self.request.leaves_on_ssd:
            return {}
        segments = (piece.segment for piece in self.pieces)
        return {
            s.segment_id: s.durable for s in segments if s.segment_id not in self.sizes_bytes and s.durable
        }

    def look_for_stream(self, budget: Budget) -> dict[int, int]:
        """As `look`; where there is no room for all of it, what is in DRAM already, as far as the limit goes."""
        if not budget.has_room(self.request.owner, self.look()):
            size_bytes = self.session.layout.size_bytes
            resident = dict.fromkeys(p.segment.segment_id for p in self.pieces if p.segment.memory)
            kept = list(resident)[: budget.limit_of(self.request.owner) // size_bytes]
            self.sizes_bytes = dict.fromkeys(kept, size_bytes)
        return self.sizes_bytes
