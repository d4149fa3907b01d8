"""The same conversation with all state dropped after every turn, restored by one method from the store.

Knows the engine and the store. The engine gets no history from us: what it continues is what the
store gave back. Worst case: a turn that differs, which the result says in a sentence.
"""

from collections.abc import Callable, Sequence

from ctxcache.client import Client
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families.generation import common_prefix
from gpu_worker.planning.plan import Method
from lab.demo.results import ReferenceTurn, RestoredTurn, Source, Stored
from lab.demo.subject import METHOD_TITLES, Subject


class Replay:
    """One method's session. `session_id` is new; an engine lives for one turn."""

    def __init__(self, subject: Subject, method: Method, session_id: str) -> None:
        self._subject = subject
        self._method = method
        self._plan = subject.plan(method)
        self.session_id = session_id

    @property
    def method(self) -> Method:
        """How the state comes back."""
        return self._method

    def turn(
        self, client: Client, number: int, reference: ReferenceTurn, on_token: Callable[[int], None]
    ) -> RestoredTurn:
        """Answer as the reference did, with as many tokens; returns when the turn is durable.

        Raises what stopped its saving, if anything did.
        """
        source = source_of(client, self.session_id, self._subject.spec.fingerprint())
        with TransformersEngine(self._subject.model, client, self._subject.spec, self._plan) as engine:
            turn = engine.turn(
                self.session_id,
                reference.new_token_ids,
                max_new_tokens=len(reference.token_ids),
                on_token=on_token,
            )
            if (failure := engine.wait(self.session_id)) is not None:
                raise failure
        return self._compared(turn, source, number, reference)

    def stored(self, client: Client) -> Stored:
        """The state of this session that the store keeps now."""
        session = client.sessions.get(f"sessions/{self.session_id}")
        row_bytes = self._subject.bytes_per_token(self._method)
        return Stored(self._method, row_bytes, session.token_count, session.ssd_bytes)

    def _compared(self, turn: Turn, source: Source, number: int, reference: ReferenceTurn) -> RestoredTurn:
        difference = first_difference(turn.token_ids, reference.token_ids)
        where = f"turn {number}, {METHOD_TITLES[self._method]} from {source.value}"
        return RestoredTurn(
            method=self._method,
            source=source,
            history_token_count=turn.history_token_count,
            reused_token_count=turn.reused_token_count,
            prefilled_token_count=turn.prefilled_token_count,
            restore_ns=turn.restore_ns,
            first_token_ns=turn.first_token_ns,
            token_ids=turn.token_ids,
            first_difference=difference,
            problem=_problem(turn, difference, where, reference),
        )


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None where all are equal."""
    same_count = common_prefix(tokens, expected)
    return None if same_count == len(tokens) == len(expected) else same_count


def source_of(client: Client, session_id: str, fingerprint: bytes) -> Source:
    """Where the store has a session's tokens at this moment."""
    (found,) = client.sessions.lookup([(f"sessions/{session_id}", fingerprint)])
    if not found.token_count:
        return Source.NOWHERE
    if not found.dram_token_count:
        return Source.SSD
    return Source.DRAM if found.dram_token_count == found.token_count else Source.MIXED


def _problem(turn: Turn, difference: int | None, where: str, reference: ReferenceTurn) -> str:
    if turn.reused_token_count != reference.history_token_count or turn.miss_reason:
        reason = f" ({turn.miss_reason})" if turn.miss_reason else ""
        return f"{where}: reused {turn.reused_token_count} of {reference.history_token_count} tokens{reason}"
    if difference is None:
        return ""
    got = turn.token_ids[difference : difference + 1]
    expected = reference.token_ids[difference : difference + 1]
    return f"{where}: token {difference} of the reply is {got}, the run that kept its state said {expected}"
