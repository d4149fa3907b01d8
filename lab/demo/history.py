"""Time to first token by length of history: one long prefill, saved once per method, then continued often.

Every measured turn continues a fork of the saved session, so that all start from the same state;
SSD turns after the store was told to take the session out of DRAM. Rounds are interleaved: lengths,
methods and tiers take turns, so that a busy moment of the machine hits all of them. Recomputation
reads 4 bytes per token, so its tier makes no difference and is measured once.
Worst case: a reply that is not the one of the cache that was never dropped is part of the result.
"""

import copy
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median

from torch import Tensor
from transformers import DynamicCache

from ctxcache.client import CallerModel
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import StateKind
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families.generation import PREFILL_PIECE_TOKENS, Capture, continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.planning.plan import Method
from gpu_worker.saving import Saver, Slice
from lab.demo.embedded_store import EmbeddedStore
from lab.demo.replay import first_difference, source_of
from lab.demo.results import HistoryPoint, Source, Spread, Stored
from lab.demo.subject import METHOD_TITLES, Subject
from lab.demo.text import turn_ids, user_turns
from lab.demo.view import View, duration, source_words

QUESTION = "What is this text about?"
REPLY_TOKENS = 8
# Measured turns stay below this beyond the longest history.
MARGIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """The setting of one point of the picture."""

    length: int
    method: Method
    source: Source


class HistoryRun:
    """One model's measurement at `lengths`, ascending. Raises InvalidArgument where they do not fit."""

    def __init__(self, subject: Subject, store: EmbeddedStore, view: View, lengths: Sequence[int]) -> None:
        check_lengths(subject, lengths)
        self._subject, self._store, self._view, self._lengths = subject, store, view, lengths
        self._run_id = secrets.token_hex(4)
        self._token_ids = history_ids(subject, lengths[-1])
        self._new_ids = {
            length: turn_ids(subject.tokenizer, subject.chat, QUESTION, previous=self._token_ids[:length])
            for length in lengths
        }
        self._expected: dict[int, list[int]] = {}
        self._problems: dict[Case, str] = {}

    def build(self) -> list[Stored]:
        """Prefill once; every method's session is durable afterwards."""
        sessions = {method: self._create(method) for method in self._subject.methods}
        cache = DynamicCache(config=self._subject.model.config)
        with ExitStack() as stack:
            savers = {method: stack.enter_context(self._saver(method)) for method in sessions}
            for begin, end in pairwise(self._cuts()):
                self._view.doing(f"prefill of {self._lengths[-1]:,} tokens, {begin:,} done")
                sessions = self._prefill(cache, begin, end, savers, sessions)
                if end in self._new_ids:
                    self._expected[end] = self._answer(copy.deepcopy(cache), end)
        return [self._stored(method, session) for method, session in sessions.items()]

    def measure(self, repeat_count: int) -> list[HistoryPoint]:
        """Measure every case `repeat_count` times, in rounds."""
        turns: dict[Case, list[Turn]] = defaultdict(list)
        with ExitStack() as stack:
            engines = {
                method: stack.enter_context(
                    TransformersEngine(
                        self._subject.model,
                        self._store.client,
                        self._subject.spec,
                        self._subject.plan(method),
                    )
                )
                for method in self._subject.methods
            }
            for round_number in range(1, repeat_count + 1):
                for case in self._cases():
                    turns[case].append(self._one(case, engines, f"round {round_number} of {repeat_count}"))
        return [self._point(case, measured) for case, measured in turns.items()]

    # -- building ----------------------------------------------------------------------------------

    def _cuts(self) -> list[int]:
        return sorted({*range(0, self._lengths[-1], PREFILL_PIECE_TOKENS), *self._lengths})

    def _base_id(self, method: Method) -> str:
        return f"history-{self._run_id}-{self._subject.model_id}-{method.value}"

    def _create(self, method: Method) -> SessionInfo:
        client = self._store.client
        return client.sessions.create(
            client.models.register(self._subject.spec),
            id=self._base_id(method),
            layout=self._subject.plan(method).streams(),
        ).info

    def _saver(self, method: Method) -> Saver:
        plan = self._subject.plan(method)
        return Saver(self._store.client, CallerModel(self._subject.spec), plan.streams())

    def _prefill(
        self,
        cache: DynamicCache,
        begin: int,
        end: int,
        savers: Mapping[Method, Saver],
        sessions: Mapping[Method, SessionInfo],
    ) -> dict[Method, SessionInfo]:
        """One pass, whose rows are in every method's session when this returns."""

        def put(layer: int, kind: StateKind, rows: Tensor) -> None:
            for saver in savers.values():
                saver.put(layer, kind, rows)

        ids = self._token_ids[begin:end]
        streams = {stream for method in savers for stream in self._subject.plan(method).streams()}
        with ExitStack() as stack:
            stack.enter_context(Capture(adapt(self._subject.model), streams, put))
            for method, saver in savers.items():
                saver.open(sessions[method])
                stack.enter_context(saver.passing([Slice(sessions[method].name, begin, len(ids))], ids))
            prefill(self._subject.model, cache, ids)
        return {method: self._saved(saver, sessions[method]) for method, saver in savers.items()}

    def _saved(self, saver: Saver, session: SessionInfo) -> SessionInfo:
        saver.finish(session.name, durability=Durability.DISK)
        if (failure := saver.wait(session.name)) is not None:
            raise failure
        return self._store.client.sessions.get(session.name)

    def _answer(self, cache: DynamicCache, length: int) -> list[int]:
        return continue_greedy(
            self._subject.model, cache, self._new_ids[length], max_new_tokens=REPLY_TOKENS
        ).token_ids

    def _stored(self, method: Method, session: SessionInfo) -> Stored:
        kept = self._store.client.sessions.get(session.name)
        return Stored(method, self._subject.bytes_per_token(method), kept.token_count, kept.ssd_bytes)

    # -- measuring ---------------------------------------------------------------------------------

    def _cases(self) -> Iterator[Case]:
        for length in self._lengths:
            for method in self._subject.methods:
                yield Case(length, method, Source.DRAM)
                if method is not Method.TOKENS:
                    yield Case(length, method, Source.SSD)

    def _one(self, case: Case, engines: Mapping[Method, TransformersEngine], round_title: str) -> Turn:
        title = f"{METHOD_TITLES[case.method]} from {source_words(case.source)}"
        self._view.doing(f"{round_title}: {case.length:,} tokens, {title}")
        session_id = self._place(case)
        engine = engines[case.method]
        turn = engine.turn(session_id, self._new_ids[case.length], max_new_tokens=REPLY_TOKENS)
        if (failure := engine.wait(session_id)) is not None:
            raise failure
        self._store.client.sessions.open(f"sessions/{session_id}").delete()
        self._problems.setdefault(case, self._problem(case, turn, title))
        self._view.say(
            f"  {round_title}  {case.length:>6,} tokens  {title:<24}"
            f"  first token {duration(turn.first_token_ns)}, restored in {duration(turn.restore_ns)}"
        )
        return turn

    def _place(self, case: Case) -> str:
        """Return a fresh session of the case's length whose state is where the case wants it."""
        client = self._store.client
        session_id = f"{self._base_id(case.method)}-{secrets.token_hex(4)}"
        base = client.sessions.open(f"sessions/{self._base_id(case.method)}", CallerModel(self._subject.spec))
        session = base.fork(id=session_id, token_count=case.length)
        if case.source is Source.SSD:
            client.admin.demote_session(session.name)
        else:
            # A read brings what lies on SSD alone into DRAM.
            session.read().close()
        found = source_of(client, session_id, self._subject.spec.fingerprint())
        if found is not case.source:
            self._problems[case] = (
                f"history of {case.length}: state is in {found.value}, not {case.source.value}"
            )
        return session_id

    def _problem(self, case: Case, turn: Turn, title: str) -> str:
        expected = self._expected[case.length]
        difference = first_difference(turn.token_ids, expected)
        if turn.reused_token_count != case.length or turn.miss_reason:
            return f"history of {case.length}, {title}: reused {turn.reused_token_count} {turn.miss_reason}"
        if difference is None:
            return ""
        return f"history of {case.length}, {title}: token {difference} of the reply differs"

    def _point(self, case: Case, turns: Sequence[Turn]) -> HistoryPoint:
        return HistoryPoint(
            method=case.method,
            source=case.source,
            history_token_count=case.length,
            first_token=spread([turn.first_token_ns for turn in turns]),
            restore=spread([turn.restore_ns for turn in turns]),
            problem=self._problems[case],
        )


def spread(times_ns: Sequence[int]) -> Spread:
    """Median, lowest and highest."""
    return Spread(int(median(times_ns)), min(times_ns), max(times_ns))


def check_lengths(subject: Subject, lengths: Sequence[int]) -> None:
    """Raise InvalidArgument unless all lengths, and a question after them, fit into the context."""
    room = subject.context_tokens - MARGIN_TOKENS
    if not all(0 < length <= room for length in lengths):
        problem = f"lengths must be within 1 and {room}, which {subject.title} has room for"
        raise InvalidArgument(field="--history", problem=problem)


def history_ids(subject: Subject, count: int) -> list[int]:
    """Return the ids of a text of `count` tokens, begun as the chat format wants it."""
    first, *rest = islice(user_turns(subject.tokenizer, token_count=256), count // 128 + 2)
    ids = turn_ids(subject.tokenizer, subject.chat, first, previous=[])
    for text in rest:
        ids += turn_ids(subject.tokenizer, subject.chat, text, previous=ids)
    return ids[:count]
