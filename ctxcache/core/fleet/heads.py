"""Heads and node records: what a fleet's bucket says of sessions and of hosts.

    v1/s/<hh>/<digest of tenant>/<digest of session>    a head: who continues the session
    v1/n/<node>                                         a node record: where a host's store is reached
    v1/away/<node>                                      its record was removed: it was silent for long
    v1/o/<hh>/<digest of tenant>/<digest of session>/   rows of the session, and what they are: `shared.py`
    v1/p/<hh>/<digest of a prefix's key>                a holder: which host has that prefix

Names are keyed digests under the fleet's secret: a listing of the bucket tells nothing, and paths spread
evenly. The objects are JSON, with a digest under the same secret: the object of another fleet, or one that
somebody has edited, is refused. Leaf.
"""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

VERSION = 1
DIGEST_BYTES = 16
T = TypeVar("T")
TAKEN_LIMIT = 256
"""Sessions that a node record lists as taken; with one more it says that all may be."""


PAST_LIMIT = 16
"""Copies that a head lists as past; with one more, every other copy counts as past."""


class Name(NamedTuple):
    """A session's name: unique in the fleet."""

    tenant: str
    session_id: str


class ForeignObject(Exception):
    """The object is of another fleet, or of a newer version, or damaged; the text says which."""


@dataclass(frozen=True, slots=True)
class Head:
    """Who continues a session.

    `node` and `incarnation` own it: a store, and one run of it. `term` grows with each owner, and `nonce` is
    drawn for every change, so that two heads with equal bytes are one. `uid` is that of the owner's copy,
    `past`: uids of copies that had the name before, the last ones; None:
    so many that any copy may have had it. A deleted head says that there is no such session. One that is
    marked `is_dead` besides is about to be removed, and nobody changes it any more.
    `shared` names the object that says which rows of the session the bucket has; empty for none.
    """

    uid: str
    node: str
    incarnation: str
    address: str
    term: int
    nonce: str
    past: tuple[str, ...] | None = ()
    is_deleted: bool = False
    shared: str = ""
    is_dead: bool = False

    def followed_by(self, head: "Head") -> "Head":
        """The head that takes this one's place: of the next term, and with what is known of the past."""
        past = self.past
        if past is not None and head.uid != self.uid:
            past = (*(uid for uid in past if uid != head.uid), self.uid)
        return replace(
            head, term=self.term + 1, past=past if past is None or len(past) <= PAST_LIMIT else None
        )

    def touched(self, nonce: str) -> "Head":
        """The same, as another object: whoever has read this one can change it no more."""
        return replace(self, term=self.term + 1, nonce=nonce)

    def dead(self, nonce: str) -> "Head":
        """The same, about to be removed."""
        return replace(self.touched(nonce), is_deleted=True, shared="", is_dead=True)

    def is_touched(self, before: "Head") -> bool:
        """Whether this is `before`, `touched`."""
        return replace(before, term=self.term, nonce=self.nonce) == self

    def is_past(self, uid: str) -> bool:
        """Whether a copy that is here had the name before what this head names, as far as is known."""
        return self.past is None or uid in self.past


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Where a host's store is reached, as of its last beat. It gives no right to anything.

    `taken`: paths of heads that others took over while this node did not answer; None: too many to be listed.
    `hosts`: those of engines beside it, as routers call them.
    """

    node: str
    incarnation: str
    address: str
    beat: int
    nonce: str
    taken: tuple[str, ...] | None = ()
    hosts: tuple[str, ...] = ()

    def with_taken(self, path: str, nonce: str) -> "NodeRecord":
        """The record with one more head that was taken from this node."""
        if self.taken is None or path in self.taken:
            return replace(self, nonce=nonce)
        taken = (*self.taken, path)
        return replace(self, nonce=nonce, taken=taken if len(taken) <= TAKEN_LIMIT else None)


@dataclass(frozen=True, slots=True)
class Holder:
    """A host that had a prefix when this was written. It promises nothing."""

    node: str
    address: str
    nonce: str


class Secret:
    """The secret of a fleet: paths and objects are made, and checked, with it."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: at least 16 bytes. Raises ValueError."""
        if len(secret) < DIGEST_BYTES:
            raise ValueError(f"{len(secret)} bytes are too few for a secret: at least {DIGEST_BYTES}")
        self._key = blake2b(secret, digest_size=32).digest()

    def head_path(self, name: Name) -> str:
        """The path of a session's head."""
        tenant = self._digest(b"tenant", name.tenant.encode())
        session = self._digest(b"session", f"{name.tenant}/{name.session_id}".encode())
        return f"{HEADS}{session[:2]}/{tenant}/{session}"

    def holder_path(self, tenant: str, key: bytes) -> str:
        """The path of what is known of a prefix, by its key."""
        digest = self._digest(b"prefix", tenant.encode() + b"/" + key)
        return f"{HOLDERS}{digest[:2]}/{digest}"

    def write(self, item: Head | NodeRecord | Holder) -> bytes:
        """The bytes of an object."""
        facts = {"version": VERSION, **asdict(item)}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return json.dumps(
            {"digest": self._digest(type(item).__name__.encode(), text.encode()), "object": text}
        ).encode()

    def objects_folder(self, name: Name) -> str:
        """Where the bucket has what is shared of a session."""
        return self.head_path(name).replace(HEADS, OBJECTS, 1) + "/"

    def signed(self, path: str, body: bytes) -> bytes:
        """An object of other bytes than a head's, to be read at this path alone."""
        return bytes.fromhex(self._digest(b"object", path.encode() + b"\0" + body)) + body

    def hasher(self, path: str) -> blake2b:
        """A digest of bytes that belong to the object at this path."""
        hasher = blake2b(digest_size=DIGEST_BYTES, key=self._key, person=b"rows")
        hasher.update(path.encode() + b"\0")
        return hasher

    def verified(self, path: str, body: bytes) -> bytes:
        """The bytes that were signed. Raises ForeignObject."""
        plain = body[DIGEST_BYTES:]
        if body[:DIGEST_BYTES] != self.signed(path, plain)[:DIGEST_BYTES]:
            raise ForeignObject("it was written with another fleet secret, or changed since")
        return plain

    def read_head(self, body: bytes) -> Head:
        """A head from its bytes. Raises ForeignObject."""
        facts = self._read(Head, body)
        past = facts.pop("past")
        return _made(Head, facts | {"past": None if past is None else tuple(past)})

    def read_node(self, body: bytes) -> NodeRecord:
        """A node record from its bytes. Raises ForeignObject."""
        facts = self._read(NodeRecord, body)
        taken, hosts = facts.pop("taken"), tuple(facts.pop("hosts", ()))
        return _made(NodeRecord, facts | {"taken": None if taken is None else tuple(taken), "hosts": hosts})

    def read_holder(self, body: bytes) -> Holder:
        """A holder from its bytes. Raises ForeignObject."""
        return _made(Holder, self._read(Holder, body))

    def _read(self, kind: type, body: bytes) -> dict[str, Any]:
        try:
            found = json.loads(body)
            text, digest = str(found["object"]).encode(), str(found["digest"])
        # Brackets without end are a recursion to the reader.
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ForeignObject("it is no object of a fleet") from error
        # The digest first: of an object that somebody else wrote, no word is read.
        if digest != self._digest(kind.__name__.encode(), text):
            raise ForeignObject("it was written with another fleet secret, or changed since")
        facts: dict[str, Any] = json.loads(text)
        version = facts.pop("version")
        if version != VERSION:
            raise ForeignObject(f"it has version {version}, and this store reads version {VERSION}")
        return facts

    def _digest(self, use: bytes, text: bytes) -> str:
        return blake2b(text, digest_size=DIGEST_BYTES, key=self._key, person=use[:16]).hexdigest()


def node_path(node: str) -> str:
    """The path of a node's record."""
    return f"{NODES}{node}"


def away_path(node: str) -> str:
    """The path of the mark that a node was away for so long that its record was removed."""
    return f"v1/away/{node}"


HEADS = "v1/s/"
"""The beginning of the paths of heads."""
NODES = "v1/n/"
"""The beginning of the paths of node records."""
OBJECTS = "v1/o/"
"""The beginning of the paths of what is shared of sessions."""
HOLDERS = "v1/p/"
"""The beginning of the paths of holders."""


def _made(kind: type[T], facts: dict[str, Any]) -> T:
    try:
        return kind(**facts)
    except TypeError as error:
        raise ForeignObject("it has other facts than this version knows") from error
