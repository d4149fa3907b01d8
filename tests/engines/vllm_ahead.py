"""vLLM's OpenAI server computes an edited conversation ahead of its next request, on a real store.

Run by `make engines`. The template keeps thoughts within a chain of tools and strips them when a user writes,
as templates of thinking models do. Each reply is compared with one that the server computes from nothing:
nobody else has its salt. vLLM's own prefix cache is off, so that what is not computed comes from the store.
"""

import http.client
import itertools
import json
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from lab.engines.families import SHAPE
from lab.engines.vllm_server import CALL_S, NAME, VllmServer, give_tokenizer
from tests.server_process import ServerProcess

BLOCK = 32
KEY = "a-key"
USED = "the context store is used"
WAIT_S = 60.0
_salts = itertools.count()
TEMPLATE = """
{%- set seen = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set thought = message.reasoning or message.reasoning_content or '' -%}
  {{- {'user': 't3', 'assistant': 't4', 'tool': 't5', 'system': 't6'}[message.role] ~ ' ' -}}
  {%- if thought and loop.index0 > seen.user -%}{{- 't7 ' ~ thought ~ ' t8 ' -}}{%- endif -%}
  {{- message.content ~ ' t9 ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 't4 ' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def server(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with the middleware, which asks for a key."""
    place = tmp_path_factory.mktemp("server")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / "tiny")
    give_tokenizer(place / "tiny", SHAPE["vocab_size"])
    (place / "template.jinja").write_text(TEMPLATE)
    transfer = {
        "kv_connector": "CtxcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"target": store.target, "model_id": "tiny", "timeout_s": 60},
    }
    options = (
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--api-key", KEY),
        *("--chat-template", str(place / "template.jinja")),
        *("--middleware", "ctxcache.engines.vllm.AheadMiddleware"),
    )
    with VllmServer(place / "tiny", place / "log", transfer, *options) as running:
        end_s = time.monotonic() + CALL_S
        while USED not in running.log:
            assert time.monotonic() < end_s, running.log[-2000:]
            time.sleep(0.05)
        yield running


def _posted(server: VllmServer, path: str, body: dict[str, Any], key: str = KEY) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _chat(server: VllmServer, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The reply: its text, and how many tokens of the prompt were restored. Streams are put together."""
    body = {"model": NAME, "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, text = _posted(server, "/v1/chat/completions", body | fields)
    assert status == HTTPStatus.OK, text
    if not fields.get("stream"):
        answer = json.loads(text)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {"text": answer["choices"][0]["message"]["content"], "cached": cached}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
    return {"text": "".join(delta.get("content") or "" for delta in deltas), "cached": 0}


def _expected(server: VllmServer, messages: list[dict[str, Any]]) -> str:
    """The reply computed from nothing, of a conversation that ends with it: nothing is computed behind it."""
    over = {"ends": True}
    answer = _chat(server, messages, cache_salt=f"s{next(_salts)}", kv_transfer_params=over)
    assert answer["cached"] == 0
    text: str = answer["text"]
    return text


def _rendered(server: VllmServer, messages: list[dict[str, Any]]) -> list[int]:
    status, text = _posted(server, "/tokenize", {"model": NAME, "messages": messages})
    assert status == HTTPStatus.OK, text
    tokens: list[int] = json.loads(text)["tokens"]
    return tokens


def _words(seed: int, count: int) -> str:
    return " ".join(f"t{(31 * seed + 7 * i * i) % 480 + 10}" for i in range(count))


def _chain(seed: int) -> list[dict[str, Any]]:
    """A user's question, a thought with a call, and what the tool said: the thought is behind no user."""
    return [
        {"role": "user", "content": _words(seed, 40)},
        {"role": "assistant", "content": _words(seed + 1, 6), "reasoning_content": _words(seed + 2, 20)},
        {"role": "tool", "content": _words(seed + 3, 150), "tool_call_id": "1"},
    ]


def _passes(server: VllmServer, outcome: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=CALL_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    pattern = rf'^vllm:ctxcache_ahead_passes_total\{{outcome="{outcome}"\}} (\S+)$'
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def _wait_for_a_pass(server: VllmServer, outcome: str, before: float) -> None:
    end_s = time.monotonic() + WAIT_S
    while _passes(server, outcome) <= before:
        assert time.monotonic() < end_s, server.log[-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_stripped_thoughts_cost_the_next_request_nothing(
    server: VllmServer, store: ServerProcess, *, is_stream: bool
) -> None:
    """All whole blocks of the next prompt but the user's message come from the store; the reply is right."""
    name, chain = f"stripped-{is_stream}", _chain(100 + 10 * is_stream)
    before = _passes(server, "computed")
    reply = _chat(server, chain, session_id=name, stream=is_stream)
    assert reply["text"] == _expected(server, chain)
    _wait_for_a_pass(server, "computed", before)
    following = [
        *chain,
        {"role": "assistant", "content": reply["text"]},
        {"role": "user", "content": "t11 t12"},
    ]
    stable = len(_rendered(server, following)) - 4
    answer = _chat(server, following, session_id=name)
    assert answer["cached"] >= stable // BLOCK * BLOCK - BLOCK
    assert answer["text"] == _expected(server, following)
    with ctxcache.connect(store.target) as client:
        assert client.sessions.get(f"sessions/{name}").token_count >= stable // BLOCK * BLOCK


def test_where_nothing_is_stripped_nothing_is_computed(server: VllmServer) -> None:
    """A conversation without thoughts goes on where it was."""
    before = _passes(server, "nothing to do")
    _chat(server, [{"role": "user", "content": _words(200, 90)}], session_id="plain")
    _wait_for_a_pass(server, "nothing to do", before)


def test_a_client_says_what_it_will_send_next(server: VllmServer) -> None:
    """An agent prunes a tool's result: the request behind that finds its prompt."""
    chain = _chain(300)
    before = _passes(server, "computed")
    _chat(server, chain, session_id="pruned")
    _wait_for_a_pass(server, "computed", before)
    pruned = [
        chain[0],
        {"role": "assistant", "content": _words(301, 120)},
        {"role": "user", "content": "t20"},
    ]
    before = _passes(server, "computed")
    fields = {"model": NAME, "messages": pruned, "session_id": "pruned"}
    status, text = _posted(server, "/v1/ctxcache/next", fields)
    tokens = len(_rendered(server, pruned))
    assert (status, json.loads(text)) == (HTTPStatus.ACCEPTED, {"token_count": tokens})
    _wait_for_a_pass(server, "computed", before)
    answer = _chat(server, pruned, session_id="pruned")
    assert answer["cached"] >= (tokens - 1) // BLOCK * BLOCK
    assert answer["text"] == _expected(server, pruned)


def test_who_may_not_ask_the_server_has_nothing_computed(server: VllmServer) -> None:
    """A wrong key is refused as by the server itself; so is a body that is none."""
    fields = {"model": NAME, "messages": _chain(400)}
    before = _passes(server, "computed")
    assert _posted(server, "/v1/ctxcache/next", fields, key="wrong")[0] == HTTPStatus.UNAUTHORIZED
    assert _posted(server, "/v1/chat/completions", fields, key="wrong")[0] == HTTPStatus.UNAUTHORIZED
    for wrong in ({"model": NAME}, {"model": NAME, "messages": []}, {"model": NAME, "messages": "x"}):
        assert _posted(server, "/v1/ctxcache/next", wrong)[0] == HTTPStatus.BAD_REQUEST
    assert _posted(server, "/v1/ctxcache/next", fields | {"model": "none"})[0] == HTTPStatus.NOT_FOUND
    assert _passes(server, "computed") == before
