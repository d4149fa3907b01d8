"""The player: calls of a recording, made against another store as an engine would make them.

Owned by one thread.

A session that the store lost is written anew with all that it had, as after any miss; what
it has more of than the recorded one is not written again. Worst case: a store that cannot be reached, which
is Unavailable; every other refusal is counted by its reason, and the next call is made.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ctxcache.client import CallerModel, Client
from ctxcache.client.rows import SessionRows
from ctxcache.client.types import SessionInfo, seconds
from ctxcache.client.writer import SessionWriter
from ctxcache.errors import CacheError, SessionAlreadyExists, SessionNotFound, Unavailable
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.simulate.recorded import Before, Called, Layout
from ctxcache.simulate.tally import FineHistogram

LEAST_TTL_S = 1.0
RANGES = 4096
"""That one call drops."""
NOT_PLAYED = frozenset(("expire", "evict", "cut"))
"""The store's own acts."""

WRITE_BYTES = 64 << 20
"""Bytes that are written at a time, all streams together, or a segment."""


class MadeUp:
    """A model whose sessions take as much as those of a recorded layout."""

    def __init__(self, layout: Layout) -> None:
        sizes = [row_bytes for row_bytes, count in layout.streams for _ in range(count)]
        specs = [
            StreamSpec(Stream(layer, StateKind.KV), row_bytes, DType.INT8)
            for layer, row_bytes in enumerate(sizes)
        ]
        digest = hashlib.sha256(repr(layout.streams).encode()).hexdigest()[:16]
        spec = ModelSpec(
            model_id=f"replay-{digest}",
            architecture="Replay",
            revision="",
            weights_digest="",
            tokenizer_digest="",
            dtype=DType.INT8,
            layer_count=len(sizes),
            hidden_size=1,
            kv_head_count=1,
            head_size=1,
            rope="",
            norm="",
            is_relocatable=True,
            streams=tuple(specs),
        )
        self.model = CallerModel(spec)
        self.streams = tuple(spec.stream for spec in specs)
        self._sizes = {TOKENS: TOKENS_SPEC.row_bytes} | {spec.stream: spec.row_bytes for spec in specs}
        segments = WRITE_BYTES // (sum(self._sizes.values()) * SEGMENT_TOKENS)
        self.most_tokens = max(segments, 1) * SEGMENT_TOKENS
        """That are written at a time."""
        draw = np.random.default_rng(0)
        self._bytes = draw.integers(0, 256, self.most_tokens * max(self._sizes.values()), np.uint8)

    def rows(self, session: str, begin: int, token_count: int) -> Mapping[Stream, npt.NDArray[np.uint8]]:
        """Rows of so many tokens of every stream, [token_count, row_bytes]; at most `most_tokens`.

        No two sessions begin with the same tokens: a store keeps what they have in common.
        """
        seed = int.from_bytes(hashlib.sha256(session.encode()).digest()[:4])
        places = np.arange(begin, begin + token_count, dtype=np.uint32)
        tokens = ((places * np.uint32(2654435761) + np.uint32(seed)) >> 1).astype(np.int32)
        rows = {
            stream: self._bytes[: token_count * size].reshape(token_count, size)
            for stream, size in self._sizes.items()
            if stream != TOKENS
        }
        return {TOKENS: tokens.view(np.uint8).reshape(token_count, -1), **rows}


class Player:
    """Plays calls; `latencies` by kind in seconds, `errors` by kind and reason."""

    def __init__(self, client: Client, made_up: Mapping[int, MadeUp], prefix: str, speed: float) -> None:
        """`prefix` of the names of sessions; times to live are `speed` times shorter, 0 changes none."""
        self._client, self._made_up, self._prefix = client, made_up, prefix
        self._times = 1 / speed if speed else 1.0
        self._ttls_s: dict[str, float] = {}
        self._held: dict[int, SessionRows] = {}
        self._writers: dict[str, SessionWriter] = {}
        self.latencies: dict[str, FineHistogram] = {}
        self.errors: Counter[tuple[str, str]] = Counter()
        self._plays: Mapping[str, Callable[[Called], object]] = {
            "open": self._open,
            "reserve": self._reserve,
            "append": self._append,
            "finish": self._finish,
            "lookup": self._lookup,
            "get": self._get,
            "read": self._read,
            "release": self._release,
            "truncate": self._truncate,
            "fork": self._fork,
            "touch": self._touch,
            "hint": self._hint,
            "flush": lambda call: client.sessions.open(self.name(call.session)).flush(),
            "demote": lambda call: client.admin.demote_session(self.name(call.session)),
            "delete": self._delete,
        }

    def name(self, session: str) -> str:
        """A session's name in the store."""
        return f"sessions/{self._prefix}{session}"

    def prime(self, before: Before) -> None:
        """Have a session as it was when the recording began. Raises CacheError."""
        self._grow(before.session, before.layout, before.tokens)

    def play(self, call: Called) -> None:
        """Make one call. Raises Unavailable."""
        begun_s = perf_counter()
        try:
            self._plays[call.kind](call)
        except Unavailable:
            raise
        except CacheError as error:
            self.errors[call.kind, error.reason] += 1
        took_s = perf_counter() - begun_s
        self.latencies.setdefault(call.kind, FineHistogram()).add(took_s)

    def close(self) -> None:
        """Give back what is held."""
        ends = [held.close for held in self._held.values()] + [held.close for held in self._writers.values()]
        for end in ends:
            with suppress(CacheError):
                end()

    # -- calls ---------------------------------------------------------------------------------------

    def _open(self, call: Called) -> None:
        self._ttls_s[call.session] = self._ttl_s(call)
        self._made(call.session, call.count("layout"), is_pinned=bool(call.values.get("is_pinned")))

    def _append(self, call: Called) -> None:
        if call.is_refused:
            return
        writer = self._writers.get(call.session)
        if writer is None or call.session_tokens > writer.write_offset + writer.token_count:
            self._finish(call)
            self._grow(call.session, call.count("layout"), call.session_tokens)
            return
        begin = writer.session.token_count
        if call.session_tokens > begin:
            made_up, count = self._made_up[call.count("layout")], call.session_tokens - begin
            rows_of = made_up.rows(call.session, begin, count)
            for stream, rows in rows_of.items():
                writer.write(stream, begin - writer.write_offset, rows)
            writer.commit(call.session_tokens, keep_open=True)

    def _reserve(self, call: Called) -> None:
        """Room from here on, as far as it would not be too much to write at a time."""
        self._finish(call)
        layout = call.count("layout")
        found = self._found(call.session, layout)
        count = call.session_tokens + call.count("tokens") - found.token_count
        if 0 < count <= self._made_up[layout].most_tokens:
            self._writers[call.session] = self._client.sessions.open(
                found, self._made_up[layout].model
            ).writer(count)

    def _finish(self, call: Called) -> None:
        writer = self._writers.pop(call.session, None)
        if writer is not None:
            writer.close()

    def _lookup(self, call: Called) -> None:
        # A session that was never seen has no layout.
        made_up = self._made_up.get(call.count("layout")) or next(iter(self._made_up.values()), None)
        if made_up is not None:
            self._client.sessions.lookup([(self.name(call.session), made_up.model.fingerprint)])

    def _get(self, call: Called) -> None:
        self._client.sessions.get(self.name(call.session))

    def _read(self, call: Called) -> None:
        begin = call.count("begin")
        # The size of a refused one is not known.
        end = None if call.is_refused else begin + call.count("tokens")
        rows = self._client.sessions.open(
            self.name(call.session), self._made_up[call.count("layout")].model
        ).read(begin=begin, end=end)
        self._held[call.count("lease")] = rows
        for _ in rows.chunks():
            pass

    def _release(self, call: Called) -> None:
        rows = self._held.pop(call.count("lease"), None)
        if rows is not None:
            rows.close()

    def _truncate(self, call: Called) -> None:
        dropped = call.values.get("dropped")
        ends = [int(index) for index in dropped] if isinstance(dropped, list) else []
        ranges = list(zip(ends[::2], ends[1::2], strict=True))
        # From behind: what is dropped changes no index before it.
        while ranges:
            self._client.sessions.open(self.name(call.session)).drop_ranges(ranges[-RANGES:])
            del ranges[-RANGES:]

    def _fork(self, call: Called) -> None:
        self._ttls_s[call.session] = ttl_s = self._ttl_s(call)
        fork = partial(
            self._client.sessions.open(self.name(call.text("source"))).fork,
            id=self._prefix + call.session,
            token_count=call.session_tokens,
            ttl=seconds(ttl_s),
        )
        try:
            fork()
        except SessionAlreadyExists:
            # An adoption: the session was opened before, and is empty.
            self._client.sessions.open(self.name(call.session)).delete()
            fork()

    def _touch(self, call: Called) -> None:
        self._ttls_s[call.session] = ttl_s = self._ttl_s(call)
        is_pinned = bool(call.values.get("is_pinned"))
        self._client.sessions.open(self.name(call.session)).update(ttl=seconds(ttl_s), is_pinned=is_pinned)

    def _delete(self, call: Called) -> None:
        self._ttls_s.pop(call.session, None)
        self._client.sessions.open(self.name(call.session)).delete()

    def _hint(self, call: Called) -> None:
        name, client = self.name(call.session), self._client
        tokens = call.count("end") if "end" in call.values else None
        budget_bytes = call.count("budget_bytes") if "budget_bytes" in call.values else None
        ttl, priority = seconds(self._ttl_s(call)), call.count("priority")
        match call.text("hint"):
            case "share":
                client.hints.share(name, token_count=tokens)
            case "prefetch":
                client.hints.prefetch(name, token_count=tokens, budget_bytes=budget_bytes, ttl=ttl)
            case "demote":
                client.hints.demote(name)
            case "pin":
                client.hints.pin(name, ttl=ttl, priority=priority, budget_bytes=budget_bytes)
            case "retain":
                client.hints.retain(name, ttl=ttl, priority=priority, budget_bytes=budget_bytes)
            case "release":
                client.hints.release(name)
            case "expect":
                is_over = "return_in_ms" not in call.values
                return_in_s = call.count("return_in_ms") / 1000 * self._times
                client.hints.expect(name, None if is_over else seconds(return_in_s))

    # -- parts ---------------------------------------------------------------------------------------

    def _ttl_s(self, call: Called) -> float:
        return max(call.count("ttl_ms") / 1000 * self._times, LEAST_TTL_S)

    def _made(self, session: str, layout: int, *, is_pinned: bool = False) -> SessionInfo:
        """The session, made if it is not there."""
        ttl_s = self._ttls_s.get(session)
        try:
            made_up = self._made_up[layout]
            return self._client.sessions.create(
                made_up.model,
                id=self._prefix + session,
                layout=made_up.streams,
                ttl=None if ttl_s is None else seconds(ttl_s),
                is_pinned=is_pinned,
            ).info
        except SessionAlreadyExists:
            return self._client.sessions.get(self.name(session))

    def _found(self, session: str, layout: int) -> SessionInfo:
        """The session, made if it is not there, and it is expected to be."""
        try:
            return self._client.sessions.get(self.name(session))
        except SessionNotFound:
            return self._made(session, layout)

    def _grow(self, session: str, layout: int, token_count: int) -> None:
        """Let the session have so many tokens, if it has fewer."""
        found, made_up = self._found(session, layout), self._made_up[layout]
        while (left_count := token_count - found.token_count) > 0:
            count = min(left_count, made_up.most_tokens)
            with self._client.sessions.open(found, made_up.model).writer(count) as writer:
                for stream, rows in made_up.rows(session, found.token_count, count).items():
                    writer.write(stream, 0, rows)
                found = writer.commit()
