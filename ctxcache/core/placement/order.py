"""An order over sessions by a key that may change, and a set of keys that counts. Pure."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeAlias

SLACK = 64
"""Outdated entries of a heap that are not worth a pass."""
Accepts = Callable[[bytes], bool]
"""Whether a session may be named now; the owner of an order decides this anew for each question."""
Key = tuple[float, ...]


class Keyed:
    """Sessions by key, the lowest first. Every operation takes amortised O(log n), `first` per refusal.

    The heap is made when `first` is first asked. Before that a session costs an entry of a dictionary.
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, Key] = {}
        """The key of each session in here. To be looked at, not changed."""
        self._heap: list[tuple[Key, bytes]] | None = None

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
        """Take the session out, if it is in here."""
        known = self.keys.pop(uid, None)
        if known is not None and self._heap is not None and len(self._heap) > 2 * len(self.keys) + SLACK:
            self._in_order()

    def first(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """The lowest session that `accepts` takes, or None. It stays in here."""
        heap = self._in_order() if self._heap is None else self._heap
        passed: list[tuple[Key, bytes]] = []
        found = None
        while heap and found is None:
            entry = heappop(heap)
            key, uid = entry
            # Outdated: another entry, or none, is the current one.
            if self.keys.get(uid) != key:
                continue
            found = uid if accepts(uid) else None
            # The entry stays in the heap, because `first` only names it.
            passed.append(entry)
        for entry in passed:
            heappush(heap, entry)
        return found

    def _in_order(self) -> list[tuple[Key, bytes]]:
        self._heap = [(key, uid) for uid, key in self.keys.items()]
        heapify(self._heap)
        return self._heap


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
