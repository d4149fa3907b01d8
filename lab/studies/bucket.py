"""N hosts behind a router, and a bucket behind them: what is found where, and what it costs.

    python -m lab.studies.bucket ../shared/data/agentic_cc_A.csv.gz --hosts 4 --affinity 0.9

Sessions are replayed in order of arrival, turns take no time. The router sends a turn to its session's host
with the probability of the affinity, else to any other. Each host has its part of the capacity, places by
`value`, and keeps what it had of a session that goes on elsewhere. Three ways to use the bucket: none of it,
all that is written, and by price: a turn is put where the chance that its session returns, as the host
learned it, is worth PUT and storage until TTL. It is fetched where that is cheaper than computing and no
slower. Not modelled: transfers between hosts, hosts that fail.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ctxcache.core.placement.policy import Capacities, Facts
from ctxcache.core.placement.prices import Bucket, BucketPrices, Recomputation
from ctxcache.core.placement.value import ReturnValue
from ctxcache.simulate.load import MODELS, Load, Model
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.store import InclusiveTiers
from ctxcache.simulate.study import footprint_bytes, look
from ctxcache.simulate.trace import Trace

WAYS = ("none", "all", "price")
HOUR_S = 3600.0
DRAM_SHARE = 0.06


@dataclass(slots=True)
class Spent:
    """Tokens of history by where they came from, requests, seconds and US dollars of all hosts."""

    way: str
    session_count: int = 0
    history_tokens: int = 0
    local_tokens: int = 0
    bucket_tokens: int = 0
    computed_tokens: int = 0
    put_count: int = 0
    get_count: int = 0
    stored_bytes: int = 0
    wait_s: float = 0.0
    """What turns wait for the bucket."""
    gpu: float = 0.0
    """Of history that is computed anew."""
    requests: float = 0.0
    storage: float = 0.0
    total: float = field(default=0.0)

    def put(
        self, prices: BucketPrices, known: "_Object", new_bytes: int, until_s: float, kept_s: float
    ) -> None:
        """The end that the bucket has not got is put; what it knows of the session is kept for longer."""
        self.put_count += prices.object_count(new_bytes)
        self.stored_bytes += new_bytes
        self.requests += prices.puts(new_bytes)
        self.storage += prices.storage(known.size_bytes, until_s - known.until_s)
        self.storage += prices.storage(new_bytes, kept_s)

    def close(self) -> "Spent":
        """With the sum."""
        self.total = self.gpu + self.requests + self.storage
        return self


@dataclass(slots=True)
class _Object:
    """What the bucket has of a session, from its beginning, and until when."""

    size_bytes: int = 0
    until_s: float = 0.0


class _Host:
    """One store: what it has of each session is what the session had when it last was here."""

    def __init__(self, capacity_bytes: int) -> None:
        memory_bytes = int(capacity_bytes * DRAM_SHARE)
        capacities = Capacities(memory_bytes, capacity_bytes - memory_bytes)
        self.policy = ReturnValue(capacities)
        self.tiers = InclusiveTiers(capacities, self.policy)
        self.sizes: dict[bytes, int] = {}

    def held_bytes(self, uid: bytes) -> int:
        """What is here of it."""
        return 0 if self.tiers.tier(uid) is None else self.sizes.get(uid, 0)


def routed(uid: bytes, turn: int, hosts: int, affinity: float) -> int:
    """The host of a turn: the session's, or another one; the same in each run."""
    home = zlib.crc32(uid) % hosts
    draw = zlib.crc32(b"%b at %d" % (uid, turn))
    if hosts == 1 or draw < affinity * 2**32:
        return home
    return (home + 1 + zlib.crc32(b"%b strays %d" % (uid, turn)) % (hosts - 1)) % hosts


def play(
    turns: Iterable[TraceTurn],
    way: str,
    bucket: Bucket,
    capacity_bytes: int,
    *,
    hosts: int,
    affinity: float,
    ttl_s: float,
) -> Spent:
    """Replay the turns in one way."""
    spent = Spent(way)
    stores = [_Host(capacity_bytes // hosts) for _ in range(hosts)]
    objects: dict[bytes, _Object] = {}
    sizes: dict[bytes, int] = {}
    counts: dict[bytes, int] = {}
    last: dict[bytes, _Host] = {}
    token_bytes = int(bucket.recomputation.token_bytes)
    for turn in turns:
        uid, now_s = turn.session, turn.arrival_s
        number = counts[uid] = counts.get(uid, 0) + 1
        history_tokens = turn.history_tokens if turn.history_tokens is not None else sizes.get(uid, 0)
        history_bytes = history_tokens * token_bytes if number > 1 else 0
        host = stores[routed(uid, number, hosts, affinity)]
        before = last.get(uid, host)
        if before is not host:
            # The host that had it hears of it, else returns that stray would teach nothing.
            before.policy.continued(uid)
        last[uid] = host
        local_bytes = min(host.held_bytes(uid), history_bytes)
        there = objects.get(uid)
        far_bytes = min(there.size_bytes, history_bytes) if there and there.until_s > now_s else 0
        more_bytes = max(far_bytes - local_bytes, 0)
        if not (more_bytes and bucket.is_worth_get(more_bytes)):
            more_bytes = 0
        computed_bytes = history_bytes - local_bytes - more_bytes
        spent.history_tokens += history_bytes // token_bytes
        spent.local_tokens += local_bytes // token_bytes
        spent.bucket_tokens += more_bytes // token_bytes
        spent.computed_tokens += computed_bytes // token_bytes
        spent.gpu += bucket.recomputation.cost(computed_bytes)
        if more_bytes:
            spent.get_count += bucket.prices.object_count(more_bytes)
            spent.requests += bucket.prices.gets(more_bytes)
            spent.wait_s += bucket.prices.fetch_s(more_bytes)
        whole_tokens = history_tokens + turn.input_tokens + turn.output_tokens
        size_bytes = sizes[uid] = whole_tokens
        size_bytes *= token_bytes
        host.tiers.arrived(uid, now_s)
        new_bytes = (turn.input_tokens + turn.output_tokens) * token_bytes
        host.sizes[uid] = size_bytes
        facts = Facts(size_bytes, number, new_bytes, token_bytes, turn.output_tokens * token_bytes)
        host.tiers.idle(uid, facts, now_s)
        if way != "none":
            known = there if there and there.until_s > now_s else _Object(until_s=now_s)
            put_bytes = max(size_bytes - known.size_bytes, 0)
            chance = host.policy.chance(uid)
            if way == "all" or bucket.is_worth_put(size_bytes, chance, ttl_s, put_bytes):
                spent.put(bucket.prices, known, put_bytes, now_s + ttl_s, ttl_s)
                objects[uid] = _Object(size_bytes, now_s + ttl_s)
    spent.session_count = len(counts)
    return spent.close()


def report(spent: Sequence[Spent]) -> Iterator[str]:
    """A table, a line for each way."""
    heads = ("bucket", "found", "local", "from bucket", "computed", "PUT", "GET", "GPU $", "requests $")
    yield f"| {' | '.join((*heads, 'storage $', 'total $', '$ a million sessions'))} |"
    yield "|---" * (len(heads) + 3) + "|"
    for one in spent:
        all_tokens = max(one.history_tokens, 1)
        found_tokens = one.local_tokens + one.bucket_tokens
        shares = (found_tokens, one.local_tokens, one.bucket_tokens, one.computed_tokens)
        cells = (
            one.way,
            *(f"{share / all_tokens:.1%}" for share in shares),
            f"{one.put_count:,}",
            f"{one.get_count:,}",
            *(f"{money:.2f}" for money in (one.gpu, one.requests, one.storage, one.total)),
            f"{one.total / max(one.session_count, 1) * 1e6:,.0f}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--affinity", type=float, default=0.9)
    parser.add_argument("--footprint", type=float, default=0.5, help="capacity of all hosts together")
    parser.add_argument("--ttl-hours", type=float, default=2.0, help="how long the bucket keeps what it has")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-70b")
    parser.add_argument("--gbps", type=float, default=2.0, help="GB a second from the bucket to a host")
    parser.add_argument("--results", type=Path, help="JSON lines")
    arguments = parser.parse_args()
    model: Model = MODELS[arguments.model]
    turns = list(Trace(arguments.trace))
    load = replace(Load(), token_bytes=model.token_bytes)
    footprint = footprint_bytes(turns, load, look(turns), lambda _what, _done: None)
    recomputation = Recomputation(
        model.prefill_tokens_per_s, model.token_bytes, load.prices.gpu_hour, model.gpu_count
    )
    bucket = Bucket(BucketPrices(bytes_per_s=arguments.gbps * 1e9), recomputation)
    spent = [
        play(
            turns,
            way,
            bucket,
            int(arguments.footprint * footprint),
            hosts=arguments.hosts,
            affinity=arguments.affinity,
            ttl_s=arguments.ttl_hours * HOUR_S,
        )
        for way in WAYS
    ]
    sys.stdout.write("\n".join(report(spent)) + "\n")
    if arguments.results:
        said = {
            key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()
        }
        with arguments.results.open("a") as out:
            out.writelines(json.dumps({**said, **asdict(one)}) + "\n" for one in spent)


if __name__ == "__main__":
    main()
