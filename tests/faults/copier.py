"""A client that leases a session over gRPC and copies its rows again and again: what others freeze.

    python -m tests.faults.copier TARGET SESSION [BUG]

Prints `copies` once it has a copy. When a check fails it prints `refused`, and `foreign` or `own` for what
lies in its slots by then; when a check passes over other rows than it copied first, `believed`.
"""

import sys

import numpy as np

import ctxcache
from ctxcache.errors import LeaseNotFound
from ctxcache.format.streams import TOKENS
from tests.faults import planted, plants  # noqa: F401  # they register
from tests.stored_model import stored_model

TOKENS_COPIED = 8
"""So few that copying them never lets go of the interpreter."""
SWITCH_INTERVAL_S = 60.0
"""No thread takes the interpreter from the one that copies: the thread that receives hears of nothing before.

At Python's own 5 ms it does on a loaded machine, where a thawed client is at times not run for as long.
"""


def copy_on(target: str, name: str) -> str:
    """Copy for as long as the copies are good; returns what ended it."""
    with ctxcache.connect(target, access="local", transport="grpc") as client:
        rows = client.sessions.open(name, stored_model(client, name)).read(
            streams=[TOKENS], end=TOKENS_COPIED
        )
        first, views = rows.array(TOKENS), rows.pieces(TOKENS)
        copy = np.empty_like(first)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
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
    _say(copy_on(*sys.argv[1:3]))
