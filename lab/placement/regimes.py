"""Nine regimes of load that share prefixes, generated: each a list of turns that names its blocks.

Documents and prompts are drawn by Zipf's law, `1 / rank ** skew`; sizes are whole blocks of BLOCK_TOKENS. A
session that has only one turn is a request of an API. The same seed gives the same turns.

    rag       a system prompt, one of 600 documents of 4 to 32 blocks, a question of its own
    shared    one of 120 prompts with tools of 8 to 40 blocks, then a chat of one to six turns
    loop      300 documents asked of in one order, over and over: what LRU keeps is never what comes next
    scan      rag, and for a third of the time each document of a large corpus once
    shift     rag, in which other documents are popular after each quarter of the time
    burst     rag, in which one document at a time gets forty requests within some minutes, and then rests
    fresh     news: a new document every minute, asked of less and less as it grows old
    daily     two populations of rag, by day and by night, that change places every two hours
    forks     a tree: each request goes on from a node drawn from those before, the younger the likelier
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.trace import BLOCK_TOKENS

REQUESTS = 6_000
GAP_S = 2.0
"""The mean time between two requests; their arrivals are a Poisson process."""
ANSWER_TOKENS = 200


class _Zipf:
    """Draws ranks from 0 on."""

    def __init__(self, count: int, skew: float) -> None:
        self._sums = list(accumulate(1 / (rank + 1) ** skew for rank in range(count)))

    def draw(self, chance: random.Random) -> int:
        return bisect_left(self._sums, chance.random() * self._sums[-1])


class _Load:
    """Requests in order of arrival."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  a load, the same at each run
        self.now_s = 0.0
        self._count = 0

    def wait(self, mean_s: float = GAP_S) -> None:
        self.now_s += self.chance.expovariate(1 / mean_s)

    def blocks_of(self, name: str, least: int, most: int) -> list[str]:
        """The blocks of a document, as many as its name says."""
        count = random.Random(name).randint(least, most)  # noqa: S311  as above
        return [f"{name}.{number}" for number in range(count)]

    def request(self, blocks: list[str], own_count: int = 1) -> TraceTurn:
        """A session of one turn: the blocks, and some of its own behind them."""
        self._count += 1
        own = [f"own {self._count}.{number}" for number in range(own_count)]
        return _turn(f"request {self._count}", self.now_s, 1, [*blocks, *own], 0)


def _turn(session: str, arrival_s: float, number: int, blocks: list[str], history: int) -> TraceTurn:
    """`history`: how many of the first blocks the session had before."""
    names = tuple([each.encode() for each in blocks])
    history_tokens = history * BLOCK_TOKENS
    input_tokens = len(names) * BLOCK_TOKENS - history_tokens
    return TraceTurn(session.encode(), arrival_s, input_tokens, ANSWER_TOKENS, history_tokens, number, names)


SYSTEM = ["system.0", "system.1"]


def _asked(load: _Load, document: str) -> TraceTurn:
    return load.request([*SYSTEM, *load.blocks_of(document, 4, 32)], load.chance.randint(1, 3))


def rag(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(600, 0.9)
    for _ in range(count):
        load.wait()
        yield _asked(load, f"document {zipf.draw(load.chance)}")


def shared(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(120, 1.0)
    turns: list[TraceTurn] = []
    for number in range(count // 2):
        load.wait(2 * GAP_S)
        blocks = load.blocks_of(f"tools {zipf.draw(load.chance)}", 8, 40)
        arrival_s, history = load.now_s, 0
        for turn in range(1, load.chance.choice((1, 1, 1, 2, 3, 6)) + 1):
            blocks = [*blocks, *(f"chat {number}.{turn}.{each}" for each in range(load.chance.randint(1, 3)))]
            turns.append(_turn(f"chat {number}", arrival_s, turn, blocks, history))
            arrival_s, history = arrival_s + load.chance.lognormvariate(math.log(90), 1), len(blocks)
    yield from sorted(turns, key=lambda turn: turn.arrival_s)


def loop(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load = _Load(seed)
    for number in range(count):
        load.wait()
        yield _asked(load, f"document {number % 300}")


def scan(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(300, 0.9)
    for number in range(count):
        load.wait()
        is_scanned = number % 600 >= 400
        yield _asked(load, f"corpus {number}" if is_scanned else f"document {zipf.draw(load.chance)}")


def shift(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(600, 1.0)
    for number in range(count):
        load.wait()
        era = 4 * number // count
        yield _asked(load, f"document {(zipf.draw(load.chance) + 150 * era) % 600}")


def burst(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(600, 0.8)
    hot = [0, 0]
    for number in range(count):
        load.wait()
        if number % 40 == 0:
            hot = [load.chance.randrange(600), hot[0]]
        is_hot = load.chance.random() < 0.5
        document = hot[load.chance.random() < 0.3] if is_hot else zipf.draw(load.chance)
        yield _asked(load, f"document {document}")


def fresh(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load = _Load(seed)
    for _ in range(count):
        load.wait()
        age = int(load.chance.lognormvariate(math.log(20), 1.2))
        yield _asked(load, f"news {int(load.now_s / 60) - age}")


def daily(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load, zipf = _Load(seed), _Zipf(300, 0.8)
    for _ in range(count):
        load.wait()
        is_night = int(load.now_s / 7200) % 2 == 1
        yield _asked(load, f"{'night' if is_night else 'day'} {zipf.draw(load.chance)}")


def forks(seed: int, count: int = REQUESTS) -> Iterator[TraceTurn]:
    """See the module."""
    load = _Load(seed)
    paths: list[list[str]] = []
    for number in range(count):
        load.wait()
        is_root = not paths or load.chance.random() < 0.02
        back = int(load.chance.lognormvariate(math.log(40), 1.5))
        before = SYSTEM if is_root else paths[max(len(paths) - 1 - back, 0)]
        if len(before) > 60:
            before = before[: load.chance.randint(2, 30)]
        blocks = [*before, *(f"node {number}.{each}" for each in range(load.chance.randint(1, 6)))]
        paths.append(blocks)
        yield _turn(f"node {number}", load.now_s, 1, blocks, 0)


REGIMES: dict[str, Callable[..., Iterator[TraceTurn]]] = {
    each.__name__: each for each in (rag, shared, loop, scan, shift, burst, fresh, daily, forks)
}
