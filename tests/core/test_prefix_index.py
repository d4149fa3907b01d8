"""Keys and the index from keys to segments: against a plain model, by vectors, and by their memory."""

import hashlib
import struct
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxcache.core.prefix.keys import (
    BLOCK_TOKENS,
    KEY_BYTES,
    NO_PARENT,
    Entry,
    PrefixIndex,
    all_stored,
    layout_tag,
    make_scope,
    scope_of,
)
from ctxcache.format.streams import TOKENS_RANGE, Content, StateKind, StreamRange, contents_within

BYTES_PER_KEY = 100
"""The most bytes of an entry."""
RANGES = (StreamRange(StateKind.HIDDEN, 0, 3), StreamRange(StateKind.KV, 3, 16))
SCOPES = [make_scope(tenant, bytes(32), layout_tag(RANGES)) for tenant in ("alice", "bob")]


def key_number(number: int) -> bytes:
    """Some key."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def ids(*tokens: int) -> bytes:
    """Token ids as they are stored."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


class IndexMachine(RuleBasedStateMachine):
    """Few keys, owners and scopes, so that they meet; many puts at a time, so that tables grow."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[int, list[tuple[int, int, int]]] = {}
        self.order = 0

    def under(self, scope: int, number: int) -> list[Entry]:
        """The model's entries under a key, the last first."""
        puts = [
            (order, Entry(owner, 64 * (i + 1)))
            for owner, keys in self.held.items()
            for i, (order, at, key) in enumerate(keys)
            if (at, key) == (scope, number)
        ]
        return [entry for _, entry in sorted(puts, reverse=True)]

    @rule(owner=st.integers(1, 60), scope=st.integers(0, 1), numbers=st.lists(st.integers(0, 40), max_size=5))
    def put(self, owner: int, scope: int, numbers: list[int]) -> None:
        """An owner gets keys behind those that it has."""
        keys = self.held.setdefault(owner, [])
        # An owner is of one scope.
        scope = keys[0][1] if keys else scope
        for number in numbers:
            self.order += 1
            keys.append((self.order, scope, number))
            self.index.put(SCOPES[scope], key_number(number), owner, 64 * len(keys))
        if not keys:
            del self.held[owner]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), kept=st.integers(0, 3))
    def drop(self, data: st.DataObject, kept: int) -> None:
        """An owner loses its last keys, or all."""
        owner = data.draw(st.sampled_from(sorted(self.held)))
        assert self.index.knows(owner) == bool(self.held[owner])
        assert self.index.drop(owner, beyond=64 * kept) == max(len(self.held[owner]) - kept, 0)
        self.held[owner] = self.held[owner][:kept]
        if not self.held[owner]:
            del self.held[owner]

    @rule(owner=st.integers(61, 70))
    def drop_what_is_not_there(self, owner: int) -> None:
        """An owner without keys."""
        assert not self.index.drop(owner)

    @invariant()
    def is_as_held(self) -> None:
        """Every key, every owner."""
        assert len(self.index) == sum(map(len, self.held.values()))
        assert sorted(self.index.owners()) == sorted(self.held)
        for scope in range(2):
            for number in range(41):
                found = list(self.index.find_all(SCOPES[scope], key_number(number)))
                assert found == self.under(scope, number)
                first = next(self.index.find_all(SCOPES[scope], key_number(number)), None)
                assert first == (found[0] if found else None)
        for owner, keys in self.held.items():
            expected = [(key_number(number), 64 * (i + 1)) for i, (_, _, number) in enumerate(keys)]
            assert self.index.keys_of(SCOPES[keys[0][1]], owner) == expected
            # All, all but the last, all but the first.
            for begin, end in ((0, 64 * len(keys)), (0, 64 * len(keys) - 1), (64, 64 * len(keys) + 9)):
                own = [key for key, count in expected if begin < count <= end]
                assert self.index.stored_keys(owner, begin, end) == all_stored(SCOPES[keys[0][1]], own)
        assert self.index.stored_keys(71, 0, 64) == b""


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_many_keys_come_go_and_come_again() -> None:
    """Parts of the tables grow, lose half of their entries and are filled again."""
    index = PrefixIndex()
    for number in range(30_000):
        index.put(SCOPES[0], key_number(number), number, 64)
    size_bytes = index.size_bytes
    for number in range(0, 30_000, 2):
        index.drop(number)
    for number in range(30_000):
        found = next(index.find_all(SCOPES[0], key_number(number)), None)
        assert found == (Entry(number, 64) if number % 2 else None)
        assert next(index.find_all(SCOPES[1], key_number(number)), None) is None
    for number in range(0, 30_000, 2):
        index.put(SCOPES[0], key_number(number), number, 64)
    many = [next(index.find_all(SCOPES[0], key_number(number)), None) for number in range(30_000)]
    assert many == [Entry(number, 64) for number in range(30_000)]
    assert index.size_bytes == size_bytes, "rooms of dropped keys are taken again"


def test_a_key_takes_at_most_100_bytes() -> None:
    """Counted by the allocator, at every stage of the tables' growth between 40,000 and 84,000 keys."""
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        index = PrefixIndex()
        for number in range(1, 84_001):
            index.put(SCOPES[0], key_number(number), number, 64)
            if number >= 40_000 and not number % 2_000:
                taken_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
                assert taken_bytes <= BYTES_PER_KEY * number, f"{taken_bytes / number:.1f} bytes a key"
                assert index.size_bytes <= taken_bytes
    finally:
        tracemalloc.stop()


def test_keys_are_as_documented() -> None:
    """Written out field by field, as a client in any language has to."""
    tag = hashlib.sha256(struct.pack("<6i", 2, 0, 3, 3, 3, 16)).digest()
    assert layout_tag((TOKENS_RANGE, *RANGES)) == layout_tag(RANGES) == tag
    fingerprint, block = bytes(range(32)), ids(*range(64))
    expected, parent = [], bytes(32)
    for tokens in (block, ids(*range(64, 128))):
        fields = (b"ctxcache.prefix.v1", b"alice", fingerprint, tag, b"", parent, tokens)
        parent = hashlib.sha256(b"".join(struct.pack("<I", len(f)) + f for f in fields)).digest()
        expected.append(parent)
    scope = scope_of("alice", fingerprint, RANGES)
    assert list(scope.keys(ids(*range(130)))) == expected, "two tokens are left over"
    assert list(scope.keys(ids(*range(63)))) == []
    assert [key.hex() for key in expected] == VECTORS


def test_contents_and_salt_are_as_documented() -> None:
    """The vectors with both, and with a range told in parts, or beyond the tokens."""
    digest = bytes(range(31, -1, -1))
    scope = scope_of("alice", bytes(range(32)), RANGES, b"user 17")
    tokens = ids(*range(128))
    whole = (Content(60, 70, digest),)
    assert [key.hex() for key in scope.keys(tokens, contents=whole)] == VECTORS_OF_CONTENTS
    told = contents_within((Content(60, 65, digest), Content(65, 70, digest)), 0, 200)
    assert told == whole
    first, second = scope.keys(tokens, contents=whole)
    assert list(scope.keys(tokens[256:], first, whole, 64)) == [second]
    assert scope.mask == scope_of("alice", bytes(range(32)), RANGES).mask


@given(st.data())
def test_every_difference_behind_tokens_makes_another_key(data: st.DataObject) -> None:
    """From the run of 64 on that it lies in, and none before; by a model that looks at each token."""
    spans = st.lists(st.integers(0, 256), min_size=2, max_size=8, unique=True).map(sorted)
    digests = [bytes([i]) * 32 for i in range(3)]

    def drawn() -> tuple[Content, ...]:
        ends = data.draw(spans)
        pairs = zip(ends[::2], ends[1::2], strict=False)
        return contents_within([Content(a, b, data.draw(st.sampled_from(digests))) for a, b in pairs], 0, 256)

    def behind(contents: tuple[Content, ...], block: int) -> list[bytes | None]:
        token = range(64 * block, 64 * block + 64)
        return [next((one.digest for one in contents if one.begin <= i < one.end), None) for i in token]

    one, other = drawn(), drawn()
    scope = make_scope("alice", bytes(32), layout_tag(RANGES))
    tokens = ids(*range(256))
    keys, others = (list(scope.keys(tokens, contents=contents)) for contents in (one, other))
    same = True
    for block in range(4):
        same = same and behind(one, block) == behind(other, block)
        assert (keys[block] == others[block]) == same


VECTORS_OF_CONTENTS = [
    "36e2f8976f0ef80122cdbf8c8397245d61d64a21dac0f67227d76974e979ec97",
    "315469fddfb08ccc5d4de2e9b86bdcff95ce0b804c9cf388dddd92d8563254c2",
]
VECTORS = [
    "76fbe318c89f200ce681896a4083297064a01d8e65a6fb50727b3dc5de4992b4",
    "198fa1141bfc0d4d3b21f83c4f276078310af789594839ac00cbcb37ddc27525",
]
"""The keys of docs/prefixes.md."""


def test_every_field_makes_another_key() -> None:
    """And the end of one field is not the begin of the next."""
    tag, block = layout_tag(RANGES), ids(*range(BLOCK_TOKENS))
    scopes = [
        make_scope("alice", bytes(32), tag),
        make_scope("alic", bytes(32), tag, b"e"),
        make_scope("bob", bytes(32), tag),
        make_scope("alice", bytes(31) + b"\1", tag),
        make_scope("alice", bytes(32), layout_tag(RANGES[:1])),
        make_scope("alice", bytes(32), tag, b"salt"),
    ]
    keys = {scope.key(NO_PARENT, block) for scope in scopes}
    keys.add(scopes[0].key(bytes(KEY_BYTES - 1) + b"\1", block))
    keys.add(scopes[0].key(NO_PARENT, ids(*range(63), 64)))
    assert len(keys) == len(scopes) + 2
