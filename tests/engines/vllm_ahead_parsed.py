"""vLLM's OpenAI server computes ahead behind replies that its own parsers took apart, on a real store.

Run by `make engines`. Guided decoding holds a tiny model of bytes to the form of a thinking model's replies;
what it says within that form depends on its rows. vLLM's parsers for reasoning and for tools make thoughts,
calls and items of it, whole and in streams. Each reply is compared with one that the server computes from
nothing. vLLM's own prefix cache is off, so that what is not computed comes from the store.
"""

import http.client
import itertools
import json
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lab.engines.families import SHAPE
from lab.engines.vllm_server import CALL_S, NAME, VllmServer
from tests.server_process import ServerProcess

BLOCK = 32
WAIT_S = 60.0
USED = "the context store is used"
SPECIAL = ["<|end|>", "<think>", "</think>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
_salts = itertools.count()
# Thoughts stay behind the last message of a user, or everywhere where the client asks for that.
TEMPLATE = """
{%- set seen = namespace(user=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<|system|>effort ' ~ (reasoning_effort or 'low') ~ '<|end|>' -}}
{%- for m in messages -%}
  {%- set thought = m.reasoning or m.reasoning_content or '' -%}
  {{- '<|' ~ m.role ~ '|>' -}}
  {%- if thought and (loop.index0 > seen.user or preserve_thinking) -%}
    {{- '<think>' ~ thought ~ '</think>' -}}
  {%- endif -%}
  {%- if m.content is string -%}{{- m.content -}}
  {%- else -%}{%- for part in m.content or [] -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
  {%- for c in m.tool_calls or [] -%}
    {{- '<tool_call>{"name": "' ~ c.function.name ~ '", "arguments": ' -}}
    {{- (c.function.arguments | tojson) ~ '}</tool_call>' -}}
  {%- endfor -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}
"""
# The prompt opens the thought, so that the parser of streams knows where a reply within a chain begins.
ANSWER = "[a-z]{70}</think>[A-Z]{90}"
# Its arguments have no spaces, and the template's have.
CALL = '[a-z]{70}</think><tool_call>\\{"name":"look","arguments":\\{"word":"[a-z]{90}"\\}\\}</tool_call>'
MARKS = {str(SPECIAL.index("</think>")): 100}
"""The mark as the token by which parsers know it: within the form its letters would do."""
TOOL = {"type": "object", "properties": {"word": {"type": "string"}}}
RESULT = "it is so " * 15
QUESTION = "what is the word of the day? " * 5
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


def save_model(directory: Path) -> None:
    """Write a tiny model of bytes with its tokenizer, and the template beside it."""
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL[:1])
    backend.add_tokens(SPECIAL[1:])
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=backend, eos_token=SPECIAL[0]).save_pretrained(directory)
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": len(alphabet), "bos_token_id": None, "eos_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(directory)
    (directory / "template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module", params=["tokenizes", "renders"])
def server(
    request: pytest.FixtureRequest, store: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server with parsers and the middleware; one that renders whole requests too."""
    place = tmp_path_factory.mktemp("server")
    save_model(place / "tiny")
    transfer = {
        "kv_connector": "CtxcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "target": store.target, "model_id": f"parsed-{request.param}", "timeout_s": 60,
        },
    }  # fmt: skip
    options = (
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", "2048"),
        *("--chat-template", str(place / "tiny" / "template.jinja")),
        *("--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config", json.dumps({"enable_in_reasoning": True})),
        *("--middleware", "ctxcache.engines.vllm.AheadMiddleware"),
        *(("--enable-scale-out",) if request.param == "renders" else ()),
    )
    with VllmServer(place / "tiny", place / "log", transfer, *options) as running:
        running.wait_for(USED)
        yield running


def posted(server: VllmServer, path: str, body: Fields) -> str:
    """The answer's text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status in (HTTPStatus.OK, HTTPStatus.ACCEPTED), text
        return text
    finally:
        connection.close()


class Chat:
    """`/v1/chat/completions`: messages."""

    history: list[Fields]

    def __init__(self, server: VllmServer, session: str, *, is_stream: bool, **fields: Any) -> None:
        self._server, self._session, self._is_stream, self.fields = server, session, is_stream, fields
        self.history = [{"role": "user", "content": QUESTION}]
        self.cached = self.prompt_count = 0

    def ask(self, form: str, *, salt: str = "", **fields: Any) -> list[Fields]:
        """The server's reply, which has this form, as its client sends it back."""
        body: Fields = {"model": NAME, "temperature": 0, **self._own(form), **self.fields, **fields}
        body |= {"stream": self._is_stream, "structured_outputs": {"regex": form}, "logit_bias": MARKS}
        if salt:
            # Nobody has this salt, and nothing is computed behind the conversation's end.
            body |= {"cache_salt": salt, "kv_transfer_params": {"ends": True}}
        else:
            body["session_id"] = self._session
        return self._read(posted(self._server, self.path, body))

    def asked(self, form: str, **fields: Any) -> list[Fields]:
        """As `ask`; the reply is that of a server that has nothing, and goes into the history."""
        reply = self.ask(form, **fields)
        cached, prompt_count = self.cached, self.prompt_count
        right = self.ask(form, salt=f"s{next(_salts)}", **fields)
        assert _without_ids(reply) == _without_ids(right)
        assert self.cached == 0
        self.cached, self.prompt_count = cached, prompt_count
        self.history += reply
        return reply

    path = "/v1/chat/completions"

    def _own(self, form: str) -> Fields:
        del form
        tool = {"type": "function", "function": {"name": "look", "parameters": TOOL}}
        return {"messages": self.history, "max_tokens": 400, "tools": [tool], "stream_options": self._usage}

    @property
    def _usage(self) -> Fields | None:
        return {"include_usage": True} if self._is_stream else None

    def _read(self, text: str) -> list[Fields]:
        if not self._is_stream:
            answer = json.loads(text)
            self._note(answer["usage"], "prompt")
            whole = answer["choices"][0]["message"]
            names = ("role", "content", "reasoning", "tool_calls")
            return [{name: whole[name] for name in names if whole.get(name)}]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
        self._note(parts[-1]["usage"], "prompt")
        message: Fields = {"role": "assistant"}
        calls: dict[int, Fields] = {}
        for delta in (part["choices"][0]["delta"] for part in parts if part["choices"]):
            for key in ("content", "reasoning"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = piece.get("id") or call.get("id")
                for key in ("name", "arguments"):
                    call["function"][key] += piece["function"].get(key) or ""
        return [message | ({"tool_calls": list(calls.values())} if calls else {})]

    def _note(self, usage: Fields, what: str) -> None:
        self.prompt_count = usage[f"{what}_tokens"]
        self.cached = (usage.get(f"{what}_tokens_details") or {}).get("cached_tokens") or 0

    def result(self, reply: list[Fields]) -> None:
        """The tool has answered."""
        call_id = reply[-1]["tool_calls"][0]["id"]
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": RESULT})

    def say(self, text: str) -> None:
        """The user writes."""
        self.history.append({"role": "user", "content": text})


class Responses(Chat):
    """`/v1/responses`: items."""

    path = "/v1/responses"

    def _own(self, form: str) -> Fields:
        del form
        tool = {"type": "function", "name": "look", "parameters": TOOL}
        return {"input": self.history, "max_output_tokens": 400, "tools": [tool], "store": False}

    def _read(self, text: str) -> list[Fields]:
        if self._is_stream:
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            response = next(
                part["response"]
                for part in map(json.loads, (line for line in lines if line != "[DONE]"))
                if part["type"] == "response.completed"
            )
        else:
            response = json.loads(text)
        self._note(response["usage"], "input")
        items: list[Fields] = response["output"]
        return items

    def result(self, reply: list[Fields]) -> None:
        """See Chat."""
        call = next(item for item in reply if item["type"] == "function_call")
        self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": RESULT})


def _answer(reply: list[Fields]) -> bool:
    """Whether the answer is apart from the thought."""
    last = reply[-1]["content"]
    text = last if isinstance(last, str) else last[0]["text"]
    return re.fullmatch("[A-Z]{90}", text) is not None


def _without_ids(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _without_ids(value) for key, value in told.items() if key not in ("id", "call_id")}
    return [_without_ids(each) for each in told] if isinstance(told, list) else told


def passes(server: VllmServer, outcome: str = "computed") -> float:
    """How many passes ended so."""
    return _outcomes(server).get(outcome, 0)


def _outcomes(server: VllmServer) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'^vllm:ctxcache_ahead_passes_total\{outcome="(.+)"\} (\S+)$', text, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found}


def wait_for_a_pass(server: VllmServer, before: float, outcome: str = "computed") -> None:
    """Wait until one more has ended so."""
    end_s = time.monotonic() + WAIT_S
    while passes(server, outcome) <= before:
        assert time.monotonic() < end_s, (_outcomes(server), server.log[-3000:])
        time.sleep(0.05)


KINDS = [
    pytest.param(kind, is_stream, id=f"{kind.__name__}-{'stream' if is_stream else 'whole'}")
    for kind in (Chat, Responses)
    for is_stream in (False, True)
]


@pytest.mark.parametrize(("kind", "is_stream"), KINDS)
def test_a_chain_and_its_end_cost_their_next_requests_nothing(
    server: VllmServer, kind: type[Chat], *, is_stream: bool
) -> None:
    """The call is computed as the template writes it, and the answer without the thoughts before it."""
    chat = kind(server, f"chain-{kind.__name__}-{is_stream}", is_stream=is_stream)
    before = passes(server)
    reply = chat.asked(CALL)
    assert "look" in json.dumps(reply)
    wait_for_a_pass(server, before)
    chat.result(reply)
    before = passes(server)
    reply = chat.asked(ANSWER)
    # All before the tool's result: a block, and the marks around the message, are no more than these.
    assert chat.cached >= chat.prompt_count - len(RESULT) - 2 * BLOCK
    assert _answer(reply), reply
    wait_for_a_pass(server, before)
    chat.say("and now?")
    before = passes(server)
    chat.asked(ANSWER)
    assert chat.cached >= chat.prompt_count - len("and now?") - 2 * BLOCK
    # The next test counts its own.
    wait_for_a_pass(server, before)


def test_thoughts_that_a_template_is_asked_to_keep_are_kept(server: VllmServer) -> None:
    """`preserve_thinking` and its like are arguments as any: nothing differs, nothing is computed."""
    chat = Chat(server, "kept", is_stream=False, chat_template_kwargs={"preserve_thinking": True})
    before, nothing = passes(server), passes(server, "nothing to do")
    chat.asked(ANSWER)
    wait_for_a_pass(server, nothing, "nothing to do")
    chat.say("and now?")
    chat.asked(ANSWER)
    assert chat.cached >= chat.prompt_count - len("and now?") - 2 * BLOCK
    assert passes(server) == before


@pytest.mark.parametrize(("kind", "is_stream"), KINDS[::3])
def test_an_effort_that_switches_for_a_question(
    server: VllmServer, kind: type[Chat], *, is_stream: bool
) -> None:
    """The usual one is computed ahead; the other is found as far as it was."""
    chat = kind(server, f"effort-{kind.__name__}", is_stream=is_stream)

    def effort(level: str) -> Fields:
        return {"reasoning": {"effort": level}} if kind is Responses else {"reasoning_effort": level}

    for level in ("low", "low", "high"):
        before = passes(server)
        chat.asked(ANSWER, **effort(level))
        wait_for_a_pass(server, before)
        chat.say(f"at {level}, and now? ")
    before = passes(server)
    chat.asked(ANSWER, **effort("low"))
    assert chat.cached >= chat.prompt_count - 20 - 2 * BLOCK
    wait_for_a_pass(server, before)
    chat.say("and now?")
    before = passes(server)
    chat.asked(ANSWER, **effort("high"))
    # Up to the last question at that effort, in runs of 64 tokens.
    assert chat.cached >= 256
    wait_for_a_pass(server, before)


def test_a_client_says_by_items_what_it_will_send(server: VllmServer) -> None:
    """An agent compacts: the request behind that finds its prompt."""
    chat = Responses(server, "compacted", is_stream=False)
    before = passes(server)
    chat.asked(ANSWER)
    wait_for_a_pass(server, before)
    chat.history = [{"role": "user", "content": "in short: " + "the word was told. " * 10}]
    before = passes(server)
    body = {"model": NAME, "session_id": "compacted", **chat._own("")}
    answer = json.loads(posted(server, "/v1/ctxcache/next", body))
    wait_for_a_pass(server, before)
    chat.asked(ANSWER)
    assert chat.prompt_count == answer["token_count"]
    assert chat.cached >= (chat.prompt_count - 1) // BLOCK * BLOCK - BLOCK
