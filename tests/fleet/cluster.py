"""A cluster under faults: real stores, a real object store, and users whose turns land anywhere.

    python -m tests.fleet.cluster                   three stores, six users, 12 faults of every sort
    python -m tests.fleet.cluster --faults 100
    python -m tests.fleet.cluster --control strip   conditions are taken off on the way: it must be refused

Every turn is compared with what its user was told: a row that was never stored, or one of a conversation that
went on elsewhere, is wrong. What a fault may cost is tokens to compute again, never their content. A turn
that a fault hits ends in an error in bounded time. Some beats after the last fault every store has all. What
was acknowledged as shared is found by then whatever happened to its host.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Self

import numpy as np

from ctxcache.client import OPAQUE, TOKENS, Durability, connect
from ctxcache.errors import CacheError, InvalidArgument
from tests.fleet import seaweed
from tests.fleet.bucket_proxy import BucketProxy, PeerProxy
from tests.fleet.stores import BEAT_S, SPEC, Stores, User, WrongRows, rows_of
from tests.server_process import ServerDidNotStart

CLIENT_TIMEOUT_S = 4.0
SLOWEST_TURN_S = 20.0
"""A turn that takes longer hangs: a client waits its own deadline for each of its calls."""
PAUSE_S = 0.05
SETTLED_S = 4.0
SHARED_TURNS = 0.3
PROMPTS, PROMPT_TURNS, PROMPT_TOKENS, PROMPT_TTL = 6, 0.2, 3000, timedelta(seconds=20)
"""Prompts without a name that all users ask, how often they do, how long those are, and are kept."""
PATIENCE_S = 10.0
FAULTS = (
    "kill",
    "freeze",
    "cut_bucket",
    "cut_peer",
    "lose_answers",
    "lose_requests",
    "late",
    "refuse",
    "kill_bucket",
    "restart",
)


class Cluster:
    """Three stores, each with proxies of its own before the bucket and before its peers' questions."""

    def __init__(self, directory: Path, count: int, held: ExitStack) -> None:
        self.bucket = held.enter_context(seaweed.Seaweed(directory))
        self.bucket_proxies = [held.enter_context(BucketProxy(self.bucket.port)) for _ in range(count)]
        self.peer_proxies = [held.enter_context(PeerProxy()) for _ in range(count)]
        self.stores = Stores(directory, 0, bucket="s3://fleet/cluster")
        for number in range(count):
            self.stores.add_process(
                *("--fleet-address", f"127.0.0.1:{self.peer_proxies[number].port}"),
                *("--arena-size-bytes", "64MiB", "--ssd-size-bytes", "128MiB", "--fleet-patience-s", "0.5"),
                # Engines so slow that whatever another host has of a prompt is worth its way.
                *("--prefill-tokens-per-s", "2000"),
                environment=seaweed.VARIABLES
                | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.bucket_proxies[number].port}"},
            )
        held.enter_context(self.stores)
        for number in range(count):
            self._point(number)

    def _point(self, number: int) -> None:
        target = self.stores.processes[number].target
        self.peer_proxies[number].target_port = int(target.rpartition(":")[2])
        self.stores.clients[number].close()
        self.stores.clients[number] = connect(target, timeout_s=CLIENT_TIMEOUT_S)
        self.stores.models[number] = self.stores.clients[number].models.register(SPEC)

    @contextlib.contextmanager
    def fault(self, which: str, number: int) -> Iterator[None]:
        """A fault that holds within the block, at one store."""
        store, bucket, peers = (
            self.stores.processes[number],
            self.bucket_proxies[number],
            self.peer_proxies[number],
        )
        if which == "kill":
            store.kill9()
            yield
            self._start(number)
        elif which == "restart":
            store.terminate()
            yield
            self._start(number)
        elif which == "freeze":
            with self.stores.frozen(number):
                yield
        elif which == "kill_bucket":
            self.bucket.kill()
            yield
            self.bucket.start()
        elif which == "cut_peer":
            with _mode(peers, "cut"):
                yield
        else:
            with _mode(bucket, which.removesuffix("_bucket")):
                yield

    def _start(self, number: int) -> None:
        self.stores.processes[number].start()
        self._point(number)


@contextlib.contextmanager
def _mode(proxy: BucketProxy | PeerProxy, mode: str) -> Iterator[None]:
    proxy.mode = mode
    proxy.break_connections()
    try:
        yield
    finally:
        proxy.mode = "pass"
        proxy.break_connections()


class Crowd:
    """Users at work, each in a thread of its own, until it is told to rest."""

    def __init__(self, cluster: Cluster, users: int, seed: int) -> None:
        self.cluster, self.counts = cluster, Counter[str]()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self.is_faulty = False
        """Whether a fault holds, or has held a moment ago."""
        self.users = [User(cluster.stores, f"user{number}") for number in range(users)]
        self._locks = [threading.Lock() for _ in self.users]
        self._randoms = [random.Random(f"{seed}/{number}") for number in range(users)]
        self._may_work, self._is_over = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(users)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_work.set()
        for thread in self._threads:
            thread.join(60)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Nobody works within the block."""
        self._may_work.clear()
        with ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            yield
        self._may_work.set()

    def begin(self) -> None:
        """Let them work."""
        self._may_work.set()

    def _work(self, number: int) -> None:
        draw = self._randoms[number]
        while True:
            self._may_work.wait()
            if self._is_over.is_set() or self.wrong:
                return
            with self._locks[number]:
                self._turn(self.users[number], draw)
            time.sleep(PAUSE_S)

    def _turn(self, user: User, draw: random.Random) -> None:
        store, begun = draw.randrange(len(self.cluster.stores.processes)), time.monotonic()
        before = len(user.tokens)
        try:
            if draw.random() < PROMPT_TURNS:
                self._prompt(store, draw)
            elif before and draw.random() < 0.02:
                user.delete(store)
                self.counts["deleted"] += 1
            else:
                outdated = user.outdated
                durability = Durability.SHARED if draw.random() < SHARED_TURNS else Durability.MEMORY
                found = user.turn(
                    store,
                    draw.randrange(20, 200),
                    may_be_outdated=self.is_faulty,
                    durability=durability,
                )
                self.counts["turns acknowledged as shared"] += durability is Durability.SHARED
                self.counts["turns that found what was superseded"] += user.outdated - outdated
                self.counts["turns"] += 1
                self.counts["tokens found"] += found
                self.counts["tokens computed again"] += before - found
        except WrongRows as error:
            self.wrong.append(str(error))
        except InvalidArgument as error:
            # No fault makes a right call a wrong one.
            self.wrong.append(f"{user.name} at store {store}: {error}")
        except CacheError as error:
            self.counts[f"refused: {error.reason}"] += 1
        except Exception as error:  # noqa: BLE001  a thread that ends in silence would find nothing any more
            self.wrong.append(repr(error))
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)

    def _prompt(self, number: int, draw: random.Random) -> None:
        """A request without a name: what any store has of its prompt is compared, the rest is computed."""
        stores = self.cluster.stores
        client, model = stores.clients[number], stores.models[number]
        # Prompts part somewhere: what comes for one is the beginning of another.
        own = draw.randrange(PROMPTS)
        tokens, rows = (
            np.concatenate(parts)
            for parts in zip(
                rows_of("prompt", 0, PROMPT_TOKENS // 2),
                rows_of(f"prompt {own}", 0, PROMPT_TOKENS),
                strict=True,
            )
        )
        # A router's word, which may be wrong.
        source = f"127.0.0.1:{draw.choice(self.cluster.peer_proxies).port}" if draw.random() < 0.5 else ""
        session = client.sessions.create(model, ttl=PROMPT_TTL)
        found = session.adopt(tokens, source=source).token_count
        if found:
            with session.read() as read:
                is_right = np.array_equal(read.array(TOKENS).view(np.int32).reshape(-1), tokens[:found])
                if not (is_right and np.array_equal(read.array(OPAQUE), rows[:found])):
                    raise WrongRows(f"prompt {own} at store {number}: {found} tokens")
        session.append({TOKENS: tokens[found:], OPAQUE: rows[found:]})
        self.counts["prompts without a name"] += 1
        self.counts["tokens of such prompts found"] += found

    def _found(self, user: User, number: int) -> int:
        # A machine under load answers late, and what is not heard of in time is computed: no loss.
        deadline = time.monotonic() + PATIENCE_S
        while (found := user.found(number)) < len(user.tokens) and time.monotonic() < deadline:
            time.sleep(BEAT_S)
        return found

    def check(self) -> None:
        """Every user's session is whole, wherever it is asked for. Raises WrongRows."""
        for user, draw in zip(self.users, self._randoms, strict=True):
            numbers = list(range(len(self.cluster.stores.processes)))
            draw.shuffle(numbers)
            found = {number: self._found(user, number) for number in numbers}
            # The first that is asked may have to take it over from a store that lost a part of it.
            if len(set(found.values())) > 1 or max(found.values()) < user.shared_count:
                shared = f"{user.shared_count} of them shared"
                raise WrongRows(f"{user.name}: {found} of {len(user.tokens)} tokens, {shared}")


def run(directory: Path, *, stores: int, users: int, faults: int, seed: int) -> Crowd:
    """Do it. Raises WrongRows."""
    draw = random.Random(seed)
    with ExitStack() as held:
        cluster = Cluster(directory, stores, held)
        crowd = held.enter_context(Crowd(cluster, users, seed))
        crowd.begin()
        time.sleep(3)
        for number in range(faults):
            which = FAULTS[number % len(FAULTS)]
            crowd.is_faulty = True
            with cluster.fault(which, draw.randrange(stores)):
                time.sleep(draw.uniform(1.0, 2.5))
            crowd.counts[f"fault: {which}"] += 1
            # Whatever was private to several stores is published by then.
            time.sleep(SETTLED_S)
            crowd.is_faulty = False
            # A store that was cut off hears at its next beat what was taken from it.
            with crowd.at_rest():
                time.sleep(3 * BEAT_S)
            time.sleep(1)
            if crowd.wrong:
                raise WrongRows(crowd.wrong[0])
        with crowd.at_rest():
            time.sleep(6 * BEAT_S)
            crowd.check()
        for client in cluster.stores.clients:
            view = client.admin.fleet()
            crowd.counts["sessions out of the bucket"] += view.restored_session_count
            crowd.counts["prefixes that came from other stores"] += view.borrowed_prefix_count
    if crowd.slowest_s > SLOWEST_TURN_S:
        raise WrongRows(f"a turn took {crowd.slowest_s:.1f} s")
    return crowd


def strip(directory: Path) -> str:
    """A bucket whose conditions are taken off on the way; what the store that refuses it says."""
    with ExitStack() as held:
        bucket = held.enter_context(seaweed.Seaweed(directory, is_open=True))
        proxy = held.enter_context(BucketProxy(bucket.port))
        proxy.mode = "strip"
        stores = Stores(directory, 0, bucket="s3://fleet/cluster")
        # Conditions are signed. Without signatures whoever is on the way can take them off.
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_SKIP_SIGNATURE": "true",
        }
        stores.add_process(environment=seaweed.VARIABLES | variables)
        try:
            with stores:
                return ""
        except ServerDidNotStart as error:
            return error.stderr


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=int, default=3)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", choices=("strip",))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if asked.control:
            said = strip(Path(directory))
            sys.stdout.write(f"refused: {said}\n" if said else "a bucket without conditions was taken\n")
            raise SystemExit(not said)
        try:
            crowd = run(
                Path(directory), stores=asked.stores, users=asked.users, faults=asked.faults, seed=asked.seed
            )
        except WrongRows as error:
            sys.stdout.write(f"WRONG: {error}\n")
            raise SystemExit(1) from None
    for what, count in sorted(crowd.counts.items()):
        sys.stdout.write(f"{count:8} {what}\n")
    sys.stdout.write(f"good; the slowest turn took {crowd.slowest_s:.1f} s\n")


if __name__ == "__main__":
    main()
