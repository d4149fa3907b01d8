"""A conversation held once without dropping anything, and once per method with everything dropped.

Knows who answers and when the server is killed, not how state is stored. The server is killed with
SIGKILL after every second turn, so that each method restores from DRAM and from SSD. Worst case: a
turn that differs is part of the result; a server that does not come back raises StoreDidNotStart.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ctxcache.errors import InvalidArgument
from gpu_worker.demo.embedded_store import EmbeddedStore
from gpu_worker.demo.reference import Reference
from gpu_worker.demo.replay import Replay
from gpu_worker.demo.results import ModelResult, ReferenceTurn, RestoredTurn, TurnResult
from gpu_worker.demo.stopwatch import Stopwatch
from gpu_worker.demo.subject import METHOD_TITLES, Subject
from gpu_worker.demo.user_turns import user_turns
from gpu_worker.demo.view import View
from gpu_worker.demo.words import duration, reference_facts, restored_facts

OPENING_TOKENS = 512
# Of the texts of the later turns' size, the first ones quote what the opening quotes.
_LATER_TEXTS = 12
# What the chat format puts around a text, and a sentence's worth of inexactness.
_MARGIN_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Script:
    """What is said: a long text first, then shorter ones; `reply_tokens` at most are answered to each."""

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
