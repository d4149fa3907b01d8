"""Commons: what sessions have in common, and which session keeps it.

    session A    t0 ........ t639 | its own end      A and B begin alike: the policy hears of a prefix of 640
    session B    t0 ........ t639 | its own end      B, the last that used it, keeps it
    B gives way  t0 ........ t639                    its end leaves; the prefix stays, as a session of no name

A turn that is over says which of its tokens others have, or had: tokens are compared by their keys (`keyed`),
and keys of what was given up are remembered (`core/placement/prefixes.py`). The policy ranks a prefix by its
own uses. Sessions give way in the order of their own ranks. One that keeps a prefix of a higher rank stays
with that prefix alone, without its name, found by its tokens. Later uses find it and refresh it.

Memory: that of `Prefixes`, and an entry for each prefix that is kept. A restart forgets how often prefixes
were used, and what was given up; a prefix that is kept is on disk as any session. Worst case: all that is
told of prefixes is wrong; then as many bytes are kept for nobody as the policy ranks them for.
"""

from collections.abc import Callable, Container, Mapping

from ctxcache.core.ledger.feed import Feed
from ctxcache.core.ledger.keyed import Keyed
from ctxcache.core.ledger.session import Session
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts
from ctxcache.core.placement.prefixes import Prefixes
from ctxcache.core.prefix.keys import BLOCK_TOKENS

MOST_KEYS = 1 << 12
"""Keys of a session that are looked at when it rests or leaves: of its first 262,144 tokens."""


class _ElsewhereToo(Container[bytes]):
    """Keys that name more than one segment: somebody else computed the same tokens."""

    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._keyed.is_elsewhere_too(key)


class Commons:
    """The prefixes of sessions. Owned by the ledger, whose events it hears of.

    Does nothing under a policy that ranks by the order of uses alone: to that, a use of a prefix is one of
    the session that has it.
    """

    def __init__(
        self,
        feed: Feed,
        keyed: Keyed,
        by_uid: Mapping[bytes, Session],
        touched: Callable[[Session], None],
    ) -> None:
        """`touched` hears of sessions of no name whose prefix was used."""
        self._feed, self._keyed, self._by_uid, self._touched = feed, keyed, by_uid, touched
        self.is_on = feed.policy.ranks_holders
        self._elsewhere_too = _ElsewhereToo(keyed)
        self._prefixes = Prefixes()
        self._keepers: dict[bytes, bytes] = {}
        """By the policy's name of a prefix, the uid of the session that keeps it."""
        self._kept: dict[bytes, dict[int, bytes]] = {}
        """By the uid of a session, the names of the prefixes that it keeps, by their tokens."""

    # -- what sessions do ----------------------------------------------------------------------------

    def resting(self, session: Session, now_s: float) -> None:
        """A turn of the session ends: others may have what it began with. Called before the feed hears."""
        standing = self._feed.standings[session.uid]
        if not self.is_on or session.is_block or session.is_hidden or not standing.is_turn_over:
            return
        whole_count = session.whole_token_count // BLOCK_TOKENS
        asked_count = min(session.whole_token_count, session.input_end) // BLOCK_TOKENS
        own_count = standing.own_end // BLOCK_TOKENS
        if own_count < asked_count:
            found_count = min(standing.adopted_end // BLOCK_TOKENS, asked_count)
            asked_count = min(asked_count, own_count + MOST_KEYS)
            # The session had its first blocks before this turn: their names are not asked for.
            names = self._keyed.names_of(session, own_count, asked_count)
            asked = [b""] * own_count + names
            used, before = self._prefixes.used(
                standing.name,
                asked,
                own_count,
                min(max(found_count, own_count), len(asked)),
                self._elsewhere_too,
            )
            if before is not None:
                self._feed.continued(before)
            layout = session.layout
            token_bytes = layout.size_bytes / layout.segment_tokens
            # Long segments pad less than this: the session's own bytes say how much.
            size_share = session.size_bytes / max(session.token_count, 1)
            for count, prefix in used:
                token_count = count * BLOCK_TOKENS
                size_bytes = int(token_count * size_share)
                facts = Facts(size_bytes, prefix.use_count, 0, token_bytes, is_prefix=True)
                self._use(session, token_count, prefix.uid, facts, now_s)
        if own_count < whole_count:
            last = self._keyed.names_of(session, whole_count - 1, whole_count)
            if last:
                self._prefixes.ended(standing.name, last[-1])

    def leaving(self, session: Session, token_count: int = 0) -> None:
        """The session gives way to others, but for so many tokens. Called while it has all of them."""
        if not self.is_on or session.is_block:
            return
        begin, end = token_count // BLOCK_TOKENS, session.whole_token_count // BLOCK_TOKENS
        names = self._keyed.names_of(session, begin, min(end, begin + MOST_KEYS), of_its_own=True)
        # The deepest is forgotten first.
        self._prefixes.given_up(self._feed.standings[session.uid].name, reversed(names))

    def cut(self, session: Session) -> None:
        """The session has fewer tokens than before, or is gone: it keeps no longer prefix."""
        kept = self._kept.get(session.uid)
        if kept is None:
            return
        whole_count = 0 if session.is_gone else session.whole_token_count
        for count in [count for count in kept if count > whole_count]:
            name = kept.pop(count)
            del self._keepers[name]
            self._feed.prefix_left(name)
        if not kept:
            del self._kept[session.uid]

    # -- what stays ------------------------------------------------------------------------------------

    def rank(self, session: Session) -> Key | None:
        """The highest rank of the prefixes that the session keeps; None where it keeps none."""
        ranks = (self._feed.prefix_rank(name) for name in self._kept.get(session.uid, {}).values())
        return max((rank for rank in ranks if rank is not None), default=None)

    def is_worth_wear(self, session: Session) -> bool:
        """Whether a prefix that the session keeps is worth the wear of writing it below."""
        return any(map(self._feed.policy.is_worth_wear, self._kept.get(session.uid, {}).values()))

    def staying_count(self, session: Session) -> int:
        """How many of its first tokens stay where the session gives way; 0 for none.

        They are those of the longest prefix that it keeps and that ranks above the session itself.
        """
        own = self._feed.rank(session.uid)
        for count, name in sorted(self._kept.get(session.uid, {}).items(), reverse=True):
            rank = self._feed.prefix_rank(name)
            # Rows that memory alone has would have to be written first, and a session of no name that gives
            # way leaves less than it was.
            is_there = count <= session.durable_end and not (
                session.is_hidden and count >= session.token_count
            )
            if is_there and rank is not None and own is not None and rank > own:
                return count
        return 0

    def stays(self, session: Session, token_count: int) -> None:
        """The session, which has lost its name, is the prefix of so many tokens that it keeps."""
        self._feed.stays_as(session, self._kept[session.uid][token_count])
        self._be_found(session, token_count)

    # -- parts -----------------------------------------------------------------------------------------

    def _use(self, session: Session, token_count: int, name: bytes, facts: Facts, now_s: float) -> None:
        keeper = self._by_uid.get(self._keepers.get(name, b""))
        self._feed.prefix_used(name, facts, now_s, is_new=keeper is None)
        if keeper is not None and keeper.is_hidden:
            self._touched(keeper)
            return
        if keeper is not None:
            self._forget(keeper.uid, name)
        self._keepers[name] = session.uid
        self._kept.setdefault(session.uid, {})[token_count] = name
        self._be_found(session, token_count)

    def _be_found(self, session: Session, token_count: int) -> None:
        """Let a search for these tokens come to the session first."""
        for segment in session.segments_of(((0, token_count),)):
            lister = self._by_uid.get(segment.lister_uid)
            # A shorter prefix within this one may have a session that stays.
            if lister is None or not lister.is_hidden:
                segment.lister_uid = session.uid

    def _forget(self, uid: bytes, name: bytes) -> None:
        """The session keeps this prefix no more: another one does."""
        kept = self._kept[uid]
        for count in [count for count, each in kept.items() if each == name]:
            del kept[count]
        if not kept:
            del self._kept[uid]

    @property
    def is_empty(self) -> bool:
        """Whether no session keeps anything, for checks."""
        return not (self._keepers or self._kept)
