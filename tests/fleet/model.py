"""A fleet of the production `Claims` on a register in memory, one step at a time, by a seed.

Every call to the register or to a peer is a step, and between any two the seed may lose the call, lose its
answer, delay it, kill a node, freeze it, or cut it off. Rows are a list of tags here: tests with real stores
check what moves.

    python -m tests.fleet.model --seeds 10000          good, or the first seed that broke something
    python -m tests.fleet.model --control forget_uid   the same with a bug planted: it must be found
"""

import argparse
import random
import sys
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import CORO_CREATED, getcoroutinestate
from itertools import count
from typing import Any, NamedTuple

from ctxcache.core.fleet import claims as production
from ctxcache.core.fleet import heads
from ctxcache.core.fleet.claims import Busy, Claims, Left, Source, Verdict
from ctxcache.core.fleet.heads import Head, Name, NodeRecord, Secret, away_path, node_path
from ctxcache.core.fleet.register import Entry, NoAnswer, Refused, put
from ctxcache.core.fleet.tenure import Tenure

SECRET = Secret(b"a secret of sixteen bytes or more")
TENANT = "t"
NAMES = [Name(TENANT, f"s{i}") for i in range(2)]
NODES = "abc"
STEPS = 400
heads.PAST_LIMIT = 2
BEAT_EVERY = 25
GRACE = 6
DEAD = 60


class Broken(AssertionError):
    """An invariant does not hold."""


class Step:
    """Awaited: the scheduler decides what becomes of a call: `lost`, `unheard`, `late` or `done`."""

    def __await__(self) -> Generator[None, str, str]:
        """Give way to the scheduler."""
        return (yield)


class MemoryRegister:
    """One node's way to the register that all share."""

    def __init__(self, world: "World", node: "Node") -> None:
        self._world, self._node = world, node

    async def get(self, path: str) -> Entry | None:
        """See Register."""
        fate = await Step()
        if fate in ("lost", "late") or self._node.is_cut:
            raise NoAnswer
        found = self._world.objects.get(path)
        if fate == "unheard":
            raise NoAnswer
        return found

    async def create(self, path: str, body: bytes) -> str:
        """See Register."""
        return await self._change(path, body, None)

    async def replace(self, path: str, body: bytes, tag: str) -> str:
        """See Register."""
        return await self._change(path, body, tag)

    async def _change(self, path: str, body: bytes, tag: str | None) -> str:
        fate = await Step()
        if fate == "lost" or self._node.is_cut:
            return self._unanswered()
        if fate == "late":
            # It is on its way while its sender goes on.
            self._world.late.append((path, body, tag, self._node))
            return self._unanswered()
        made = self._world.change(path, body, tag, self._node)
        if fate == "unheard":
            return self._unanswered()
        if made is None:
            raise Refused
        return made

    def _unanswered(self) -> str:
        if self._world.control == "unanswered_is_yes":
            return "guessed"
        raise NoAnswer

    async def remove(self, path: str) -> None:
        """See Register."""
        # Sent at once or never: a bucket carries no removal out long after.
        if await Step() not in ("lost", "late") and not self._node.is_cut:
            self._world.objects.pop(path, None)

    async def paths(self, folder: str) -> AsyncIterator[str]:
        """See Register."""
        for path in list(self._world.objects):
            if path.startswith(folder):
                yield path


class Offered(NamedTuple):
    """A guest on its host."""

    owner: "Node"
    uid: str


class Stored(NamedTuple):
    """What the bucket has of a session."""

    tags: tuple[int, ...]


@dataclass
class Rows:
    """A copy: its tags, and whether somebody writes."""

    uid: str
    tags: list[int]
    is_written: bool = False


class Node:
    """A host: its claims and copies. Copies survive a kill, claims do not."""

    def __init__(self, world: "World", letter: str) -> None:
        self.world, self.letter = world, letter
        self.named: dict[Name, Rows] = {}
        self.guests: dict[str, Rows] = {}
        self.is_cut = self.is_frozen = self.is_down = False
        self.frozen_at = 0
        self.start()

    def start(self) -> None:
        """A new run."""
        self.run = next(self.world.numbers)
        self.tasks: list[Coroutine[Any, str, None]] = []
        self.settling: set[Name] = set()
        self.sharing: set[Name] = set()
        self.created: set[str] = set()
        """Uids of sessions that were created by this run."""
        self.heard_beat_begun, self.is_beating = -1, False
        for rows in self.named.values():
            rows.is_written = False
        self.claims = Claims(
            MemoryRegister(self.world, self),
            SECRET,
            self,
            self,
            node=self.letter,
            incarnation=f"{self.letter}{self.run}",
            address=self.letter,
            nonce=lambda: f"{next(self.world.numbers):016x}",
            new_uid=lambda: f"{next(self.world.numbers):032x}",
        )

    # -- copies ------------------------------------------------------------------------------------

    def uid(self, name: Name) -> str | None:
        """See Copies."""
        rows = self.named.get(name)
        return None if rows is None else rows.uid

    def is_written(self, name: Name) -> bool:
        """See Copies."""
        return self.named[name].is_written

    def has_guest(self, name: Name, uid: str) -> bool:
        """See Copies."""
        return uid in self.guests and name.tenant == TENANT

    def retire(self, name: Name) -> None:
        """See Copies."""
        rows = self.named.pop(name)
        head = self.world.head(name)
        is_free = head is None or head.is_deleted or head.node == self.letter
        # One that may have been published, in a change without an answer, may have been taken as well.
        is_sure = rows.uid in self.created and self.claims.tenure(name) is not Tenure.UNSURE
        if is_free and is_sure and not self.world.was_published(name, rows.uid):
            raise Broken("a session that nobody else has was given up")
        rows.is_written = False
        self.guests[rows.uid] = rows

    def restore(self, name: Name, uid: str) -> None:
        """See Copies."""
        self.named[name] = self.guests.pop(uid)
        self.world.given = {pair for pair in self.world.given if pair[0] != uid}

    async def has_place(self, name: Name, offer: object) -> bool:  # noqa: ARG002  the protocol's
        """See Copies."""
        if await Step() == "done":
            return True
        # What cannot be here gives its name to what can.
        self.world.over.add(self.world.shared_by(name))
        return False

    async def land(self, name: Name, uid: str, offer: object) -> bool:
        """See Copies."""
        fate = await Step()
        if isinstance(offer, Stored):
            if fate == "lost" or name in self.named:
                return False
            stored = list(offer.tags)
            self.named[name] = Rows(uid, stored if fate == "done" else stored[: len(stored) // 2])
            return True
        assert isinstance(offer, Offered)
        owner, source_uid = offer
        # A transfer that breaks leaves a shorter session, or none.
        rows = owner.guests.get(source_uid)
        if owner.is_down or self.is_cut or fate == "lost" or rows is None or name in self.named:
            return False
        tags = list(rows.tags)
        self.named[name] = Rows(uid, tags if fate == "done" else tags[: len(tags) // 2])
        return True

    # -- peers -------------------------------------------------------------------------------------

    async def yield_(self, name: Name, source: Source, term: int) -> object:
        """See Peers."""
        fate = await Step()
        owner = self.world.nodes.get(source.address)
        if owner is None or owner.is_down or owner.is_frozen or owner.is_cut or self.is_cut or fate == "lost":
            raise NoAnswer
        _pry(owner, name, source, term)
        owner.claims.yielded(name, source.uid, term)
        if fate != "done":
            raise NoAnswer
        self.world.given.add((source.uid, self.letter))
        return Offered(owner, source.uid)

    async def stored(self, name: Name, shared: str) -> object:
        """See Peers."""
        fate = await Step()
        if fate in ("lost", "unheard") or self.is_cut:
            raise NoAnswer
        if fate == "late" or shared in self.world.over:
            # Its time is over.
            self.world.over.add(shared)
            raise Left
        if shared not in self.world.shared:
            if self.world.shared_by(name) == shared:
                raise Broken("a head names what was removed")
            # The head has changed since it was read.
            raise Left
        return Stored(self.world.shared[shared])

    # -- what runs ---------------------------------------------------------------------------------

    async def turn(self, name: Name) -> None:
        """A user's turn: look up, create where there is none, append, commit."""
        if self.claims.is_here(name) and name not in self.named:
            raise Broken("a session that has ended here is not looked for")
        if not self.claims.is_here(name):
            # One look at a name at a time, as the store has it.
            if name in self.settling:
                return
            self.settling.add(name)
            try:
                verdict = await self.claims.settle(name)
            finally:
                self.settling.discard(name)
            if verdict is Verdict.ELSEWHERE or (verdict is Verdict.UNKNOWN and name not in self.named):
                return
        rows = self.named.get(name)
        if rows is None:
            rows = self.named[name] = Rows(f"{next(self.world.numbers):032x}", [])
            self.created.add(rows.uid)
            if self.claims.created(name) and await self.claims.publish(name) is not Verdict.HERE:
                return
        if self.named.get(name) is not rows or rows.is_written:
            return
        rows.is_written = True
        try:
            await Step()
            # Cut off by whoever took the session over.
            if self.named.get(name) is rows:
                self.world.append(self, name, rows)
        finally:
            rows.is_written = False

    async def share(self, name: Name) -> None:
        """Put a session's rows into the bucket, and have its head say so."""
        rows = self.named.get(name)
        # One at a time, as the store has it.
        if self.claims.tenure(name) is not Tenure.OWNED or name in self.sharing:
            return
        if rows is None or not self.claims.is_here(name):
            return
        self.sharing.add(name)
        try:
            await self._share(name, rows)
        finally:
            self.sharing.discard(name)

    async def _share(self, name: Name, rows: Rows) -> None:
        term = self.claims.term(name)
        before, shared, tags = self.claims.shared(name), f"o{next(self.world.numbers)}", tuple(rows.tags)
        if await Step() != "done":
            return
        self.world.shared[shared] = tags
        self.world.put_at[shared] = name, self.world.step
        # There are several, and one that lists them.
        for _ in range(3):
            await Step()
        if await self.claims.share(name, rows.uid, shared, term) is not Verdict.HERE:
            return
        self.world.acknowledge(name, shared)
        # What the head named before is named by none, and never will be.
        if before != shared:
            self.world.shared.pop(before, None)

    async def collect(self, name: Name) -> None:
        """Remove what the bucket has of a session that its head does not name."""
        world, path = self.world, SECRET.head_path(name)
        put_at = [
            shared
            for shared, (whose, at) in world.put_at.items()
            if whose == name and world.step - at > GRACE
        ]
        old = [shared for shared in put_at if shared in world.shared]
        try:
            entry = await MemoryRegister(world, self).get(path)
            head = None if entry is None else SECRET.read_head(entry.body)
            old = [shared for shared in old if head is None or shared != head.shared]
            if old and entry is not None and head is not None and world.control != "no_fence":
                body = SECRET.write(head.touched(f"{next(world.numbers):016x}"))
                found = await put(MemoryRegister(world, self), path, body, entry)
                if found is None or found.body != body:
                    return
        except NoAnswer:
            return
        for shared in old:
            world.shared.pop(shared, None)

    async def tidy(self, name: Name) -> None:
        """Remove the records of nodes that were silent for long, and a head that nobody needs."""
        world, register = self.world, MemoryRegister(self.world, self)
        if not self.claims.is_settled:
            return
        try:
            for letter in world.nodes:
                if letter != self.letter and world.age(node_path(letter)) > DEAD:
                    mark = SECRET.write(NodeRecord(letter, "", "", 0, ""))
                    await put(register, away_path(letter), mark, None)
                    await register.remove(node_path(letter))
            path = SECRET.head_path(name)
            entry = await register.get(path)
            is_old = world.age(path) > DEAD + 2 * BEAT_EVERY and world.objects[path] == entry
            if not is_old and world.control != "remove_young":
                return
            head = None if entry is None else SECRET.read_head(entry.body)
            if entry is None or head is None or head.shared or head.is_dead:
                return
            if not (head.is_deleted or await self._is_ended(name, head)) or not self.claims.is_settled:
                return
            if world.control != "no_mark":
                mark = SECRET.write(head.dead(f"{next(world.numbers):016x}"))
                found = await put(register, path, mark, entry)
                if found is None or found.body != mark:
                    return
            await register.remove(path)
        except NoAnswer:
            return

    async def _is_ended(self, name: Name, head: Head) -> bool:
        """Whether a head's owner is away, or says that the session has ended."""
        world, owner = self.world, self.world.nodes[head.node]
        if node_path(head.node) not in world.objects:
            return True
        if await Step() != "done" or owner.is_down or owner.is_frozen or owner.is_cut or self.is_cut:
            return False
        return name not in owner.named and SECRET.head_path(name) not in owner.claims.moving()

    async def look_after(self) -> None:
        """Look at the heads of what was taken, also while this node did not run."""
        claims = self.claims
        was_away, taken = claims.was_away, claims.taken_before
        due = claims.noted()
        if was_away or taken != ():
            due += list(self.named)
        for name in due:
            if not await claims.look_after(name):
                return
        claims.taken_before = ()
        if was_away:
            await MemoryRegister(self.world, self).remove(away_path(self.letter))
            claims.was_away = away_path(self.letter) in self.world.objects

    async def publish(self) -> None:
        """Write the heads that are lacking."""
        for name in self.claims.private():
            await self.claims.publish(name)

    async def beat(self) -> None:
        """One beat, unless one is under way."""
        # One after the other, as the store has it.
        if self.is_beating:
            return
        begun, self.is_beating = self.world.step, True
        try:
            is_alone = await self.claims.beat()
        except NoAnswer:
            self.claims.doubt()
            return
        finally:
            self.is_beating = False
        if not is_alone:
            raise Broken("a node was told that another process has its name")
        self.heard_beat_begun = max(self.heard_beat_begun, begun)
        await self.look_after()

    async def end(self, name: Name) -> None:
        """A session expires, or is evicted."""
        if name in self.named and not self.named[name].is_written:
            del self.named[name]

    async def replace(self, name: Name) -> None:
        """A session takes the place of what had its name here."""
        if self.claims.is_here(name) and name in self.named and not self.named[name].is_written:
            self.named[name] = Rows(f"{next(self.world.numbers):032x}", [])
            if self.claims.created(name):
                await self.claims.publish(name)

    async def forget(self) -> None:
        """Forget what has ended here, and have again what nobody took over."""
        try:
            await self.claims.reclaim()
        except NoAnswer:
            return
        names = self.claims.names()
        self.claims.forget(name for name in names if name not in self.named and name not in self.settling)

    async def delete(self, name: Name) -> None:
        """A user's deletion."""
        if self.claims.is_here(name) and name in self.named and not self.named[name].is_written:
            rows = self.named[name]
            try:
                shared = await self.claims.bury_first(name)
                if self.named.get(name) is not rows or rows.is_written:
                    return
                del self.named[name]
                deleted_at = self.world.step
                await self.claims.bury(name)
            except NoAnswer:
                return
            self.world.shared.pop(shared, None)
            if self.world.was_published(name, rows.uid, is_deleted=True):
                self.world.deleted[name] = deleted_at
            head = self.world.head(name)
            if head is not None and head.uid == rows.uid and head.shared and not head.is_deleted:
                raise Broken("a session that was deleted is in the bucket")


def _pry(owner: Node, name: Name, source: Source, term: int) -> None:
    """Another tenant asks for a session by its uid."""
    with suppress(Busy, Left):
        owner.claims.yielded(name._replace(tenant="another"), source.uid, term)
        raise Broken("a session of one tenant was given to another")


@dataclass
class World:
    """The register, the nodes and what has happened."""

    seed: int
    control: str = ""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    objects: dict[str, Entry] = field(default_factory=dict)
    late: list[tuple[str, bytes, str | None, Node]] = field(default_factory=list)
    step: int = 0
    heads: dict[str, list[tuple[int, Head]]] = field(default_factory=dict)
    contents: dict[str, list[int]] = field(default_factory=dict)
    given: set[tuple[str, str]] = field(default_factory=set)
    """Copies that were given up, by uid, and to which node."""
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What the bucket has, by the names that heads have for it."""
    put_at: dict[str, tuple[Name, int]] = field(default_factory=dict)
    """Of which session it is, and at which step it was put."""
    over: set[str] = field(default_factory=set)
    """What of it was found to have expired."""
    moves: int = 0
    changed_at: dict[str, int] = field(default_factory=dict)
    """At which step an object was last changed."""
    deleted: dict[Name, int] = field(default_factory=dict)
    """At which step a session was last deleted, and its head said so."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # What is removed is old: it takes long until a host that was away comes back and misses it.
        self.is_long = self.seed % len(MIXES) == len(MIXES) - 1
        self.nodes = {letter: Node(self, letter) for letter in NODES}

    def age(self, path: str) -> int:
        """For how many steps an object was not changed; 0 where there is none."""
        return self.step - self.changed_at[path] if path in self.objects else 0

    def change(self, path: str, body: bytes, tag: str | None, node: Node) -> str | None:
        """The register's own step. None: refused."""
        found = self.objects.get(path)
        is_met = (found and found.tag) == tag
        if not is_met and self.control != "no_conditions":
            return None
        made = Entry(body, f"t{next(self.numbers)}")
        self.objects[path], self.changed_at[path] = made, self.step
        if path.startswith("v1/s/"):
            self._check_head(path, SECRET.read_head(body), node)
        return made.tag

    def _check_head(self, path: str, head: Head, node: Node) -> None:
        """Terms rise, and each is of one run of one node."""
        history = self.heads.setdefault(path, [])
        if history and history[-1][1].is_dead:
            # It was removed. What comes is a new head.
            history.append((self.step, head))
            return
        if history and head.term <= history[-1][1].term:
            raise Broken(f"term {head.term} behind {history[-1][1].term}")
        if history and head == history[-1][1].dead(head.nonce):
            if history[-1][1].shared:
                raise Broken("a head that names rows was removed")
            history.append((self.step, head))
            return
        is_touched = bool(history) and head.is_touched(history[-1][1])
        if head.node != node.letter and not is_touched:
            raise Broken("a node made another one the owner")
        if history and head.uid == history[-1][1].uid and head.node != history[-1][1].node:
            raise Broken("a session was taken over without a new uid")
        before = history[-1][1].shared if history else ""
        is_kept = head.shared in ("", before) or head.shared in self.shared
        is_forgotten = before and before not in self.over and not (head.shared or head.is_deleted)
        # Another session may take the place of one that has ended, where it is.
        if is_forgotten and (head.uid == history[-1][1].uid or head.node != history[-1][1].node):
            raise Broken("a head forgets what is shared")
        if not is_kept:
            raise Broken("a head names what the bucket has not got")
        self.moves += bool(history) and head.node != history[-1][1].node
        history.append((self.step, head))

    def head(self, name: Name) -> Head | None:
        """The head of a session as it is now."""
        entry = self.objects.get(SECRET.head_path(name))
        return None if entry is None else SECRET.read_head(entry.body)

    def shared_by(self, name: Name) -> str:
        """What the head of a session says is shared."""
        head = self.head(name)
        return "" if head is None else head.shared

    def acknowledge(self, name: Name, shared: str) -> None:
        """A user was told that the bucket has it."""
        if not any(head.shared == shared for _, head in self.heads.get(SECRET.head_path(name), [])):
            raise Broken("what was acknowledged as shared was named by no head")

    def was_published(self, name: Name, uid: str, *, is_deleted: bool = False) -> bool:
        """Whether a head has ever named this copy, or said that it was deleted."""
        named = (head for _, head in self.heads.get(SECRET.head_path(name), []) if head.uid == uid)
        return any(head.is_deleted and not head.is_dead for head in named) if is_deleted else any(named)

    def append(self, node: Node, name: Name, rows: Rows) -> None:
        """A commit, acknowledged to a user."""
        history = self.heads.get(SECRET.head_path(name), [])
        # A session that has no head yet, or none since its deletion broke off, is its host's alone. The host
        # learns of another one when it publishes it.
        is_private = node.claims.tenure(name) is Tenure.PRIVATE or not self.was_published(name, rows.uid)
        deleted = self.deleted.get(name, -1)
        had_name = any(head.uid == rows.uid and step < deleted for step, head in history)
        if had_name and deleted < node.heard_beat_begun and node.claims.is_here(name):
            raise Broken("a session that was deleted goes on")
        for begun, head in () if is_private else history[-1:]:
            if head.past and head.past[-1] == rows.uid and (rows.uid, head.node) in self.given:
                raise Broken("a copy goes on that was given up and taken over")
            if head.node != node.letter and begun < node.heard_beat_begun and node.claims.is_here(name):
                raise Broken("a copy goes on though a beat has said that it was taken")
        known = self.contents.setdefault(rows.uid, [])
        if rows.tags != known[: len(rows.tags)] and known != rows.tags[: len(known)]:
            raise Broken("one uid has two contents")
        rows.tags.append(next(self.numbers))
        self.contents[rows.uid] = list(rows.tags)

    def run(self) -> None:
        """Do `STEPS` steps."""
        draw, count_of_steps = self.random, STEPS * (8 if self.is_long else 1)
        for self.step in range(count_of_steps):
            for node in self.nodes.values():
                if not node.is_down and self.step % BEAT_EVERY == 8 * (ord(node.letter) % 3):
                    node.tasks.append(node.beat())
            if draw.random() < 0.35:
                node = draw.choice(list(self.nodes.values()))
                if not node.is_down:
                    node.tasks.append(self._chore(node))
            if draw.random() < (0.05 if self.is_long else 0.03):
                self._blow()
            if self.late and draw.random() < 0.2:
                self.change(*self.late.pop(draw.randrange(len(self.late))))
            ready = [n for n in self.nodes.values() if n.tasks and not n.is_frozen]
            if ready:
                self._advance(draw.choice(ready))

    def _chore(self, node: Node) -> Coroutine[Any, str, None]:
        # Users who delete have one session: the rest would seldom meet.
        names = NAMES[:1] if self.seed % len(MIXES) > 1 else NAMES
        which, name = self.random.random(), self.random.choice(names)
        turns, others, shares, collections, tidied = MIXES[self.seed % len(MIXES)]
        chores = (
            *((turns, node.turn), (others / 4, node.end), (others / 4, node.replace)),
            *((others / 2, node.delete), (shares, node.share), (collections, node.collect)),
            (tidied, node.tidy),
        )
        for share, chore in chores:
            if which < share:
                return chore(name)
            which -= share
        return node.forget() if which < 0.03 else node.publish()

    def _advance(self, node: Node) -> None:
        task = self.random.choice(node.tasks)
        fate = self.random.choices(("done", "unheard", "lost", "late"), (90, 4, 4, 2))[0]
        try:
            is_new = getcoroutinestate(task) == CORO_CREATED
            task.send(None if is_new else fate)  # type: ignore[arg-type]  # what a coroutine begins with
        except StopIteration:
            node.tasks.remove(task)

    def _blow(self) -> None:
        node, which = self.random.choice(list(self.nodes.values())), self.random.random()
        if which < 0.3:
            for task in node.tasks:
                task.close()
            node.is_down = not node.is_down
            if not node.is_down:
                node.start()
            else:
                node.tasks = []
        elif which < 0.6:
            node.is_frozen = not node.is_frozen
            # The clock tells it, where it was for long.
            if not node.is_frozen and self.step - node.frozen_at > 3 * BEAT_EVERY:
                node.claims.doubt()
            node.frozen_at = self.step
        else:
            node.is_cut = not node.is_cut


MIXES = (
    (0.6, 0.14, 0.1, 0.06, 0.0),
    (0.3, 0.05, 0.3, 0.25, 0.0),
    (0.3, 0.3, 0.3, 0.0, 0.0),
    (0.3, 0.15, 0.0, 0.0, 0.2),
)
"""Parts of turns, of ends and deletions, of shares, of collections, and of looks for dead heads in what is
done. By seed: mostly turns; users who have all that they say shared, and a bucket tidied all the while; users
who delete that; users who delete, and heads that are removed soon after."""
CONTROLS = (
    "no_conditions",
    "unanswered_is_yes",
    "forget_uid",
    "keep_head",
    "no_note",
    "deaf_beat",
    "keep_copy",
    "trust_claims",
    "forget_shared",
    "share_early",
    "no_fence",
    "blind_delete",
    "remove_young",
    "never_away",
    "any_tenant",
    "deaf_to_deletion",
)


def planted(world: World) -> None:
    """Put the bug of a world's control into its nodes."""
    for node in world.nodes.values():
        plain_start = node.start

        def start(node: Node = node, plain_start: Any = plain_start) -> None:
            plain_start()
            _plant(world.control, node.claims, node)

        node.start = start  # type: ignore[method-assign]
        _plant(world.control, node.claims, node)


def _is_claimed(inside: Any, name: Name) -> bool:
    # What was claimed is taken to be there.
    copy = inside._claimed.get(name)
    return copy is not None and inside.is_sure and copy.tenure is not Tenure.UNSURE


def _plant(control: str, claims: Claims, node: Node) -> None:  # noqa: C901  a bug each
    inside: Any = claims
    plain = inside._fetch

    async def fetch(name: Name, entry: Entry, head: Head, source: Source, _: str) -> Any:
        # The new owner goes on under the old uid.
        return await plain(name, entry, head, source, head.uid)

    async def renew(name: Name, entry: Entry, head: Head) -> Verdict:
        # What the head says is believed, with no change of it.
        if node.uid(name) is None:
            node.restore(name, head.uid)
        inside._claimed[name] = production.Copy(head.uid, Tenure.UNSURE)
        inside._owned(name, entry, head)
        return Verdict.HERE

    async def note(_node: str, _path: str) -> None:
        # The silent owner is told nothing.
        return

    def yielded(name: Name, uid: str, term: int) -> None:
        # The owner says yes and goes on.
        rows = node.named.get(name)
        if rows is None or rows.uid != uid:
            if uid not in node.guests:
                raise Left
            return
        if rows.is_written:
            raise Busy
        node.guests[uid] = replace(rows, tags=list(rows.tags))

    plain_land = inside._land

    async def land(name: Name, entry: Entry, head: Head, *rest: Any) -> Any:
        # The new owner's head says nothing of what the bucket has.
        return await plain_land(name, entry, replace(head, shared=""), *rest)

    async def share(*_: object) -> Verdict:
        # Acknowledged, and the head is not changed.
        return Verdict.HERE

    plain_bury_first = inside.bury_first

    async def bury_first(name: Name) -> Any:
        # What is on its way into the head is taken for nothing.
        inside._telling.clear()
        return await plain_bury_first(name)

    plain_unnamed = inside._unnamed

    def unnamed(name: Name, uid: str | None, entry: Entry | None) -> Any:
        # A node that comes back after long goes on with what ended meanwhile.
        inside.was_away = False
        return plain_unnamed(name, uid, entry)

    plain_yielded = inside.yielded

    def yielded_to_any(name: Name, uid: str, term: int) -> None:
        # The uid is enough, whichever tenant asks.
        plain_yielded(name._replace(tenant=TENANT), uid, term)

    plain_is_over = inside._is_over

    def is_over(name: Name, uid: str, head: Head) -> bool:
        # A session that another node deleted goes on here.
        return not head.is_deleted and plain_is_over(name, uid, head)

    bugs: dict[str, tuple[str, Any]] = {
        "any_tenant": ("yielded", yielded_to_any),
        "deaf_to_deletion": ("_is_over", is_over),
        "blind_delete": ("bury_first", bury_first),
        "never_away": ("_unnamed", unnamed),
        "forget_shared": ("_land", land),
        "share_early": ("share", share),
        "forget_uid": ("_fetch", fetch),
        "keep_head": ("_renew", renew),
        "no_note": ("_note_taken", note),
        "deaf_beat": ("_give_up", lambda _taken: None),
        "keep_copy": ("yielded", yielded),
        "trust_claims": ("is_here", lambda name: _is_claimed(inside, name)),
    }
    if control in bugs:
        setattr(inside, *bugs[control])


def try_seed(seed: int, control: str = "") -> World:
    """One history. Raises Broken."""
    world = World(seed, control)
    planted(world)
    try:
        world.run()
    finally:
        for node in world.nodes.values():
            for task in node.tasks:
                task.close()
    return world


def is_broken(seed: int, control: str) -> bool:
    """Whether this history breaks something."""
    try:
        try_seed(seed, control)
    except Broken:
        return True
    return False


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--control", choices=CONTROLS, default="")
    asked = parser.parse_args()
    broken, moves, first = 0, 0, ""
    for seed in range(asked.seeds):
        try:
            moves += try_seed(seed, asked.control).moves
        except Broken as error:
            broken += 1
            first = first or f"seed {seed}: {error}"
    sys.stdout.write(f"{asked.seeds} histories, {moves} takeovers, {broken} broken; {first or 'good'}\n")
    raise SystemExit(bool(broken) != bool(asked.control))


if __name__ == "__main__":
    main()
