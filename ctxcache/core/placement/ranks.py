"""Ranks: keys in order, and how many are before one. A treap: every operation takes expected O(log n).

Shapes depend on Python's salted hashes, answers do not: nobody who chooses keys can make it deep.
"""

from typing import NamedTuple, TypeAlias

Place = tuple[float, ...]


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
