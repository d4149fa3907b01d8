"""A turn that does not fit into the context window: the store truncates, nothing is prefilled again.

Forks the sessions of a conversation that is over. The reply is approximate by nature: kept state
still carries what it once saw of the tokens that are dropped, so it is compared with nothing; what
is asserted is that only the new tokens went through the model. Worst case: a model with learned
positions, which cannot do this.
"""

from collections.abc import Sequence

from ctxcache.errors import PositionsNotRelocatable
from gpu_worker.conversation import SINK_TOKENS
from gpu_worker.demo.conversation import shown_by
from gpu_worker.demo.embedded_store import EmbeddedStore
from gpu_worker.demo.replay import Replay
from gpu_worker.demo.results import WindowTurn
from gpu_worker.demo.subject import METHOD_TITLES, Subject
from gpu_worker.demo.view import View
from gpu_worker.demo.words import window_facts
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.turn import Turn
from gpu_worker.plan import Method


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
        client.fork_session(f"sessions/{replay.session_id}", session_id=session_id)
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
