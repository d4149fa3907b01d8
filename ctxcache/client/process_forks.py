"""Forks of the process: a child has its parent's connections, and must not use them.

    parent   connected ──► forks ──► goes on
    child                    └────► its copies are closed; each call raises Unavailable

Both would read one another's answers: a child that died in the middle of a call gave its parent a lease on
other rows than were asked for. Locks may be held by threads that a child does not have, and are made anew.
"""

import os
from typing import Protocol
from weakref import WeakSet

from ctxcache.errors import Unavailable


class Shared(Protocol):
    """A connection, queue or thread that a forked child would share with its parent."""

    def forked(self) -> None:
        """Called in a child, before anything else runs there: be of no use, and leave the peer alone."""


_SHARED: WeakSet[Shared] = WeakSet()


def end_in_children(shared: Shared) -> None:
    """Have its `forked` called in each child of this process, as long as it lives."""
    _SHARED.add(shared)


def of_parent(target: str) -> Unavailable:
    """The error of a child that calls."""
    return Unavailable(target=target, problem="this process was forked from the client's: connect in it anew")


def _in_child() -> None:
    for shared in list(_SHARED):
        shared.forked()


os.register_at_fork(after_in_child=_in_child)
