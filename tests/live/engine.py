"""An engine beside a running store: what a replay asks of its ledger, done with real calls and real bytes.

It looks up, leases what is there and verifies every byte, keeps the lease while the turn lasts, and writes
what is new; what is not there is made anew with the whole history, as an engine does that has recomputed
it. Worst case: a byte that is not the session's, which is an AssertionError.
"""

import zlib
from typing import Protocol

from ctxcache.client import Client
from ctxcache.client.rows import SessionRows
from ctxcache.core.placement.ledger import Act, Move
from ctxcache.core.placement.policy import Facts, Tier
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.v1.session_pb2 import LOOKUP_STATE_HIT, Session
from tests.faults.rows import first_difference, rows_of

STORED = (TOKENS_SPEC, *(StreamSpec(Stream(layer, StateKind.KV), 64, DType.FLOAT16) for layer in range(2)))
MODEL = ModelSpec(
    model_id="live", architecture="Live", revision="", weights_digest="", tokenizer_digest="",
    dtype=DType.FLOAT16, layer_count=2, hidden_size=64, kv_head_count=1, head_size=16, rope="", norm="",
    is_relocatable=True, streams=STORED[1:],
)  # fmt: skip
LAYOUT = SegmentLayout(STORED)
SLOT_BYTES = LAYOUT.size_bytes
TOKEN_BYTES = SLOT_BYTES // LAYOUT.segment_tokens
"""What a token of a full segment takes in the store, header and padding included."""


class Store(Protocol):
    """What the engine needs of a running store beside its address."""

    def set_time(self, now_s: float) -> None:
        """Let it be so many seconds after the start."""

    def rest(self) -> None:
        """Wait until it has nothing more to do."""


class Hints:
    """What a scheduler says: nothing yet."""

    def hinted(self, uid: bytes, order: float) -> None:
        """A job of the session waits."""

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """When the session returns; None: never."""


class Engine:
    """Stands where a replay has its ledger."""

    def __init__(self, store: Store, client: Client) -> None:
        self._store, self._client = store, client
        self.policy = Hints()
        self._fingerprint = MODEL.fingerprint()
        self._sizes: dict[bytes, int] = {}
        """Tokens of every session, as the engine knows them."""
        self._open: dict[bytes, SessionRows] = {}
        self._promoted_count = self._evicted_count = 0
        client.register_model(MODEL)

    def tier(self, uid: bytes) -> Tier | None:
        """Where the whole session lies. Fails for one that is there in part."""
        (found,) = self._client.lookup([(_name(uid), self._fingerprint)])
        if found.state != LOOKUP_STATE_HIT:
            return None
        if found.token_count != self._sizes.get(uid):
            raise AssertionError(f"{uid!r} has {found.token_count} tokens, not {self._sizes.get(uid)}")
        return Tier.DRAM if found.dram_token_count == found.token_count else Tier.SSD

    def arrived(self, uid: bytes, now_s: float) -> list[Move]:
        """A turn begins: lease the session if it is there."""
        self._store.set_time(now_s)
        tier = self.tier(uid)
        if tier is not None:
            self._open[uid] = self._read(uid)
        return self._moves()

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> list[Move]:
        """The turn is over: write what is new, or everything, and let the store come to rest."""
        self._store.set_time(now_s)
        token_count = facts.size_bytes // TOKEN_BYTES
        held = self._open.pop(uid, None)
        session = held.session if held else self._create(uid)
        begin = session.token_count
        with self._client.writer(session, token_count - begin) as writer:
            if held:
                held.close()
            for spec in STORED:
                writer.write(
                    spec.stream, 0, rows_of(_owner(uid), spec.stream, begin, token_count, spec.row_bytes)
                )
            writer.commit()
        self._sizes[uid] = token_count
        self._store.rest()
        return self._moves()

    def ended(self, uid: bytes) -> list[Move]:
        """The session's time is over by the clock."""
        self._sizes.pop(uid, None)
        return []

    def prefetch(self) -> list[Move]:
        """The store prefetches by itself."""
        return []

    def _read(self, uid: bytes) -> SessionRows:
        rows = self._client.read(_name(uid))
        for spec in STORED:
            wrong = first_difference(rows.array(spec.stream), _owner(uid), spec.stream, 0)
            if wrong is not None:
                raise AssertionError(f"{uid!r}: row {wrong} of {spec.stream} is not its own")
        return rows

    def _create(self, uid: bytes) -> Session:
        return self._client.create_session(
            f"models/{MODEL.model_id}", session_id=uid.decode(), layout=[spec.stream for spec in STORED]
        )

    def _moves(self) -> list[Move]:
        """What the store has moved since the last call, as far as its counters say."""
        stats = self._client.stats()
        promoted = stats.promoted_segment_count - self._promoted_count
        evicted = stats.evicted_session_count - self._evicted_count
        self._promoted_count += promoted
        self._evicted_count += evicted
        moves = [Move(Act.EVICT, b"", 0, Tier.SSD)] * evicted
        return [Move(Act.PROMOTE, b"", promoted * SLOT_BYTES, Tier.DRAM)] * bool(promoted) + moves


def _name(uid: bytes) -> str:
    return f"sessions/{uid.decode()}"


def _owner(uid: bytes) -> int:
    return zlib.crc32(uid) >> 1
