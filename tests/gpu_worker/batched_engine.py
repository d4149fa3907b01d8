"""Continuous batching in small: sequences join and leave between passes, and every pass is saved.

A pass has one token of each sequence that decodes, and chunks of the prompts of those that do not yet. Enough
to test and to measure saving under an engine's load; what a serving engine does besides (paged memory,
preemption, sampling) is not here. Worst case: prompts wait for one another, for each pass takes so many
tokens.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from ctxcache.client.types import Durability, SessionInfo
from gpu_worker.engines.transformers_packed import PackedModel, SequenceCache, Work
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt
from gpu_worker.saving import Saver, Slice

PASS_TOKENS = 512
"""Tokens of a pass, those that decode first."""


@dataclass(slots=True, eq=False)
class Running:
    """One session's turn in the batch: `waiting` tokens have not gone through the model."""

    session: SessionInfo
    cache: SequenceCache
    waiting: deque[int]
    reply_count: int
    reply: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether all of it, the reply's last token too, has gone through the model."""
        return len(self.reply) == self.reply_count and not self.waiting


class BatchedEngine:
    """Greedy generation of many sessions at once.

    Their rows go to `saver` through a capture that is the caller's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        saver: Saver | None,
        *,
        pass_tokens: int = PASS_TOKENS,
        durability: Durability = Durability.MEMORY,
    ) -> None:
        """`saver`: None saves nothing; else packed passes are compared with the probe that the store keeps.

        Raises UnsupportedArchitecture, ModelFingerprintMismatch, ModelProbeMismatch.
        """
        # Before its attention is ours: a model proves itself by passes of its own.
        adapter = None if saver is None else adapt(model)
        self._model, self._saver = PackedModel(model), saver
        if saver is not None and adapter is not None:
            saver.register(probe_of(adapter, saver.spec, self._probe))
        self._pass_tokens, self._durability = pass_tokens, durability
        self.running: list[Running] = []

    def add(self, session: SessionInfo, prompt: Sequence[int], *, reply_count: int) -> Running:
        """An empty session's turn joins the batch: its prompt, then `reply_count` tokens."""
        capacity = len(prompt) + reply_count
        sequence = Running(session, SequenceCache(capacity), deque(prompt), reply_count)
        self.running.append(sequence)
        if self._saver is not None:
            self._saver.open(session)
        return sequence

    def step(self) -> None:
        """One pass; sequences that are done then leave."""
        chosen = self._choose()
        batch = [Work(sequence.cache, ids) for sequence, ids in chosen]
        slices = [
            Slice(sequence.session.name, sequence.session.token_count + sequence.cache.token_count, len(ids))
            for sequence, ids in chosen
        ]
        passing: AbstractContextManager[None] = nullcontext()
        if self._saver is not None:
            passing = self._saver.passing(slices, [token for _, ids in chosen for token in ids])
        with passing:
            logits = self._model.step(batch)
        for (sequence, _), token in zip(chosen, logits.argmax(dim=-1).tolist(), strict=True):
            if not sequence.waiting and len(sequence.reply) < sequence.reply_count:
                sequence.reply.append(token)
                sequence.waiting.append(token)
        for sequence in [item for item in self.running if item.is_done]:
            self.running.remove(sequence)
            if self._saver is not None:
                self._saver.finish(sequence.session.name, durability=self._durability)

    def run(self) -> None:
        """Pass after pass, until nobody is left."""
        while self.running:
            self.step()

    def _probe(self, token_ids: Sequence[int]) -> None:
        self._model.step([Work(SequenceCache(len(token_ids)), token_ids)])

    def _choose(self) -> list[tuple[Running, list[int]]]:
        """The sessions of the next pass and their tokens: those with least to do first."""
        room = self._pass_tokens
        chosen = []
        for sequence in sorted(self.running, key=lambda item: len(item.waiting)):
            count = min(len(sequence.waiting), room)
            if count:
                chosen.append((sequence, [sequence.waiting.popleft() for _ in range(count)]))
                room -= count
        return chosen
