"""Orders over sessions: by a key that may change, and by when they came. Pure; nothing is scanned twice."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

SLACK = 64
"""Outdated entries of a heap that are not worth a pass."""
Accepts = Callable[[bytes], bool]
"""Whether a session may be named now; the owner of an order decides this anew for each question."""
Key = tuple[float, ...]


class Keyed:
    """Sessions by key, the lowest first. Every operation takes amortised O(log n), `first` per refusal.

    Put in order when `first` is first asked: who never asks pays for a dictionary.
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, Key] = {}
        """The key of each session in here. To be looked at, not changed."""
        self._heap: list[tuple[Key, bytes]] | None = None
        self._aside: list[tuple[Key, bytes]] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self.keys

    def put(self, uid: bytes, key: Key) -> Key | None:
        """Add the session, or give it another key; returns the key that it had."""
        # A key that did not change is not entered again.
        before = self.keys.get(uid)
        if before != key:
            self.keys[uid] = key
            if self._heap is not None:
                heappush(self._heap, (key, uid))
                if len(self._heap) > 2 * len(self.keys) + SLACK:
                    self._in_order()
        return before

    def discard(self, uid: bytes) -> None:
        """Take the entry out: it is in the line no more."""
        known = self.keys.pop(uid, None)
        if known is not None and self._heap is not None and len(self._heap) > 2 * len(self.keys) + SLACK:
            self._in_order()

    def first(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """The lowest that `accepts` takes; None when it takes none. It stays in here."""
        heap = self._in_order() if self._heap is None else self._heap
        passed: list[tuple[Key, bytes]] = []
        # While `pass_over` holds, refused entries are set aside for good; without it they go back at the end.
        refused = passed if self._aside is None else self._aside
        found = None
        while heap and found is None:
            entry = heappop(heap)
            key, uid = entry
            # Outdated: another entry, or none, is the current one.
            if self.keys.get(uid) != key:
                continue
            found = uid if accepts(uid) else None
            # An entry that was found stays in the heap, because `first` only names it.
            (passed if found else refused).append(entry)
        for entry in passed:
            heappush(heap, entry)
        return found

    def pass_over(self) -> None:
        """Look at those that `first` refuses once, until `look_again`: they will be refused all the while."""
        self._aside = []

    def look_again(self) -> None:
        """End `pass_over`."""
        aside, self._aside = self._aside or [], None
        if self._heap is not None:
            for entry in aside:
                heappush(self._heap, entry)

    def _in_order(self) -> list[tuple[Key, bytes]]:
        self._heap = [(key, uid) for uid, key in self.keys.items()]
        heapify(self._heap)
        return self._heap


class Line:
    """Sessions in the order in which they were put, with their sizes. O(1), `first` per refusal."""

    def __init__(self) -> None:
        # Deleting from the front leaves gaps in a plain dict, and each iteration begins by walking over them.
        # A plain dict would look at every gap at its front for each `first`.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._aside: list[tuple[bytes, int]] | None = None
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def put(self, uid: bytes, size_bytes: int = 0) -> None:
        """Put the session last, wherever it stood."""
        self.size_bytes += size_bytes - self._sizes.pop(uid, 0)
        self._sizes[uid] = size_bytes

    def renew(self, uid: bytes) -> None:
        """Put the session last if it is in here."""
        if uid in self._sizes:
            self._sizes.move_to_end(uid)

    def resize(self, uid: bytes, size_bytes: int) -> None:
        """Change its size and let it stand where it is."""
        self.size_bytes += size_bytes - self._sizes[uid]
        self._sizes[uid] = size_bytes

    def discard(self, uid: bytes) -> int | None:
        """Take it out; its size, None if it was not in here."""
        size_bytes = self._sizes.pop(uid, None)
        self.size_bytes -= size_bytes or 0
        return size_bytes

    def first(self, accepts: Accepts) -> bytes | None:
        """The earliest that `accepts` takes."""
        sizes, aside = self._sizes, self._aside
        if aside is None:
            for uid in sizes:
                if accepts(uid):
                    return uid
            return None
        while sizes:
            uid = next(iter(sizes))
            if accepts(uid):
                return uid
            aside.append((uid, sizes.pop(uid)))
        return None

    def pass_over(self) -> None:
        """Look at those that `first` refuses once, until `look_again`: they will be refused all the while.

        Meanwhile they are not in here, but for their bytes.
        """
        self._aside = []

    def look_again(self) -> None:
        """End `pass_over`: they stand where they stood."""
        aside, self._aside = self._aside or [], None
        # Reversed, and each to the front: the first of them is the first again.
        for uid, size_bytes in reversed(aside):
            self._sizes[uid] = size_bytes
            self._sizes.move_to_end(uid, last=False)


def takes_or_passes(accepts: Accepts, in_turn: set[bytes], passed: list[bytes]) -> Accepts:
    """The filter `accepts`, with a note of refusals.

    `passed` are those in a turn that it does not, until the turn is over.
    """

    def takes(uid: bytes) -> bool:
        if accepts(uid):
            return True
        if uid in in_turn:
            passed.append(uid)
        return False

    return takes


# A set of keys that counts. A treap: every operation takes expected O(log n). Priorities come from Python's
# salted hashes, so that no choice of keys makes the tree deep; answers do not depend on the salt.

Place = tuple[float, ...]


# Each node counts its subtree, so that the rank of a key is a walk from the root:
#
#     rank(k) = sum over every step to the right of (size of the left subtree + 1)
class _Node:
    __slots__ = ("key", "left", "priority", "right", "size")

    def __init__(self, key: Place) -> None:
        self.key = key
        # Text is hashed with the process's salt; numbers are not.
        self.priority = hash(str(key))
        self.size = 1
        self.left: _Tree = None
        self.right: _Tree = None


_Tree: TypeAlias = _Node | None


class Neighbours(NamedTuple):
    """Where a key stands, and which stand beside it."""

    rank: int
    before: Place | None
    after: Place | None


class Ranks:
    """A set of keys."""

    def __init__(self) -> None:
        self._root: _Tree = None

    def __len__(self) -> int:
        return _size(self._root)

    def add(self, key: Place) -> None:
        """Add a key that is not in here."""
        less, more = _split(self._root, key)
        self._root = _merge(_merge(less, _Node(key)), more)

    def discard(self, key: Place) -> None:
        """Take a key out, if it is in here."""
        self._root = _without(self._root, key)

    def find(self, key: Place) -> Neighbours:
        """Count the keys below `key`, and name those next to it; it need not be in here."""
        node, rank = self._root, 0
        before: Place | None = None
        after: Place | None = None
        while node is not None:
            if node.key < key:
                # Everything to the left is smaller.
                rank += _size(node.left) + 1
                before, node = node.key, node.right
            else:
                if node.key != key:
                    after = node.key
                    node = node.left
                    continue
                if node.left is not None:
                    before = _last(node.left).key
                if node.right is not None:
                    after = _first(node.right).key
                rank += _size(node.left)
                break
        return Neighbours(rank, before, after)


def _size(tree: _Tree) -> int:
    return tree.size if tree else 0


def _first(node: _Node) -> _Node:
    while node.left:
        node = node.left
    return node


def _last(node: _Node) -> _Node:
    while node.right:
        node = node.right
    return node


def _split(tree: _Tree, key: Place) -> tuple[_Tree, _Tree]:
    """Split into those below `key` and the others."""
    if tree is None:
        return None, None
    if tree.key < key:
        tree.right, more = _split(tree.right, key)
        return _sized(tree), more
    less, tree.left = _split(tree.left, key)
    return less, _sized(tree)


def _merge(less: _Tree, more: _Tree) -> _Tree:
    if less is None or more is None:
        return less or more
    # The larger priority is the root: the shape is that of a random tree, whatever order the keys came in.
    if less.priority > more.priority:
        less.right = _merge(less.right, more)
        return _sized(less)
    more.left = _merge(less, more.left)
    return _sized(more)


def _without(tree: _Tree, key: Place) -> _Tree:
    if tree is None:
        return None
    if tree.key == key:
        return _merge(tree.left, tree.right)
    if key < tree.key:
        tree.left = _without(tree.left, key)
    else:
        tree.right = _without(tree.right, key)
    return _sized(tree)


def _sized(node: _Node) -> _Node:
    node.size = _size(node.left) + _size(node.right) + 1
    return node
