#!/usr/bin/env python3
"""Edited conversations in vLLM: its prefix cache and offloading beside the store, cut today and ahead.

    .venv-vllm/bin/python -m lab.studies.edits_vllm --results FILE       # SmolLM2-135M on this machine's CPU
    .venv-vllm/bin/python -m lab.studies.edits_vllm --seed 7 --conversations 8

Conversations of real text are held side by side through vLLM's own server, so that each finds vLLM's blocks
taken by the others when its user is back. `thoughts`: the template strips a reply's thought when the user
writes. `prunes`: the agent drops a tool's result behind the reply. Beside each, the same conversation of
which nothing is dropped. A model
says the beginning of a reply. The rest is real text, which one more request computes as if it had been said.

Ways, each a server of its own: `no cache`, vLLM's `prefix cache`, vLLM's `offloading` to host memory, `today`
(CtxcacheConnector, cut where a prompt differs), `ahead` (the same with the middleware, which is told by
`/v1/ctxcache/next` what comes behind a reply). Counted: tokens of the history that an edit changed, and those
that are computed while a user waits; all that are computed; times to the first token, beside the same turn of
the conversation that nobody edits; whether replies are those of `no cache`. One that differs makes the exit
status 1.
"""

import http.client
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gpu_worker.families.generation import common_prefix
from lab.bench.server import serving
from lab.demo.machine import physical_core_count
from lab.demo.models import smollm2
from lab.demo.text import passages
from lab.engines.vllm_server import CALL_S, NAME, VllmServer

WAYS = ("no cache", "prefix cache", "offloading", "today", "ahead")
KINDS = ("thoughts", "prunes")
SYSTEM, MESSAGE, THOUGHT, RESULT, ANSWER = 1200, 200, 1600, 3200, 1600
"""Characters of the parts of a conversation; about a quarter as many tokens."""
GENERATED = 8
OTHER = "\N{SNOWMAN}"
"""A character that no message begins with."""
BLOCK_TOKENS = 32
"""Of vLLM's blocks."""
STORE_BYTES = 4 << 30
WAITING, TOKENS = "vllm:ctxcache_ahead_waiting", "vllm:ctxcache_ahead_tokens_total"
COLUMNS = (
    *("edits", "way", "changed tokens", "history computed in a user's time", "tokens computed in all"),
    *("first token, s", "beside the same of which nothing is dropped", "replies"),
)
PASS_S = 30.0
"""The longest pause behind a reply."""
TEMPLATE = """
{%- set seen = namespace(user=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- set thought = m.reasoning or m.reasoning_content or '' -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' -}}
  {%- if thought and (keep or loop.index0 > seen.user) -%}
    {{- '<think>\n' ~ thought ~ '\n</think>\n' -}}
  {%- endif -%}
  {{- m.content -}}
  {%- if not loop.last or add_generation_prompt -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
Message = dict[str, str]
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One turn that a user waits for. `cached_tokens`: of the prompt, those that were not computed."""

    kind: str
    is_edited: bool
    conversation: int
    turn: int
    way: str
    prompt_tokens: int
    cached_tokens: int
    changed_tokens: int
    """Of the history, behind the first that is not the one that was computed before."""
    all_tokens: int
    """That the server computed for this turn: the prompt, the reply, and what is ahead of the next one."""
    message_tokens: int
    first_token_s: float
    text: str
    is_right: bool


class Served:
    """A way's server."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def ask(self, name: str, prompt: Fields) -> tuple[str, float, int, int]:
        """Reply to a prompt: text, seconds to its first token, the prompt's tokens and those not computed."""
        body = prompt | {
            "session_id": name,
            "max_tokens": GENERATED,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin_s, first_s, text = time.perf_counter(), 0.0, ""
        usage: dict[str, Any] = {}
        for part in self._streamed("/v1/chat/completions", body):
            for choice in part["choices"]:
                said = choice["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() - begin_s if said else 0.0)
                text += said
            usage = part.get("usage") or usage
        return text, first_s, usage["prompt_tokens"], _cached(usage)

    def say(self, name: str, tokens: list[int]) -> int:
        """Compute a conversation up to a reply's end, as if the model had said it: tokens computed."""
        body = {"model": NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0, "session_id": name}
        answer = self._posted("/v1/completions", body | {"cache_salt": name})
        return len(tokens) - _cached(answer["usage"])

    def tokens(self, prompt: Fields, **options: bool) -> list[int]:
        """Token ids of a prompt."""
        found: list[int] = self._posted("/tokenize", prompt | options)["tokens"]
        return found

    def expect(self, name: str, prompt: Fields) -> int:
        """Tell what comes, and wait for the pass: tokens that it computed."""
        tokens = self._ahead_tokens()
        self._posted("/v1/ctxcache/next", prompt | {"session_id": name})
        end_s = time.monotonic() + PASS_S
        while self._server.metric(WAITING) and time.monotonic() < end_s:
            time.sleep(0.05)
        return self._ahead_tokens() - tokens

    def _ahead_tokens(self) -> int:
        return int(self._server.metric(f'{TOKENS}{{what="computed"}}'))

    def _posted(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._asked(path, body).read())

    def _streamed(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        for line in self._asked(path, body):
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield json.loads(data)

    def _asked(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=CALL_S)
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status not in (http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED):
            raise RuntimeError(f"{response.status}: {response.read()!r}")
        return response


def _cached(usage: Any) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Conversation:
    """One conversation, whose texts are drawn by its number: edited or not, it is the same."""

    def __init__(self, kind: str, number: int, text: str, seed: int, *, is_edited: bool) -> None:
        self.kind, self.number, self.is_edited, self._text = kind, number, is_edited, text
        self._name = f"{kind}-{number}-{'edited' if is_edited else 'whole'}"
        self._draw = random.Random(f"{seed} {kind} {number}")  # noqa: S311  texts
        self._messages: list[Message] = [{"role": "system", "content": self._some(SYSTEM)}]
        self._computed: list[int] = []

    def turn(self, served: Served, way: str, turn: int, right: str | None) -> Call:
        """The user writes; what the reply took. In the pause behind it, what is ahead is computed."""
        news: list[Message] = [{"role": "user", "content": self._some(MESSAGE)}]
        if self.kind == "prunes":
            news.insert(0, {"role": "tool", "content": self._some(RESULT)})
        # The history as this turn has it, whatever its messages say.
        other = served.tokens(self._prompt([news[0] | {"content": OTHER}]))
        self._messages += news
        tokens = served.tokens(self._prompt())
        history_count = common_prefix(tokens, other)
        text, first_s, count, cached = served.ask(self._name, self._prompt())
        changed = max(history_count - common_prefix(self._computed, tokens), 0)
        reply = {"role": "assistant", "content": text + self._some(ANSWER)}
        if self.kind == "thoughts":
            reply["reasoning"] = self._some(THOUGHT)
        self._messages.append(reply)
        open_end = {"add_generation_prompt": False, "continue_final_message": True}
        self._computed = served.tokens(self._prompt(), **open_end)
        spent = count - cached + served.say(self._name, self._computed)
        if self.is_edited and self.kind == "prunes":
            self._messages = [one for one in self._messages if one["role"] != "tool"]
        if way == "ahead":
            spent += served.expect(self._name, self._prompt())
        return Call(
            kind=self.kind,
            is_edited=self.is_edited,
            conversation=self.number,
            turn=turn,
            way=way,
            prompt_tokens=count,
            cached_tokens=cached,
            changed_tokens=changed,
            all_tokens=spent,
            message_tokens=len(tokens) - history_count,
            first_token_s=first_s,
            text=text,
            is_right=right is None or text == right,
        )

    def _prompt(self, news: Sequence[Message] = ()) -> Fields:
        return {
            "model": NAME,
            "messages": [*self._messages, *news],
            "chat_template_kwargs": {"keep": not self.is_edited},
            # The same text is said in another conversation, which is not to be found.
            "cache_salt": self._name,
        }

    def _some(self, characters: int) -> str:
        begin = self._draw.randrange(len(self._text) - characters)
        return self._text[begin : begin + characters].strip()


def started(way: str, model: Path, place: Path, target: str, blocks: int) -> VllmServer:
    """A way's server."""
    transfer: dict[str, Any] | None = None
    extra: dict[str, Any]
    if way == "offloading":
        extra = {
            "spec_name": "OffloadOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": STORE_BYTES,
            "block_size": BLOCK_TOKENS,
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    elif way in ("today", "ahead"):
        extra = {"target": target, "timeout_s": 60}
        transfer = {"kv_connector": "CtxcacheConnector", "kv_connector_extra_config": extra}
    if transfer is not None:
        transfer["kv_role"] = "kv_both"
    options = (
        "--no-enable-prefix-caching" if way == "no cache" else "--enable-prefix-caching",
        *("--enable-prompt-tokens-details", "--chat-template", str(place / "template.jinja")),
        *("--max-model-len", str(min(8192, 24 * blocks)), "--num-gpu-blocks-override", str(blocks)),
        *(("--middleware", "ctxcache.engines.vllm.AheadMiddleware") if way == "ahead" else ()),
    )
    return VllmServer(model, place / f"{way}.log", transfer, *options)


def table(calls: Sequence[Call]) -> str:
    """A line for each sort and way, of edited conversations; times are medians over the turns."""
    whole = {
        (one.kind, one.way, one.conversation, one.turn): one.first_token_s
        for one in calls
        if not one.is_edited
    }
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for kind in KINDS:
        for way in WAYS:
            edited = [one for one in calls if (one.kind, one.way) == (kind, way) and one.is_edited]
            own = [one for one in edited if one.turn]
            if not own:
                continue
            ratios = [one.first_token_s / whole[kind, way, one.conversation, one.turn] for one in own]
            counts = (
                sum(one.changed_tokens for one in own),
                sum(max(one.prompt_tokens - one.cached_tokens - one.message_tokens, 0) for one in own),
                sum(one.all_tokens for one in edited),
            )
            times = (statistics.median(one.first_token_s for one in own), statistics.median(ratios))
            words = "equal" if all(one.is_right for one in edited) else "DIFFER"
            cells = [
                kind,
                way,
                *(f"{count:,}" for count in counts),
                *(f"{time:.2f}" for time in times),
                words,
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="A local model directory; SmolLM2-135M.")] = None,
    conversations: Annotated[int, typer.Option(help="Of each sort, side by side.", min=1)] = 4,
    turns: Annotated[int, typer.Option(help="Of each conversation.", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="Of texts.")] = 1,
    blocks: Annotated[int, typer.Option(help="Blocks of 32 tokens that vLLM has.", min=64)] = 320,
    ways: Annotated[str, typer.Option(help="Which, by commas; the first says what is right.")] = ",".join(
        WAYS
    ),
    results: Annotated[Path | None, typer.Option(help="Write every call as a JSON line.")] = None,
) -> None:
    """Measure, check, print a table."""
    chosen = ways.split(",")
    if wrong := sorted({*chosen} - {*WAYS}):
        raise typer.BadParameter(f"{', '.join(wrong)}: the ways are {', '.join(WAYS)}", param_hint="--ways")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    text = "\n".join(line for part in passages() for line in part.paragraphs)
    directory, calls = model or smollm2(), list[Call]()
    right: dict[tuple[str, bool, int, int], str] = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (place / "template.jinja").write_text(TEMPLATE)
        for way in chosen:
            with ExitStack() as own:
                # Each has a store of its own: rows are found by what was said, and both say the same.
                store = serving(place / way, arena_bytes=STORE_BYTES // 4, ssd_bytes=STORE_BYTES)
                target = own.enter_context(store).target("tcp")
                server = own.enter_context(started(way, directory, place, target, blocks))
                served = Served(server)
                held = [
                    Conversation(kind, i, text, seed, is_edited=is_edited)
                    for i in range(conversations)
                    for kind in KINDS
                    for is_edited in (True, False)
                ]
                warm = [{"role": "user", "content": text[:SYSTEM]}]
                served.ask("warm", {"model": NAME, "messages": warm})
                for turn in range(turns):
                    for one in held:
                        key = one.kind, one.is_edited, one.number, turn
                        call = one.turn(served, way, turn, right.get(key))
                        right.setdefault(key, call.text)
                        calls.append(call)
                        sys.stderr.write(f"\r{way}: {len(calls)} calls")
    sys.stdout.write(f"{table(calls)}\n")
    if results is not None:
        facts = {
            "what": "facts",
            "command": " ".join(["python", "-m", "lab.studies.edits_vllm", *sys.argv[1:]]),
            "machine": f"{physical_core_count()} cores of {platform.machine()}",
        }
        rows = [facts, *({"what": "call", **asdict(call)} for call in calls)]
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.exit(0 if all(call.is_right for call in calls) else 1)


if __name__ == "__main__":
    typer.run(main)
