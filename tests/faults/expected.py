"""The state that must be there after a crash: a model kept outside the victim, a state per session.

Every token appended in a run has a number of its own, its tag, which is its token id as well; tags of
one session ascend along its log. So a session's content is a list of tags, and any prefix that a
crash may leave is one of a few: those that end where a commit ended, at or behind the last
acknowledged durable token. One change of a session is under way at a time; after a crash it
happened or it did not.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Change:
    """A change under way: the tags that live after it, and where its commit ends (0: it commits no rows)."""

    live: tuple[int, ...] = ()
    cut: int = 0
    is_removal: bool = False
    expire_time_ns: int | None = None


@dataclass(slots=True)
class Expected:
    """One session. Owned by the client that changes it; by the harness while the server is down.

    `cuts`: one past the last tag of each commit, ascending. Tags below `durable` were acknowledged as
    durable. `may_be_absent`: its creation is under way, or it was seen to be evicted or expired.
    `is_done`: no client works on it any more. `seen`: what lived at each generation of each uid.
    """

    name: str
    is_pinned: bool = False
    live: tuple[int, ...] = ()
    cuts: list[int] = field(default_factory=lambda: [0])
    durable: int = 0
    expire_time_ns: int = NEVER_NS
    may_be_absent: bool = True
    is_done: bool = False
    change: Change | None = None
    seen: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """One past its newest committed tag."""
        return self.cuts[-1]

    def begin(self, change: Change) -> None:
        """Note that a change was asked for."""
        self.change = change
        if change.cut:
            self.cuts.append(change.cut)

    def settle(self) -> None:
        """Note that the change under way was acknowledged."""
        change, self.change = self.change, None
        if change is None:
            raise RuntimeError(f"{self.name}: nothing is under way")
        self.live = change.live
        if change.expire_time_ns is not None:
            self.expire_time_ns = change.expire_time_ns

    def refuse(self) -> None:
        """Note that the change under way was refused: it did not happen and will not."""
        if self.change is not None and self.change.cut:
            self.cuts.remove(self.change.cut)
        self.change = None

    def flushed(self) -> None:
        """Note that all that lives was acknowledged as durable."""
        self.durable = self.end

    def note(self, uid: str, generation: int) -> str | None:
        """Note what lives at a generation; returns what is wrong.

        It was told of something else, or went back.
        """
        content = hash(self.live)
        known = self.seen.setdefault((uid, generation), content)
        if known != content:
            return f"{self.name}: generation {generation} stood for other tokens before"
        newest = max(known_generation for known_uid, known_generation in self.seen if known_uid == uid)
        if generation < newest:
            return f"{self.name}: generation {generation} after {newest}"
        return None

    def expire_times_ns(self) -> tuple[int, int]:
        """The earliest and the latest moment at which it may and must be gone."""
        times = [self.expire_time_ns]
        if self.change is not None and self.change.expire_time_ns is not None:
            times.append(self.change.expire_time_ns)
        return min(times), max(times)

    def is_gone_allowed(self, now_ns: int) -> bool:
        """Whether a crash by now may leave nothing of it, eviction aside."""
        is_removed = self.change is not None and self.change.is_removal
        return self.may_be_absent or is_removed or self.expire_times_ns()[0] <= now_ns

    def judge(self, found: Sequence[int]) -> str | None:
        """Return what is wrong with the tags found after a crash; None when some outcome explains them."""
        verdicts = [self._judge(tuple(found), live) for live in self._lives()]
        return None if None in verdicts else f"{self.name}: {verdicts[0]}"

    def adopt(self, found: Sequence[int], expire_time_ns: int) -> None:
        """Take what a crash left as what is, and as durable."""
        self.live = tuple(found)
        self.cuts = [self.live[-1] + 1 if self.live else 0]
        self.durable = self.end
        self.expire_time_ns = expire_time_ns
        self.change = None
        self.may_be_absent = False

    def _lives(self) -> Iterator[tuple[int, ...]]:
        yield self.live
        if self.change is not None and not self.change.is_removal:
            yield self.change.live

    def _judge(self, found: tuple[int, ...], live: tuple[int, ...]) -> str | None:
        count = len(found)
        if found != live[:count]:
            wrong = next((i for i, tag in enumerate(found) if i >= len(live) or live[i] != tag), 0)
            return f"token {wrong} of {count} is not the one that was left there ({len(live)} expected)"
        lost = sum(1 for tag in live[count:] if tag < self.durable)
        if lost:
            return f"{lost} of {len(live)} tokens acknowledged as durable are lost"
        if count < len(live) and not self._is_cut(found[-1] if found else -1, live[count]):
            return f"it ends at token {count}, inside a commit"
        return None

    def _is_cut(self, last: int, following: int) -> bool:
        i = bisect_right(self.cuts, last)
        return i < len(self.cuts) and self.cuts[i] <= following
