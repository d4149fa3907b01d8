"""News of blocks: what becomes of the blocks of a space, for whoever subscribed to it.

A subscription begins with every block that is known. From then on a key is told whenever its block comes,
goes, or moves between the tiers. A changed key waits here, once, until it is taken, and its block is looked
up then. So a slow reader finds the newest state of each block. Memory: some 300 bytes for each
block that is there, and each subscription.
"""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice

from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.session import PREFIX_LENGTH, Session, block_key, space_prefix


# Why the change itself is not kept: a reader that is slow would need a log without bound. A key and a look at
# its block now is enough, for a subscriber wants to know what is there, not what was.
class BlockNews:
    """One subscription. Hears of its blocks as a Watcher. Owned by the event loop."""

    def __init__(self, tenant: str, space: bytes) -> None:
        self.tenant, self.space = tenant, space
        self.has_news = asyncio.Event()
        """Set while something is to be told."""
        self._keys: dict[bytes, bytes] = {}
        """Keys of the blocks that the subscriber was told of, by uid."""
        self._changed: dict[bytes, None] = {}
        """Keys to be told, in the order in which something happened to them first."""

    def promoted(self, uid: bytes) -> None:
        """See Watcher."""
        self._tell(self._keys[uid])

    demoted = recounted = promoted

    def evicted(self, uid: bytes) -> None:
        """See Watcher."""
        self._tell(self._keys.pop(uid))

    ended = evicted

    def take(self, limit: int) -> list[bytes]:
        """Keys whose blocks changed, at most so many; they are told by this."""
        keys = list(islice(self._changed, limit))
        for key in keys:
            del self._changed[key]
        if not self._changed:
            # Cleared only when nothing is left: a limit cuts what one message takes.
            self.has_news.clear()
        return keys

    def follow(self, block: Session, ledger: Ledger) -> None:
        """Hear of a block from now on, and tell of it."""
        if block.uid not in self._keys:
            self._keys[block.uid] = block_key(block.session_id)
            ledger.placement.watch(block.uid, self)
        self._tell(self._keys[block.uid])

    def leave(self, ledger: Ledger) -> Iterator[None]:
        """Hear of nothing any more, of one block less after each step."""
        # One block at each step: a subscription may have followed a million.
        while self._keys:
            uid, _ = self._keys.popitem()
            ledger.placement.unwatch(uid, self)
            yield

    def _tell(self, key: bytes) -> None:
        self._changed[key] = None
        self.has_news.set()


class Subscriptions:
    """All subscriptions. Owned by the event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_space: dict[tuple[str, str], list[BlockNews]] = {}
        """By tenant, and the beginning of the blocks' ids."""

    def __len__(self) -> int:
        return sum(map(len, self._by_space.values()))

    def count_of(self, tenant: str) -> int:
        """The subscriptions of one tenant."""
        return sum(len(news) for (whose, _), news in self._by_space.items() if whose == tenant)

    def begin(self, tenant: str, space: bytes) -> BlockNews:
        """Hear of the blocks of a space that come from now on. `end` it."""
        news = BlockNews(tenant, space)
        self._by_space.setdefault((tenant, space_prefix(space)), []).append(news)
        return news

    def present(self, news: BlockNews) -> Iterable[None]:
        """Follow the blocks that are known, one at each step: others may have their turn between two.

        Also those that are not there yet, or lie on a lost path, and are told as misses.
        """
        # A list: blocks come and go between the steps.
        prefix = space_prefix(news.space)
        for block in list(self._ledger.blocks()):
            is_own = block.tenant == news.tenant and block.session_id.startswith(prefix)
            if is_own and not block.is_gone:
                news.follow(block, self._ledger)
            yield

    def came(self, block: Session) -> None:
        """A block is there."""
        # There is nearly always no subscriber.
        if self._by_space:
            prefix = block.session_id[:PREFIX_LENGTH]
            for news in self._by_space.get((block.tenant, prefix), ()):
                news.follow(block, self._ledger)

    def end(self, news: BlockNews) -> Iterator[None]:
        """Let a subscription go, and one of its blocks at each step: others may have their turn between two.

        All steps have to be taken.
        """
        place = news.tenant, space_prefix(news.space)
        # Out of the table first: a block that comes during the steps is not followed any more.
        self._by_space[place].remove(news)
        if not self._by_space[place]:
            del self._by_space[place]
        yield from news.leave(self._ledger)
