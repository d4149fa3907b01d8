#!/usr/bin/env python3
"""Edited conversations: what users wait for where history is stripped, pruned or neither, by way to keep it.

    python -m lab.studies.edits --results FILE                        # SmolLM2-135M on this machine's CPU
    python -m lab.studies.edits --traces ../shared/data --seed 7      # users' and agents' pauses by traces

Conversations of real text, by three sorts of edits. `thoughts`: each reply begins with a thought, which is
stripped when the user writes again. `tools`: a chain of two calls with thoughts, which stay within the chain
and are stripped behind it. `prunes`: no thoughts; the agent drops a tool's result when the next turn has
ended, and says so. `unedited` is the same conversation of which nothing is dropped.

Ways: `no cache` computes every prompt anew, `today` restores and cuts the session where it differs, `ahead`
computes the next rendering in the pause behind a reply, as far as the pause lasts. Each way has a store of
its own, and they take turns conversation by conversation. A reply that is not that of `no cache` makes the
exit status 1. The first tokens of a reply are what the model says; the others are text that is computed
behind them in one pass, as if the model had said it, so that a run takes minutes.
"""

import csv
import gzip
import json
import math
import platform
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import DynamicCache, PreTrainedModel

from ctxcache.client import Client
from gpu_worker.engines.ahead import Ahead
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.families.generation import common_prefix, prefill, stream_greedy
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan
from lab.demo.embedded_store import embedded_store
from lab.demo.machine import physical_core_count
from lab.demo.models import load_model, smollm2
from lab.demo.text import passages

KINDS = ("thoughts", "tools", "prunes")
WAYS = ("no cache", "today", "ahead")
UNEDITED = "unedited"
PAUSE_S = 30.0
"""Between a reply and the next message, where no trace says it."""
STORE_BYTES = 768 << 20
MESSAGE = "message"
"""A call that a user waits for with a new message."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of what a conversation is made of."""

    system: int = 256
    message: int = 48
    thought: int = 96
    call: int = 24
    result: int = 256
    answer: int = 128
    generated: int = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model. Times in seconds; tokens computed before the first one of the reply."""

    kind: str
    conversation: int
    turn: int
    part: str
    way: str
    history_tokens: int
    new_tokens: int
    differing_tokens: int
    """Tokens of the history behind the first that is not the one that was computed before."""
    computed_tokens: int
    first_token_s: float
    reply_tokens: int
    is_right: bool


@dataclass(slots=True)
class Answer:
    """A reply, and what it took."""

    token_ids: list[int]
    computed_tokens: int
    first_token_s: float


class Way(ABC):
    """One way to keep conversations."""

    @abstractmethod
    def answer(self, session: str, history: list[int], new: list[int], count: int) -> Answer:
        """Reply to a prompt of history and new tokens by so many tokens."""

    def say(self, session: str, history: list[int], text: list[int]) -> None:  # noqa: B027
        """Compute the rest of a reply behind what was said of it."""

    def pause(self, session: str, following: list[int], seconds: float) -> int:  # noqa: ARG002
        """Nobody waits for so long; the next prompt begins with `following`. Returns tokens computed."""
        return 0


class NoCache(Way):
    """Every prompt is computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def answer(self, session: str, history: list[int], new: list[int], count: int) -> Answer:
        """See Way."""
        del session
        begin_s, first_s = time.perf_counter(), 0.0
        cache, reply = DynamicCache(config=self._model.config), list[int]()
        prompt = [*history, *new]
        for token in stream_greedy(self._model, cache, prompt, max_new_tokens=count, eos_token_ids=()):
            first_s = first_s or time.perf_counter() - begin_s
            reply.append(token)
        return Answer(reply, len(prompt), first_s)


class Kept(Way):
    """In the store, cut where the history differs."""

    def __init__(self, model: PreTrainedModel, client: Client) -> None:
        spec = model_spec(model, model_id="edits")
        plan = RestorePlan.uniform(Method.KV, spec.layer_count)
        self.engine = TransformersEngine(model, client, spec, plan)

    def answer(self, session: str, history: list[int], new: list[int], count: int) -> Answer:
        """See Way."""
        turn = self.engine.turn(session, new, max_new_tokens=count, history=history, eos_token_ids=())
        return Answer(turn.token_ids, turn.prefilled_token_count, turn.first_token_ns / 1e9)

    def say(self, session: str, history: list[int], text: list[int]) -> None:
        """See Way."""
        self.engine.turn(session, text, max_new_tokens=0, history=history)
        # The user reads: what is saved behind a reply is no part of the next call's time.
        self.engine.wait(session)


class KeptAhead(Kept):
    """In the store, and the next rendering is computed in the pause."""

    def __init__(self, model: PreTrainedModel, client: Client) -> None:
        super().__init__(model, client)
        self.ahead = Ahead(self.engine, share=1.0)

    def pause(self, session: str, following: list[int], seconds: float) -> int:
        """See Way."""
        before = self.engine.ahead.computed_token_count
        self.ahead.offer(session, following)
        self.ahead.wait(seconds)
        return self.engine.ahead.computed_token_count - before


@dataclass(slots=True)
class Conversation:
    """The tokens of one conversation as its client renders them. `texts` has the tokens that others write."""

    kind: str
    number: int
    sizes: Sizes
    texts: Iterator[list[int]]
    is_edited: bool = True
    parts: list[tuple[str, list[int]]] = field(default_factory=list)

    def rendered(self, *, is_message: bool) -> list[int]:
        """All tokens. `is_message`: as they are when the user writes."""
        return [token for part, ids in self.parts if self.stays(part, is_message=is_message) for token in ids]

    def ended(self) -> None:
        """A turn has ended: what the client drops for good is dropped."""
        if self.kind == "prunes" and self.is_edited:
            results = [i for i, (part, _) in enumerate(self.parts) if part == "result"]
            # The newest stays: the answer that the user sees is about it.
            for i in results[:-1]:
                self.parts[i] = "pruned", []

    def stays(self, part: str, *, is_message: bool) -> bool:
        """Whether a part is in the rendering."""
        return part != "thought" or not (is_message and self.is_edited)

    def calls(self) -> list[tuple[str, int, int]]:
        """The calls of a turn: who writes how many tokens, and how many of the reply are thought."""
        sizes = self.sizes
        if self.kind == "thoughts":
            return [(MESSAGE, sizes.message, sizes.thought)]
        thought = sizes.thought if self.kind == "tools" else 0
        return [(MESSAGE, sizes.message, thought), ("result", sizes.result, thought)]


def held(
    conversation: Conversation,
    way: Way,
    name: str,
    turns: int,
    pauses: Iterator[float],
    right: list[list[int]],
) -> Iterator[tuple[Call, int]]:
    """Hold it: each call, and the tokens that were computed in the pause behind it.

    `right`: the replies of the way that has no cache, which that one fills in.
    """
    session, sizes = f"{conversation.kind}-{conversation.number}-{name.replace(' ', '-')}", conversation.sizes
    conversation.parts.append(("system", _of(conversation.texts, sizes.system)))
    computed: list[int] = []
    replies: list[list[int]] = []
    for turn in range(turns):
        calls = conversation.calls()
        for number, (part, count, thought) in enumerate(calls):
            history = conversation.rendered(is_message=part == MESSAGE)
            if part == MESSAGE:
                # The client renders anew when the user writes: thoughts of the turn before are gone.
                conversation.parts = [
                    one for one in conversation.parts if conversation.stays(one[0], is_message=True)
                ]
            new = _of(conversation.texts, count)
            is_last = number == len(calls) - 1
            spoken = thought + (sizes.answer if is_last else sizes.call)
            answer = way.answer(session, history, new, sizes.generated)
            text = _of(conversation.texts, spoken - sizes.generated)
            way.say(session, [*history, *new, *answer.token_ids], text)
            reply = [*answer.token_ids, *text]
            replies.append(answer.token_ids)
            if name == WAYS[0]:
                right.append(answer.token_ids)
            conversation.parts += [(part, new), ("thought", reply[:thought]), ("said", reply[thought:])]
            if is_last:
                conversation.ended()
            following = conversation.rendered(is_message=is_last)
            in_pause = way.pause(session, following, next(pauses) if is_last else 0.0)
            common = common_prefix(computed, history)
            yield (
                Call(
                    conversation.kind,
                    conversation.number,
                    turn,
                    part,
                    name,
                    len(history),
                    len(new),
                    len(history) - common if computed else 0,
                    answer.computed_tokens,
                    answer.first_token_s,
                    len(reply),
                    name == UNEDITED or answer.token_ids == right[len(replies) - 1],
                ),
                in_pause,
            )
            computed = [*history, *new, *reply]


def _of(texts: Iterator[list[int]], count: int) -> list[int]:
    """The next tokens of a text."""
    found = next(texts)
    return found[:count]


def studied(
    model: PreTrainedModel,
    text: Sequence[int],
    *,
    sizes: Sizes,
    kinds: Sequence[str],
    conversations: int,
    turns: int,
    seed: int,
    pauses_s: Sequence[float],
    store_bytes: int = STORE_BYTES,
) -> Iterator[tuple[Call, int]]:
    """All calls of all ways, and the tokens computed behind each."""
    most = max(asdict(sizes).values())
    with ExitStack() as stack:
        stores = {name: stack.enter_context(embedded_store(store_bytes)) for name in (*WAYS[1:], UNEDITED)}
        ways: dict[str, Way] = {WAYS[0]: NoCache(model)}
        for name in (WAYS[1], UNEDITED):
            kept = Kept(model, stores[name].client)
            stack.callback(kept.engine.close)
            ways[name] = kept
        ahead = KeptAhead(model, stores[WAYS[2]].client)
        stack.callback(ahead.engine.close)
        stack.callback(ahead.ahead.close)
        ways[WAYS[2]] = ahead
        # The first pass of a process is slower than the others.
        prefill(model, DynamicCache(config=model.config), text[: sizes.system])
        for number in range(conversations):
            for kind in kinds:
                right: list[list[int]] = []
                # What others compare themselves with comes first; the others by turns.
                order = [WAYS[0], *_turned([*WAYS[1:], UNEDITED], number)]
                for name in order:
                    draw = random.Random(f"{seed} {kind} {number}")  # noqa: S311
                    conversation = Conversation(
                        kind, number, sizes, _texts(text, most, draw), is_edited=name != UNEDITED
                    )
                    pauses = _drawn(pauses_s, draw)
                    yield from held(conversation, ways[name], name, turns, pauses, right)


def _turned(names: list[str], count: int) -> list[str]:
    return [*names[count % len(names) :], *names[: count % len(names)]]


def _drawn(pauses_s: Sequence[float], draw: random.Random) -> Iterator[float]:
    while True:
        yield draw.choice(pauses_s)


def _texts(text: Sequence[int], most: int, draw: random.Random) -> Iterator[list[int]]:
    while True:
        begin = draw.randrange(len(text) - most)
        yield list(text[begin : begin + most])


def summary(calls: Sequence[tuple[Call, int]], kind: str, way: str) -> dict[str, object]:
    """One line of the table; first tokens are those of calls that a user's message begins."""
    own = [one for one in calls if one[0].way == way and kind in ("all", one[0].kind)]
    # The first call of a conversation has no history that could be edited.
    firsts = sorted(call.first_token_s for call, _ in own if call.part == MESSAGE and call.turn)
    unedited = {
        (call.kind, call.conversation, call.turn): call.first_token_s
        for call, _ in calls
        if call.way == UNEDITED and call.part == MESSAGE
    }
    ratios = [
        call.first_token_s / unedited[call.kind, call.conversation, call.turn]
        for call, _ in own
        if call.part == MESSAGE and call.turn
    ]
    changed = sum(call.differing_tokens for call, _ in own)
    # A conversation's first call computes what comes before it, in every way.
    waited = sum(
        call.computed_tokens - call.new_tokens for call, _ in own if call.turn or call.part != MESSAGE
    )
    in_all = sum(call.computed_tokens + call.reply_tokens + behind for call, behind in own)
    return {
        "kind": kind,
        "way": way,
        "calls": len(own),
        "changed_tokens": changed,
        "history_tokens_computed_in_a_user_s_time": waited,
        "tokens_in_all": in_all,
        "first_token_s": {
            "median": round(statistics.median(firsts), 4),
            "p95": round(firsts[min(math.ceil(0.95 * len(firsts)), len(firsts)) - 1], 4),
        },
        "first_token_over_unedited": {
            "median": round(statistics.median(ratios), 3),
            "quartiles": [round(each, 3) for each in statistics.quantiles(ratios, n=4)[::2]]
            if len(ratios) > 1
            else [],
        },
        "are_replies_right": all(call.is_right for call, _ in own),
    }


def table(lines: Sequence[dict[str, object]]) -> str:
    """The lines as a table of Markdown; shares of the changed tokens, and of what `today` computes in all."""
    in_all = {line["kind"]: line["tokens_in_all"] for line in lines if line["way"] == "today"}
    changed = {line["kind"]: line["changed_tokens"] for line in lines if line["way"] == "today"}
    rows = [
        "| edits | way | in a user's time | first token, median | p95 | over unedited | in all | replies |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        first, over = line["first_token_s"], line["first_token_over_unedited"]
        waited, edited = line["history_tokens_computed_in_a_user_s_time"], changed[line["kind"]]
        assert isinstance(first, dict)  # noqa: S101  # for types
        assert isinstance(over, dict)  # noqa: S101
        assert isinstance(waited, int)  # noqa: S101
        assert isinstance(edited, int)  # noqa: S101
        all_tokens, of_today = line["tokens_in_all"], in_all[line["kind"]]
        assert isinstance(all_tokens, int)  # noqa: S101
        assert isinstance(of_today, int)  # noqa: S101
        rows.append(
            f"| {line['kind']} | {line['way']}"
            f" | {waited:,} tokens, {waited / max(edited, 1):.1%} of the changed"
            f" | {first['median'] * 1e3:.0f} ms | {first['p95'] * 1e3:.0f} ms | {over['median']:.2f}"
            f" | {all_tokens:,}, {all_tokens / of_today:.2f} of today"
            f" | {'equal' if line['are_replies_right'] else 'DIFFER'} |"
        )
    return "\n".join(rows)


def pauses_of(traces: Path | None) -> list[float]:
    """The pauses before a turn of the traces' agents, in seconds; PAUSE_S without traces."""
    if traces is None:
        return [PAUSE_S]
    with gzip.open(traces / "agentic_cc_A.csv.gz", "rt") as file:
        return [int(row["think_ms"]) / 1e3 for row in csv.DictReader(file) if row["think_ms"]]


def main(
    *,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model directory; SmolLM2-135M.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="Sorts of edits.")] = ",".join(KINDS),
    conversations: Annotated[int, typer.Option(help="Of each sort.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Of each conversation.", min=2)] = 5,
    seed: Annotated[int, typer.Option(help="Of texts and pauses.")] = 1,
    traces: Annotated[Path | None, typer.Option(help="A folder of traces, for pauses.")] = None,
    results: Annotated[Path | None, typer.Option(help="Write every call as a JSON line.")] = None,
) -> None:
    """Measure, check, print a table."""
    torch.set_num_threads(physical_core_count())
    loaded, tokenizer = load_model(model or smollm2())
    text = tokenizer.encode("\n".join(line for part in passages() for line in part.paragraphs))
    pauses_s = pauses_of(traces)
    calls = []
    for call in studied(
        loaded, text, sizes=Sizes(), kinds=kinds.split(","), conversations=conversations, turns=turns,
        seed=seed, pauses_s=pauses_s,
    ):  # fmt: skip
        calls.append(call)
        print(f"\r{len(calls)} calls", end="", file=sys.stderr, flush=True)
    lines = [summary(calls, kind, way) for kind in (*kinds.split(","), "all") for way in (*WAYS, UNEDITED)]
    print(table(lines))
    if results is not None:
        facts = {
            "what": "facts",
            "command": " ".join(["python", "-m", "lab.studies.edits", *sys.argv[1:]]),
            "machine": f"{physical_core_count()} cores of {platform.machine()}",
            "sizes": asdict(Sizes()),
            "pauses": "agentic_cc_A" if traces else f"{PAUSE_S:g} s",
        }
        rows = [facts, *({"what": "summary", **line} for line in lines)]
        rows += [{"what": "call", **asdict(call), "tokens_behind": behind} for call, behind in calls]
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.exit(0 if all(call.is_right for call, _ in calls) else 1)


if __name__ == "__main__":
    typer.run(main)
