"""Aging: idle sessions are kept in smaller forms, used ones in their first form.

```
   hot: as an engine saves it   ──►   warm: layer inputs, or few bits   ──►   cold: token ids alone
   │        while it is idle: the form of least  back + make + rent x bytes x time idle           │
   │◄───────────────────── used again: computed anew from its token ids ──────────────────────────┘
```

A form costs rent while it is kept, and time when the session comes back, as the planner says of this machine.
A session that has been idle for some time is to lie in the form that would have been the cheapest, had that
time been known before. No return is guessed, and where changing the form costs nothing the sum is at most
twice that of a keeper who knows all returns: the lower envelope, Irani, Shukla and Gupta, "Online strategies
for dynamic power management in systems with multiple power-saving states", ACM TECS 2003.

The new form is a session of its own until it is whole and durable. Then it takes the other's place in one
step of the store. A process that is killed leaves the one or the other, and a form that it had begun expires.
Sessions that are read, written or waited for are left alone. Rows of few bits are never packed again, and
exact rows are never made of them. Used by one thread: an engine's between its turns, or that of a process
with a model of its own. Worst case: a rent that is wrong, and sessions come back slower than they would have
had to; or a full SSD, where the new form needs room before the old one gives its own back.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ctxcache.client import CallerModel, Client, SessionHandle
from ctxcache.client.arena import Bytes
from ctxcache.client.types import SessionInfo
from ctxcache.core.placement.returns import ReturnShare
from ctxcache.errors import CacheError, GenerationMismatch, InvalidArgument, SessionNotFound, Unavailable
from ctxcache.format.packing import DELTAS, LOSSY_KINDS, is_on_tokens, unpacked
from ctxcache.format.streams import TOKEN_ROW_BYTES, TOKENS, StateKind, Stream
from gpu_worker.families import Adapter
from gpu_worker.families.generation import Capture, prefill
from gpu_worker.families.model_shape import model_shape
from gpu_worker.forms.deltas import Chain, chained_layers
from gpu_worker.forms.rounding import Roundings
from gpu_worker.forms.rows import as_stored
from gpu_worker.pipeline.compute import inputs_of
from gpu_worker.planning.adaptive import AdaptivePlanner
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.layout import Kinds, kinds_of_form
from gpu_worker.planning.profile import NO_LIMIT, Profile, StatePlace

log = logging.getLogger(__name__)

RENT_S_PER_GB_HOUR = 0.059
"""Seconds of a machine that cost what 10^9 bytes on SSD cost in an hour, in `ctxcache simulate`."""
THAW_S = 300.0
"""A session that was used so lately is in use again."""
THAW_RETURNS = 2
"""How often a session is taken to return, where its form is compared with the first one."""
PIECE_TOKENS = 512
STAGED = "aging."
"""The ids of forms under way begin so; no session of such a name is looked at."""
STAGED_TTL_S = 600.0
"""A form that was begun and not finished expires then."""


@dataclass(frozen=True, slots=True)
# A form's cost is a line over the time that its session is idle: back_s + make_s + rent * bytes * idle.
#
#     hot     begins lowest: comes back at once            rises fastest: most bytes
#     warm    between                                      between
#     cold    begins highest: a prefill to come back       rises slowest: token ids alone
#
# The lowest line at a moment is the form that is due then; together these are the lower envelope.
class Form:
    """A form of one session: its kinds by layer, its size, and seconds of the machine.

    `back_s` brings the form back, `make_s` makes it of the session's present form, `again_s` makes the first
    form of it when the session is used.
    """

    kinds: Kinds
    size_bytes: float
    back_s: float
    make_s: float = 0.0
    again_s: float = 0.0

    def cost_s(self, idle_s: float, rent_s_per_gb_hour: float, returning: float = 1.0) -> float:
        """Seconds of the machine for a session that is idle for so long and then so likely to come back."""
        # Seconds of the machine: s / (GB h) * GB * h.
        rent_s = rent_s_per_gb_hour * self.size_bytes / 1e9 * idle_s / 3600.0
        return returning * (self.back_s + self.again_s) + self.make_s + rent_s


@dataclass(frozen=True, slots=True)
class SessionLook:
    """A session as it is kept: `due` is the form that it should have, None where it has that form already.

    `back_s` of a form is from SSD. `rent_s_per_hour`: seconds of the machine that its bytes are worth.
    """

    session: SessionInfo
    idle_s: float
    form: Form
    due: Form | None
    rent_s_per_hour: float


@dataclass(frozen=True, slots=True)
class Aged:
    """The outcome for one session. `reason`: why it was left alone; empty where it has the new form."""

    session_name: str
    token_count: int
    before: str
    after: str
    before_bytes: float
    after_bytes: float
    reason: str = ""


def kinds_text(kinds: Kinds) -> str:
    """Say which kind each layer has: `kv:0-29`, or `tokens` where none has any."""
    if not any(kinds):
        return "tokens"
    parts, begin = [], 0
    for kind, group in groupby(kinds):
        end = begin + len(list(group))
        name = "tokens" if kind is None else kind.name.lower()
        parts.append(f"{name}:{begin}-{end - 1}" if end > begin + 1 else f"{name}:{begin}")
        begin = end
    return ",".join(parts)


class Aging:
    """Re-encodes one model's sessions in a store."""

    def __init__(
        self,
        adapter: Adapter,
        client: Client,
        model: CallerModel,
        profile: Profile,
        hot: Iterable[Stream],
        *,
        rent_s_per_gb_hour: float = RENT_S_PER_GB_HOUR,
        thaw_s: float = THAW_S,
        returning: float | None = None,
    ) -> None:
        """`hot`: the layout of sessions in use. Packed kinds are used where `model` lists them.

        `rent_s_per_gb_hour`: seconds of this machine that a GB kept for an hour is worth. `returning`: the
        share of idle sessions that are known to come back; at 1 the sum is bounded whatever they do. None: it
        is learned from sweep to sweep, and is 1 at first. Raises
        InvalidArgument(field="rent" | "thaw" | "returning").
        """
        if not 0 < rent_s_per_gb_hour < NO_LIMIT:
            raise InvalidArgument(field="rent", problem=f"{rent_s_per_gb_hour} s per GB and hour is none")
        if not 0 <= thaw_s < NO_LIMIT:
            raise InvalidArgument(field="thaw", problem=f"{thaw_s} s is no time")
        if returning is not None and not 0 < returning <= 1:
            raise InvalidArgument(field="returning", problem=f"{returning} is no share of sessions")
        self._adapter, self._client, self._model = adapter, client, model
        self._rent, self._thaw_s, self._fixed = rent_s_per_gb_hour, thaw_s, returning
        self._watch = _Watching()
        self._shape = model_shape(adapter, adapter.architecture)
        self._profile, self._roundings = profile, Roundings(adapter)
        self._allowed = frozenset(spec.stream.kind for spec in model.spec.streams)
        engine = EngineAbilities(lossy_kinds=self._allowed & frozenset(LOSSY_KINDS))
        self._planner = AdaptivePlanner(self._shape, profile, engine=engine)
        by_layer = _by_layer(hot, len(self._shape.layers))
        if by_layer is None:
            raise InvalidArgument(field="hot", problem="a layer has several kinds")
        self._hot = by_layer

    # -- which form ----------------------------------------------------------------------------------

    @property
    def returning(self) -> float:
        """How likely a session is taken to return."""
        return self._watch.returns.share if self._fixed is None else self._fixed

    def due(self, session: SessionInfo, idle_s: float) -> Form | None:
        """The form that is due for a session that has been idle for so long; None where it has that form."""
        look = self.look(session, idle_s)
        return None if look is None else look.due

    def look(self, session: SessionInfo, idle_s: float) -> SessionLook | None:
        """A session that has been idle for so long; None for one without tokens, or with several kinds."""
        held = _by_layer(session.streams(), len(self._shape.layers))
        if held is None or not session.token_count:
            return None
        current = self._form(held, session.token_count, held)
        due = self._due(current, session.token_count, idle_s)
        return SessionLook(session, idle_s, current, due, self._rent * current.size_bytes / 1e9)

    def _due(self, current: Form, count: int, idle_s: float) -> Form | None:
        # A session used a moment ago gets the form of sessions in use again, where it pays.
        if idle_s < self._thaw_s:
            return self._form(self._hot, count, current.kinds) if current.again_s else None
        forms = self._forms(current.kinds, count)
        # An idle session gets smaller forms only: it grows again when it is used.
        smaller = [each for each in forms if each.size_bytes < current.size_bytes]
        returning = self.returning
        best = min((current, *smaller), key=lambda each: each.cost_s(idle_s, self._rent, returning))
        return None if best is current else best

    def _forms(self, held: Kinds, count: int) -> Iterator[Form]:
        # Token ids are always held, and a prefill makes all rows of them.
        yield self._form((None,) * len(held), count, held)
        for kind in sorted(self._allowed - {StateKind.TOKENS}):
            kinds = kinds_of_form(self._shape, kind, held)
            if kinds != held and self._allowed.issuperset(each for each in kinds if each):
                # A form that cannot come back on this machine is left out.
                with suppress(InvalidArgument):
                    yield self._form(kinds, count, held)

    def _form(self, kinds: Kinds, count: int, held: Kinds) -> Form:
        layers = self._shape.layers
        size_bytes, back_s = self._measured(kinds, count)
        computing_s = sum(self._profile.recompute_s(layer, 0, count) for layer in layers)
        make_s = again_s = 0.0
        if kinds != held:
            writing_s = sum(self._profile.transfer_s({StatePlace.SSD: size_bytes}))
            # A form that is made of rows is priced by its write, another form by its prefill.
            make_s = writing_s if self._is_from_rows(kinds, held) else computing_s
        hot_bytes, hot_back_s = self._measured(self._hot, count)
        # Making the first form again pays where a prefill costs less than two returns lose by this form:
        #
        #     computing_s < 2 * (back_s of this form - back_s of the first)
        if size_bytes < hot_bytes and computing_s < THAW_RETURNS * (back_s - hot_back_s):
            again_s = computing_s
        return Form(kinds, size_bytes, back_s, make_s, again_s)

    def _measured(self, kinds: Kinds, count: int) -> tuple[float, float]:
        """Bytes of so many tokens on SSD, and the seconds to bring them back."""
        spans = (HeldSpan(StatePlace.SSD, 0, count),)
        holding = Holding(tuple(LayerHolding(((kind, spans),) if kind else ()) for kind in kinds))
        layers = self._shape.layers
        sizes = (layer.row_bytes(kind) for layer, kind in zip(layers, kinds, strict=True) if kind)
        size_bytes = float(count * (TOKEN_ROW_BYTES + sum(sizes)))
        return size_bytes, self._planner.plan(holding, count).restored_s

    def _is_from_rows(self, kinds: Kinds, held: Kinds) -> bool:
        """Whether the rows that are held suffice: each layer's as they are, or exact ones."""
        return all(
            # Packed rows are made of exact ones only: packing twice would add a second loss.
            kind is None or kind is has or unpacked(kind) is has
            for kind, has in zip(kinds, held, strict=True)
        )

    # -- all sessions --------------------------------------------------------------------------------

    def looks(self, *, now_s: float | None = None) -> Iterator[SessionLook]:
        """Look at every session of the model that may change its form, and change nothing.

        `now_s`: Unix time. Raises Unavailable, DeadlineExceeded.
        """
        for listed in self._watch.seen(self._listed()):
            at_s = time.time() if now_s is None else now_s
            idle_s = at_s - (listed.access_time_ns or 0) / 1e9
            # A pin says that somebody wants the session as it is.
            look = None if listed.is_pinned else self.look(listed, idle_s)
            if look is not None:
                yield look

    def _listed(self) -> Iterator[SessionInfo]:
        for listed in self._client.sessions.list(self._model.name):
            # Another model under the same name has other rows: its sessions are not read here.
            is_own = listed.model_fingerprint == self._model.fingerprint
            if is_own and not listed.name.startswith(f"sessions/{STAGED}"):
                yield listed

    def sweep(self, *, now_s: float | None = None) -> Iterator[Aged]:
        """Look at every session of the model once; tells of each that got, or should have, another form.

        `now_s`: Unix time. Raises Unavailable, DeadlineExceeded.
        """
        for look in self.looks(now_s=now_s):
            aged = self.aged(look)
            if aged is not None:
                yield aged

    def aged(self, look: SessionLook) -> Aged | None:
        """Give a session the form that it is due; None where it has that. Raises Unavailable."""
        if look.due is None:
            return None
        session, reason = look.session, ""
        try:
            self.reencode(session, look.due.kinds)
        # The store is gone: the sweep ends, and the next one begins anew. Other errors are of one session.
        except Unavailable:
            raise
        except CacheError as error:
            reason = error.reason
            log.info("session_not_aged session=%s reason=%s error=%s", session.name, reason, error)
        return Aged(
            session.name,
            session.token_count,
            kinds_text(look.form.kinds),
            kinds_text(look.due.kinds),
            look.form.size_bytes,
            look.due.size_bytes,
            reason,
        )

    # -- one session ---------------------------------------------------------------------------------

    def reencode(self, session: SessionInfo, kinds: Kinds) -> SessionInfo:
        """Give a session, as it was seen, rows of these kinds; all of it, or nothing changes.

        Raises GenerationMismatch, SessionInUse, WriteInProgress and SessionNotFound where somebody has it or
        has changed it, InvalidArgument(field="kinds" | "session"), and what reading and appending raise.
        """
        streams = self._streams(kinds)
        self._model.check(session)
        now = self._client.sessions.get(session.name)
        # A session of that name was made since: it is another session.
        if now.uid != session.uid:
            raise SessionNotFound(session=session.name)
        if now.generation != session.generation:
            raise GenerationMismatch(session=session.name, expected=session.generation, actual=now.generation)
        # Lost tokens leave a gap in the positions, and pictures
        # are more than their token ids: a prefill would differ.
        if now.whole_token_count < now.token_count or now.contents:
            problem = (
                f"{now.name} has lost tokens, or has other contents: it is not computed from its token ids"
            )
            raise InvalidArgument(field="session", problem=problem)
        # One session's change of form, and what a crash leaves at each step:
        #
        #     create "aging.<id>", with a ttl     an empty session, which expires
        #     append rows, piece by piece         an unfinished one, which expires; the old one is as it was
        #     fork onto the old name              one step: the old session before it, the new one behind
        #     delete "aging.<id>"                 left over: it expires, its segments are shared
        staged = self._client.sessions.create(
            self._model,
            id=STAGED + uuid.uuid4().hex,
            layout=[stream for stream in streams if stream != TOKENS],
            ttl=timedelta(seconds=STAGED_TTL_S),
            salt=now.salt,
            copies=now.copies,
        )
        try:
            self._fill(staged, now, kinds, streams)
            aged = staged.fork(
                id=now.name.removeprefix("sessions/"),
                if_generation_match=staged.info.generation,
                # A turn that came meanwhile has another generation:
                # the store refuses, and the session keeps its rows.
                replaces_generation=now.generation,
            )
            return aged.info
        finally:
            # The staged session expires anyway; the error of the work matters more.
            with suppress(CacheError):
                staged.delete()

    def _streams(self, kinds: Kinds) -> tuple[Stream, ...]:
        layers = self._shape.layers
        if len(kinds) != len(layers):
            raise InvalidArgument(field="kinds", problem=f"{len(kinds)} layers, the model has {len(layers)}")
        streams = tuple(Stream(layer, kind) for layer, kind in enumerate(kinds) if kind is not None)
        self._model.specs(streams)
        # For its error: a delta without a base below it must not be begun.
        chained_layers(streams)
        if is_on_tokens(streams) and not self._adapter.has_token_inputs:
            problem = f"layer 0's input of {self._adapter.architecture} does not follow from token ids alone"
            raise InvalidArgument(field="kinds", problem=problem)
        return (TOKENS, *streams)

    def _fill(
        self, staged: SessionHandle, session: SessionInfo, kinds: Kinds, streams: Sequence[Stream]
    ) -> None:
        held = _by_layer(session.streams(), len(kinds))
        is_from_rows = held is not None and self._is_from_rows(kinds, held)
        pieces = self._held_rows(session, kinds) if is_from_rows else self._computed_rows(session, streams)
        begin = 0
        for token_ids, rows in pieces:
            ids = np.asarray(token_ids, "<i4").view(np.uint8).reshape(-1, TOKEN_ROW_BYTES)
            staged.append({TOKENS: ids, **self._packed(streams, rows, token_ids, begin)})
            begin += len(token_ids)

    def _packed(
        self, streams: Sequence[Stream], rows: Mapping[Stream, Tensor], token_ids: Sequence[int], begin: int
    ) -> dict[Stream, Bytes]:
        """Rows of tokens from `begin` on, wide or as they are stored, in the form that is stored now."""
        count = len(token_ids)
        # Each piece has a chain of its own, since it has the rows of all layers for its own tokens.
        chain = Chain(chained_layers(streams), count, self._adapter.hidden_size, rounding=self._rounding)
        if is_on_tokens(streams):
            ids = torch.tensor(token_ids)
            for first, inputs in inputs_of(self._adapter, ids, torch.arange(begin, begin + count)):
                chain.take_inputs(ids[first : first + len(inputs)], inputs.cpu(), first)
        packed: dict[Stream, Bytes] = {}
        for stream, spec in self._model.specs(streams).items():
            if stream == TOKENS:
                continue
            wide = rows[stream]
            # Layer by layer in storage order: a delta needs the rows below it, as they come back.
            stored = chain.packed(spec, wide) if stream.kind in _FROM_INPUTS else as_stored(wide, spec)
            packed[stream] = stored.contiguous().view(torch.uint8).numpy().reshape(count, -1)
        return packed

    def _rounding(self, layer: int) -> Tensor | None:
        """See Roundings. The factor is on the host, where the rows are."""
        factor = self._roundings.of(layer)
        return None if factor is None else factor.cpu()

    def _held_rows(
        self, session: SessionInfo, kinds: Kinds
    ) -> Iterator[tuple[list[int], Mapping[Stream, Tensor]]]:
        """The rows that the session has, a piece at a time. The reads are quiet: nobody returned."""
        held = set(session.streams())
        needed: dict[Stream, Stream] = {}
        for layer, kind in enumerate(kinds):
            if kind is not None:
                exact = Stream(layer, unpacked(kind))
                needed[Stream(layer, kind)] = exact if exact in held else Stream(layer, kind)
        handle = self._client.sessions.open(session, self._model)
        dtype = self._adapter.model.dtype
        for begin in range(0, session.token_count, PIECE_TOKENS):
            with handle.read(
                streams=[TOKENS, *needed.values()],
                begin=begin,
                end=min(begin + PIECE_TOKENS, session.token_count),
                if_generation_match=session.generation,
                is_quiet=True,
            ) as rows:
                token_ids = rows.token_ids()
                by_stream = {}
                for stream, source in needed.items():
                    part = torch.from_numpy(rows.array(source))
                    by_stream[stream] = part if source.kind in LOSSY_KINDS else part.view(dtype)
            # Behind the lease: `array` has copied the rows.
            yield token_ids, by_stream

    def _computed_rows(
        self, session: SessionInfo, streams: Sequence[Stream]
    ) -> Iterator[tuple[list[int], Mapping[Stream, Tensor]]]:
        """The rows that a pass over the session's token ids makes, a piece at a time."""
        with self._client.sessions.open(session, self._model).read(
            streams=[TOKENS], if_generation_match=session.generation, is_quiet=True
        ) as rows:
            token_ids = rows.token_ids()
        adapter, by_stream = self._adapter, dict[Stream, list[Tensor]]()

        def sink(layer: int, kind: StateKind, part: Tensor) -> None:
            # The model uses the memory of its activations again at the next pass.
            by_stream.setdefault(Stream(layer, kind), []).append(part.clone())

        cache = DynamicCache(config=adapter.model.config)
        with Capture(adapter, streams, sink):
            for begin in range(0, len(token_ids), PIECE_TOKENS):
                piece = token_ids[begin : begin + PIECE_TOKENS]
                prefill(adapter.model, cache, piece, is_stepwise=adapter.is_stepwise)
                yield piece, {stream: torch.cat(parts) for stream, parts in by_stream.items()}
                by_stream.clear()


class _Watching:
    """Learns from one sweep to the next how many sessions return. Keeps an entry for each session.

    The time that a session was idle when the watch began counts once it has ended: with a turn, or with the
    session.
    """

    def __init__(self) -> None:
        self.returns = ReturnShare()
        self._access_ns: dict[str, int] = {}
        self._early: set[str] = set()
        """Sessions of the first sweep that have had no turn since."""
        self._is_first = True

    def seen(self, sessions: Iterable[SessionInfo]) -> Iterator[SessionInfo]:
        """Pass on all sessions that there are."""
        there: set[str] = set()
        for session in sessions:
            there.add(session.name)
            self._see(session.name, session.access_time_ns or 0)
            yield session
        # A session that is gone has ended without a further return, and counts so.
        for name in self._access_ns.keys() - there:
            del self._access_ns[name]
            self._enter(name)
        self._is_first = False

    def _see(self, name: str, access_ns: int) -> None:
        known_ns = self._access_ns.get(name)
        if known_ns is None and self._is_first:
            self._early.add(name)
        elif known_ns is None:
            self.returns.turn(is_first=True)
        # Quiet reads leave the time of access: only turns move it.
        elif access_ns > known_ns:
            self._enter(name)
            self.returns.turn(is_first=False)
        self._access_ns[name] = access_ns

    def _enter(self, name: str) -> None:
        if name in self._early:
            self._early.discard(name)
            self.returns.turn(is_first=True)


_FROM_INPUTS = (StateKind.HIDDEN, StateKind.HIDDEN_INT8, StateKind.HIDDEN_INT4, *DELTAS)


def _by_layer(streams: Iterable[Stream], layer_count: int) -> Kinds | None:
    """The kind of each layer; None where a layer has several."""
    kinds: list[StateKind | None] = [None] * layer_count
    for stream in streams:
        if stream == TOKENS:
            continue
        if kinds[stream.layer] is not None:
            return None
        kinds[stream.layer] = stream.kind
    return tuple(kinds)
