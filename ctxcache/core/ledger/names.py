"""Names: every session and block that is known, by name and by uid, and the session ids of each tenant.

A name is given again after its session ended. A uid never is, so that work under way finds by the uid that
its session is gone. Sessions and blocks have a dict each: a listing of sessions walks no block.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ctxcache.core.ledger.residence import Kin
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import HIDDEN, BlockIndex, Session, former_prefix


class Names:
    """The index of sessions and blocks. Owned by the ledger."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[str, str], Session] = {}
        """Sessions that are not dormant, by tenant and session id."""
        self.by_uid: dict[bytes, Session] = {}
        """Those sessions, and every block."""
        self.blocks = BlockIndex()
        self._ids: dict[str, list[str]] = {}
        """Session ids of each tenant, in order; those of dormant sessions are among them."""
        self.children: dict[tuple[str, str], dict[bytes, Session]] = {}
        """Blocks by tenant and the id of the block that they continue, which may be gone."""
        self._model_counts: Counter[tuple[str, str]] = Counter()
        self._hidden_counts: Counter[str] = Counter()
        """By tenant, those ids that no client can ask for."""

    def add(self, session: Session) -> None:
        """A session or block appeared."""
        self.by_uid[session.uid] = session
        if session.is_block:
            self.blocks.put(session)
            if session.parent_id:
                self.children.setdefault((session.tenant, session.parent_id), {})[session.uid] = session
            return
        self.sessions[session.tenant, session.session_id] = session
        self._model_counts[session.tenant, session.model_id] += 1
        # Sorted at insertion: pages of a listing are cut by bisection, with a million sessions.
        insort(self._ids.setdefault(session.tenant, []), session.session_id)
        self._hidden_counts[session.tenant] += session.is_hidden

    def rename(self, session: Session, session_id: str) -> None:
        """A session that is not dormant has another id from here on, which is free."""
        self.forget(session)
        session.session_id = session_id
        # It is still told by the name that clients asked for: an answer may be under way.
        if not session.is_hidden:
            session.name = f"sessions/{session_id}"
        self.add(session)

    def forget(self, session: Session) -> None:
        """A session or block is gone: its name is free."""
        del self.by_uid[session.uid]
        if not session.is_block:
            del self.sessions[session.tenant, session.session_id]
            self._model_counts[session.tenant, session.model_id] -= 1
            ids = self._ids[session.tenant]
            del ids[bisect_left(ids, session.session_id)]
            self._hidden_counts[session.tenant] -= session.is_hidden
            return
        self.blocks.drop(session)
        if session.parent_id:
            parent = session.tenant, session.parent_id
            del self.children[parent][session.uid]
            if not self.children[parent]:
                del self.children[parent]

    def dormant_at_start(
        self, ids: Mapping[str, Iterable[str]], model_counts: Counter[tuple[str, str]]
    ) -> None:
        """Dormant sessions have these ids, by tenant, and are so many of each tenant's model."""
        for tenant, some in ids.items():
            self._ids[tenant] = ordered = sorted([*self._ids.get(tenant, ()), *some])
            self._hidden_counts[tenant] = sum(one.startswith(HIDDEN) for one in ordered)
        self._model_counts.update(model_counts)

    def fell_asleep(self, session: Session) -> None:
        """A session is dormant from here on: its id and the count of its model stay."""
        del self.sessions[session.tenant, session.session_id], self.by_uid[session.uid]

    def woke(self, session: Session) -> None:
        """A dormant session is known again."""
        self.sessions[session.tenant, session.session_id] = session
        self.by_uid[session.uid] = session

    def ids(self, tenant: str) -> Sequence[str]:
        """A tenant's session ids, in order."""
        return self._ids.get(tenant, ())

    def own_count(self, tenant: str) -> int:
        """A tenant's sessions, hidden ones aside."""
        return len(self.ids(tenant)) - self._hidden_counts[tenant]

    @property
    def hidden_count(self) -> int:
        """Hidden sessions of all tenants."""
        return sum(self._hidden_counts.values())

    def former_ids(self, session: Session) -> list[str]:
        """The ids of a session's former renderings."""
        ids, prefix = self.ids(session.tenant), former_prefix(session.session_id)
        # What follows the prefix is hexadecimal.
        return list(ids[bisect_left(ids, prefix) : bisect_left(ids, f"{prefix}{HIDDEN}")])

    def tenants(self) -> Collection[str]:
        """Tenants that have had a session since the start."""
        return self._ids.keys()

    def model_count(self, tenant: str, model_id: str) -> int:
        """Sessions of a tenant's model."""
        return self._model_counts[tenant, model_id]

    def continued_by(self, session: Session) -> Collection[Session]:
        """The blocks that name this one as what they continue."""
        return self.children.get((session.tenant, session.session_id), {}).values()

    def listers(self, segment: Segment) -> list[Session]:
        """The sessions that list a segment. Looks at all that are kin to them."""
        # A segment with a residence has one lister, and nothing has to be searched.
        home = segment.home
        if not isinstance(home, Kin):
            return [self.by_uid[home.uid]] if home else []
        kin = (self.by_uid[uid] for uid in home.uids)
        return [session for session in kin if session.lists(segment)]
