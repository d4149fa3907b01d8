"""The conversation whose state is never dropped: the engine's own cache, turn after turn.

Knows transformers, no store. Worst case: one whole KV cache in memory.
"""

from collections.abc import Callable

from transformers import DynamicCache

from gpu_worker.demo.chat import turn_ids
from gpu_worker.demo.results import ReferenceTurn
from gpu_worker.demo.stopwatch import Stopwatch
from gpu_worker.demo.subject import Subject
from gpu_worker.generation import prefill, stream_greedy


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
