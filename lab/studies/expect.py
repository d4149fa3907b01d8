"""Whether sessions that are said to return are in DRAM when they do: `expect`, on a server with little DRAM.

    python -m lab.studies.expect

Forty sessions lie on SSD, of which DRAM takes about twelve. They return in an order that recency does
not foretell. Each return is announced some seconds ahead, and looked up when it is due. Then the same returns
are played without a word. The command ends with 1 where fewer than 95 % of the announced ones were found in
DRAM whole.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np

import ctxcache
from ctxcache.client import Client, Durability, SessionHandle
from ctxcache.format.streams import TOKENS
from lab.bench.contexts import model_of
from lab.bench.row import Scale
from lab.bench.server import serving

SESSIONS, SESSION_TOKENS, ROW_BYTES = 40, 128, 8192
ARENA_BYTES, SSD_BYTES = 16 << 20, 256 << 20
APART = 12
"""So many others return before one returns again: as many as DRAM takes."""
PAUSE_S = 0.7
NEEDED = 0.95


def returns(count: int) -> list[int]:
    """The sessions that return, in order."""
    chance, order = np.random.default_rng(2), list[int]()
    while len(order) < count:
        each = int(chance.integers(SESSIONS))
        if each not in order[-APART:]:
            order.append(each)
    return order


def play(
    client: Client,
    sessions: Sequence[SessionHandle],
    fingerprint: bytes,
    order: Sequence[int],
    ahead_s: float | None,
) -> int:
    """Let the sessions return, PAUSE_S apart, each announced `ahead_s` before; how many were in DRAM."""
    lead = 0 if ahead_s is None else round(ahead_s / PAUSE_S)
    begin_s, found_count = time.monotonic(), 0
    for step in range(len(order) + lead):
        time.sleep(max(begin_s + step * PAUSE_S - time.monotonic(), 0.0))
        if ahead_s is not None and step < len(order):
            client.hints.expect(sessions[order[step]].name, return_in=timedelta(seconds=lead * PAUSE_S))
        if step < lead:
            continue
        session = sessions[order[step - lead]]
        (found,) = client.sessions.lookup([(session.name, fingerprint)])
        found_count += found.dram_token_count == found.token_count == SESSION_TOKENS
        with session.read(streams=[TOKENS]):
            pass
    return found_count


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--returns", type=int, default=60)
    parser.add_argument("--ahead", type=float, default=5.6, help="seconds between the word and the return")
    arguments = parser.parse_args()
    spec = model_of(Scale(1, 1, 64, ROW_BYTES, call_count=0, segment_count=0))
    ids = np.random.default_rng(1)
    # Not in /tmp, which may be memory.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        serving(Path(directory) / "data", arena_bytes=ARENA_BYTES, ssd_bytes=SSD_BYTES) as server,
        ctxcache.connect(server.target("unix"), access="local", transport="socket") as client,
    ):
        model = client.models.register(spec)
        rows = {each.stream: np.zeros((SESSION_TOKENS, each.row_bytes), np.uint8) for each in spec.streams}
        sessions = []
        for number in range(SESSIONS):
            session = client.sessions.create(model, id=f"returns-{number}", ttl=timedelta(hours=1))
            tokens = ids.integers(0, 1 << 30, SESSION_TOKENS, np.int32).view(np.uint8).reshape(-1, 4)
            session.append({TOKENS: tokens, **rows}, durability=Durability.DISK)
            sessions.append(session)
        order = returns(arguments.returns)
        announced = play(client, sessions, spec.fingerprint(), order, arguments.ahead)
        silent = play(client, sessions, spec.fingerprint(), order, None)
    said = f"{announced} announced {arguments.ahead:g} s ahead, {silent} not announced"
    print(f"in DRAM of {len(order)} returns: {said}")
    sys.exit(announced < NEEDED * len(order))


if __name__ == "__main__":
    main()
