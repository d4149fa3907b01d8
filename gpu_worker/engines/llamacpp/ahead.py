"""Edited conversations in llama.cpp's slots, computed ahead in the time in which nobody asks for anything.

```
   a chat request ends ──► what was asked and said ──► queue
   nobody is served    ──► rendered with the next message; the session's slot, restored where it has another's
                           they part before many tokens? the rest by requests of n_predict=0, in steps
   a request comes     ──► it waits for the end of one step; the slot keeps what was computed
   all is computed     ──► the slot's state is saved, in the place of the session's
```

llama.cpp itself renders and tokenizes. Worst case: a rendering that is not what the client sends; the next
request finds the session as far as both agree.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctxcache.client.wire import Closing
from gpu_worker.engines.conversations import WAYS, Fields, as_sent, way_of
from gpu_worker.engines.idle_passes import IdlePasses
from gpu_worker.engines.llamacpp.keeper import LlamaRefused, LlamaServer
from gpu_worker.engines.llamacpp.slots import Slot, Slots
from gpu_worker.engines.next_prompts import UsualWays, next_history, stated_history
from gpu_worker.planning.ahead import GAVE_WAY, SHARE

log = logging.getLogger(__name__)

STEP_TOKENS = 128
"""Tokens of a step, for the end of which a request waits at most."""
LEAST_TOKENS = 64
"""Where fewer differ, the request computes them as soon as a pass would have begun."""
_NOT_OF_A_PROMPT = ("stream", "stream_options", "session_id", "id_slot")


class SlotStates(Protocol):
    """Brings states into slots, and keeps them."""

    def restore(self, session: str, slot: Slot) -> bool:
        """Put a session's state into a slot, where the store has it."""

    def save(self, session: str, slot: Slot) -> None:
        """Keep a slot's state as its session's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat request, and its reply as the client will send it: the next prompt is rendered from both."""

    request: Fields
    reply: Fields | None
    """None where `request` is what the client will send next."""
    usual: Fields
    """The fields by which the conversation's history is rendered as a rule."""


class SlotAhead(Closing):
    """Passes ahead for one llama.cpp, in a thread of its own. Close it, behind the slots."""

    def __init__(self, llama: LlamaServer, slots: Slots, states: SlotStates, *, share: float = SHARE) -> None:
        """`share`: the most of the time that passes take. Raises InvalidArgument(field="share")."""
        self._llama, self._slots, self._states = llama, slots, states
        self._usual: UsualWays[Fields] = UsualWays()
        self._passes: IdlePasses[Asked] = IdlePasses(self._passed, share=share)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many passes ended how."""
        return self._passes.outcomes

    def turn_begins(self, session: str) -> None:
        """A conversation is back: what waits for it is forgotten."""
        self._passes.turn_begins(session)

    def replied(self, session: str, request: Fields, reply: Fields) -> None:
        """A chat request has ended. In the thread that has its slot."""
        usual = self._usual.asked(session, way_of(request))
        self._passes.offer(session, Asked(request, as_sent(reply, request["messages"]), usual))

    def expect(self, session: str, request: Fields) -> int:
        """A client says what it will send next; how many tokens that has. Raises LlamaRefused, OSError."""
        asked = Asked(request, None, {})
        # Before it is taken: what llama.cpp does not render is refused.
        count = len(self._following(asked))
        self._passes.offer(session, asked)
        return count

    def close(self) -> None:
        """End the thread, behind the step that it is at."""
        self._passes.close()

    def _passed(self, session: str, asked: Asked) -> str:
        try:
            following = self._following(asked)
            with self._slots.ahead(session) as slot:
                return GAVE_WAY if slot is None else self._computed(session, slot, following)
        except LlamaRefused:
            return "refused"
        except OSError:
            return "no answer"

    def _following(self, asked: Asked) -> npt.NDArray[np.int32]:
        if asked.reply is None:
            told = stated_history(lambda them: self._rendered(asked.request, them), asked.request["messages"])
            return np.asarray(told, np.int32)
        way = {name: value for name, value in asked.request.items() if name not in WAYS} | asked.usual
        messages = [*asked.request["messages"], asked.reply]
        return np.asarray(next_history(lambda them: self._rendered(way, them), messages), np.int32)

    def _rendered(self, request: Fields, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a chat request's prompt, as llama.cpp makes it."""
        body = {name: value for name, value in request.items() if name not in _NOT_OF_A_PROMPT}
        prompt = self._llama.call("POST", "/apply-template", body | {"messages": messages})["prompt"]
        text = {"content": prompt, "add_special": True, "parse_special": True}
        return list(self._llama.call("POST", "/tokenize", text)["tokens"])

    def _computed(self, session: str, slot: Slot, following: npt.NDArray[np.int32]) -> str:
        if slot.session != session:
            slot.session, slot.kept = None, slot.kept[:0]
            if not self._states.restore(session, slot):
                return "not there"
        slot.session = None
        common = _common_count(slot.kept, following)
        differing = len(following) - common
        if differing < LEAST_TOKENS or not self._passes.is_worth(differing, differing):
            slot.session = session
            return "nothing to do"
        for begin in range(common, len(following), STEP_TOKENS):
            if self._slots.is_wanted or self._passes.is_closing:
                # The next request finds the tokens of the slot, as far as its prompt agrees with them.
                slot.session = session
                return GAVE_WAY
            prompt = following[: begin + STEP_TOKENS].tolist()
            step = {"prompt": prompt, "n_predict": 0, "id_slot": slot.number, "cache_prompt": True}
            self._llama.call("POST", "/completion", step)
        slot.session = session
        self._states.save(session, slot)
        log.info("a conversation's next prompt is computed ahead: %d tokens, session=%a", differing, session)
        return "in place"


def _common_count(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    count = min(one.size, other.size)
    differing = np.flatnonzero(one[:count] != other[:count])
    return int(differing[0]) if differing.size else count
