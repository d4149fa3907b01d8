"""A client that leases a session over gRPC and copies its rows again and again: what others freeze.

    python -m tests.faults.copier TARGET SESSION [BUG]

Prints `copies` once it has a copy. When a check fails it prints `refused`, and `foreign` or `own` for what
lies in its slots by then; when a check passes over other rows than it copied first, `believed`. It hears of
the stream's end only where it asks: as on a machine where the thread that receives is not run for long.
"""

import sys
import threading

import numpy as np

import ctxcache
from ctxcache.client.grpc_access import GrpcAccess
from ctxcache.errors import CacheError, LeaseNotFound
from ctxcache.format.streams import TOKENS
from tests.faults import planted, plants  # noqa: F401  # they register
from tests.stored_model import stored_model

TOKENS_COPIED = 8
"""So few that copying them never lets go of the interpreter."""


def hear_when_asking() -> None:
    """Let the thread that receives tell of the stream's end only while a question is under way."""
    asks = threading.Event()
    end, probe = GrpcAccess._end, GrpcAccess._probe

    def end_later(self: GrpcAccess, failure: CacheError) -> None:
        if threading.current_thread() is self._thread:
            asks.wait()
        else:
            # From here on it is known, and the thread may end.
            asks.set()
        end(self, failure)

    def ask(self: GrpcAccess) -> None:
        asks.set()
        try:
            probe(self)
        finally:
            asks.clear()

    setattr(GrpcAccess, "_end", end_later)  # noqa: B010  # a patch, whatever mypy says
    setattr(GrpcAccess, "_probe", ask)  # noqa: B010


def copy_on(target: str, name: str) -> str:
    """Copy for as long as the copies are good; returns what ended it."""
    with ctxcache.connect(target, access="local", transport="grpc") as client:
        rows = client.sessions.open(name, stored_model(client, name)).read(
            streams=[TOKENS], end=TOKENS_COPIED
        )
        first, views = rows.array(TOKENS), rows.pieces(TOKENS)
        copy = np.empty_like(first)
        _say("copies")
        try:
            while np.array_equal(rows.array(TOKENS, out=copy), first):
                continue
        except LeaseNotFound:
            return "refused own" if np.array_equal(np.concatenate(views), first) else "refused foreign"
    return "believed"


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    planted.plant_all(",".join(sys.argv[3:]))
    hear_when_asking()
    _say(copy_on(*sys.argv[1:3]))
