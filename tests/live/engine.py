"""An engine beside a running store: what a replay asks of its ledger, done with real calls and real bytes.

It looks up, leases what is there and verifies every byte, keeps the lease while the turn lasts, and writes
what is new; what is not there is made anew with the whole history, as an engine does that has recomputed
it. Worst case: a byte that is not the session's, which is an AssertionError.
"""

from collections import Counter
from contextlib import suppress
from typing import Protocol

from ctxcache.client import CallerModel, Client
from ctxcache.client.rows import SessionRows
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.core.placement.policy import Facts, Level
from ctxcache.errors import CacheError, SessionNotFound
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.simulate.store import Move
from tests.faults.rows import first_difference, rows_of
from tests.live.names import name_of, owner_of
from tests.live.scheduler import Hints
from tests.model_specs import small_model

STORED = (TOKENS_SPEC, *(StreamSpec(Stream(layer, StateKind.KV), 64, DType.FLOAT16) for layer in range(2)))
MODEL = small_model(
    *STORED[1:], model_id="live", architecture="Live", layer_count=2, hidden_size=64, head_size=16
)
OWN = CallerModel(MODEL)
LAYOUT = SegmentLayout(STORED)
SLOT_BYTES = LAYOUT.size_bytes
TOKEN_BYTES = SLOT_BYTES // LAYOUT.segment_tokens
"""Bytes of a token of a full segment in the store, header and padding included."""
TRIES = 3


class Store(Protocol):
    """The engine's view of a running store, beside its address."""

    def set_time(self, now_s: float) -> None:
        """Let it be so many seconds after the start."""

    def written(self) -> None:
        """Rows are in place and not committed."""

    def rest(self) -> None:
        """The turn is over: wait until it has nothing more to do but to read ahead."""

    def prefetch(self) -> None:
        """Wait until nobody is to be read ahead."""


class Engine:
    """Stands where a replay has its ledger; what the store moves it does not say.

    With `goes_on` what the store refuses is a trouble, counted by reason, and the turn goes on as after a
    miss; without, it is raised.
    """

    def __init__(
        self,
        store: Store,
        client: Client,
        hints: Hints | None = None,
        *,
        goes_on: bool = False,
        is_durable: bool = False,
    ) -> None:
        self._store, self._client, self._goes_on = store, client, goes_on
        self._durability = Durability.DISK if is_durable else Durability.MEMORY
        self.policy = hints or Hints()
        self.policy.tell_time = self._set_time
        self.troubles: Counter[str] = Counter()
        self.verified_tokens = 0
        self._fingerprint = MODEL.fingerprint()
        self._sizes: dict[bytes, int] = {}
        """Tokens of every session, as the engine knows them."""
        self._found_tokens = 0
        """The tokens that the last look-up found."""
        self._open: dict[bytes, SessionRows] = {}
        client.models.register(MODEL)

    def tier(self, uid: bytes) -> Level | None:
        """Where the whole session lies; None for one that is there in part, too."""
        known_tokens = self._sizes.get(uid, 0)
        try:
            (found,) = self._client.sessions.lookup([(name_of(uid), self._fingerprint)])
        except CacheError as error:
            self._trouble(error)
            return None
        self._found_tokens = found.token_count
        is_right = found.token_count in (0, known_tokens) or self._goes_on
        if found.token_count > known_tokens or not is_right:
            raise AssertionError(f"{uid!r} has {found.token_count} tokens, not {known_tokens}")
        if not known_tokens or found.token_count < known_tokens:
            return None
        return Level.MEMORY if found.dram_token_count == found.token_count else Level.BELOW

    def is_on_ssd(self, uid: bytes) -> bool:  # noqa: ARG002  for a ledger's
        """The store counts its writes itself."""
        return False

    def arrived(self, uid: bytes, now_s: float) -> list[Move]:
        """A turn begins: lease the session if it is there, create it if it is not."""
        self._set_time(now_s)
        self._found_tokens = 0
        self.tier(uid)
        if self._found_tokens:
            self._lease(uid)
        else:
            try:
                self._made(uid)
            except CacheError as error:
                self._trouble(error)
        return []

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> list[Move]:
        """The turn is over: write what is new, or everything, and let the store come to rest."""
        self._set_time(now_s)
        self._sizes[uid] = facts.size_bytes // TOKEN_BYTES
        held = self._open.pop(uid, None)
        for _ in range(TRIES):
            try:
                self._write(uid, held)
                break
            except CacheError as error:
                self._trouble(error)
            if held:
                held.close()
                held = None
        self._store.rest()
        return []

    def left(self, uid: bytes) -> None:
        """The turn is over, and has written nothing."""
        held = self._open.pop(uid, None)
        if held:
            held.close()

    def ended(self, uid: bytes) -> list[Move]:
        """The session's time is over by the clock."""
        self._sizes.pop(uid, None)
        return []

    def prefetch(self) -> list[Move]:
        """Let the store read ahead whom it wants, until there is nobody or no room."""
        self._store.prefetch()
        return []

    def _set_time(self, now_s: float) -> None:
        self._store.set_time(now_s)
        self.policy.set_time(now_s)

    def _lease(self, uid: bytes) -> None:
        try:
            self._open[uid] = self._read(uid)
        except CacheError as error:
            self._trouble(error)
            # A session that cannot be read is made anew.
            with suppress(CacheError):
                self._client.sessions.open(name_of(uid)).delete()

    def _read(self, uid: bytes) -> SessionRows:
        rows = self._client.sessions.open(name_of(uid), OWN).read()
        for spec in STORED:
            wrong = first_difference(rows.array(spec.stream), owner_of(uid), spec.stream, 0)
            if wrong is not None:
                raise AssertionError(f"{uid!r}: row {wrong} of {spec.stream} is not its own")
        self.verified_tokens += rows.token_count
        return rows

    def _write(self, uid: bytes, held: SessionRows | None) -> None:
        session = held.session if held else self._made(uid)
        begin, end = session.token_count, self._sizes[uid]
        if begin == end:
            return
        with self._client.sessions.open(session, OWN).writer(end - begin) as writer:
            if held:
                held.close()
            for spec in STORED:
                rows = rows_of(owner_of(uid), spec.stream, begin, end, spec.row_bytes)
                writer.write(spec.stream, 0, rows)
            self._store.written()
            writer.commit(durability=self._durability)

    def _made(self, uid: bytes) -> SessionInfo:
        with suppress(SessionNotFound):
            return self._client.sessions.get(name_of(uid))
        layout = [spec.stream for spec in STORED]
        return self._client.sessions.create(OWN, id=uid.decode(), layout=layout).info

    def _trouble(self, error: CacheError) -> None:
        if not self._goes_on:
            raise error
        self.troubles[error.reason] += 1
