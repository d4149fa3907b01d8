"""A conversation held once without dropping anything, and once per method with everything dropped.

The first is the engine's own cache, turn after turn. The server is killed with SIGKILL after every second
turn, so that each method restores from DRAM and from SSD. A turn that differs is part of the result; a server
that does not come back raises StoreDidNotStart.

The last turn does not fit into the context window: the store truncates forks of the sessions, and nothing is
prefilled again. Its reply is approximate by nature, as kept state still carries the tokens that are dropped.
So it is compared with nothing, and only the count of tokens that went through the model is asserted. Worst
case: one whole KV cache in memory; a model with learned positions, which cannot be truncated.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from transformers import DynamicCache

from ctxcache.errors import InvalidArgument, PositionsNotRelocatable
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families.generation import SINK_TOKENS, prefill, stream_greedy
from gpu_worker.planning.plan import Method
from lab.demo.embedded_store import EmbeddedStore
from lab.demo.replay import Replay
from lab.demo.results import ModelResult, ReferenceTurn, RestoredTurn, Stopwatch, TurnResult, WindowTurn
from lab.demo.subject import METHOD_TITLES, Subject
from lab.demo.text import turn_ids, user_turns
from lab.demo.view import View, duration, reference_facts, restored_facts, window_facts


class Reference:
    """One conversation. `token_ids` are all of it so far, prompts and replies."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._cache = DynamicCache(config=subject.model.config)
        self.token_ids: list[int] = []

    def new_ids(self, text: str) -> list[int]:
        """Return the ids that a user's text adds to the conversation."""
        return turn_ids(self._subject.tokenizer, self._subject.chat, text, previous=self.token_ids)

    def turn(self, text: str, reply_tokens: int, on_token: Callable[[int], None]) -> ReferenceTurn:
        """Answer `text` greedily."""
        model, new_ids = self._subject.model, self.new_ids(text)
        watch, reply = Stopwatch(), list[int]()
        for token in stream_greedy(model, self._cache, new_ids, max_new_tokens=reply_tokens):
            watch.stop_once()
            reply.append(token)
            on_token(token)
        # As the engine does: the last token goes through the model too, so that a turn is whole.
        prefill(model, self._cache, reply[-1:])
        history_count = len(self.token_ids)
        self.token_ids += new_ids + reply
        decoded = str(self._subject.tokenizer.decode(reply, skip_special_tokens=True))
        return ReferenceTurn(new_ids, reply, history_count, watch.elapsed_ns, decoded)


OPENING_TOKENS = 512
# The first texts of the later turns' size quote what the opening quotes.
_LATER_TEXTS = 12
# Tokens that the chat format puts around a text, and a sentence's worth of inexactness.
_MARGIN_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Script:
    """The user's texts: a long one first, then shorter ones; `reply_tokens` at most are answered to each."""

    turn_count: int
    opening_tokens: int
    turn_tokens: int
    reply_tokens: int

    @property
    def token_count(self) -> int:
        """Most tokens of the whole conversation, and of one more turn."""
        later = self.turn_count * (self.turn_tokens + self.reply_tokens + _MARGIN_TOKENS)
        return self.opening_tokens + self.reply_tokens + _MARGIN_TOKENS + later

    def texts(self, subject: Subject) -> list[str]:
        """The user's texts, one more than there are turns: the last is for the window."""
        opening = next(user_turns(subject.tokenizer, token_count=self.opening_tokens))
        later = user_turns(subject.tokenizer, token_count=self.turn_tokens, first_turn=_LATER_TEXTS)
        return [opening, *islice(later, self.turn_count)]


def script_for(
    subject: Subject, *, turn_count: int, opening_tokens: int | None, turn_tokens: int, reply_tokens: int
) -> Script:
    """Return a script that fits into the model's context. Raises InvalidArgument when none does."""
    smallest = Script(turn_count, opening_tokens or turn_tokens, turn_tokens, reply_tokens)
    room = subject.context_tokens - smallest.token_count
    if room < 0:
        problem = (
            f"{turn_count} turns need {smallest.token_count} tokens,"
            f" {subject.title} has a context of {subject.context_tokens}"
        )
        raise InvalidArgument(field="--turns", problem=problem)
    if opening_tokens is None:
        return replace(smallest, opening_tokens=min(OPENING_TOKENS, turn_tokens + room))
    return smallest


class Conversation:
    """One model's conversation. Afterwards `replays` hold the sessions, `reference` all tokens."""

    def __init__(self, subject: Subject, store: EmbeddedStore, view: View, result: ModelResult) -> None:
        run_id = secrets.token_hex(4)
        self._subject, self._store, self._view, self._result = subject, store, view, result
        self.reference = Reference(subject)
        self.replays = [
            Replay(subject, method, f"demo-{run_id}-{subject.model_id}-{method.value}")
            for method in subject.methods
        ]

    def hold(self, script: Script, texts: Sequence[str]) -> None:
        """Have every turn; results go into the model's result as they come."""
        for number, text in enumerate(texts, start=1):
            self._turn(number, text, script)
            # Between turns 2 and 3, 4 and 5: what comes next is restored by another process.
            if number % 2 == 0 and number < script.turn_count:
                self._kill()
        self._result.stored = [replay.stored(self._store.client) for replay in self.replays]

    def _turn(self, number: int, text: str, script: Script) -> None:
        self._view.begin_turn(f"{self._subject.title}, turn {number} of {script.turn_count}", text)
        reference = self._ask_reference(text, script.reply_tokens)
        restored = [self._ask(replay, number, reference) for replay in self.replays]
        self._view.end_turn()
        self._result.turns.append(TurnResult(number, text, reference, restored))

    def _ask_reference(self, text: str, reply_tokens: int) -> ReferenceTurn:
        self._view.begin_reply("never dropped")
        self._view.doing("the engine continues on the state it kept")
        turn = self.reference.turn(text, reply_tokens, shown_by(self._view, self._subject))
        self._view.end_reply(reference_facts(turn), is_good=True)
        return turn

    def _ask(self, replay: Replay, number: int, reference: ReferenceTurn) -> RestoredTurn:
        title = METHOD_TITLES[replay.method]
        self._view.begin_reply(title)
        self._view.doing(f"nothing is left in the engine; state comes back by {title}")
        on_token = shown_by(self._view, self._subject)
        turn = replay.turn(self._store.client, number, reference, on_token)
        self._view.end_reply(restored_facts(turn), is_good=turn.is_identical)
        return turn

    def _kill(self) -> None:
        self._view.doing("the server is killed and another one started")
        old_pid = self._store.kill()
        watch = Stopwatch()
        ready = self._store.start()
        watch.stop_once()
        self._result.kill_count += 1
        self._view.say(
            f"\nSIGKILL to the server (pid {old_pid}); after {duration(watch.elapsed_ns)} pid {ready.pid}"
            f" serves the {ready.session_count} sessions it found on SSD"
        )


def shown_by(view: View, subject: Subject) -> Callable[[int], None]:
    """Return a listener for tokens that shows the text they make."""
    tokens: list[int] = []

    def show(token: int) -> None:
        tokens.append(token)
        view.reply(str(subject.tokenizer.decode(tokens, skip_special_tokens=True)))

    return show


def require_relocatable(subject: Subject) -> None:
    """Raise PositionsNotRelocatable for a model whose kept tokens cannot move."""
    if not subject.spec.is_relocatable:
        raise PositionsNotRelocatable(model=subject.title)


class WindowRun:
    """One turn over a window, by every method that keeps state."""

    def __init__(self, subject: Subject, store: EmbeddedStore, view: View) -> None:
        self._subject, self._store, self._view, self._window = subject, store, view, 0

    def turn(
        self, replays: Sequence[Replay], text: str, new_ids: Sequence[int], reply_tokens: int, *, window: int
    ) -> list[WindowTurn]:
        """Continue a fork of each replay's session in a window of `window` tokens. Raises InvalidArgument."""
        self._window = window
        title = f"{self._subject.title}, a turn too many for a window of {self._window:,} tokens"
        self._view.begin_turn(title, text)
        keeping = [replay for replay in replays if replay.method is not Method.TOKENS]
        results = [self._one(replay, new_ids, reply_tokens) for replay in keeping]
        self._view.end_turn()
        return results

    def _one(self, replay: Replay, new_ids: Sequence[int], reply_tokens: int) -> WindowTurn:
        self._view.begin_reply(METHOD_TITLES[replay.method])
        self._view.doing("the store drops the oldest half but the sinks")
        turn = self._run(replay, new_ids, reply_tokens)
        result = self._result(replay.method, turn, len(new_ids))
        self._view.end_reply(window_facts(result), is_good=not result.problem)
        return result

    def _run(self, replay: Replay, new_ids: Sequence[int], reply_tokens: int) -> Turn:
        client, session_id = self._store.client, f"{replay.session_id}-window"
        client.sessions.open(f"sessions/{replay.session_id}").fork(id=session_id)
        plan = self._subject.plan(replay.method)
        with TransformersEngine(
            self._subject.model, client, self._subject.spec, plan, window=self._window
        ) as engine:
            return engine.turn(
                session_id,
                new_ids,
                max_new_tokens=reply_tokens,
                on_token=shown_by(self._view, self._subject),
            )

    def _result(self, method: Method, turn: Turn, new_count: int) -> WindowTurn:
        text = str(self._subject.tokenizer.decode(turn.token_ids, skip_special_tokens=True))
        return WindowTurn(
            method=method,
            window=self._window,
            sink_count=SINK_TOKENS,
            history_token_count=turn.history_token_count,
            dropped_token_count=turn.dropped_token_count,
            reused_token_count=turn.reused_token_count,
            new_token_count=new_count,
            prefilled_token_count=turn.prefilled_token_count,
            restore_ns=turn.restore_ns,
            first_token_ns=turn.first_token_ns,
            text=text,
            problem=_problem(method, turn, new_count),
        )


def _problem(method: Method, turn: Turn, new_count: int) -> str:
    where = f"window, {METHOD_TITLES[method]}"
    if turn.miss_reason:
        return f"{where}: {turn.miss_reason}"
    if turn.prefilled_token_count != new_count or not turn.reused_token_count:
        return (
            f"{where}: prefilled {turn.prefilled_token_count} tokens, only {new_count} are new;"
            f" reused {turn.reused_token_count}"
        )
    return ""
