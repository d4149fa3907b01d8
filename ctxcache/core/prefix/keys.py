"""Chain keys: what a run of 64 tokens is called, together with everything before it; and their index.

    key = SHA-256(field(DOMAIN) | field(tenant) | field(model fingerprint) | field(layout tag) | field(salt)
                  | field(parent) | field(token ids) [| field(contents)])
    field(x) = length of x in bytes, u32 little endian | x

`parent` is the key of the 64 tokens before, 32 zero bytes for the first. Token ids are int32, little endian.
`contents` are there where pictures or sounds lie behind some of the 64 tokens: of each, where it begins and
ends among them, int32 little endian, and its digest, 32 bytes. Two keys are equal only if all of this is:
tenant, model, layout, salt, and every token and digest from the first on. docs/prefixes.md has the same with
test vectors.

Blocks of an engine are looked for in a space; a block of one tenant and space is never found in another.
docs/blocks.md has the same in words.

    space = SHA-256(field(BLOCK_DOMAIN) | field(model fingerprint) | field(layout tag) | field(salt)
                    | field(parts))

`parts`: layer begin, layer end and rank of each, int32 little endian, in their order.

The index leads from a key to the segments whose rows it names. Each entry is a row of flat arrays, found by
two hash tables with linear probing, one by key and one by owner. An owner is a segment's number. Several
owners may have one key: state that was computed twice.

    key table ──► row of the key's newest entry ──► `_older` ──► the same key's entry before ...
    owner table ──► row of the owner's first entry ──► `_next` ──► the owner's next entry ...

The tables are cut into 1,024 parts that grow by themselves, so that no entry waits for more than one part to
be laid out anew: 10 M keys, 10,000 entries. Keys are combined with their scope's mask before they are stored
or looked for: one of another scope is not there, in the time that one that is nowhere takes. The mask leaves
the salt out, which is in the keys themselves: so a segment's record need not say it. Python's own
hash, which is seeded for each process, places them: a caller cannot choose keys that collide.
"""

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from typing_extensions import Buffer

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DIGEST_BYTES, TOKENS_RANGE, Content, StreamRange

BLOCK_TOKENS = 64
"""Tokens that one key covers."""
TOKEN_BYTES = 4
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
"""Bytes of the token ids under one key."""
KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)
TOKENS_LIMIT_BYTES = 1 << 20
"""Token ids of the longest prompt that is looked for."""
DOMAIN = b"ctxcache.prefix.v1"
_CONTENT_END = attrgetter("end")
SCOPES_KEPT = 4096
"""Scopes that are kept ready: one for each tenant, model, layout and salt in use."""
_LENGTH, _RANGE, _CONTENT = struct.Struct("<I"), struct.Struct("<iii"), struct.Struct(f"<ii{DIGEST_BYTES}s")
_PARENT_LENGTH, _TOKENS_LENGTH = _LENGTH.pack(KEY_BYTES), _LENGTH.pack(BLOCK_BYTES)


# Which scopes meet, and which never do:
#
#     other tenant, model, layout    another head and another mask    not in the same part of the index
#     other salt                     another head, the same mask      other keys, so not found either
class Scope(NamedTuple):
    """The bounds of a search for keys. Keys of one scope are never found in another.

    `mask`: 256 bits that the index combines every key of the scope with.
    """

    head: bytes
    """The fields before `parent`, encoded."""
    mask: int

    def key(self, parent: bytes, token_ids: Buffer, contents: bytes = b"") -> bytes:
        """The key of 64 token ids behind `parent`, 32 bytes. `contents`: the encoded field, or nothing."""
        return hashlib.sha256(
            b"".join((self.head, _PARENT_LENGTH, parent, _TOKENS_LENGTH, token_ids, contents))
        ).digest()

    def keys(
        self,
        token_ids: Buffer,
        parent: bytes = NO_PARENT,
        contents: Sequence[Content] = (),
        first_token: int = 0,
    ) -> Iterator[bytes]:
        """The key of each whole run of 64 token ids. The rest has none.

        `contents` are in order, in the session's token indexes, of which `first_token` is the first here.
        """
        # The ids are made bytes: to join a slice of a view with bytes is slower.
        data = bytes(token_ids)
        # The first content that ends behind the first token here.
        at = bisect_right(contents, first_token, key=_CONTENT_END)
        # All keys share a beginning, which is hashed once: to copy a hasher costs less.
        begun = hashlib.sha256(self.head + _PARENT_LENGTH)
        for begin in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            field = b""
            if at < len(contents):
                # Contents before these 64 tokens are done with.
                first = first_token + begin // TOKEN_BYTES
                while at < len(contents) and contents[at].end <= first:
                    at += 1
                field = _contents_field(contents, at, first)
            hasher = begun.copy()
            hasher.update(parent + _TOKENS_LENGTH + data[begin : begin + BLOCK_BYTES] + field)
            parent = hasher.digest()
            yield parent


def _contents_field(contents: Sequence[Content], at: int, first: int) -> bytes:
    """The contents from number `at` on that lie behind the 64 tokens from `first` on."""
    packed = list[bytes]()
    while at < len(contents) and contents[at].begin < first + BLOCK_TOKENS:
        begin, end, digest = contents[at]
        # The numbers count within the 64 tokens: the same picture at the same place gives the same key in any
        # session.
        packed.append(_CONTENT.pack(max(begin - first, 0), min(end - first, BLOCK_TOKENS), digest))
        at += 1
    body = b"".join(packed)
    return _LENGTH.pack(len(body)) + body if body else b""


def layout_tag(ranges: Iterable[StreamRange]) -> bytes:
    """A session's layout, as it enters a key: SHA-256 of its ranges, token ids left out. 32 bytes.

    Each range is kind, layer_begin and layer_end, int32 little endian; by kind, then by layer, as few as can
    be.
    """
    # Sorted, because a layout is a set of ranges, in whatever order a client names them.
    packed = (_RANGE.pack(kind, begin, end) for kind, begin, end in sorted(ranges))
    tokens = _RANGE.pack(*TOKENS_RANGE)
    return hashlib.sha256(b"".join(item for item in packed if item != tokens)).digest()


# The cache hashes the ranges, which have to be a tuple for that.
@lru_cache(SCOPES_KEPT)
def scope_of(
    tenant: str, model_fingerprint: bytes, ranges: Sequence[StreamRange], salt: bytes = b""
) -> Scope:
    """The scope of state of that model and layout. `ranges` are a tuple, as `ranges_of` makes them."""
    return make_scope(tenant, model_fingerprint, layout_tag(ranges), salt)


def make_scope(tenant: str, model_fingerprint: bytes, tag: bytes, salt: bytes = b"") -> Scope:
    """As `scope_of`, with a layout tag."""
    fields = (DOMAIN, tenant.encode(), model_fingerprint, tag)
    head = b"".join(_LENGTH.pack(len(item)) + item for item in fields)
    mask = int.from_bytes(hashlib.sha256(head).digest(), "little")
    return Scope(b"".join((head, _LENGTH.pack(len(salt)), salt)), mask)


FREE = -1
PARTS = 1024
LEAST_SLOTS = 4
_GROWTH_SHIFT = 4
"""Rows are added by sixteenths of the present ones."""


class Entry(NamedTuple):
    """The rows that a key names: the first `token_count` tokens of the owner end with the last of them."""

    owner: int
    token_count: int


class PrefixIndex:
    """Keys and owners, any number of either for the other."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._owners, self._counts = array("q"), array("I")
        self._older, self._newer, self._next = array("i"), array("i"), array("i")
        """Rows; FREE at an end. `_next` also leads from one unused row to the next."""
        self._unused = FREE
        self._by_key = [array("i", [FREE] * LEAST_SLOTS) for _ in range(PARTS)]
        self._by_owner = [array("i", [FREE] * LEAST_SLOTS) for _ in range(PARTS)]
        self._key_counts, self._owner_counts = array("I", bytes(4 * PARTS)), array("I", bytes(4 * PARTS))
        self._count = 0
        self._last_owner: int | None = None
        """Owner of the entry in `_last_row`, the last put: a segment gets its keys one after another."""
        self._last_row = FREE
        self._table_bytes = 2 * PARTS * LEAST_SLOTS * self._older.itemsize

    def __len__(self) -> int:
        """How many entries there are."""
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that entries take, room for more included."""
        rows = (self._owners, self._counts, self._older, self._newer, self._next)
        return len(self._keys) + sum(len(part) * part.itemsize for part in rows) + self._table_bytes

    def put(self, scope: Scope, key: bytes, owner: int, token_count: int) -> None:
        """Let a key name an owner's first tokens; an owner's keys come in the order of their token counts."""
        # The key is stored under the mask, and found only with it.
        stored = _stored(scope, key)
        row = self._take_row()
        begin = row * KEY_BYTES
        self._keys[begin : begin + KEY_BYTES] = stored
        self._owners[row], self._counts[row] = owner, token_count
        self._newer[row] = self._next[row] = FREE
        # The newest entry is the head of its key's chain.
        part, slot = self._key_slot(stored)
        head = self._older[row] = part[slot]
        part[slot] = row
        if head == FREE:
            self._grow_keys(hash(stored) % PARTS)
        else:
            self._newer[head] = row
        number = hash(owner) % PARTS
        part, slot = self._owner_slot(owner)
        first = part[slot]
        if first == FREE:
            part[slot] = row
            self._grow_owners(number)
        else:
            # Keys of a segment come one after another: the last row is remembered, or each put would walk its
            # chain.
            last = self._last_row if self._last_owner == owner else self._last_of(first)
            self._next[last] = row
        self._last_owner, self._last_row = owner, row
        self._count += 1

    def find_all(self, scope: Scope, key: bytes) -> Iterator[Entry]:
        """All entries under a key, the last first. The index must not change meanwhile."""
        return self.find_stored(_stored(scope, key))

    def find_stored(self, stored: bytes) -> Iterator[Entry]:
        """As `find_all`, of a key as it is stored."""
        part, slot = self._key_slot(stored)
        row = part[slot]
        while row != FREE:
            yield Entry(self._owners[row], self._counts[row])
            row = self._older[row]

    def keys_of(self, scope: Scope, owner: int) -> list[tuple[bytes, int]]:
        """An owner's keys, each with its token count, in order."""
        keys: list[tuple[bytes, int]] = []
        for row in self._rows_of(owner):
            begin = row * KEY_BYTES
            key = _stored(scope, self._keys[begin : begin + KEY_BYTES])
            keys.append((key, self._counts[row]))
        return keys

    def stored_keys(self, owner: int, begin: int, end: int) -> bytes:
        """An owner's keys of more than `begin` and at most `end` tokens, one behind the other, as stored."""
        part, slot = self._owner_slot(owner)
        row, follows, rows = part[slot], self._next, list[int]()
        # `_rows_of` takes three times as long, and sessions have thousands of rows.
        while row != FREE:
            rows.append(row)
            row = follows[row]
        count_of = self._counts.__getitem__
        rows = rows[bisect_right(rows, begin, key=count_of) : bisect_right(rows, end, key=count_of)]
        # Keys that were put one after another lie in a row, and are one copy.
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return bytes(self._keys[rows[0] * KEY_BYTES : (rows[-1] + 1) * KEY_BYTES])
        return b"".join([self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] for row in rows])

    def knows(self, owner: int) -> bool:
        """Whether an owner has keys."""
        part, slot = self._owner_slot(owner)
        return part[slot] != FREE

    def drop(self, owner: int, beyond: int = 0) -> int:
        """Forget an owner's keys, or those for more than `beyond` tokens; returns how many there were."""
        rows = list(self._rows_of(owner))
        # The remembered owner may be the one that goes.
        self._last_owner = None
        kept = [row for row in rows if self._counts[row] <= beyond]
        for row in rows[len(kept) :]:
            self._unlink(row)
        if len(kept) == len(rows):
            return 0
        if kept:
            self._next[kept[-1]] = FREE
        else:
            # The owner has no row left. Its slot, which names the first row, is taken out.
            number = hash(owner) % PARTS
            part, slot = self._owner_slot(owner)
            _take_out(part, slot, self._owner_home)
            self._owner_counts[number] -= 1
        for row in rows[len(kept) :]:
            self._next[row], self._unused = self._unused, row
            self._count -= 1
        return len(rows) - len(kept)

    def owners(self) -> Iterator[int]:
        """Every owner, once. The index must not change meanwhile."""
        for part in self._by_owner:
            for row in part:
                if row != FREE:
                    yield self._owners[row]

    # -- rows --------------------------------------------------------------------------------------

    def _take_row(self) -> int:
        if self._unused == FREE:
            count = len(self._owners)
            # Rows grow by a sixteenth: doubling would hold twice the memory of a large index at once.
            added = max(count >> _GROWTH_SHIFT, 64)
            self._keys += bytes(added * KEY_BYTES)
            self._owners.frombytes(bytes(added * self._owners.itemsize))
            self._counts.frombytes(bytes(added * self._counts.itemsize))
            self._older.frombytes(bytes(added * self._older.itemsize))
            self._newer.frombytes(bytes(added * self._newer.itemsize))
            self._next.extend(range(count + 1, count + added))
            self._next.append(FREE)
            self._unused = count
        row = self._unused
        self._unused = self._next[row]
        return row

    def _rows_of(self, owner: int) -> Iterator[int]:
        part, slot = self._owner_slot(owner)
        row = part[slot]
        while row != FREE:
            yield row
            row = self._next[row]

    def _last_of(self, row: int) -> int:
        while self._next[row] != FREE:
            row = self._next[row]
        return row

    def _unlink(self, row: int) -> None:
        """Take an entry from under its key."""
        older, newer = self._older[row], self._newer[row]
        if older != FREE:
            self._newer[older] = newer
        if newer != FREE:
            self._older[newer] = older
            # Only the head of a chain is in the table.
            return
        begin = row * KEY_BYTES
        stored = bytes(self._keys[begin : begin + KEY_BYTES])
        part, slot = self._key_slot(stored)
        if older != FREE:
            part[slot] = older
        else:
            _take_out(part, slot, self._key_home)
            self._key_counts[hash(stored) % PARTS] -= 1

    # -- tables ------------------------------------------------------------------------------------

    def _key_slot(self, stored: bytes) -> "tuple[array[int], int]":
        """The part of the table and the slot that has a key, or would have it."""
        hashed = hash(stored)
        # The low bits choose the part, and the others the slot, so that the two do not depend on each other.
        part = self._by_key[hashed % PARTS]
        mask = len(part) - 1
        slot = (hashed // PARTS) & mask
        keys = self._keys
        while (row := part[slot]) != FREE:
            begin = row * KEY_BYTES
            if keys[begin : begin + KEY_BYTES] == stored:
                break
            slot = (slot + 1) & mask
        return part, slot

    def _owner_slot(self, owner: int) -> "tuple[array[int], int]":
        part = self._by_owner[hash(owner) % PARTS]
        mask = len(part) - 1
        slot = (hash(owner) // PARTS) & mask
        while (row := part[slot]) != FREE and self._owners[row] != owner:
            slot = (slot + 1) & mask
        return part, slot

    def _key_home(self, row: int) -> int:
        begin = row * KEY_BYTES
        return hash(bytes(self._keys[begin : begin + KEY_BYTES])) // PARTS

    def _owner_home(self, row: int) -> int:
        return hash(self._owners[row]) // PARTS

    def _grow_keys(self, number: int) -> None:
        self._key_counts[number] += 1
        part = self._by_key[number]
        # A part doubles when it is two thirds full: linear probing becomes slow beyond that.
        if 3 * self._key_counts[number] > 2 * len(part):
            self._table_bytes += len(part) * part.itemsize
            self._by_key[number] = _doubled(part, [self._key_home(row) for row in part if row != FREE])

    def _grow_owners(self, number: int) -> None:
        self._owner_counts[number] += 1
        part = self._by_owner[number]
        if 3 * self._owner_counts[number] > 2 * len(part):
            self._table_bytes += len(part) * part.itemsize
            self._by_owner[number] = _doubled(part, [self._owner_home(row) for row in part if row != FREE])


def _stored(scope: Scope, key: bytes | bytearray) -> bytes:
    # Exclusive or is the same operation there and back.
    return (int.from_bytes(key, "little") ^ scope.mask).to_bytes(KEY_BYTES, "little")


def all_stored(scope: Scope, keys: Sequence[bytes]) -> bytes:
    """Keys as the index has them, one behind the other."""
    joined, masks = b"".join(keys), scope.mask.to_bytes(KEY_BYTES, "little") * len(keys)
    # One operation masks all keys: one key at a time takes as long as making it.
    return (int.from_bytes(joined, "little") ^ int.from_bytes(masks, "little")).to_bytes(
        len(joined), "little"
    )


def _doubled(part: "array[int]", homes: list[int]) -> "array[int]":
    """The same rows in twice as many slots; `homes` of them, in the order of their slots."""
    larger = array("i", [FREE]) * (2 * len(part))
    mask = len(larger) - 1
    for row, home in zip((row for row in part if row != FREE), homes, strict=True):
        slot = home & mask
        while larger[slot] != FREE:
            slot = (slot + 1) & mask
        larger[slot] = row
    return larger


def _take_out(part: "array[int]", slot: int, home_of: Callable[[int], int]) -> None:
    """Free a slot, and move what follows so that no search ends too early."""
    # Backward shift instead of marks for deleted slots, which would make every search longer with time:
    #
    #     home   2  2  3  5
    #     slot   2  3  4  5      take out 2: 3 moves to 2, 4 moves to 3, 5 stays, for 5 is its home
    mask = len(part) - 1
    follows = (slot + 1) & mask
    while (row := part[follows]) != FREE:
        home = home_of(row) & mask
        # The row may move where its own search passes the free slot.
        if (follows - home) & mask >= (follows - slot) & mask:
            part[slot] = row
            slot = follows
        follows = (follows + 1) & mask
    part[slot] = FREE


BLOCK_DOMAIN = b"ctxcache.block.v1"
PARTS_LIMIT = 256
BLOCK_LIMIT_BYTES = 16 << 20
"""The most bytes of all parts of a block together."""
TAG_LIMIT_BYTES = 1024
LAYERS_LIMIT = 1 << 16
_LENGTH, _PART = struct.Struct("<I"), struct.Struct("<iii")


class Part(NamedTuple):
    """The bytes of a block that one rank of an engine writes: those of layers `[layer_begin, layer_end)`."""

    layer_begin: int
    layer_end: int
    rank: int


def space_of(fingerprint: bytes, layout_tag: bytes, salt: bytes, parts: Sequence[Part]) -> bytes:
    """The space of blocks of this model, layout, salt and these parts. 32 bytes."""
    packed = b"".join(_PART.pack(*part) for part in parts)
    # Lengths come before fields: no two sets of fields have the same bytes.
    fields = (BLOCK_DOMAIN, fingerprint, layout_tag, salt, packed)
    return hashlib.sha256(b"".join(_LENGTH.pack(len(item)) + item for item in fields)).digest()


def check_parts(parts: Sequence[Part]) -> None:
    """Raise InvalidArgument unless every rank from 0 on has each layer from 0 on once, in some part."""
    if not 1 <= len(parts) <= PARTS_LIMIT:
        raise _bad(f"{len(parts)} are not 1 to {PARTS_LIMIT}")
    by_rank = defaultdict[int, list[Part]](list)
    for part in parts:
        if not 0 <= part.layer_begin < part.layer_end <= LAYERS_LIMIT:
            raise _bad(f"layers [{part.layer_begin}, {part.layer_end}) are no range of layers")
        by_rank[part.rank].append(part)
    ranks = sorted(by_rank)
    # Ranks from 0 on without a gap: a rank that is missing would never write its parts.
    if ranks != list(range(len(ranks))):
        raise _bad(f"ranks {ranks} are not all ranks from 0 on")
    layer_count = max(part.layer_end for part in parts)
    for rank in ranks:
        layer = 0
        for part in sorted(by_rank[rank]):
            if part.layer_begin < layer:
                raise _bad(f"of rank {rank} overlap at layer {part.layer_begin}")
            if part.layer_begin > layer:
                raise _bad(f"of rank {rank} lack layer {layer}")
            layer = part.layer_end
        if layer < layer_count:
            raise _bad(f"of rank {rank} lack layer {layer}")


def check_key(key: bytes, field: str) -> bytes:
    """A block's key. Raises InvalidArgument."""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(field=field, problem=f"{KEY_BYTES} bytes expected, {len(key)} given")
    return key


def check_sizes(sizes: Sequence[int], part_count: int, field: str) -> tuple[int, ...]:
    """The sizes of a block's parts, in bytes. Raises InvalidArgument."""
    if len(sizes) != part_count:
        raise InvalidArgument(field=field, problem=f"{len(sizes)} are not one for each of {part_count} parts")
    if min(sizes) < 1:
        raise InvalidArgument(field=field, problem=f"{min(sizes)} B are no part")
    if (size_bytes := sum(sizes)) > BLOCK_LIMIT_BYTES:
        problem = f"{size_bytes} B together are more than {BLOCK_LIMIT_BYTES} B"
        raise InvalidArgument(field=field, problem=problem)
    return tuple(sizes)


def _bad(problem: str) -> InvalidArgument:
    return InvalidArgument(field="space.parts", problem=problem)
