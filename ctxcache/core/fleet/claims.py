"""Claims: how a host comes to own a session, keeps it, and hears that it does not any more.

    settle     a session is used here that this host does not own: read its head, ask its owner, take it over
    publish    a session was created here: write its head
    yielded    another host takes a session over, and asks its owner first
    share      the bucket has rows of a session: its head says which
    beat       say where this store is, and hear what was taken from it meanwhile
    bury       a session was deleted here: its head says so

A takeover is a fork under the same name. The new owner's copy has a uid of its own, so that no pair of uid
and generation ever means two contents. The change of the head decides, whoever asked whom and whatever was
heard of it. No host's clock is compared with another's.

Knows no transport and no rows. Worst case: the register does not answer; what is here is served on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol, TypeVar

from ctxcache.core.fleet.heads import ForeignObject, Head, Name, NodeRecord, Secret, away_path, node_path
from ctxcache.core.fleet.register import Entry, NoAnswer, Register, put
from ctxcache.core.fleet.tenure import Tenure, Turn, step

K = TypeVar("K")
V = TypeVar("V")
LOOKS = 4
"""How often a session is looked at again whose head changes meanwhile."""
HOSTS_LIMIT = 32
"""Hosts of engines that a node record has."""
KNOWN_LIMIT = 4096
"""Heads, and sources of rows, that are kept for sessions which are not here; the oldest go."""


class Verdict(Enum):
    """The answer to a look at a session: whether this host may continue it."""

    HERE = auto()
    """It is here, and may be continued."""
    ABSENT = auto()
    """There is none that can be had. One may be created."""
    ELSEWHERE = auto()
    """Its owner is writing it: nobody here may."""
    UNKNOWN = auto()
    """The register does not answer. A copy here may be used; another host may have a longer one."""


class Loss(Enum):
    """Why a session that some host had is absent."""

    OWNER_LOST = auto()
    """Its owner did not answer."""
    LEFT = auto()
    """Its owner has given it up."""
    NO_PLACE = auto()
    """It cannot be here: this store has another model of that id, or room for no more sessions."""


class Busy(Exception):
    """The owner has a writer in the session, or has it by a later head."""


class Left(Exception):
    """The owner has no such copy any more."""


class Recent(dict[K, V]):
    """The last `KNOWN_LIMIT` things that were noted."""

    def note(self, key: K, value: V) -> None:
        """As the latest one."""
        self.pop(key, None)
        self[key] = value
        if len(self) > KNOWN_LIMIT:
            del self[next(iter(self))]


class Source(NamedTuple):
    """A copy on another host, as a head names it."""

    node: str
    address: str
    uid: str


class Peers(Protocol):
    """Other hosts, to be asked."""

    async def yield_(self, name: Name, source: Source, term: int) -> object:
        """Have an owner give a session up; returns by what its rows can be had.

        Raises Busy, Left, and NoAnswer.
        """

    async def stored(self, name: Name, shared: str) -> object:
        """Find what the bucket has of a session; returns by what its rows can be had.

        `shared`: see Head. Raises Left where it is gone, or its time is over, and NoAnswer.
        """


class Copies(Protocol):
    """This host's copies of sessions."""

    def uid(self, name: Name) -> str | None:
        """The uid of the copy that has this name; None where none has."""

    def is_written(self, name: Name) -> bool:
        """Whether somebody is writing to the copy of this name."""

    def has_guest(self, name: Name, uid: str) -> bool:
        """Whether a guest of this uid is here, of the tenant of this name."""

    def retire(self, name: Name) -> None:
        """The copy of this name is a guest from here on, and whoever writes to it is cut off."""

    def restore(self, name: Name, uid: str) -> None:
        """The guest of this uid has its name again."""

    async def has_place(self, name: Name, offer: object) -> bool:
        """Whether what another host offers can be here at all."""

    async def land(self, name: Name, uid: str, offer: object) -> bool:
        """Make a copy of this uid out of what another host offers, as far as it comes.

        Returns whether there is one: none where nothing of it can be had.
        """


@dataclass(slots=True)
class Copy:
    """A copy with a name. `entry`: the head as this host last saw it; None for none."""

    uid: str
    tenure: Tenure
    entry: Entry | None = None
    term: int = 0


@dataclass(slots=True)
class Counts:
    """Counts of one host since its start."""

    head_reads: int = 0
    head_changes: int = 0
    arrived: int = 0
    arrived_tokens: int = 0
    arrived_bytes: int = 0
    arrived_stored: int = 0
    """Sessions that arrived from the bucket; `arrived` counts them too."""
    yielded: int = 0
    taken_from_silent: int = 0
    superseded: int = 0
    """Copies that lost their name though nobody had asked for them."""
    no_answers: int = 0
    shares: int = 0
    """Times that a head was made to say what the bucket has of its session."""
    shared_objects: int = 0
    shared_bytes: int = 0
    share_failures: int = 0
    removed_objects: int = 0
    asked_prefixes: int = 0
    """Times that another host was asked for more of a prompt."""
    borrowed_prefixes: int = 0
    borrowed_tokens: int = 0
    borrowed_bytes: int = 0
    lent_prefixes: int = 0
    told_prefixes: int = 0
    """Prefixes that the bucket was made to know."""


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A store's place in its fleet, for whoever watches.

    `tenures`: sessions used since the start. `unshared_count`: sessions whose rows are yet to be shared.
    """

    counts: Counts
    tenures: Mapping[Tenure, int]
    is_sure: bool
    unshared_count: int


class Claims:
    """One host's claims. `nonce` draws 16 hex digits that were never drawn before."""

    def __init__(
        self,
        register: Register,
        secret: Secret,
        peers: Peers,
        copies: Copies,
        *,
        node: str,
        incarnation: str,
        address: str,
        nonce: Callable[[], str],
        new_uid: Callable[[], str],
    ) -> None:
        self._register, self._secret, self._peers, self._copies = register, secret, peers, copies
        self.node, self.incarnation, self.address = node, incarnation, address
        self._nonce, self._new_uid = nonce, new_uid
        self.hosts = Recent[str, None]()
        """Hosts of engines beside this one, as routers call them."""
        self._claimed: dict[Name, Copy] = {}
        self._private: dict[Name, None] = {}
        """Names of copies that were private, and may be still, in the order in which they were made."""
        self._seen = Recent[Name, tuple[Entry, Head]]()
        """Heads of sessions that are absent here, for whoever creates one of that name."""
        self._telling: set[str] = set()
        """Uids of copies whose heads are made to say what is shared of them."""
        self._coming: set[str] = set()
        """Uids of copies that this host is about to own: they are not given up before it does."""
        self._given: dict[str, Name] = {}
        """By a guest's uid, the session that was asked for, and was not taken over as far as is known."""
        self._owed = Recent[str, Source]()
        """By the uid of a copy whose head was put, perhaps: where its rows are, which have not come."""
        self._noted: set[str] = set()
        """Paths of heads that were noted as taken from this node, and not changed by it since."""
        self._unlooked: dict[Name, bool] = {}
        """Sessions that were noted as taken, and not looked after since; whether `noted` has seen them."""
        self._under_way = Counter[str]()
        """Paths of heads that are read and changed now: what is noted of them is not forgotten meanwhile."""
        self.losses = Recent[Name, Loss]()
        """Why sessions are absent that another host had."""
        self._record: tuple[NodeRecord, Entry] | None = None
        self.is_sure = False
        """Whether the last beat was heard: what was taken from this host is known."""
        self.was_away = False
        """Whether this node was silent for so long that its record, and heads, were removed."""
        self.taken_before: tuple[str, ...] | None = ()
        """See NodeRecord.taken: what was taken from an earlier run of this node."""
        self.counts = Counts()

    # -- what a request asks -----------------------------------------------------------------------

    def is_here(self, name: Name) -> bool:
        """Whether a session may be used with no look at its head."""
        copy = self._claimed.get(name)
        if copy is None or not self.is_sure or copy.tenure is Tenure.UNSURE:
            return False
        # One that has ended here may have begun anew elsewhere.
        return self._copies.uid(name) == copy.uid

    def tenure(self, name: Name) -> Tenure | None:
        """The tenure of the copy of this name, as far as it is known."""
        copy = self._claimed.get(name)
        return None if copy is None else copy.tenure

    def term(self, name: Name) -> int:
        """The term of the copy of this name; 0 where it has no head."""
        copy = self._claimed.get(name)
        return 0 if copy is None else copy.term

    @property
    def is_settled(self) -> bool:
        """Whether this node was heard, and has looked after all that was taken before it was."""
        return self.is_sure and not self.was_away and self.taken_before == () and not self._unlooked

    def noted(self) -> list[Name]:
        """Sessions that were noted as taken before the last call, and not looked after since."""
        due = [name for name, is_due in self._unlooked.items() if is_due]
        # A host that notes a session as taken takes it over a moment later.
        self._unlooked = dict.fromkeys(self._unlooked, True)
        return due

    def tenures(self) -> Iterator[Tenure]:
        """The tenures of all copies with names that are known."""
        return (copy.tenure for copy in self._claimed.values())

    def created(self, name: Name) -> bool:
        """A session was made here. Returns whether its head is to be written before it is used.

        It is where another host's head has its name.
        """
        uid = self._copies.uid(name)
        if uid is None:
            return False
        entry, head = self._seen.pop(name, (None, None))
        before = self._claimed.get(name)
        if entry is None and before is not None:
            entry = before.entry
        self._claim(name, Copy(uid, Tenure.PRIVATE, entry))
        return head is not None and not head.is_deleted and head.node != self.node

    def private(self) -> list[Name]:
        """Sessions that have no head of their own yet."""
        # Once a second: all that are claimed would be too many to look at.
        self._private = dict.fromkeys(n for n in self._private if self.tenure(n) is Tenure.PRIVATE)
        return list(self._private)

    def _claim(self, name: Name, copy: Copy) -> None:
        self._claimed[name] = copy
        if copy.tenure is Tenure.PRIVATE:
            self._private[name] = None

    def names(self) -> list[Name]:
        """Names of all sessions that were used here."""
        return list(self._claimed)

    def forget(self, gone: Iterable[Name]) -> None:
        """Forget names of sessions that have ended here."""
        for name in gone:
            self._claimed.pop(name, None)
        # Each path is a digest or two: of a hundred thousand sessions they hold up the event loop.
        if self._noted:
            known = {self._secret.head_path(name) for name in self._claimed}
            self._noted &= known | self._under_way.keys()

    async def settle(self, name: Name) -> Verdict:
        """Find out who continues a session, and continue it here where that can be."""
        with self._work_on(name):
            for _ in range(LOOKS):
                try:
                    verdict = await self._look(name)
                except NoAnswer:
                    self.counts.no_answers += 1
                    return Verdict.UNKNOWN
                if verdict is not None:
                    return verdict
        return Verdict.ELSEWHERE

    @contextmanager
    def _work_on(self, name: Name) -> Iterator[None]:
        path = self._secret.head_path(name)
        self._under_way[path] += 1
        try:
            yield
        finally:
            self._under_way[path] -= 1
            if not self._under_way[path]:
                del self._under_way[path]

    # One look. Which case it is follows from two facts: whom the head names, and what is here.
    #
    #     head                    here: a copy           a guest of the head's uid    nothing
    #     none, or dead           PRIVATE                -                            absent
    #                             this node was away: retired
    #     deleted                 its own: retired       -                            absent
    #     this node               its own: OWNED         restored, OWNED              landed from its source
    #     another node            retired, then ───────────────────────────────────► yield, take over, land
    async def _look(self, name: Name) -> Verdict | None:
        """None: the head changed meanwhile."""
        self._check_heard()
        self.counts.head_reads += 1
        entry = await self._register.get(self._secret.head_path(name))
        self._seen.pop(name, None)
        self.losses.pop(name, None)
        uid = self._copies.uid(name)
        if entry is None:
            return self._unnamed(name, uid, None)
        head = self._secret.read_head(entry.body)
        if head.is_dead:
            # A change could meet its removal: the next head is made anew, when this one is gone.
            return self._unnamed(name, uid, None)
        if uid is not None and self._is_over(name, uid, head):
            self._lose(name)
            uid = None
        if head.is_deleted:
            self._seen.note(name, (entry, head))
            return self._unnamed(name, uid, entry)
        if head.node == self.node:
            return await self._own(name, uid, entry, head)
        return await self._take_over(name, entry, head)

    def _is_over(self, name: Name, uid: str, head: Head) -> bool:
        """Whether a copy that has the name here does not have it any more, by its head."""
        if head.is_deleted:
            return uid == head.uid or self._is_past(name, uid, head)
        return head.node != self.node or (uid != head.uid and self._is_past(name, uid, head))

    async def look_after(self, name: Name) -> bool:
        """Retire the copy of this name where it is over. Nothing is taken over. False: to be tried again."""
        is_done = await self._look_after(name)
        if is_done:
            self._unlooked.pop(name, None)
        return is_done

    async def _look_after(self, name: Name) -> bool:
        uid, copy = self._copies.uid(name), self._claimed.get(name)
        path = self._secret.head_path(name)
        if uid is None or (copy is not None and copy.tenure is Tenure.PRIVATE):
            return True
        if path in self._under_way:
            return False
        try:
            self._check_heard()
            self.counts.head_reads += 1
            entry = await self._register.get(path)
        except NoAnswer:
            self.counts.no_answers += 1
            return False
        is_same = self._copies.uid(name) == uid and self._claimed.get(name) is copy
        if not is_same or path in self._under_way:
            return False
        try:
            head = None if entry is None else self._secret.read_head(entry.body)
        except ForeignObject:
            # The copy is still unsure: a user's turn reads the head again, and is told.
            return True
        if head is None or head.is_dead:
            self._unnamed(name, uid, None)
        elif self._is_over(name, uid, head):
            self._lose(name)
        elif head.is_deleted:
            self._unnamed(name, uid, entry)
        return True

    def _is_past(self, name: Name, uid: str | None, head: Head) -> bool:
        """Whether a copy had its name before what a head names, or named until it was deleted."""
        copy = self._claimed.get(name)
        # One that was created by this run, and has had no head, was never anybody's.
        is_new = copy is not None and copy.uid == uid and copy.tenure is Tenure.PRIVATE
        return uid is not None and not is_new and head.is_past(uid)

    def _unnamed(self, name: Name, uid: str | None, entry: Entry | None) -> Verdict:
        """No session has this head: what is here is this host's alone."""
        copy = self._claimed.get(name)
        is_new = copy is not None and copy.uid == uid and copy.tenure is Tenure.PRIVATE
        # The head that named it, or said that it was deleted, may have been removed while this node was away.
        if uid is not None and self.was_away and not is_new:
            self._lose(name)
            uid = None
        if uid is None:
            self._claimed.pop(name, None)
            return Verdict.ABSENT
        # Published, and its head is gone: the bucket was emptied. It is published again.
        tenure = Tenure.UNSURE if copy is None or copy.tenure is Tenure.OWNED else copy.tenure
        self._claim(name, Copy(uid, step(tenure, Turn.UNNAMED), entry))
        return Verdict.HERE

    async def _own(self, name: Name, uid: str | None, entry: Entry, head: Head) -> Verdict | None:
        """The head names this node."""
        if uid is not None and uid != head.uid:
            # Created here after what the head names had ended, and not published yet.
            self._claim(name, Copy(uid, Tenure.PRIVATE, entry))
            return Verdict.HERE
        if uid is None and self._copies.has_guest(name, head.uid):
            # The host that asked has not changed the head yet. A new term refuses its change.
            return await self._renew(name, entry, head)
        if uid is not None:
            if name not in self._claimed:
                self._claimed[name] = Copy(uid, Tenure.UNSURE, entry)
            # Noted as taken, and not taken yet: a new term, so that it never will be.
            if head.incarnation != self.incarnation or self._secret.head_path(name) in self._noted:
                return await self._renew(name, entry, head)
            self._owned(name, entry, head)
            return Verdict.HERE
        if head.uid in self._owed:
            # Taken over, and the answer was lost before anything came.
            return await self._fetch(name, entry, head, self._owed[head.uid], head.uid)
        # It has left this host, for room or with a disk.
        return await self._fetch_stored(name, entry, head, Loss.LEFT)

    async def _renew(self, name: Name, entry: Entry, head: Head) -> Verdict | None:
        """Own by a new term what the head names this node for."""
        made = head.followed_by(self._mine(head.uid, head.shared))
        with self._awaited(head.uid):
            found = await self._put(name, made, entry)
        if found is None or found.body != self._secret.write(made):
            return None
        if self._copies.uid(name) is None and self._copies.has_guest(name, head.uid):
            self._copies.restore(name, head.uid)
            self._claimed[name] = Copy(head.uid, Tenure.GUEST)
        # It may have been given up during the wait: whoever has it will change the head again.
        elif self._copies.uid(name) != head.uid:
            return None
        self._owned(name, found, made)
        return Verdict.HERE

    async def _take_over(self, name: Name, entry: Entry, head: Head) -> Verdict | None:
        source = Source(head.node, head.address, head.uid)
        return await self._fetch(name, entry, head, source, self._new_uid())

    async def _fetch(self, name: Name, entry: Entry, head: Head, source: Source, uid: str) -> Verdict | None:
        try:
            offer = await self._peers.yield_(name, source, head.term)
        except Busy:
            self._seen.note(name, (entry, head))
            return Verdict.ELSEWHERE
        except (Left, NoAnswer) as error:
            loss = Loss.LEFT if isinstance(error, Left) else Loss.OWNER_LOST
            return await self._fetch_stored(name, entry, head, loss)
        # Before the head is changed: what cannot be here goes on where it was.
        if not await self._copies.has_place(name, offer):
            return self._absent(name, entry, head, Loss.NO_PLACE)
        return await self._land(name, entry, head, source, uid, offer)

    # A bucket that does not answer now may do so at the next turn: NoAnswer leaves here, so that nobody takes
    # the session for absent and begins another one in its place.
    async def _fetch_stored(self, name: Name, entry: Entry, head: Head, loss: Loss) -> Verdict | None:
        """Go on with what the bucket has of it, which may be nothing."""
        if not head.shared:
            return self._absent(name, entry, head, loss)
        try:
            offer = await self._peers.stored(name, head.shared)
        except Left:
            self.counts.head_reads += 1
            now = await self._register.get(self._secret.head_path(name))
            # Its owner goes on, and has put something else in the place of what that head named.
            has_changed = now is None or now.tag != entry.tag
            return None if has_changed else self._absent(name, entry, head, loss)
        if not await self._copies.has_place(name, offer):
            return self._absent(name, entry, head, Loss.NO_PLACE)
        if head.node != self.node:
            # Told in its own record, before it is superseded. One that says it has no such copy is told too:
            # it may be on its way there.
            await self._note_taken(head.node, self._secret.head_path(name))
            self.counts.taken_from_silent += loss is Loss.OWNER_LOST
        return await self._land(name, entry, head, None, self._new_uid(), offer)

    async def _land(
        self, name: Name, entry: Entry, head: Head, source: Source | None, uid: str, offer: object
    ) -> Verdict | None:
        # A client has created a session of this name during the wait.
        if self._copies.uid(name) is not None:
            return None
        if source is not None:
            self._owed.note(uid, source)
        # Also where the head names this node already: another one may have changed it since it was read.
        made = head.followed_by(self._mine(uid, head.shared))
        with self._awaited(uid):
            entry_made = await self._put(name, made, entry)
        if entry_made is None or entry_made.body != self._secret.write(made):
            return None
        entry, head = entry_made, made
        # From here on the session is ours. Rows that do not come are computed.
        self._owed.pop(uid, None)
        with self._awaited(uid):
            has_landed = await self._copies.land(name, uid, offer)
        if not has_landed:
            return self._absent(name, entry, head, Loss.LEFT)
        self.counts.arrived += 1
        self._owned(name, entry, head)
        return Verdict.HERE

    @contextmanager
    def _awaited(self, uid: str) -> Iterator[None]:
        self._coming.add(uid)
        try:
            yield
        finally:
            self._coming.discard(uid)

    def _absent(self, name: Name, entry: Entry, head: Head, loss: Loss) -> Verdict | None:
        # Somebody here has created one during the wait.
        if self._copies.uid(name) is not None:
            return None
        self._claimed.pop(name, None)
        self._seen.note(name, (entry, head))
        self.losses.note(name, loss)
        return Verdict.ABSENT

    # -- changes of heads --------------------------------------------------------------------------

    async def publish(self, name: Name) -> Verdict:
        """Write the head of a session that was created here. UNKNOWN: it is to be tried again."""
        copy = self._claimed.get(name)
        if copy is None or copy.tenure is not Tenure.PRIVATE or self._copies.uid(name) != copy.uid:
            return Verdict.ABSENT
        try:
            with self._work_on(name):
                return await self._publish(name, copy)
        except NoAnswer:
            self.counts.no_answers += 1
            return Verdict.UNKNOWN

    async def _publish(self, name: Name, copy: Copy) -> Verdict:
        before, made = copy.entry, self._mine(copy.uid)
        if before is not None:
            head = self._secret.read_head(before.body)
            made = head.followed_by(made)
            if not head.is_deleted and head.node != self.node:
                # Its owner did not answer. It is told in its own record, before it is superseded.
                await self._note_taken(head.node, self._secret.head_path(name))
                self.counts.taken_from_silent += 1
        found = await self._put(name, made, before)
        if self._claimed.get(name) is not copy:
            return Verdict.ABSENT
        if found is None:
            copy.entry = None
            return Verdict.UNKNOWN
        if found.body == self._secret.write(made):
            self._owned(name, found, made)
            return Verdict.HERE
        head = self._secret.read_head(found.body)
        known = None if before is None else self._secret.read_head(before.body)
        # A collector, or this host's own sharing, has changed the head of what was known to have ended here.
        is_known = known is not None and (
            head.is_touched(known) or (head.node == self.node and head.uid == known.uid)
        )
        # The bucket may have rows of what had this name here: then it was created while nobody could tell.
        if is_known or head.is_deleted or (head.node == self.node and not head.shared):
            # What had this name has ended meanwhile.
            copy.entry = None if head.is_dead else found
            return Verdict.UNKNOWN
        self._lose(name)
        return Verdict.ELSEWHERE

    def shared(self, name: Name) -> str:
        """See Head: what the head of a copy here says. Empty for a copy that is not known to be owned."""
        copy = self._claimed.get(name)
        if copy is None or copy.entry is None or copy.tenure is Tenure.PRIVATE:
            return ""
        return self._secret.read_head(copy.entry.body).shared

    async def share(self, name: Name, uid: str, shared: str, term: int) -> Verdict:
        """Have the head of an owned copy say which rows the bucket has.

        `term`: that of its head before the first of them was put: what was put under another may be gone.
        HERE: it does. UNKNOWN: it may, and what was put for it may be gone: it is to be put again. Else the
        copy is not this host's.
        """
        copy = self._claimed.get(name)
        is_owned = copy is not None and copy.tenure is Tenure.OWNED
        if copy is None or copy.entry is None or not (is_owned and copy.uid == uid == self._copies.uid(name)):
            return Verdict.ABSENT
        if copy.term != term:
            return Verdict.UNKNOWN
        made = self._secret.read_head(copy.entry.body).followed_by(self._mine(uid, shared))
        self._telling.add(uid)
        try:
            with self._work_on(name):
                found = await self._put(name, made, copy.entry)
        except NoAnswer:
            self.counts.no_answers += 1
            # It may have been changed, or may yet be: whoever deletes the session reads it first.
            copy.tenure = step(copy.tenure, Turn.DOUBTED)
            return Verdict.UNKNOWN
        finally:
            self._telling.discard(uid)
        # A look at the head may have noted the same copy anew meanwhile, with the head as it was before.
        now = self._claimed.get(name)
        if now is None or now.uid != uid:
            return Verdict.ABSENT
        if found is not None and found.body == self._secret.write(made):
            self._owned(name, found, made)
            return Verdict.HERE
        return self._not_shared(name, now, found)

    def _not_shared(self, name: Name, copy: Copy, found: Entry | None) -> Verdict:
        """The head was not as it was known."""
        if found is None:
            copy.tenure = step(copy.tenure, Turn.DOUBTED)
            return Verdict.UNKNOWN
        head = self._secret.read_head(found.body)
        if (head.node, head.incarnation, head.uid) == (self.node, self.incarnation, copy.uid):
            # Our own change, of which no answer came, or that of a collector.
            copy.entry, copy.term = found, head.term
            if head.is_deleted:
                # A deletion that broke off: for all others there is no such session.
                self._claim(name, Copy(copy.uid, Tenure.PRIVATE, None if head.is_dead else found))
            return Verdict.UNKNOWN
        self._lose(name)
        return Verdict.ELSEWHERE

    async def bury(self, name: Name) -> str:
        """The head of a session that has ended here says so.

        Returns what was shared, see Head, where that may go now. Raises NoAnswer.
        """
        copy = self._claimed.get(name)
        if copy is None or copy.entry is None or self._copies.uid(name) is not None:
            return ""
        head = self._secret.read_head(copy.entry.body)
        if head.is_deleted or head.node != self.node:
            return ""
        made = self.ended(head)
        found = await self._put(name, made, copy.entry)
        # Another one of this name may have been created during the wait.
        if self._claimed.get(name) is copy:
            del self._claimed[name]
        return head.shared if found is not None and found.body == self._secret.write(made) else ""

    async def bury_first(self, name: Name) -> str:
        """The head of a session says that it is deleted, before it is: the bucket has rows of it.

        Returns what was shared, see Head; empty where nothing is, and the head was left as it is. Raises
        NoAnswer.
        """
        copy = self._claimed.get(name)
        if copy is None or copy.tenure is Tenure.PRIVATE:
            return ""
        if copy.entry is None or copy.tenure is not Tenure.OWNED or copy.uid in self._telling:
            raise NoAnswer("whether the bucket has rows of it is not known")
        head = self._secret.read_head(copy.entry.body)
        if not head.shared:
            return ""
        made = self.ended(head)
        # Without an answer it may be deleted for all others, who may begin another one.
        copy.tenure = step(copy.tenure, Turn.DOUBTED)
        with self._work_on(name):
            found = await self._put(name, made, copy.entry)
        # Sharing may have noted a change of its own meanwhile, which came before ours.
        now = self._claimed.get(name)
        is_still = now is not None and now.uid == copy.uid
        if not is_still or found is None or found.body != self._secret.write(made):
            raise NoAnswer("its head changed meanwhile")
        # Should it not be deleted after all, it is published again.
        self._claim(name, Copy(copy.uid, Tenure.PRIVATE, found))
        return head.shared

    def ended(self, head: Head) -> Head:
        """The head that says that there is no such session any more."""
        return replace(head.followed_by(self._mine(head.uid)), is_deleted=True)

    def _mine(self, uid: str, shared: str = "") -> Head:
        return Head(uid, self.node, self.incarnation, self.address, 1, self._nonce(), shared=shared)

    async def _put(self, name: Name, made: Head, before: Entry | None) -> Entry | None:
        """Put a head of this host; the entry that the register has then, which may be another host's."""
        # Without a record nobody can tell this host what is taken from it.
        self._check_heard()
        self.counts.head_changes += 1
        path = self._secret.head_path(name)
        # A note that comes from here on may mean the new head.
        self._noted.discard(path)
        return await put(self._register, path, self._secret.write(made), before)

    def _check_heard(self) -> None:
        """Raise NoAnswer before the first beat: whether this node was away is not known."""
        if self._record is None:
            raise NoAnswer("no beat of this host was heard yet")

    def _owned(self, name: Name, entry: Entry, head: Head) -> None:
        copy = self._claimed.get(name)
        tenure = step(Tenure.UNSURE if copy is None else copy.tenure, Turn.PUBLISHED)
        # A beat during the wait for our change may have said that this head was taken since.
        if self._secret.head_path(name) in self._noted:
            tenure = step(tenure, Turn.DOUBTED)
        self._claimed[name] = Copy(head.uid, tenure, entry, head.term)

    # -- what others do ----------------------------------------------------------------------------

    def yielded(self, name: Name, uid: str, term: int) -> None:
        """Another host takes a copy over, which it knows by a head of this term. Raises Busy, Left."""
        if uid in self._coming:
            raise Busy
        copy, named = self._claimed.get(name), self._copies.uid(name)
        if named != uid:
            # Asked for once before, and the answer was lost.
            if self._copies.has_guest(name, uid):
                return
            # The session that replaced this copy here is not published yet.
            if copy is not None and copy.uid == named and copy.tenure is Tenure.PRIVATE:
                raise Busy
            raise Left
        if self._copies.is_written(name) or (copy is not None and copy.term > term):
            raise Busy
        self.counts.yielded += 1
        self._retire(name, copy)
        self._given[uid] = name

    async def reclaim(self) -> None:
        """Have the sessions again that were asked for and not taken over. Raises NoAnswer.

        Whoever asks may stop before it changes the head, or may have no place for it: nobody continues the
        session then, and a guest is soon gone.
        """
        for uid, name in list(self._given.items()):
            if self._copies.uid(name) is None and self._copies.has_guest(name, uid):
                self.counts.head_reads += 1
                entry = await self._register.get(self._secret.head_path(name))
                head = None if entry is None else self._secret.read_head(entry.body)
                is_own = head is not None and head.node == self.node and head.uid == uid
                if entry is not None and head is not None and is_own and not head.is_deleted:
                    with self._work_on(name):
                        await self._own(name, self._copies.uid(name), entry, head)
            self._given.pop(uid, None)

    def moving(self) -> set[str]:
        """Paths of heads of sessions that come or go now."""
        return {self._secret.head_path(name) for name in self._given.values()} | self._under_way.keys()

    def _lose(self, name: Name) -> None:
        self.counts.superseded += 1
        self._retire(name, self._claimed.get(name))

    def _retire(self, name: Name, copy: Copy | None) -> None:
        step(Tenure.UNSURE if copy is None else copy.tenure, Turn.FOREIGN)
        if self._copies.uid(name) is not None:
            self._copies.retire(name)
        self._claimed.pop(name, None)

    async def _note_taken(self, node: str, path: str) -> None:
        """Have a silent node find out at its next beat. Raises NoAnswer."""
        for _ in range(LOOKS):
            entry = await self._register.get(node_path(node))
            if entry is None:
                return
            body = self._secret.write(self._secret.read_node(entry.body).with_taken(path, self._nonce()))
            found = await put(self._register, node_path(node), body, entry)
            if found is not None and found.body == body:
                return
        raise NoAnswer(f"the record of {node} changes all the while")

    async def beat(self) -> bool:
        """Write this node's record, and give up what it says was taken. Raises NoAnswer.

        False: another process has this node's name, and this one has to end.
        """
        path = node_path(self.node)
        for _ in range(LOOKS):
            if self._record is None:
                entry = await self._register.get(path)
                record = None if entry is None else self._secret.read_node(entry.body)
                if record is None or record.incarnation != self.incarnation:
                    self.was_away = await self._register.get(away_path(self.node)) is not None
                    self.taken_before = () if record is None else record.taken
            else:
                record, entry = self._record
            # The first beat takes the record over from an earlier run. Later ones find their own.
            is_own = record is not None and record.incarnation == self.incarnation
            if self._record is not None and not is_own:
                return False
            if record is not None and is_own:
                self._give_up(record.taken)
            beat = record.beat + 1 if record is not None else 1
            made = NodeRecord(
                self.node,
                self.incarnation,
                self.address,
                beat,
                self._nonce(),
                hosts=tuple(self.hosts)[-HOSTS_LIMIT:],
            )
            body = self._secret.write(made)
            found = await put(self._register, path, body, entry)
            if found is not None and found.body == body:
                self._record, self.is_sure = (made, found), True
                return True
            if found is None and self._record is not None:
                # It was removed, and nothing is noted of what was taken since.
                self._give_up(None)
            self._record = None if found is None else (self._secret.read_node(found.body), found)
            # At the first beat there is no record of ours to be changed by another process.
            if record is None or not is_own:
                self._record = None
        raise NoAnswer(f"the record of {self.node} changes all the while")

    def _give_up(self, taken: tuple[str, ...] | None) -> None:
        """Heads are read again of what was taken: whoever noted it may have stopped before taking it."""
        if taken == ():
            return
        paths = {self._secret.head_path(name): name for name in self._claimed}
        self._noted |= set(paths if taken is None else taken)
        for path in self._noted & paths.keys():
            copy = self._claimed[paths[path]]
            self._unlooked[paths[path]] = False
            # A private copy is doubted too: an unanswered change may have put its head.
            copy.tenure = step(copy.tenure, Turn.DOUBTED)

    def doubt(self) -> None:
        """No beat was heard for long: heads are read before their sessions are used, until one is."""
        self.is_sure = False
