"""Keyed: which segments are found by the tokens that their rows belong to.

A session's tokens have a key every 64, from its first token on, as they are committed. A key names the
segment that holds the last of its tokens. No key is made behind a cut: what comes there was computed with
tokens that are not there any more. A session that goes on behind a short segment which is not in memory gets
no more keys.

    committed, whole 64 ──► key ──► segment, rows of it ──► a session that has all tokens up to there
    unlisted, cut before its end ──► leaving: the key is passed over ──► tidied: it is gone

Keys leave the index some at a time: a session of a million tokens has 16,384, which would hold up everybody
else if they left at once.

A holder of a key is a session of which the segment still is what it holds at that place, with nothing missing
before. Two sessions that list a segment, and hold its row at the same position, list the same ones before it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from typing_extensions import Buffer

from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import BEGIN, Piece, Session
from ctxcache.core.prefix.keys import (
    BLOCK_TOKENS,
    KEY_BYTES,
    NO_PARENT,
    Entry,
    PrefixIndex,
    Scope,
    all_stored,
    scope_of,
)


class Keyed:
    """Keys of segments. Owned by the ledger, whose events it hears of."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._leaving: dict[int, int] = {}
        """Rows that are still found by keys, of segments that have keys for more."""

    def appended(self, session: Session, begin: int, token_ids: Callable[[Piece], Buffer | None]) -> None:
        """Tokens from index `begin` on were committed: those that fill 64 now get keys.

        `token_ids` of a piece; None where memory does not have them.
        """
        # Keys by the 64, and segments by their own lengths: a key names the segment with the last of its
        # tokens.
        #
        #     tokens      0 ........ 64 ........ 128 ........ 192 ....
        #     keys                 k1          k2           k3          k2 = hash(k1, tokens 64..127)
        #     segments    [ s0, 40 rows ][ s1, 100 rows    ][ s2 ...
        #     entries     k1 ► s1, row 24     k2 ► s1, row 88     k3 ► s2, row 52
        end = session.token_count - session.token_count % BLOCK_TOKENS
        first = begin - begin % BLOCK_TOKENS
        # Nothing was dropped: what is shown is one run from the first position to the log's end.
        if first >= end or session.live[:1] != ((0, session.log_end),):
            return
        ranges = session.layout.outline.ranges
        scope = scope_of(session.tenant, session.model_fingerprint, ranges, session.salt)
        parent = self._key_at(session, scope, first)
        # The key before is not known: its segment was loaded without keys, or is short and out of memory.
        # Keys made without their parent would be those of other tokens.
        if parent is None:
            return
        pieces = session.pieces(first, end)
        parts: list[Buffer] = []
        for piece in pieces:
            part = token_ids(piece)
            if part is None:
                return
            parts.append(part)
        holders = iter(pieces)
        piece = next(holders)
        keys = scope.keys(b"".join(parts), parent, session.contents, first)
        for i, key in enumerate(keys, 1):
            # A piece may hold no end of 64 tokens, and one may hold many.
            position = first + i * BLOCK_TOKENS
            while piece.token_begin + piece.row_end - piece.row_begin < position:
                piece = next(holders)
            segment = piece.segment
            # New keys of a segment that still has old ones to be tidied: those go now, or they would be mixed
            # up.
            if segment.segment_id in self._leaving:
                self._leave(segment.segment_id)
            self.index.put(scope, key, segment.segment_id, position - segment.begin)

    def found(self, scope: Scope, key: bytes) -> Iterator[Entry]:
        """The entries under a key, the latest first. No event may come meanwhile."""
        return self._there(self.index.find_all(scope, key))

    def _there(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            # Keys that wait to be tidied are still in the index. They count up to the rows that the segment
            # kept.
            most_rows = self._leaving.get(entry.owner)
            if most_rows is None or entry.token_count <= most_rows:
                yield entry

    def longest(self, scope: Scope, keys: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Segments that the last of these keys name, then those that the one before names, and so on.

        Each as the key's number, the segment's number and its row count.
        """
        for number in reversed(range(len(keys))):
            for owner, row_count in self.found(scope, keys[number]):
                yield number, owner, row_count

    def is_leaving(self, segment_id: int) -> bool:
        """Whether the segment has keys that are found no more."""
        return segment_id in self._leaving

    def tidy(self, most_keys: int) -> bool:
        """Take about so many of the keys that are found no more out of the index; whether more are left."""
        while self._leaving and most_keys > 0:
            most_keys -= self._leave(next(iter(self._leaving)))
        return bool(self._leaving)

    def recalled(self, scope: Scope, segment_id: int, begin: int, keys: Iterable[bytes]) -> None:
        """The record of a segment that begins there has these keys."""
        row_count = BLOCK_TOKENS - begin % BLOCK_TOKENS
        for i, key in enumerate(keys):
            self.index.put(scope, key, segment_id, row_count + i * BLOCK_TOKENS)

    def joined(self, parts: Iterable[Segment], whole: Segment) -> None:
        """One segment has the rows of these: their keys name it too, as far as none is missing."""
        scope, row_count = _scope(whole), first_row_count(whole)
        for part in parts:
            for key, count in self._keys_of(scope, part.segment_id):
                # A gap: keys behind it have no unbroken chain within the whole.
                if part.begin - whole.begin + count != row_count:
                    return
                self.index.put(scope, key, whole.segment_id, row_count)
                row_count += BLOCK_TOKENS

    def cut(self, session: Session) -> None:
        """The session has lost tokens: what only it lists is not found beyond them."""
        end = session.whole_token_count
        # From the segment in which the whole tokens end. Those before keep all their keys.
        first = max(bisect_right(session.segments, end, key=BEGIN) - 1, 0)
        for segment in session.segments[first:]:
            # A fork that lists the segment may hold it whole. Each look-up compares, see `holds`.
            if segment.reference_count > 1 or segment.row_count < first_row_count(segment):
                continue
            kept_count = max(end - segment.begin, 0)
            if self.index.knows(segment.segment_id):
                self._forget(segment.segment_id, kept_count)
            elif not kept_count:
                # Nothing behind it has keys either.
                break

    def shortened(self, segment: Segment) -> None:
        """The segment's last rows are lost."""
        self.index.drop(segment.segment_id, beyond=segment.row_count)

    def gone(self, segment: Segment) -> None:
        """No session lists the segment."""
        if self.index.knows(segment.segment_id):
            self._forget(segment.segment_id, 0)

    def keys_of(self, segment: Segment, row_count: int) -> tuple[bytes, ...]:
        """The keys of a segment's first rows, in order: what a record of it keeps."""
        keys = self._keys_of(_scope(segment), segment.segment_id)
        return tuple([key for key, count in keys if count <= row_count])

    def agreeing_count(self, session: Session, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are the session's own; no token of it was dropped."""
        ranges = session.layout.outline.ranges
        scope = scope_of(session.tenant, session.model_fingerprint, ranges, session.salt)
        given, begin = all_stored(scope, keys), 0
        for piece in session.pieces(0, len(keys) * BLOCK_TOKENS):
            # A part of a segment that is shown has only the keys that end in it, and those that leave are
            # found no more.
            segment_id = piece.segment.segment_id
            end = min(piece.row_end, self._leaving.get(segment_id, piece.row_end))
            own = self.index.stored_keys(segment_id, piece.row_begin, end)
            there = given[begin : begin + len(own)]
            if there != own:
                for at in range(0, len(own), KEY_BYTES):
                    if own[at : at + KEY_BYTES] != there[at : at + KEY_BYTES]:
                        return (begin + at) // KEY_BYTES
            begin += len(own)
        return begin // KEY_BYTES

    def names_of(self, session: Session, begin: int, end: int, *, of_its_own: bool = False) -> list[bytes]:
        """The session's keys from number `begin` up to `end`, up to the first that is missing, as stored.

        As stored they name the tokens up to there in all scopes. No token of the session before them was
        dropped. `of_its_own`: of segments that no other session lists, whatever is missing.
        """
        names = list[bytes]()
        for piece in session.pieces(begin * BLOCK_TOKENS, end * BLOCK_TOKENS):
            segment_id, row_end = piece.segment.segment_id, piece.row_end
            if of_its_own and piece.segment.reference_count > 1:
                continue
            row_end = min(row_end, self._leaving.get(segment_id, row_end))
            stored = self.index.stored_keys(segment_id, piece.row_begin, row_end)
            names += [stored[at : at + KEY_BYTES] for at in range(0, len(stored), KEY_BYTES)]
            token_end = piece.token_begin + piece.row_end - piece.row_begin
            if not of_its_own and len(names) < token_end // BLOCK_TOKENS - begin:
                break
        return names

    def is_elsewhere_too(self, name: bytes) -> bool:
        """Whether a key that is stored under that name leads to more than one segment."""
        return sum(1 for _ in self._there(self.index.find_stored(name))) > 1

    def key_at(self, session: Session, token_count: int) -> bytes | None:
        """The key of the session's first tokens, a multiple of 64; None where they have none."""
        ranges = session.layout.outline.ranges
        scope = scope_of(session.tenant, session.model_fingerprint, ranges, session.salt)
        return self._key_at(session, scope, token_count)

    def _key_at(self, session: Session, scope: Scope, token_count: int) -> bytes | None:
        """The key of the session's tokens up to there; None where they have none."""
        if not token_count:
            return NO_PARENT
        [piece] = session.pieces(token_count - 1, token_count)
        for key, row_count in self._keys_of(scope, piece.segment.segment_id):
            if piece.segment.begin + row_count == token_count:
                return key
        return None

    def _keys_of(self, scope: Scope, segment_id: int) -> list[tuple[bytes, int]]:
        """The keys by which a segment is found, each with its row count, in order."""
        keys, most_rows = self.index.keys_of(scope, segment_id), self._leaving.get(segment_id)
        return keys if most_rows is None else [found for found in keys if found[1] <= most_rows]

    def _forget(self, segment_id: int, beyond: int) -> None:
        # Cut twice before it is tidied: the shorter rest counts.
        self._leaving[segment_id] = min(self._leaving.get(segment_id, beyond), beyond)

    def _leave(self, segment_id: int) -> int:
        return self.index.drop(segment_id, beyond=self._leaving.pop(segment_id))


def _scope(segment: Segment) -> Scope:
    """Within which a segment's keys are stored; none is made with it, for the salt is not known."""
    return scope_of(segment.tenant, segment.model_fingerprint, segment.layout.outline.ranges)


def first_row_count(segment: Segment) -> int:
    """How many rows of a segment its first key covers."""
    return BLOCK_TOKENS - segment.begin % BLOCK_TOKENS


def holds(session: Session, segment: Segment, row_count: int) -> bool:
    """Whether the session's tokens up to that row of the segment are those that a key stands for."""
    token_count = segment.begin + row_count
    if token_count > session.whole_token_count or not session.lists(segment):
        return False
    # Another segment may hold that position since the newest tokens were dropped and written anew.
    [piece] = session.pieces(token_count - 1, token_count)
    return piece.segment is segment
